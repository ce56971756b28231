"""Payloads of every compressor, damaged: bits turned over, ends cut off or doubled, other types,
heads that claim very much, scales that are not numbers.

The gate refuses each with a reason or passes a sound update; it never raises, and takes little
memory and time.
"""

import random
import resource
import time
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from flrce.core.gate import validate_replies
from flrce.core.payloads import MAX_COORDINATE, ReplyContext, make_encoding_stream
from flrce.core.roles import Compressor
from flrce.core.types import Payload, Reply, Task
from flrce.errors import BadInput
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import TopK
from flrce.methods.compression.ternary import SparseTernary
from flrce.methods.registry import PIECES

LAYOUT = (  # two members, for the compressor that sends the one that was trained
    ("members.0.a.weight", 900),
    ("members.0.a.bias", 7),
    ("members.0.b.running_mean", 5),
    ("members.0.b.running_var", 5),
    ("members.1.c.weight", 90),
)
D = sum(size for _, size in LAYOUT)
INNER = (TopK(0.1), RotatedCode(1), RotatedCode(0.3), SparseTernary(0.05), Quantizer(4))
MORE = (
    RotatedCode(3),
    RotatedCode(0.3),
    TopK(0.1, bits=3),
    TopK(1.0),
    EntropyCoded(EntropyCoded(SparseTernary(0.02))),
)
DTYPES = (
    torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
)  # fmt: skip
SECONDS, MEGABYTES = 2, 50  # of the processor, that a case may take
#: numbers of values: 2^32, 2^35, one that never ends, a few thousand, none
HEADS = ([255] * 4 + [15], [255] * 4 + [127], [128] * 5, [200, 200, 1], [0])


def list_compressors() -> Iterator[Compressor]:
    """Every registered compressor, those that wrap another around several."""
    yield from MORE
    for make in PIECES["compressor"].values():
        wraps = [field.name for field in fields(make) if field.metadata.get("piece")]
        for inner in INNER if wraps else (None,):
            try:
                yield make(**dict.fromkeys(wraps, inner))
            except BadInput:  # error feedback around scaled values
                continue


COMPRESSORS = tuple(list_compressors())


def damage_buffer(buffer: Tensor, rng: random.Random) -> Tensor:
    """The buffer with one kind of damage."""
    flat, kind = buffer.clone().contiguous().view(-1), rng.random()
    if kind < 0.45 and flat.numel() and flat.dtype != torch.bool:
        raw = flat.view(torch.uint8)
        for _ in range(rng.choice([1, 1, 2, 8])):
            raw[rng.randrange(min(len(raw), rng.choice([4, 16, len(raw)])))] ^= 1 << rng.randrange(
                8
            )
        return flat
    if kind < 0.6:
        return flat[: rng.randrange(len(flat) + 1)]
    if kind < 0.7:
        return torch.cat([flat, flat[: rng.randrange(len(flat) + 1)]])
    if kind < 0.78:
        return flat.to(rng.choice(DTYPES))
    if kind < 0.88:
        if flat.is_floating_point():
            return torch.full_like(flat, rng.choice([float("nan"), float("inf"), 3e38, -1.0]))
        return torch.full_like(flat, rng.choice([0, 1, 127]))
    if kind < 0.97:
        rest = rng.randbytes(rng.randrange(40))
        return torch.tensor([rng.randrange(6), *rng.choice(HEADS), *rest], dtype=torch.uint8)
    return flat.reshape(1, -1)


def case(rng: random.Random) -> bool:
    """Whether one damaged payload passed, as a sound update."""
    task = Task("x", 0, 3, seed=1, compressor=rng.choice(COMPRESSORS))
    u = 0.01 * torch.randn(D, generator=torch.Generator().manual_seed(rng.randrange(50)))
    payload, _ = task.compressor.encode(u, LAYOUT, make_encoding_stream(task), {})
    buffers = dict(payload.buffers)
    for name in rng.sample(sorted(buffers), min(len(buffers), rng.choice([1, 1, 2]))):
        buffers[name] = damage_buffer(buffers[name], rng)
    if rng.random() < 0.05:
        buffers |= {str(i): rng.choice(list(buffers.values())) for i in range(30)}
    reply = Reply("x", 3, Payload(buffers), n=4, loss=1.0)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    updates, rejected = validate_replies(
        [task], [reply], ReplyContext(lambda _: (None, LAYOUT), D, D, w=torch.ones(D))
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert time.process_time() - began < SECONDS, task.compressor
    assert grown < MEGABYTES, (task.compressor, grown)
    assert len(updates) + len(rejected) == 1
    if len(updates):
        assert float(updates.U.abs().max()) <= MAX_COORDINATE  # a NaN compares with nothing
        return True
    why = rejected["x"]
    assert why, task.compressor
    assert why.isprintable(), why
    assert len(why) < 200, why
    assert "while decoding" not in why, (task.compressor, why)  # an exception, not a reason
    return False
