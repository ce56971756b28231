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

__all__ = [
    "ChunkGroup",
    "draw_sign_rows",
    "draw_signs",
    "plan_chunks",
    "split_chunks",
    "transform_hadamard",
]

log = logging.getLogger("flrce")


def split_chunks(x: Tensor, groups: Sequence[ChunkGroup]) -> list[Tensor]:
    """x (..., n) as one tensor of chunks (rows, size) for each group, padded with zeros; chunks of
    the same row of x follow one another.
    """
    if not groups:
        return []
    x = pad(x, (0, sum(group.floats for group in groups) - x.shape[-1]))
    parts = torch.split(x, [group.floats for group in groups], -1)
    return [part.reshape(-1, group.size) for part, group in zip(parts, groups, strict=True)]


def draw_signs(rng: Generator, n: int, device: torch.device) -> Tensor:
    """(n,) random signs, +1 or -1."""
    return draw_sign_rows([rng], n, device)[0]


def draw_sign_rows(rngs: Sequence[Generator], n: int, device: torch.device) -> Tensor:
    """(K, n) random signs, a row from each generator; n / 8 bytes a row go to the device."""
    rows = [np.frombuffer(rng.bytes(-(-n // 8)) or b"\0", np.uint8) for rng in rngs]
    packed = np.stack(rows)
    if device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed, axis=1))[:, :n]
    else:
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
        bits = (torch.from_numpy(packed).to(device)[..., None] >> places & 1).flatten(1)[:, :n]
    return bits.float().mul_(-2).add_(1)


def transform_hadamard(x: Tensor) -> Tensor:
    """H x of each row of x (rows, size): Sylvester's H of +1 and -1, not normalised, so H H x =
    size * x.

    A row is a matrix of about sqrt(size) columns: the butterflies go over its columns, then over
    its rows, so that each one works on long runs of memory. On the host every step is one float32
    addition or subtraction in a fixed order, compiled where there is a compiler.
    """
    rows, size = x.shape
    if x.device.type != "cpu":
        return multiply_hadamard(x)
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


def multiply_hadamard(x: Tensor) -> Tensor:
    """As `transform_hadamard`, by two products with small matrices in float64: sums of centroids
    are exact, so what is decoded has the same bits as on the host.
    """
    rows, size = x.shape
    columns = 1 << (size.bit_length() - 1) // 2
    left, right = (make_hadamard_matrix(n, x.device) for n in (size // columns, columns))
    y = left @ x.reshape(rows, size // columns, columns).double() @ right
    return y.reshape(rows, size).to(x.dtype)


@cache
def make_hadamard_matrix(n: int, device: torch.device) -> Tensor:
    """(n, n) Sylvester's H in float64, n a power of two."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H.to(device)


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
