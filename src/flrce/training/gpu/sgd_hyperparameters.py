"""Convolutions of few input channels with channels last, by Triton: sums over channels and taps
together.
"""

import torch
from torch import Tensor

from flrce.training.gpu.rows import ConvolutionGeometry, Pair
from flrce.training.gpu.tiles import choose_product_mode, choose_tile_size
from flrce.training.gpu.transposition import sum_partial_gradients

MAX_FEW_CHANNELS = (
    8  # input channels up to which they are few: half of what a product sums over at once
)
# programs of one lane's weight gradient; not by the number of lanes, so that bits do not depend on
# it
WEIGHT_GRADIENT_PROGRAMS = 32
# (outputs, pixels, pairs of channel and tap, warps, stages), and for weights (outputs, pairs,
# pixels, warps, stages)
FORWARD, WEIGHTS = (64, 128, 32, 4, 3), (128, 64, 64, 4, 2)


def has_few_channels(weight: Tensor) -> bool:
    """Whether a convolution by weight (k, O, C, R, S) is made here."""
    return weight.shape[2] <= MAX_FEW_CHANNELS and weight.shape[3] * weight.shape[4] > 1


def convolve_few_channels(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Pair, how: ConvolutionGeometry
) -> Tensor:
    """x (k, B, H, W, C), weight (k, O, C, R, S), bias (k, O) -> (k, B, *out, O)."""
    from flrce.training.gpu import triton_few as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    stride, padding, dilation = how
    z = torch.empty(k, B, *out, O, dtype=x.dtype, device=x.device)
    N = B * out[0] * out[1]
    most_o, block_n, most_j, warps, stages = FORWARD
    block_o, block_j = choose_tile_size(O, 16, most_o), choose_tile_size(C * R * S, 16, most_j)
    kernels.few_channel_convolution[(-(-N // block_n), -(-O // block_o), k)](
        x,
        weight.contiguous(),
        z if bias is None else bias.contiguous(),
        z,
        N,
        C,
        H,
        W,
        O,
        *out,
        S,
        R * S,
        *stride,
        *padding,
        *dilation,
        BIASED=bias is not None,
        HOW=choose_product_mode(x),
        BLOCK_O=block_o,
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        num_warps=warps,
        num_stages=stages,
    )
    return z


def compute_few_channel_gradients(
    x: Tensor, g: Tensor, weight: Tensor, biased: bool, how: ConvolutionGeometry
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the weight and, if `biased`, by the bias; g (k, B, P, Q, O)."""
    from flrce.training.gpu import triton_few as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    P, Q = g.shape[2:4]
    N = B * P * Q
    most_o, most_j, block_n, warps, stages = WEIGHTS
    block_o, block_j = choose_tile_size(O, 16, most_o), choose_tile_size(C * R * S, 16, most_j)
    high, wide = -(-O // block_o), -(-C * R * S // block_j)
    parts = max(1, min(-(-N // (8 * block_n)), WEIGHT_GRADIENT_PROGRAMS // (high * wide)))
    span = -(-N // (parts * block_n)) * block_n
    long = O * C * R * S + O * biased
    out = torch.empty(parts, k, long, dtype=torch.float32, device=x.device)
    kernels.few_channel_weight_gradient[(high, wide + biased, parts * k)](
        x,
        g,
        out,
        N,
        k,
        span,
        long,
        C,
        H,
        W,
        O,
        P,
        Q,
        S,
        R * S,
        *how[0],
        *how[1],
        *how[2],
        HOW=choose_product_mode(x),
        BLOCK_O=block_o,
        BLOCK_J=block_j,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    gw, gb = sum_partial_gradients(out, (O * C * R * S, 1), O * biased, weight.dtype)
    return gw.reshape(weight.shape), gb if biased else None
