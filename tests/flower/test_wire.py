"""Tasks and replies over the wire: what is sent arrives, and nothing hostile is read, built or
allocated.
"""

import io
import math
import pickle
import resource
import tracemalloc
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_helpers import start
from flrce.core.pieces import MalformedPayload, NoCompression
from flrce.core.types import LocalWork, Payload, Portion, Reply, Task
from flrce.errors import BadInput
from flrce.flower.arrays import (
    ArrayTemplate,
    count_record_bytes,
    read_array,
    read_tensors,
    to_array_record,
)
from flrce.flower.wire import (
    KEY_PREFIX,
    read_piece,
    read_reply,
    read_task,
    write_piece,
    write_reply,
    write_task,
)
from flrce.methods.registry import PIECES
from flrce.training.augment import RandomCrop, RandomFlip
from flrce.training.schedules import CosineDecay
from flrce.training.update_chain import (
    SGD,
    GradientClip,
    Momentum,
    PersistentLink,
    ProximalTerm,
    UpdateChain,
    WeightDecay,
)
from flrce_client.wire import validate_client_name

TASK = Task(
    "7",
    3,
    5,
    11,
    compressor=NoCompression(),
    work=LocalWork(epochs=2, batch=8),
    update=UpdateChain((SGD(0.05),)),
)


def npy(header: bytes, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + body


def claim(dtype: str, shape: object, body: bytes, fortran: bool = False) -> Array:
    header = f"{{'descr': '{dtype}', 'fortran_order': {fortran}, 'shape': {shape!r}, }}".encode()
    return Array("float32", (1,), "numpy.ndarray", npy(header, body))


finite = st.floats(allow_nan=False, width=64)
LINKS = st.sampled_from(
    [
        GradientClip(2.0),
        ProximalTerm(0.3, False),
        PersistentLink(Momentum(0.5, True)),
        WeightDecay(0.1),
    ]
)
TASKS = st.builds(
    Task, client=st.from_regex(r"[\w.:@+-]{1,20}", fullmatch=True), k=st.integers(0, 2**40), t=st.integers(1, 2**40),
    seed=st.integers(0, 2**62),
    work=st.builds(LocalWork, st.integers(1, 100), st.integers(1, 999), st.none() | st.integers(0, 99)),
    part=st.builds(Portion, rate=finite, ordered=st.booleans(), first=st.integers(0, 9)),
    update=st.lists(LINKS, max_size=3).map(lambda links: UpdateChain((*links, SGD(0.1, CosineDecay(0.5, "round"))))),
    augment=st.lists(st.sampled_from([RandomFlip(0.3), RandomCrop(2)]), max_size=2).map(tuple),
    compressor=st.just(NoCompression()), deadline=st.just(math.inf) | finite, rounds=st.integers(0, 2**40),
)  # fmt: skip


@given(TASKS)
def test_a_task_arrives_as_it_was_sent(task):
    assert read_task(ConfigRecord(write_task(task)), {}) == task


@pytest.mark.parametrize("name", sorted(PIECES["compressor"]))
def test_every_registered_compressor_travels_by_name(name):
    make = PIECES["compressor"][name]
    wraps = [f.name for f in fields(make) if f.metadata.get("piece")]
    piece = make(**dict.fromkeys(wraps, PIECES["compressor"]["quantize"](4))) if wraps else make()
    sent = ConfigRecord(write_task(replace(TASK, compressor=piece)))
    assert read_task(sent, {}).compressor == piece
    assert all(isinstance(value, int | float | str | bool | list) for value in sent.values())


@dataclass(frozen=True)
class Unregistered(NoCompression):
    pass


def test_a_compressor_without_a_name_is_refused_before_sending():
    with pytest.raises(BadInput, match=r"Unregistered has no name.*PIECES"):
        write_piece("compressor", Unregistered(), "c")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "flrce.core.pieces:Dense",
        "../../etc/passwd",
        "",
        "dense\x00",
        7,
        None,
        "tests.evil:Canary",
    ],
)
def test_no_code_is_imported_because_a_message_names_it(name):
    entries = write_task(TASK)
    entries[KEY_PREFIX + "compressor"] = name
    with pytest.raises(MalformedPayload, match="is not one of"):
        read_task({k: v for k, v in entries.items() if v is not None}, {})


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", "5"), ("t", 1.5), ("client", 3), ("rate", "x"), ("ordered", 1)]
)
def test_a_task_with_a_wrong_type_is_malformed(field, value):
    with pytest.raises(MalformedPayload, match=field):
        read_task({**write_task(TASK), KEY_PREFIX + field: value}, {})


