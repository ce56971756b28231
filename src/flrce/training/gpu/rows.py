"""Convolutions of many lanes with channels last, as one product a lane with rows of what each pixel
sees.
"""

from itertools import product as grid
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.tiles import (
    COPY_BLOCK_VALUES,
    choose_tile_size,
    supports_channels_last_kernels,
)
from flrce.training.gpu.transposition import sum_partial_gradients

Pair = tuple[int, int]
ConvolutionGeometry = tuple[Pair, Pair, Pair]  # stride, padding, dilation


def compute_output_size(x: Tensor, weight: Tensor, how: ConvolutionGeometry) -> Pair:
    """Height and width of what a convolution of x (k, B, H, W, C) by weight (k, O, C, R, S)
    gives.
    """
    stride, padding, dilation = how
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[3 + i] - 1) - 1) // stride[i]
        + 1
        for i in range(2)
    ]
    return sizes[0], sizes[1]


class RowsConvolution(torch.autograd.Function):
    """x (k, B, H, W, C), weight (k, O, C, R, S) -> (k, B, P, Q, O); zeros around x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: ConvolutionGeometry) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how = how
        out = compute_output_size(x, weight, how)
        taps = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (k, O, R S C)
        z = torch.bmm(_unfold_rows(x, weight, out, how), taps.mT)  # (k, B P Q, O)
        return z.reshape(*x.shape[:2], *out, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.how
        g = g.contiguous()
        k, O, C, R, S = weight.shape
        out = (g.shape[2], g.shape[3])
        gx = gw = None
        if ctx.needs_input_grad[1]:
            gw = compute_weight_gradient(x, g, weight, ctx.how)
        if ctx.needs_input_grad[0]:
            border = (dilation[0] * (R - 1) - padding[0], dilation[1] * (S - 1) - padding[1])
            if (
                stride == (1, 1) and min(border) >= 0 and O <= 2 * C
            ):  # a convolution of g by the weights turned round
                turned = weight.flip(3, 4).transpose(1, 2)  # (k, C, O, R, S)
                seen = _unfold_rows(g, turned, (x.shape[2], x.shape[3]), (stride, border, dilation))
                taps = turned.permute(0, 1, 3, 4, 2).flatten(2)
                gx = torch.bmm(seen, taps.mT).reshape(x.shape)
            else:
                taps = weight.permute(0, 1, 3, 4, 2).flatten(2)
                spread = torch.bmm(g.reshape(k, -1, O), taps)  # (k, B P Q, R S C)
                gx = _fold_rows(spread, x, weight, out, ctx.how)
        return gx, gw, None


def compute_weight_gradient(
    x: Tensor, g: Tensor, weight: Tensor, how: ConvolutionGeometry
) -> Tensor:
    k, O, C, R, S = weight.shape
    seen = _unfold_rows(x, weight, (g.shape[2], g.shape[3]), how)
    gw = torch.bmm(g.reshape(k, -1, O).mT, seen)  # (k, O, R S C)
    if R * S == 1:
        return gw.reshape(weight.shape)
    if supports_channels_last_kernels(x):
        return sum_partial_gradients(gw.reshape(1, k * O, -1), (C, R * S), 0, gw.dtype)[0].reshape(
            weight.shape
        )
    return gw.reshape(k, O, R, S, C).permute(0, 1, 4, 2, 3).contiguous()


def _unfold_rows(x: Tensor, weight: Tensor, out: Pair, how: ConvolutionGeometry) -> Tensor:
    """(k, B P Q, R S C): what each output pixel sees of x (k, B, H, W, C)."""
    stride, padding, dilation = how
    k, B, H, W, C = x.shape
    R, S = weight.shape[3:]
    if (R, S) == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return x.reshape(k, B * H * W, C)
    if supports_channels_last_kernels(x):
        from flrce.training.gpu import triton_last as kernels

        made = torch.empty(k, B * out[0] * out[1], R * S * C, dtype=x.dtype, device=x.device)
        many = made.shape[0] * made.shape[1] * R * S
        launch, tiles = _plan_copy_launch(many, C)
        kernels.unfold_rows[launch](
            x, made, many, C, H, W, *out, S, R * S, *stride, *padding, *dilation, **tiles
        )
        return made
    x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    a, b, c, d, e = x.stride()
    strides = (a, b, c * stride[0], d * stride[1], c * dilation[0], d * dilation[1], e)
    return x.as_strided((k, B, *out, R, S, C), strides).reshape(k, B * out[0] * out[1], R * S * C)


def _plan_copy_launch(many: int, C: int) -> tuple[Pair, dict[str, int]]:
    """How a kernel that moves `many` runs of C values cuts its work: its grid and its tile."""
    wide = choose_tile_size(C, 1, 64)
    places = COPY_BLOCK_VALUES // wide
    return (-(-many // places), -(-C // wide)), {"PLACES": places, "BLOCK_C": wide, "num_warps": 4}


def _fold_rows(
    spread: Tensor, x: Tensor, weight: Tensor, out: Pair, how: ConvolutionGeometry
) -> Tensor:
    """The gradient by x of what was spread over the pixels that each output pixel saw."""
    stride, padding, dilation = how
    k, B, H, W, C = x.shape
    R, S = weight.shape[3:]
    if supports_channels_last_kernels(x):
        from flrce.training.gpu import triton_last as kernels

        gx = torch.empty_like(x)
        launch, tiles = _plan_copy_launch(k * B * H * W, C)
        kernels.fold_rows[launch](
            spread, gx, k * B * H * W, C, H, W, *out, R, S, *stride, *padding, *dilation, **tiles
        )
        return gx
    spread = spread.reshape(k, B, *out, R, S, C)
    total = x.new_zeros(k, B, H + 2 * padding[0], W + 2 * padding[1], C)
    for r, s in grid(range(R), range(S)):  # in a fixed order: no atomic additions
        down, right = r * dilation[0], s * dilation[1]
        rows = slice(down, down + stride[0] * out[0], stride[0])
        total[:, :, rows, right : right + stride[1] * out[1] : stride[1]] += spread[
            :, :, :, :, r, s
        ]
    return total[:, :, padding[0] : padding[0] + H, padding[1] : padding[1] + W]
