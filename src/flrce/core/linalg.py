"""Norms, cosines and sums whose result does not depend on the order of replies.

A model of millions of floats does not fit the caches, so that every temporary of it is written to
memory and read again. For these, compiled code (passes.c) reads each value once and widens it in
registers; without a C compiler, or for vectors that do not lie in memory as plain floats, torch
makes the sums.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.c_compiler import KernelUnavailable, find_toolchain, load_or_build_library

CHUNK_COLUMNS = 2**12  # columns widened to float64 at a time: P of them stay in the cache
LARGE_MODEL_FLOATS = 2**22
LARGE_CHUNK_COLUMNS = 2**14  # of models above so many floats: fewer calls
DEVICE_CHUNK_COLUMNS = 2**20  # the same on a device, which fits no cache and waits for calls

MIN_COMPILED_FLOATS = 2**22  # floats of a model from which on it is worth a compiler
PASS_COLUMNS = 256  # as in passes.c
ALIGNMENT_BYTES = 64  # bytes
POINTER, LONG, DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
TABLE_ARGTYPES: list[Any] = [POINTER, LONG, LONG, LONG]  # the updates, rows, stride, columns
MIN_TOTAL_WEIGHT = torch.finfo(torch.float64).tiny  # in place of a weight of 0
log = logging.getLogger("flrce")


def gram_matrix(U: Tensor) -> Tensor:
    """(P, P) dot products in float64: signs decide, so they must not be rounded away. No float64
    copy of U is made.
    """
    compiled = compiled_gram(U)
    if compiled is not None:
        return compiled
    columns = LARGE_CHUNK_COLUMNS if U.shape[1] > LARGE_MODEL_FLOATS else CHUNK_COLUMNS
    if not tensor_bytes.is_on_host(U):
        columns = DEVICE_CHUNK_COLUMNS
    G = U.new_zeros(len(U), len(U), dtype=torch.float64)
    widened = U.new_empty(len(U), min(columns, U.shape[1]), dtype=torch.float64)
    for part in U.split(columns, dim=1):
        wide = widened[:, : part.shape[1]].copy_(part)
        G += wide @ wide.T
    return tensor_bytes.to_host(G)


def split_coordinates(w: Tensor, here: int, there: int = DEVICE_CHUNK_COLUMNS) -> list[slice]:
    """Coordinates to go through at a time: `here` on the host, of small models all; `there` on a
    device.
    """
    columns = here if tensor_bytes.is_on_host(w) else there
    if tensor_bytes.is_on_host(w) and len(w) <= LARGE_MODEL_FLOATS:
        columns = max(len(w), 1)
    return [slice(start, start + columns) for start in range(0, len(w), columns)]


def normalize_rows(U: Tensor) -> Tensor:
    """(L, size) the rows at length 1, whatever their floats; a row of zeros stays one."""
    largest = U.abs().amax(1, keepdim=True) if U.shape[1] else U.new_ones(len(U), 1)
    # squares of what is at most 1 do not overflow
    scaled = U / largest.clamp(min=torch.finfo(U.dtype).tiny)
    # 0, or at least 1
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp(min=1.0)
    return scaled / length


def mean_conflicts(G: Tensor) -> float:
    """Mean number of peers whose update points against a client's own (Algorithm 3), from the
    products G (P, P).
    """
    if len(G) < 2:
        return 0.0
    return int((G < 0).sum()) / len(G)  # the diagonal is never negative


def update_consensus(G: Tensor, n: Tensor) -> float:
    """|sum p_k u_k| / sum p_k |u_k|: 1 when all pull one way, 0 when they cancel out."""
    p = (n / n.sum()).double()
    pulls = float(p @ G.diagonal().clamp(min=0).sqrt())
    return float((p @ G @ p).clamp(min=0).sqrt()) / pulls if pulls > 0 else 1.0


def compiled_gram(U: Tensor) -> Tensor | None:
    """(P, P) dot products of the rows, summed in float64; None: not made."""
    code = _load_library() if _is_supported(U) else None
    if code is None:
        return None
    tile = code.count_tile_rows()
    rows = -(-len(U) // tile) * tile
    room = np.zeros(rows * PASS_COLUMNS + ALIGNMENT_BYTES // 8)
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


def write_difference(values: NDArray[Any], w: NDArray[Any], into: NDArray[Any]) -> float | None:
    """Writes values - w, vectors of float32, and returns the largest magnitude: NaN where one is.
    None: it did not.
    """
    vectors = (values, w, into)
    if not all(x.dtype == np.float32 and x.flags.aligned and x.flags.c_contiguous for x in vectors):
        return None
    code = _load_library()
    if code is None:
        return None
    pointers = [x.ctypes.data for x in vectors]
    bits = code.subtract(*pointers[:2], len(values), pointers[2])
    return float(np.uint32(bits).view(np.float32))


def sum_rotated_blocks(U: Tensor, signs: Tensor, offsets: Tensor, k: int) -> Tensor | None:
    """(P, 2 k) sums of the rows' blocks of k floats, with signs, each from its offset on; None: not
    made.
    """
    code = _load_library() if _is_supported(U) else None
    if code is None:
        return None
    sums = torch.zeros(len(U), 2 * k)
    code.turned(*_table_arguments(U), signs.data_ptr(), offsets.data_ptr(), k, sums.data_ptr())
    return sums


def _is_supported(U: Tensor) -> bool:
    """Whether these are rows of many plain floats in memory."""
    return (
        U.dtype == torch.float32
        and tensor_bytes.is_on_host(U)
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
    code.gram.argtypes = [*TABLE_ARGTYPES, LONG, POINTER, POINTER]
    code.mean.argtypes = [*TABLE_ARGTYPES, POINTER, DOUBLE, POINTER, POINTER]
    code.turned.argtypes = [*TABLE_ARGTYPES, POINTER, POINTER, LONG, POINTER]
    code.subtract.argtypes = [POINTER, POINTER, LONG, POINTER]
    for function in (code.gram, code.mean, code.turned):
        function.restype = None
    code.subtract.restype = ctypes.c_uint32
    code.count_tile_rows.restype = LONG
    return code
