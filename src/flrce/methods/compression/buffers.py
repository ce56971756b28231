"""What compressors share: checks of settings and payloads, and levels of a few bits without
gaps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flrce.core.pieces import MalformedPayload
from flrce.core.types import Payload
from flrce.errors import BadInput

TensorSizes = Sequence[tuple[str, int]]


def require_buffers(payload: Payload, names: set[str]) -> None:
    """Malformed unless the payload's buffers are these."""
    if set(payload.buffers) != names:
        got = ", ".join(map(repr, sorted(payload.buffers)))[:80] or "none"
        raise MalformedPayload(
            f"buffers {got}, not {', '.join(map(repr, sorted(names))) or 'none'}"
        )


def validate_share(name: str, value: float) -> None:
    """BadInput unless 0 < value <= 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise BadInput(f"{name} = {value!r}: must be above 0 and at most 1 (1: all)")


def count_floats(layout: TensorSizes) -> int:
    """Floats in a layout."""
    return sum(size for _, size in layout)


def pack_bits(levels: Tensor, bits: int) -> Tensor:
    """Levels (n,) uint8 below 2^bits, one after another without gaps."""
    if bits == 8:
        return levels
    if (
        8 % bits == 0
    ):  # whole levels to a byte, the first in its highest bits: shifts are many times as fast
        packed = np.zeros(-(-len(levels) * bits // 8), np.uint8)
        for i, place in enumerate(range(8 - bits, -1, -bits)):
            mine = levels.numpy()[i :: 8 // bits]
            packed[: len(mine)] |= mine << place
        return torch.from_numpy(packed)
    planes = np.unpackbits(levels.numpy()[:, None], axis=1)[:, 8 - bits :]
    return torch.from_numpy(np.packbits(planes))


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n levels that `pack_bits` packed; Malformed where the padding is not zero."""
    if bits == 8:
        return packed
    if 8 % bits == 0:
        levels = np.empty(len(packed) * 8 // bits, np.uint8)
        for i, place in enumerate(range(8 - bits, -1, -bits)):
            levels[i :: 8 // bits] = packed.numpy(force=True) >> place & (2**bits - 1)
        if levels[n:].any():
            raise MalformedPayload("bits beyond the last level are not zero")
        return torch.from_numpy(levels[:n])
    flat = np.unpackbits(packed.numpy(force=True))
    if flat[n * bits :].any():
        raise MalformedPayload("bits beyond the last level are not zero")
    planes = np.zeros((n, 8), np.uint8)
    planes[:, 8 - bits :] = flat[: n * bits].reshape(n, bits)
    return torch.from_numpy(np.packbits(planes, axis=1)[:, 0])
