"""Coverage-guided fuzzing of what reads a client's bytes. Not part of `make faults`; needs atheris.

    python tests/faults/fuzz.py array -max_total_time=300    # an .npy file, as Flower's arrays carry it
    python tests/faults/fuzz.py reply -max_total_time=300    # a reply's records, then the gate
    python tests/faults/fuzz.py payload -max_total_time=300  # a payload's buffers, every
    compressor, then the gate

Anything but Malformed is a crash, which libFuzzer reports with the input that does it; a folder
named after the options keeps the corpus. The targets themselves need no atheris:
tests/faults/test_bytes.py feeds them mutated valid input.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from io import BytesIO

try:
    from atheris import Fuzz, Setup, instrument_imports
except ImportError:
    watched = nullcontext()
else:
    watched = instrument_imports(include=["flrce", "numpy.lib._format_impl"])

with watched:
    import numpy as np
    import torch
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    from flrce.core.gate import validate_replies
    from flrce.core.payloads import ReplyContext
    from flrce.core.pieces import MalformedPayload, NoCompression
    from flrce.core.types import Payload, Reply, Task
    from flrce.flower.arrays import ArrayTemplate, read_array
    from flrce.flower.wire import read_reply, read_task
    from flrce.methods.compression.error_feedback import ErrorFeedback
    from flrce.methods.compression.quantize import Quantizer
    from flrce.methods.compression.sparsify import RandomK, TopK

W = torch.linspace(0.5, 1.5, 12)
LAYOUT = (("a.weight", 8), ("a.running_mean", 2), ("a.running_var", 2))
TEMPLATE = ArrayTemplate.from_arrays(
    ArrayRecord(
        {
            "a.weight": Array(np.zeros((2, 4), np.float32)),
            "a.running_mean": Array(np.zeros(2, np.float32)),
            "a.running_var": Array(np.zeros(2, np.float32)),
        }
    )
)
COMPRESSORS = (
    NoCompression(),
    TopK(0.5),
    TopK(0.1),
    TopK(0.9),
    TopK(0.5, dense_bn=True),
    RandomK(0.5, scaled=True),
    Quantizer(8),
    Quantizer(3),
    ErrorFeedback(TopK(0.5)),
)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
NAMES = ("u", "values", "bitmap", "indices", "dense", "levels", "ranges", "statistics")


class Source:
    """Decisions drawn from bytes; zeros once they run out."""

    def __init__(self, data: bytes) -> None:
        self.stream = BytesIO(data)

    def byte(self) -> int:
        return (self.stream.read(1) or b"\0")[0]

    def some(self) -> bytes:
        return self.stream.read(self.byte() | (self.byte() & 3) << 8)

    def word(self, *likely: str) -> str:
        pick = self.byte()
        return likely[pick] if pick < len(likely) else self.some().decode("latin-1")

    def number(self) -> int | float:
        pick = self.byte()
        if pick < 128:
            return pick
        raw = self.stream.read(8).ljust(8, b"\0")
        return (
            int.from_bytes(raw, "little", signed=True)
            if pick < 192
            else float(np.frombuffer(raw, np.float64)[0])
        )


def judge(reply: Reply, task: Task) -> None:
    """Through the gate, which must not raise; what passes must leave a sound model."""
    updates, rejected = validate_replies(
        [task], [reply], ReplyContext(lambda _: (None, LAYOUT), 12, 8, None, W)
    )
    assert len(updates) + len(rejected) == 1
    assert torch.isfinite(updates.U).all()
    assert not len(updates) or bool((W + updates.U[0])[10:].min() >= 0)


def asked(source: Source) -> Task:
    return Task("x", 0, 3, seed=1, compressor=COMPRESSORS[source.byte() % len(COMPRESSORS)])


def array(data: bytes) -> None:
    """Any bytes as an array of unknown and of known shape."""
    sent = Array("float32", (2, 4), "numpy.ndarray", data)
    for expected in ((), ("float32", (2, 4))):
        with suppress(MalformedPayload):
            assert read_array(sent, *expected).dtype.kind in "fiub"


def payload(data: bytes) -> None:
    """Any few plain buffers under names that compressors use."""
    source, buffers = Source(data), {}
    task = asked(source)
    for _ in range(source.byte() % 4):
        name, dtype, raw = source.word(*NAMES), DTYPES[source.byte() % len(DTYPES)], source.some()
        size = torch.empty(0, dtype=dtype).element_size()
        raw = bytes(b & 1 for b in raw) if dtype is torch.bool else raw[: len(raw) // size * size]
        buffers[name] = (
            torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        )
    judge(Reply("x", 3, Payload(buffers), n=4), task)


def reply(data: bytes) -> None:
    """Any records that Flower can carry."""
    source, content = Source(data), RecordDict()
    task = asked(source)
    arrays = {}
    for _ in range(source.byte() % 5):
        name = source.word(*NAMES, *(name for name, _ in LAYOUT))
        arrays[name] = Array(
            source.word("float32"), (2,), source.word("numpy.ndarray"), source.some()
        )
    content["arrays"] = ArrayRecord(arrays)
    figures = {
        source.word(
            "num-examples", "train_loss", "loss-square", "seconds", "joules"
        ): source.number()
        for _ in range(source.byte() % 6)
    }
    content["metrics"] = MetricRecord(figures)
    if source.byte() % 2:
        keys = [
            source.word("flrce.t", "flrce.client", "flrce.base") for _ in range(source.byte() % 4)
        ]
        content["reply"] = ConfigRecord(
            {key: source.number() if source.byte() % 2 else source.word("x") for key in keys}
        )
    with suppress(MalformedPayload):
        judge(read_reply(content, task, TEMPLATE, W, 10_000), task)
    with suppress(MalformedPayload):
        read_task({**content.config_records.get("reply", {}), **figures}, {})


TARGETS: dict[str, Callable[[bytes], None]] = {"array": array, "payload": payload, "reply": reply}

if __name__ == "__main__":
    Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    Fuzz()