def test_template_puts_statistics_last_and_keeps_counters():
    template = ArrayTemplate.from_arrays(start())
    assert [(s.name, s.offset, s.trainable) for s in template.layout.slots] == [
        ("layer.weight", 0, True),
        ("layer.bias", 12, True),
        ("norm.running_mean", 15, False),
    ]
    assert (template.layout.trainable, template.layout.size, template.nbytes) == (15, 18, 72)
    w = torch.arange(18.0)
    back = template.unpack(w)
    assert list(back) == list(start())  # the user's own order
    assert back["norm.num_batches_tracked"].numpy() == 7
    assert back["layer.bias"].numpy().tolist() == [12, 13, 14]
    assert torch.equal(template.pack(back), w)
    assert torch.equal(template.pack(back, minus=torch.ones(18)), w - 1)


@pytest.mark.parametrize("small", [True, False])
def test_updates_are_the_models_difference_and_large_ones_say_how_far_they_reach(
    monkeypatch, small
):
    monkeypatch.setattr("flrce.flower.arrays.MIN_COMPILED_FLOATS", 18 if small else 0)
    template = ArrayTemplate.from_arrays(start())
    back = template.unpack(torch.arange(18.0))  # minus 20: from -20 to -3
    payload = template.pack_update(back, torch.full((18,), 20.0))
    assert torch.equal(payload.buffers["u"], torch.arange(18.0) - 20)
    assert payload.largest in ((None,) if small else (20.0, None))  # None without a compiler
    back["layer.bias"] = Array(np.float32([1, np.nan, 2]))
    after = template.pack_update(back, torch.zeros(18))
    assert int(after.buffers["u"].isnan().sum()) == 1
    assert after.largest is None or np.isnan(after.largest)


def test_arrays_of_other_precision_and_order_come_back_as_they_were():
    arrays = ArrayRecord(
        {
            "a": Array(np.asfortranarray(np.arange(6.0).reshape(2, 3))),
            "b": Array(np.float16([1, 2])),
        }
    )
    template = ArrayTemplate.from_arrays(arrays)
    w = template.pack(arrays)
    assert w.tolist() == [0, 1, 2, 3, 4, 5, 1, 2]
    assert [a.dtype for a in template.unpack(w).values()] == ["float64", "float16"]
    assert template.nbytes == 6 * 8 + 2 * 2


HOSTILE = {
    "claims 1e12 items": claim("<f4", (10**12,), b"\0" * 16),
    "claims a negative size": claim("<f4", (-4,), b"\0" * 16),
    "claims two negative sizes": claim("<f4", (-2, -2), b"\0" * 16),
    "object array": claim("|O", (1,), pickle.dumps(print)),
    "text": claim("<U8", (1,), b"\0" * 32),
    "structured": Array(
        "f",
        (1,),
        "numpy.ndarray",
        npy(b"{'descr': [('a','<f4')], 'fortran_order': False, 'shape': (1,)}"),
    ),
    "complex": claim("<c8", (4,), b"\0" * 32),
    "short": claim("<f4", (4,), b"\0" * 15),
    "long": claim("<f4", (4,), b"\0" * 17),
    "pickle": Array("float32", (4,), "numpy.ndarray", pickle.dumps([1.0] * 4)),
    "empty": Array("float32", (4,), "numpy.ndarray", b""),
    "no such version": Array("float32", (4,), "numpy.ndarray", npy(b"{}", version=b"\x09\x00")),
    "header that is code": Array(
        "float32", (4,), "numpy.ndarray", npy(b"__import__('os').system('true')")
    ),
    "header deeply nested": Array("float32", (4,), "numpy.ndarray", npy(b"(" * 9000)),
    "other serialiser": Array("float32", (4,), "pickle", b"\0" * 16),
    "shape of floats": claim("<f4", (4.0,), b"\0" * 16),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_array_is_refused_without_allocating(case):
    tracemalloc.start()
    try:
        with pytest.raises(MalformedPayload):
            read_array(HOSTILE[case], "float32", (4,))
        with pytest.raises(MalformedPayload):
            read_array(HOSTILE[case])
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("role", "entries"),
    [
        ("compressor", {"c": "topk", "c.keep": 1.5}),
        ("compressor", {"c": "fixed-point", "c.levels": 128}),
        ("link", {"c": "momentum", "c.beta": 2.0}),
        ("link", {"c": "sgd", "c.lr": -1.0}),
    ],
)
def test_a_message_with_a_setting_out_of_range_is_malformed(role, entries):
    with pytest.raises(MalformedPayload, match="should be"):
        read_piece(role, entries, "c")


@given(st.binary(max_size=300))
def test_random_bytes_are_never_an_exception_of_another_kind(data):
    for blob in (data, b"\x93NUMPY\x01\x00" + data):
        with pytest.raises(MalformedPayload):
            read_array(Array("float32", (3,), "numpy.ndarray", blob), "float32", (3,))


def test_an_array_too_long_for_its_shape_is_refused_by_its_length():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(10**6, np.float32))
    with pytest.raises(MalformedPayload, match=r"4000128 bytes for float32 of shape \(4,\)"):
        read_array(Array("float32", (4,), "numpy.ndarray", buffer.getvalue()), "float32", (4,))


