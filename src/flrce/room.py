"""Memory for large vectors, used again as soon as nobody holds on to it.

A server makes a few vectors of the model's size in every round, writes each once and reads it a few times. To have the
system clear fresh pages for them takes longer than the sums over them, above all where its memory is in small pieces.
"""

import math
import sys
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce import crossing

SMALL = 2**22  # bytes below which the usual allocator has them at hand; from here on numpy asks for huge pages
LARGE = 2**29  # bytes above which memory is too dear to be kept for the next round
TABLE = 2**30  # the same of a round's table of replies, which is there whenever memory is scarcest
KINDS: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype("float32"), torch.float64: np.dtype("float64")}
Block = NDArray[Any]

_blocks: list[Block] = []  # handed out; a tensor that lies in one refers to it, so that the count says who is free
_lock = threading.Lock()


def room(*shape: int, dtype: torch.dtype = torch.float32, most: int | None = None) -> Tensor:
    """A tensor in memory whose values are not set; of more than `most` bytes (LARGE), in memory of its own."""
    kind, size = KINDS.get(dtype), math.prod(shape)
    if kind is None or size * kind.itemsize < SMALL:
        return torch.empty(*shape, dtype=dtype)
    if size * kind.itemsize > (LARGE if most is None else most):
        return torch.from_numpy(np.empty(shape, kind))
    with _lock:
        fitting = [block for block in _free(_blocks) if block.dtype == kind and len(block) == size]
        if not fitting:
            _drop_free()
            fitting = [np.empty(size, kind)]
            _blocks.extend(fitting)
        return torch.from_numpy(fitting[0]).view(*shape)


def room_like(x: Tensor) -> Tensor:
    """The same, of the shape and dtype of x, and where x is."""
    return room(*x.shape, dtype=x.dtype) if crossing.local(x) else torch.empty_like(x)


def let_go() -> None:
    """Give back what nobody uses now."""
    with _lock:
        _drop_free()


def _drop_free() -> None:
    free = {id(block) for block in _free(_blocks)}
    _blocks[:] = [block for block in _blocks if id(block) not in free]


def _users(blocks: list[Block], i: int) -> int:
    return sys.getrefcount(blocks[i])


def _free(blocks: list[Block]) -> list[Block]:
    return [blocks[i] for i in range(len(blocks)) if _users(blocks, i) <= UNUSED]


UNUSED = _users([np.empty(0)], 0)  # references to a block that only the list holds, as this Python counts them
