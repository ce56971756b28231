"""Norms, cosines and sums whose result does not depend on the order of replies."""

import torch
from torch import Tensor

from flrce.core import device_transfer, reductions

CHUNK_COLUMNS = 2**12  # columns widened to float64 at a time: P of them stay in the cache
LARGE, LONG = 2**22, 2**14  # of a model above so many floats, that many: fewer calls
DEVICE_CHUNK_COLUMNS = 2**20  # the same on a device, which fits no cache and waits for calls


def gram_matrix(U: Tensor) -> Tensor:
    """(P, P) dot products in float64: signs decide, so they must not be rounded away. No float64
    copy of U is made.
    """
    compiled = reductions.compiled_gram(U)
    if compiled is not None:
        return compiled
    columns = LONG if U.shape[1] > LARGE else CHUNK_COLUMNS
    if not device_transfer.is_on_host(U):
        columns = DEVICE_CHUNK_COLUMNS
    G = U.new_zeros(len(U), len(U), dtype=torch.float64)
    widened = U.new_empty(len(U), min(columns, U.shape[1]), dtype=torch.float64)
    for part in U.split(columns, dim=1):
        wide = widened[:, : part.shape[1]].copy_(part)
        G += wide @ wide.T
    return device_transfer.to_host(G)


def split_coordinates(w: Tensor, here: int, there: int = DEVICE_CHUNK_COLUMNS) -> list[slice]:
    """Coordinates to go through at a time: `here` on the host, of small models all; `there` on a
    device.
    """
    columns = here if device_transfer.is_on_host(w) else there
    if device_transfer.is_on_host(w) and len(w) <= LARGE:
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


def grow_square_table(table: Tensor, rows: int) -> Tensor:
    """The square table with at least this many rows and columns."""
    if len(table) >= rows:
        return table
    wide = table.new_zeros(rows, rows)
    wide[: len(table), : len(table)] = table
    return wide


def grow_table(table: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """The table with at least this many rows."""
    if len(table) >= rows:
        return table
    more = table.new_full((rows - len(table), *table.shape[1:]), fill)
    return torch.cat([table, more])
