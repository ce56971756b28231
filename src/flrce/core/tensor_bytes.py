"""Tensors as bytes: what they weigh as they travel, copies between the host and a device, and
memory for large vectors.

What travels is counted here for every direction and engine. Copies as large as a model go through
`to_host` and `to_device`, and are counted: a GPU's bus moves tens of gigabytes a second, its memory
thousands, so the server works on a round's updates where they lie. A server makes a few vectors of
the model's size in every round; to have the system clear fresh pages for them takes longer than the
sums over them, so `allocate_tensor` uses the memory again as soon as nobody refers to it.
"""

import math
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HASH_BYTES = 16  # of a hash that names a model
SEED_BYTES = 8
Tensors = Tensor | Mapping[Any, Tensor] | Iterable[Tensor]
LOSS_BYTES = 4  # a loss that a client was asked for
REPLY_FIGURES_BYTES = 8  # beside an update: the samples and their loss
EVALUATION_FIGURES_BYTES = 8  # a client's metric of the model, and on how many samples


def count_bytes(tensors: Tensors) -> int:
    """Bytes of one tensor, of a mapping's values or of several tensors, each by its own type."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in values)


def count_value_bytes(count: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of so many values that do not exist yet: of a model to be sent, of a dense update to be
    awaited.
    """
    return count * dtype.itemsize


def count_download_bytes(
    model_bytes: int, held: Tensor | None, tensors: Mapping[str, Tensor]
) -> int:
    """Bytes that a client receives: the model, or the coordinates that it holds of it, and the
    further tensors of its task.
    """
    model = model_bytes if held is None else count_value_bytes(len(held))
    return model + count_bytes(tensors)


def count_upload_bytes(buffers: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> int:
    """Bytes that a client sends back: its encoded update, and what its links send beside it."""
    return count_bytes(buffers) + count_bytes(extras)


def limit_payload_bytes(size: int, tensors: int) -> int:
    """The most bytes that any encoding of `size` floats in so many tensors can need."""
    return count_value_bytes(size, torch.float64) + 64 * tensors + 4096


# bytes up to which pinned memory is taken as large as what comes: torch keeps it, in powers of two
MAX_PINNED_COPY_BYTES = 2**29
# bytes of each of the two pinned buffers through which more than that comes
PINNED_BUFFER_BYTES = 2**25


@dataclass
class TransferBytes:
    """Bytes so far, of the whole process."""

    up: int = 0  # to devices
    down: int = 0  # to the host


transferred_bytes = TransferBytes()


def is_on_host(x: Tensor) -> bool:
    """Whether x lies in the host's memory."""
    return x.device.type == "cpu"


def to_device(x: Tensor, device: str | torch.device) -> Tensor:
    """x on a device; itself where it is there already."""
    device = torch.device(device)
    if x.device.type == device.type:
        return x
    transferred_bytes.up += count_bytes(x)
    return x.to(device)


def to_device_of(x: Tensor, y: Tensor) -> Tensor:
    """x where y is."""
    return to_device(x, y.device)


def to_host(x: Tensor) -> Tensor:
    """x in the host's memory; itself where it is there already. Through pinned pages: twice as fast
    as without.
    """
    if is_on_host(x):
        return x
    size = count_bytes(x)
    transferred_bytes.down += size
    if size <= MAX_PINNED_COPY_BYTES:
        made = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        made.copy_(x, non_blocking=True)
        torch.cuda.synchronize(x.device)
        return made
    # numpy asks for huge pages
    made = torch.from_numpy(np.empty(tuple(x.shape), _numpy_dtype(x.dtype)))
    copy_in_stages(x.reshape(-1), made.view(-1), pinned=True)
    return made


def copy_in_stages(x: Tensor, into: Tensor, pinned: bool) -> None:
    """Copy x (n,) by way of two buffers: while one is emptied into memory, the other is filled by
    the device.
    """
    size = PINNED_BUFFER_BYTES // x.element_size()
    buffers = [torch.empty(size, dtype=x.dtype, pin_memory=pinned) for _ in range(2)]
    full = [torch.cuda.Event() if pinned else None for _ in range(2)]
    waiting: list[tuple[int, Tensor]] = []
    for i, (part, target) in enumerate(zip(x.split(size), into.split(size), strict=True)):
        turn = i % 2
        buffers[turn][: len(part)].copy_(part, non_blocking=pinned)
        if (event := full[turn]) is not None:
            event.record(torch.cuda.current_stream(x.device))
        waiting.append((turn, target))
        if len(waiting) == 2:
            _drain_buffer(*waiting.pop(0), buffers, full)
    for turn, target in waiting:
        _drain_buffer(turn, target, buffers, full)


def _drain_buffer(
    turn: int, target: Tensor, buffers: list[Tensor], full: list[torch.cuda.Event | None]
) -> None:
    if (event := full[turn]) is not None:
        event.synchronize()
    target.copy_(buffers[turn][: len(target)])


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


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
    """A tensor in memory whose values are not set; of more than `most` bytes, in memory of
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
    return allocate_tensor(*x.shape, dtype=x.dtype) if is_on_host(x) else torch.empty_like(x)


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
