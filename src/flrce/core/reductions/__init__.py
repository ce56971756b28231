"""What a server does with the updates of a large model, compiled: one walk through memory for each
question.

A model of millions of floats does not fit the caches, so that every temporary of it is written to
memory and read again. Here each value is read once and widened in registers. Without a C compiler,
or for vectors that do not lie in memory as plain floats, there is no answer, and whoever asked goes
on with torch.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core import device_transfer
from flrce.core.c_compiler import KernelUnavailable, find_toolchain, load_or_build_library

MIN_COMPILED_FLOATS = 2**22  # floats of a model from which on it is worth a compiler
COLUMNS = 256  # as in passes.c
ALIGNMENT_BYTES = 64  # bytes
P, L, D = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
TABLE_ARGTYPES: list[Any] = [P, L, L, L]  # the updates, rows, stride, columns
MIN_TOTAL_WEIGHT = torch.finfo(torch.float64).tiny  # in place of a weight of 0
log = logging.getLogger("flrce")


def compiled_gram(U: Tensor) -> Tensor | None:
    """(P, P) dot products of the rows, summed in float64; None: not made."""
    code = _load_library() if _is_supported(U) else None
    if code is None:
        return None
    tile = code.count_tile_rows()
    rows = -(-len(U) // tile) * tile
    room = np.zeros(rows * COLUMNS + ALIGNMENT_BYTES // 8)
    wide = room[-room.ctypes.data % ALIGNMENT_BYTES // 8 :]
    G = torch.zeros(rows, rows, dtype=torch.float64)
    code.gram(*_table_arguments(U), rows, wide.ctypes.data, G.data_ptr())
    upper = G[: len(U), : len(U)].triu()
    return upper + upper.triu(1).T


def write_weighted_mean(w: Tensor, U: Tensor, n: Tensor, into: Tensor) -> bool:
    """Writes w plus the mean of the rows, weighted by n: the bits of sums in float64, row by row.
    False: it did not.

    Weights of 24 bits make exact products with floats, so that it is no matter whether multiply and
    add are one.
    """
    exact = bool((n.float().double() == n).all()) and len(n) > 0
    if not (
        exact
        and _is_supported(U)
        and _is_supported(w[None])
        and _is_supported(into[None])
        and U.shape[1] == len(w)
    ):
        return False
    code = _load_library()
    if code is None:
        return False
    weights = n.contiguous()
    code.mean(
        *_table_arguments(U),
        weights.data_ptr(),
        max(sum(n.tolist()), MIN_TOTAL_WEIGHT),
        w.data_ptr(),
        into.data_ptr(),
    )
    return True


def sum_rotated_blocks(U: Tensor, signs: Tensor, offsets: Tensor, k: int) -> Tensor | None:
    """(P, 2 k) sums of the rows' blocks of k floats, with signs, each from its offset on; None: not
    made.
    """
    code = _load_library() if _is_supported(U) else None
    if code is None:
        return None
    found = torch.zeros(len(U), 2 * k)
    code.turned(*_table_arguments(U), signs.data_ptr(), offsets.data_ptr(), k, found.data_ptr())
    return found


def _is_supported(U: Tensor) -> bool:
    """Whether these are rows of many plain floats in memory."""
    return (
        U.dtype == torch.float32
        and device_transfer.is_on_host(U)
        and U.shape[1] > MIN_COMPILED_FLOATS
        and U.stride(1) == 1
        and (len(U) < 2 or U.stride(0) >= U.shape[1])
    )


def _table_arguments(U: Tensor) -> tuple[int, int, int, int]:
    return U.data_ptr(), len(U), U.stride(0), U.shape[1]


@cache
def _load_library() -> ctypes.CDLL | None:
    """The compiled passes, built at first use and kept; None where they cannot be."""
    try:
        command, macros, _ = find_toolchain()
        built = load_or_build_library(
            Path(__file__).with_name("passes.c").read_text(), [*command, "-O3"], macros
        )
        code = ctypes.CDLL(str(built))
    except (KernelUnavailable, OSError) as why:
        log.info("sums over large models are made by torch: %s", why)
        return None
    code.gram.argtypes = [*TABLE_ARGTYPES, L, P, P]
    code.mean.argtypes = [*TABLE_ARGTYPES, P, D, P, P]
    code.turned.argtypes = [*TABLE_ARGTYPES, P, P, L, P]
    for each in (code.gram, code.mean, code.turned):
        each.restype = None
    code.count_tile_rows.restype = L
    return code
