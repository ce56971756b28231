"""What a client sent, inspected before it is used: sizes before contents, and nothing is ever executed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.pieces import Malformed
from flrce.rng import stream
from flrce.types import Payload, Spent, Task

LARGEST = 1e9  # of one coordinate: beyond it float32 products of updates overflow


def decoded(task: Task, payload: Payload, layout: Sequence[tuple[str, int]]) -> tuple[str, Tensor | None]:
    """("", the update) or (why its values cannot be used, None); Malformed where there are none to speak of."""
    size = sum(count for _, count in layout)
    weigh(payload, size, len(layout))
    buffers = _Watched(payload.buffers)
    u = task.compressor.decode(Payload(buffers), layout, encoding(task))
    if buffers.unread:
        raise Malformed(f"unexpected buffer {min(buffers.unread)[:40]!r}")
    if type(u) is not Tensor or tuple(u.shape) != (size,) or not u.is_floating_point():
        raise Malformed(f"decodes to {str(getattr(u, 'shape', type(u).__name__))[:40]}, not to {size} floats")
    u = u.detach().float()
    if not torch.isfinite(u).all():
        return f"{int((~torch.isfinite(u)).sum())} of {size} values are not finite", None
    if size and float(u.abs().max()) > LARGEST:
        return f"a value of {float(u.abs().max()):.3g} is beyond {LARGEST:g}", None
    return "", u


def weigh(payload: Payload, size: int, tensors: int) -> None:
    """Malformed unless the payload is plain tensors, no more and no heavier than a task of `size` floats can need."""
    if not isinstance(payload, Payload) or not isinstance(payload.buffers, Mapping):
        raise Malformed(f"a {type(payload).__name__[:40]} is no payload")
    buffers, most = payload.buffers, 8 * size + 64 * tensors + 4096
    if len(buffers) > 4 * tensors + 16:
        raise Malformed(f"{len(buffers)} buffers for {tensors} tensors")
    for name, buffer in buffers.items():
        if type(name) is not str or type(buffer) is not Tensor:
            raise Malformed(f"buffer {str(name)[:40]!r} is a {type(buffer).__name__[:40]}, not a tensor")
        if buffer.layout != torch.strided or buffer.is_meta or buffer.is_quantized:
            raise Malformed(f"buffer {name[:40]!r} is no plain tensor in memory")
    if payload.nbytes > most:
        raise Malformed(f"{payload.nbytes} bytes, more than the {most} that {size} floats can need")


def sound(spent: Spent) -> bool:
    """Whether what a client says it spent can be booked."""
    return isinstance(spent, Spent) and all(
        number(value) and value >= 0 for value in (getattr(spent, f.name) for f in fields(Spent))
    )


def number(value: Any) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def encoding(task: Task) -> Generator:
    """The randomness that the client encoded with."""
    return stream(task.seed, "encode", task.t, task.client)


class _Watched(Mapping[str, Tensor]):
    """Buffers that know which of them were looked at."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers, self.unread = buffers, set(buffers)

    def __getitem__(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self.buffers[name]

    def __iter__(self) -> Iterator[str]:
        for name in self.buffers:
            self.unread.discard(name)
            yield name

    def __len__(self) -> int:
        return len(self.buffers)
