"""Convolutions of many lanes with channels last, so that neither factor of a product is ever
transposed.

`rows`: what each pixel sees is laid out as a row, and a lane's rows are multiplied with its
weights; on any device. `direct`: a Triton kernel reads the pixels themselves, so that no rows are
written.
"""

from typing import Any, cast

import torch
from torch import Tensor

from flrce.training.gpu import sgd_hyperparameters
from flrce.training.gpu.rows import (
    ConvolutionGeometry,
    Pair,
    RowsConvolution,
    compute_output_size,
    compute_weight_gradient,
)
from flrce.training.gpu.tiles import (
    choose_product_mode,
    choose_tile_size,
    supports_channels_last_kernels,
)
from flrce.training.gpu.transposition import move_taps_first, sum_partial_gradients

# programs of one lane's weight gradient; not by the number of lanes, so that bits do not depend on
# it
WEIGHT_GRADIENT_PROGRAMS = 128
# Tiles as measured on an H200: (outputs, pixels, channels, warps, stages), and for weights
# (outputs, channels, pixels, warps, stages)
FORWARD, WIDE_FORWARD = (64, 128, 32, 4, 3), (128, 128, 32, 8, 3)
NARROW_FORWARD_TILE = (64, 256, 16, 8, 3)
WEIGHTS, NARROW_WEIGHTS = (128, 64, 32, 4, 3), (64, 64, 128, 2, 2)
MAX_NARROW_CHANNELS = 16  # channels up to which they are narrow


def choose_forward_tile(O: int, C: int, how: str) -> tuple[int, int, int, int, int]:
    """The tile of a product that gives O channels from C; three TF32 products want more warps than
    one.
    """
    if C <= MAX_NARROW_CHANNELS:
        return NARROW_FORWARD_TILE if how == "tf32x3" and O > 32 else FORWARD
    return WIDE_FORWARD if (32 if how == "tf32x3" else 64) < O else FORWARD


class DirectConvolution(torch.autograd.Function):
    """As Rows, by Triton without rows; bias (k, O) or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: ConvolutionGeometry
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.how = how
        out = compute_output_size(x, weight, how)
        if sgd_hyperparameters.has_few_channels(weight):
            return sgd_hyperparameters.convolve_few_channels(x, weight, bias, out, how)
        return _launch_convolution(
            x, move_taps_first(weight, back=False), bias, out, how, back=False
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, bias = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        g = g.contiguous()
        gx = gw = gb = None
        if by_x:
            gx = _launch_convolution(
                g,
                move_taps_first(weight, back=True),
                None,
                cast(Pair, tuple(x.shape[2:4])),
                ctx.how,
                back=True,
            )
        if by_weight and sgd_hyperparameters.has_few_channels(weight):
            gw, gb = sgd_hyperparameters.compute_few_channel_gradients(
                x, g, weight, by_bias, ctx.how
            )
        elif (
            by_weight
            and choose_product_mode(x) == "tf32"
            and min(weight.shape[1:3]) > MAX_NARROW_CHANNELS
        ):
            # the matrix units read TF32 along what is summed over, here the pixels: the kernel
            # below turns every tile, which takes longer than rows and a product by cuBLAS
            gw = compute_weight_gradient(x, g, weight, ctx.how)
        elif by_weight:
            gw, gb = _launch_weight_gradient(x, g, weight, by_bias, ctx.how)
        if by_bias and gb is None:
            gb = g.sum((1, 2, 3))
        return gx, gw, None if gb is None else gb.to(bias.dtype), None


def _launch_convolution(
    x: Tensor, held: Tensor, bias: Tensor | None, out: Pair, how: ConvolutionGeometry, back: bool
) -> Tensor:
    """x (k, B, H, W, C), held (k, R, S, O, C) -> (k, B, *out, O)."""
    from flrce.training.gpu import triton_last as kernels

    k, B, H, W, C = x.shape
    R, S, O = held.shape[1:4]
    stride, padding, dilation = how
    z = torch.empty(k, B, *out, O, dtype=x.dtype, device=x.device)
    N = B * out[0] * out[1]
    high, wide = _count_phases(how) if back else (1, 1)
    pixels = B * -(-out[0] // high) * -(-out[1] // wide)  # of a phase
    most_o, block_n, most_c, warps, stages = choose_forward_tile(O, C, choose_product_mode(x))
    block_o, block_c = choose_tile_size(O, 16, most_o), choose_tile_size(C, 16, most_c)
    kernels.convolution[(high * wide * -(-pixels // block_n), -(-O // block_o), k)](
        x,
        held,
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
        BACK=back,
        PHASES_H=high,
        PHASES_W=wide,
        BIASED=bias is not None,
        HOW=choose_product_mode(x),
        BLOCK_O=block_o,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        num_warps=warps,
        num_stages=stages,
    )
    return z


def _count_phases(how: ConvolutionGeometry) -> Pair:
    """Rows and columns after which the same taps reach an input pixel again; they skip nothing
    where taps lie apart.
    """
    stride, _, dilation = how
    return stride[0] if dilation[0] == 1 else 1, stride[1] if dilation[1] == 1 else 1


def _launch_weight_gradient(
    x: Tensor, g: Tensor, weight: Tensor, biased: bool, how: ConvolutionGeometry
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the weight and, if `biased`, by the bias."""
    from flrce.training.gpu import triton_last as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    P, Q = g.shape[2:4]
    N = B * P * Q
    most_o, most_c, block_n, warps, stages = (
        NARROW_WEIGHTS if max(O, C) <= MAX_NARROW_CHANNELS else WEIGHTS
    )
    block_o, block_c = choose_tile_size(O, 16, most_o), choose_tile_size(C, 16, most_c)
    tiles = -(-O // block_o) * -(-C // block_c)
    parts = max(1, min(-(-N // (8 * block_n)), WEIGHT_GRADIENT_PROGRAMS // (tiles * R * S)))
    span = -(-N // (parts * block_n)) * block_n
    long = R * S * O * C + O * biased
    out = torch.empty(parts, k, long, dtype=torch.float32, device=x.device)
    kernels.weight_gradient[(tiles, R * S + biased, parts * k)](
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
        BLOCK_C=block_c,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    gw, gb = sum_partial_gradients(out, (O * C, R * S), O * biased, weight.dtype)
    return gw.reshape(weight.shape), gb if biased else None


def multiply_channels_last(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer as a convolution of one pixel: x (k, n, I), weight (k, O, I), bias (k, O) ->
    (k, n, O).
    """
    pixels, held = x[:, :, None, None], weight[..., None, None]
    return cast(Tensor, DirectConvolution.apply(pixels, held, bias, ((1, 1), (0, 0), (1, 1))))[
        :, :, 0, 0
    ]


def convolve_channels_last(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: ConvolutionGeometry, direct: bool
) -> Tensor:
    """x (k, B, C, H, W) of any layout -> (k, B, O, P, Q) with channels last in memory; bias (k,
    O).
    """
    seen = x.permute(0, 1, 3, 4, 2)
    if direct and supports_channels_last_kernels(x):
        return cast(Tensor, DirectConvolution.apply(seen, weight, bias, how)).permute(0, 1, 4, 2, 3)
    z = cast(Tensor, RowsConvolution.apply(seen, weight, how)).permute(0, 1, 4, 2, 3)
    return z if bias is None else z + bias[:, None, :, None, None]
