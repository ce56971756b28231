"""Memory for large vectors, used again as soon as nobody holds on to it.

A server makes a few vectors of the model's size in every round, writes each once and reads it a few
times. To have the system clear fresh pages for them takes longer than the sums over them, above all
where its memory is in small pieces.
"""

import math
import sys
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core import device_transfer

# bytes below which the usual allocator has them at hand; from here on numpy asks for huge pages
MIN_POOLED_BYTES = 2**22
MAX_POOLED_BYTES = 2**29  # bytes above which memory is too dear to be kept for the next round
# the same of a round's table of replies, which is there whenever memory is scarcest
MAX_POOLED_TABLE_BYTES = 2**30
NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("float32"),
    torch.float64: np.dtype("float64"),
}
BufferArray = NDArray[Any]

# handed out; a tensor that lies in one refers to it, so that the count says who is free
_blocks: list[BufferArray] = []
_lock = threading.Lock()


def allocate_tensor(
    *shape: int, dtype: torch.dtype = torch.float32, most: int | None = None
) -> Tensor:
    """A tensor in memory whose values are not set; of more than `most` bytes (LARGE), in memory of
    its own.
    """
    kind, size = NUMPY_DTYPES.get(dtype), math.prod(shape)
    if kind is None or size * kind.itemsize < MIN_POOLED_BYTES:
        return torch.empty(*shape, dtype=dtype)
    if size * kind.itemsize > (MAX_POOLED_BYTES if most is None else most):
        return torch.from_numpy(np.empty(shape, kind))
    with _lock:
        fitting = [
            block for block in _list_unused(_blocks) if block.dtype == kind and len(block) == size
        ]
        if not fitting:
            _drop_unused()
            fitting = [np.empty(size, kind)]
            _blocks.extend(fitting)
        return torch.from_numpy(fitting[0]).view(*shape)


def allocate_like(x: Tensor) -> Tensor:
    """The same, of the shape and dtype of x, and where x is."""
    return (
        allocate_tensor(*x.shape, dtype=x.dtype)
        if device_transfer.is_on_host(x)
        else torch.empty_like(x)
    )


def free_unused_buffers() -> None:
    """Give back what nobody uses now."""
    with _lock:
        _drop_unused()


def _drop_unused() -> None:
    free = {id(block) for block in _list_unused(_blocks)}
    _blocks[:] = [block for block in _blocks if id(block) not in free]


def _count_references(blocks: list[BufferArray], i: int) -> int:
    return sys.getrefcount(blocks[i])


def _list_unused(blocks: list[BufferArray]) -> list[BufferArray]:
    return [
        blocks[i] for i in range(len(blocks)) if _count_references(blocks, i) <= UNUSED_REFERENCES
    ]


# references to a block that only the list holds, as this Python counts them
UNUSED_REFERENCES = _count_references([np.empty(0)], 0)
