"""What goes between the host's memory and a device's: copies as large as a model come through here,
and are counted.

A GPU's bus moves tens of gigabytes a second, its memory thousands: what the server makes of a
round's updates is made where they lie, and only what is small, or must be kept, comes home.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core.payload_bytes import count_bytes

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