def reply(**changes) -> RecordDict:
    """A rich client's reply."""
    made = Reply("7", 5, Payload({"u": torch.arange(18.0)}), n=9, loss=0.5, loss_square=0.25)
    return write_reply(replace(made, **changes), seconds=1.5, joules=None)


def test_a_reply_arrives_as_it_was_sent():
    template, w = ArrayTemplate.from_arrays(start()), torch.zeros(18)
    found = read_reply(reply(), TASK, template, w, 1000)
    assert found.payload is not None
    assert torch.equal(found.payload.buffers["u"], torch.arange(18.0))
    assert (found.client, found.t, found.n, found.loss, found.loss_square) == ("7", 5, 9, 0.5, 0.25)
    assert found.spent.bytes_up == 72
    assert found.spent.compute_seconds == 1.5
    assert not found.spent.measured
    measured = read_reply(
        write_reply(Reply("7", 5, Payload({}), n=1), 1.0, 3.5), TASK, template, w, 10
    )
    assert (measured.spent.joules, measured.spent.measured) == (3.5, True)


def test_a_plain_reply_is_the_model_minus_the_one_sent():
    template, w = ArrayTemplate.from_arrays(start()), torch.full((18,), 2.0)
    content = RecordDict(
        {
            "a": template.unpack(torch.arange(18.0)),
            "m": MetricRecord({"num-examples": 4.0, "loss": 1.0}),
        }
    )
    found = read_reply(content, TASK, template, w, 0)
    assert found.payload is not None
    assert torch.equal(found.payload.buffers["u"], torch.arange(18.0) - 2)
    assert (found.n, found.loss, found.t, found.spent.bytes_up) == (4, 1.0, 5, 72)
    assert (
        found.spent.framing >= count_record_bytes(content["a"]) - 72
    )  # headers, names and the counter


@pytest.mark.parametrize("n", [math.nan, math.inf, -3, 1e300, 2.5])
def test_absurd_num_examples_reach_the_gate_unharmed(n):
    content = RecordDict({"a": start(), "m": MetricRecord({"num-examples": n})})
    assert read_reply(content, TASK, ArrayTemplate.from_arrays(start()), torch.zeros(18), 0).n in (
        n,
        int(1e300),
    ) or math.isnan(n)


def spoiled(how) -> RecordDict:
    content = RecordDict({"arrays": start(), "metrics": MetricRecord({"num-examples": 4})})
    how(content)
    return content


SPOILS = {
    "missing array": lambda c: c["arrays"].pop("layer.bias"),
    "extra array": lambda c: c["arrays"].__setitem__("more", Array(np.zeros(1))),
    "renamed array": lambda c: c["arrays"].__setitem__("bias", c["arrays"].pop("layer.bias")),
    "broadcastable": (
        lambda c: c["arrays"].__setitem__("layer.bias", Array(np.zeros(1, np.float32)))
    ),
    "scalar": lambda c: c["arrays"].__setitem__("layer.bias", Array(np.array(0.0, np.float32))),
    "transposed": (
        lambda c: c["arrays"].__setitem__("layer.weight", Array(np.zeros((3, 4), np.float32)))
    ),
    "other kind": lambda c: c["arrays"].__setitem__("layer.bias", Array(np.zeros(3, np.int32))),
    "no arrays": lambda c: c.pop("arrays"),
    "two array records": lambda c: c.__setitem__("again", start()),
    "no metrics": lambda c: c.pop("metrics"),
    "many records": lambda c: [c.__setitem__(f"c{i}", ConfigRecord({})) for i in range(9)],
    "answers for another": lambda c: c.__setitem__(
        "reply", ConfigRecord({KEY_PREFIX + "t": 5, KEY_PREFIX + "client": "8"})
    ),
}


@pytest.mark.parametrize("case", sorted(SPOILS))
def test_a_reply_that_is_not_the_model_is_malformed(case):
    with pytest.raises(MalformedPayload):
        read_reply(
            spoiled(SPOILS[case]), TASK, ArrayTemplate.from_arrays(start()), torch.zeros(18), 1000
        )


def test_a_payload_is_capped_by_its_length_and_number_of_arrays():
    with pytest.raises(MalformedPayload, match="at most 100"):
        read_tensors(to_array_record({"u": torch.zeros(10**5)}), 100)
    many = ArrayRecord({str(i): Array(np.zeros(0, np.float32)) for i in range(5000)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MalformedPayload, match="5000 arrays"):
        read_tensors(many, 10**9)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("name", ["", "a" * 65, "../x", "a b", "a/b", 3, None, "a\n"])
def test_a_client_name_is_checked(name):
    with pytest.raises(MalformedPayload, match="client name"):
        validate_client_name(name)


@pytest.mark.parametrize("arrays", [ArrayRecord({}), ArrayRecord({"n": Array(np.arange(3))})])
def test_a_model_without_floats_is_refused(arrays):
    with pytest.raises(BadInput, match="initial_arrays"):
        ArrayTemplate.from_arrays(arrays)
