"""Random rotations on torch's devices: a Hadamard transform with random signs, over chunks of
powers of two (flrce_client.hadamard says which).
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn.functional import pad

from flrce.core.c_compiler import KernelUnavailable, find_toolchain, load_or_build_library
from flrce_client.hadamard import ChunkGroup, plan_chunks

__all__ = ["ChunkGroup", "draw_signs", "plan_chunks", "split_chunks", "transform_hadamard"]

log = logging.getLogger("flrce")


def split_chunks(x: Tensor, groups: Sequence[ChunkGroup]) -> list[Tensor]:
    """x (n,) as one (rows, size) tensor for each group, padded with zeros."""
    if not groups:
        return []
    x = pad(x, (0, sum(group.floats for group in groups) - len(x)))
    parts = torch.split(x, [group.floats for group in groups])
    return [part.view(group.rows, -1) for part, group in zip(parts, groups, strict=True)]


def draw_signs(rng: Generator, n: int, device: torch.device) -> Tensor:
    """(n,) random signs, +1 or -1; n / 8 bytes go to the device."""
    packed = torch.frombuffer(bytearray(rng.bytes(-(-n // 8)) or b"\0"), dtype=torch.uint8)
    if device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy()))[:n]
    else:
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
        bits = (packed.to(device)[:, None] >> places & 1).flatten()[:n]
    return bits.float().mul_(-2).add_(1)


def transform_hadamard(x: Tensor) -> Tensor:
    """H x of each row of x (rows, size): Sylvester's H of +1 and -1, not normalised, so H H x =
    size * x.

    A row is a matrix of about sqrt(size) columns: the butterflies go over its columns, then over
    its rows, so that each one works on long runs of memory. Every step is one float32 addition or
    subtraction in a fixed order, so every backend computes the same values: on the host a compiled
    one, where there is a compiler.
    """
    rows, size = x.shape
    if x.dtype == torch.float32 and x.device.type == "cpu":
        code = _load_library()
        if code is not None:
            y = x.clone(memory_format=torch.contiguous_format)
            code.hadamard(y.data_ptr(), rows, size)
            return y
    columns = 1 << (size.bit_length() - 1) // 2
    y = x.reshape(rows, size // columns, columns).clone()
    _apply_butterflies(y)
    y = y.transpose(1, 2).contiguous()
    _apply_butterflies(y)
    return y.transpose(1, 2).reshape(rows, size)


@cache
def _load_library() -> ctypes.CDLL | None:
    """The compiled transform, built at first use and kept; None where it cannot be."""
    try:
        command, macros, _ = find_toolchain()
        source = Path(__file__).with_name("hadamard.c").read_text()
        code = ctypes.CDLL(str(load_or_build_library(source, [*command, "-O3"], macros)))
    except (KernelUnavailable, OSError) as why:
        log.info("rotations are made by torch: %s", why)
        return None
    code.hadamard.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    code.hadamard.restype = None
    return code


def _apply_butterflies(x: Tensor) -> None:
    """In place, H over the middle dimension of x (rows, size, columns): (a, b) -> (a + b, a - b)
    over distances size / 2, size / 4, ..., 1.
    """
    rows, size, columns = x.shape
    distance = size // 2
    while distance:
        first, second = x.view(rows, -1, 2, distance * columns).unbind(2)
        difference = first - second
        first += second
        second.copy_(difference)
        distance //= 2
