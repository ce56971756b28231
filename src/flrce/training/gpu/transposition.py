"""Weights of many lanes and their gradients, from the order that torch has them in to the kernels'
and back.
"""

import torch
from torch import Tensor

from flrce.training.gpu.tiles import COPY_BLOCK_VALUES, choose_tile_size

MAX_RUN_VALUES = 64  # values that a tile reads or writes in a row, at most
SHORT, AT_ONCE = (
    512,
    8,
)  # values of a program that sums parts, and how many parts it waits for at once


def move_taps_first(weight: Tensor, back: bool) -> Tensor:
    """weight (k, O, C, R, S) as (k, R, S, O, C), or for the product back as (k, R, S, C, O)."""
    from flrce.training.gpu import triton_turn as kernels

    k, O, C, R, S = weight.shape
    if R * S == 1 and not back:
        return weight.reshape(k, 1, 1, O, C).contiguous()
    if not weight[0].is_contiguous():
        weight = weight.contiguous()
    out = torch.empty(
        k, R, S, *((C, O) if back else (O, C)), dtype=weight.dtype, device=weight.device
    )
    A, inner = (O, C) if back else (O * C, 1)
    block_j = choose_tile_size(inner * R * S, 1, MAX_RUN_VALUES)
    block_a = choose_tile_size(A, 1, COPY_BLOCK_VALUES // block_j)
    tiles = -(-A // block_a) * -(-inner * R * S // block_j)
    kernels.transpose_taps[(k * tiles,)](
        weight,
        out,
        weight.stride(0),
        A,
        inner,
        R * S,
        BLOCK_A=block_a,
        BLOCK_J=block_j,
        num_warps=4,
    )
    return out


def sum_partial_gradients(
    parts: Tensor, shape: tuple[int, int], O: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """parts (parts, k, T M + O), each row (T, M) and O more: their sums over the parts, (k, M, T)
    and (k, O).

    `shape`: (M, T).
    """
    from flrce.training.gpu import triton_turn as kernels

    many, k = parts.shape[:2]
    M, T = shape
    out = torch.empty(k, M, T, dtype=dtype, device=parts.device)
    more = torch.empty(k, O, dtype=dtype, device=parts.device)
    block_t = choose_tile_size(T, 1, MAX_RUN_VALUES)
    block_m = choose_tile_size(M, 1, (COPY_BLOCK_VALUES if many == 1 else SHORT) // block_t)
    tiles = -(-T // block_t) * -(-M // block_m)
    kernels.sum_parts[(k * tiles,)](
        parts,
        out,
        more,
        many,
        k,
        M,
        T,
        O,
        AT_ONCE=1 if many == 1 else AT_ONCE,
        BLOCK_T=block_t,
        BLOCK_M=block_m,
        num_warps=4,
    )
    return out, more
