"""Convolutions of few input channels with channels last, by Triton: sums over channels and taps together."""

import torch
from torch import Tensor

from flrce.local.stacked.rows import How, Pair
from flrce.local.stacked.tiles import mode, tile
from flrce.local.stacked.turns import gathered

FEW = 8  # input channels up to which they are few: half of what a product sums over at once
PARTS = 32  # programs of one lane's weight gradient; not by the number of lanes, so that bits do not depend on it
# (outputs, pixels, pairs of channel and tap, warps, stages), and for weights (outputs, pairs, pixels, warps, stages)
FORWARD, WEIGHTS = (64, 128, 32, 4, 3), (128, 64, 64, 4, 2)


def is_few(weight: Tensor) -> bool:
    """Whether a convolution by weight (k, O, C, R, S) is made here."""
    return weight.shape[2] <= FEW and weight.shape[3] * weight.shape[4] > 1


def products(x: Tensor, weight: Tensor, bias: Tensor | None, out: Pair, how: How) -> Tensor:
    """x (k, B, H, W, C), weight (k, O, C, R, S), bias (k, O) -> (k, B, *out, O)."""
    from flrce.local.stacked import triton_few as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    stride, padding, dilation = how
    z = torch.empty(k, B, *out, O, dtype=x.dtype, device=x.device)
    N = B * out[0] * out[1]
    most_o, block_n, most_j, warps, stages = FORWARD
    block_o, block_j = tile(O, 16, most_o), tile(C * R * S, 16, most_j)
    kernels.few_products[(-(-N // block_n), -(-O // block_o), k)](
        x, weight.contiguous(), z if bias is None else bias.contiguous(), z, N, C, H, W, O, *out, S, R * S, *stride,
        *padding, *dilation, BIASED=bias is not None, HOW=mode(x), BLOCK_O=block_o, BLOCK_N=block_n, BLOCK_J=block_j,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return z


def weights(x: Tensor, g: Tensor, weight: Tensor, biased: bool, how: How) -> tuple[Tensor, Tensor | None]:
    """The gradients by the weight and, if `biased`, by the bias; g (k, B, P, Q, O)."""
    from flrce.local.stacked import triton_few as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    P, Q = g.shape[2:4]
    N = B * P * Q
    most_o, most_j, block_n, warps, stages = WEIGHTS
    block_o, block_j = tile(O, 16, most_o), tile(C * R * S, 16, most_j)
    high, wide = -(-O // block_o), -(-C * R * S // block_j)
    parts = max(1, min(-(-N // (8 * block_n)), PARTS // (high * wide)))
    span = -(-N // (parts * block_n)) * block_n
    long = O * C * R * S + O * biased
    out = torch.empty(parts, k, long, dtype=torch.float32, device=x.device)
    kernels.few_weights[(high, wide + biased, parts * k)](
        x, g, out, N, k, span, long, C, H, W, O, P, Q, S, R * S, *how[0], *how[1], *how[2], HOW=mode(x),
        BLOCK_O=block_o, BLOCK_J=block_j, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    gw, gb = gathered(out, (O * C * R * S, 1), O * biased, weight.dtype)
    return gw.reshape(weight.shape), gb if biased else None
