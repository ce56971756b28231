"""Convolutions of many lanes with channels last, so that neither factor of a product is ever transposed.

`rows`: what each pixel sees is laid out as a row, and a lane's rows are multiplied with its weights; on any device.
`direct`: a Triton kernel reads the pixels themselves, so that no rows are written.
"""

from itertools import product as grid
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.local.stacked.triton_block import usable

Pair = tuple[int, int]
How = tuple[Pair, Pair, Pair]  # stride, padding, dilation
BLOCK = 2048  # values that one program copies
BLOCKS = 128  # programs of one lane's weight gradient; not by the number of lanes, so that bits do not depend on it
# Tiles as measured on an H200: (outputs, pixels, channels, warps, stages), and for weights (outputs, channels, pixels,
# warps, stages)
FORWARD, WIDE_FORWARD = (64, 128, 32, 4, 3), (128, 128, 32, 8, 3)
FEW_CHANNELS = (64, 256, 16, 8, 3)
WEIGHTS, NARROW_WEIGHTS = (128, 64, 32, 4, 3), (64, 64, 128, 2, 2)
NARROW = 16  # channels up to which they are narrow


def fits(x: Tensor) -> bool:
    return usable(x.device) and x.dtype in (torch.float32, torch.bfloat16)


def tile(n: int, least: int, most: int) -> int:
    """A power of two near n."""
    size = least
    while size < n and size < most:
        size *= 2
    return size


def mode(x: Tensor) -> str:
    """How products are made: bfloat16 under autocast, TF32 where it is allowed, else three TF32 products."""
    if x.dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def forward_tile(O: int, C: int, how: str) -> tuple[int, int, int, int, int]:
    """The tile of a product that gives O channels from C; three TF32 products want more warps than one."""
    if C <= NARROW:
        return FEW_CHANNELS if how == "tf32x3" and O > 32 else FORWARD
    return WIDE_FORWARD if (32 if how == "tf32x3" else 64) < O else FORWARD


def outside(x: Tensor, weight: Tensor, how: How) -> Pair:
    """Height and width of what a convolution of x (k, B, H, W, C) by weight (k, O, C, R, S) gives."""
    stride, padding, dilation = how
    sizes = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[3 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    ]
    return sizes[0], sizes[1]


class Rows(torch.autograd.Function):
    """x (k, B, H, W, C), weight (k, O, C, R, S) -> (k, B, P, Q, O); zeros around x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: How) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how = how
        out = outside(x, weight, how)
        taps = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (k, O, R S C)
        z = torch.bmm(_rows(x, weight, out, how), taps.mT)  # (k, B P Q, O)
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
            gw = _weights_by_rows(x, g, weight, ctx.how)
        if ctx.needs_input_grad[0]:
            border = (dilation[0] * (R - 1) - padding[0], dilation[1] * (S - 1) - padding[1])
            if stride == (1, 1) and min(border) >= 0 and O <= 2 * C:  # a convolution of g by the weights turned round
                turned = weight.flip(3, 4).transpose(1, 2)  # (k, C, O, R, S)
                seen = _rows(g, turned, (x.shape[2], x.shape[3]), (stride, border, dilation))
                taps = turned.permute(0, 1, 3, 4, 2).flatten(2)
                gx = torch.bmm(seen, taps.mT).reshape(x.shape)
            else:
                taps = weight.permute(0, 1, 3, 4, 2).flatten(2)
                spread = torch.bmm(g.reshape(k, -1, O), taps)  # (k, B P Q, R S C)
                gx = _fold(spread, x, weight, out, ctx.how)
        return gx, gw, None


def _weights_by_rows(x: Tensor, g: Tensor, weight: Tensor, how: How) -> Tensor:
    k, O, C, R, S = weight.shape
    seen = _rows(x, weight, (g.shape[2], g.shape[3]), how)
    gw = torch.bmm(g.reshape(k, -1, O).mT, seen)  # (k, O, R S C)
    return gw.reshape(k, O, R, S, C).permute(0, 1, 4, 2, 3).contiguous()


def _rows(x: Tensor, weight: Tensor, out: Pair, how: How) -> Tensor:
    """(k, B P Q, R S C): what each output pixel sees of x (k, B, H, W, C)."""
    stride, padding, dilation = how
    k, B, H, W, C = x.shape
    R, S = weight.shape[3:]
    if (R, S) == (1, 1) and stride == (1, 1) and padding == (0, 0):
        return x.reshape(k, B * H * W, C)
    if fits(x):
        from flrce.local.stacked import triton_last as kernels

        made = torch.empty(k, B * out[0] * out[1], R * S * C, dtype=x.dtype, device=x.device)
        many = made.shape[0] * made.shape[1] * R * S
        launch, tiles = _copied(many, C)
        kernels.rows[launch](x, made, many, C, H, W, *out, S, R * S, *stride, *padding, *dilation, **tiles)
        return made
    x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    a, b, c, d, e = x.stride()
    strides = (a, b, c * stride[0], d * stride[1], c * dilation[0], d * dilation[1], e)
    return x.as_strided((k, B, *out, R, S, C), strides).reshape(k, B * out[0] * out[1], R * S * C)


def _copied(many: int, C: int) -> tuple[Pair, dict[str, int]]:
    """How a kernel that moves `many` runs of C values cuts its work: its grid and its tile."""
    wide = tile(C, 1, 64)
    places = BLOCK // wide
    return (-(-many // places), -(-C // wide)), {"PLACES": places, "BLOCK_C": wide, "num_warps": 4}


def _fold(spread: Tensor, x: Tensor, weight: Tensor, out: Pair, how: How) -> Tensor:
    """The gradient by x of what was spread over the pixels that each output pixel saw."""
    stride, padding, dilation = how
    k, B, H, W, C = x.shape
    R, S = weight.shape[3:]
    if fits(x):
        from flrce.local.stacked import triton_last as kernels

        gx = torch.empty_like(x)
        launch, tiles = _copied(k * B * H * W, C)
        kernels.fold[launch](spread, gx, k * B * H * W, C, H, W, *out, R, S, *stride, *padding, *dilation, **tiles)
        return gx
    spread = spread.reshape(k, B, *out, R, S, C)
    total = x.new_zeros(k, B, H + 2 * padding[0], W + 2 * padding[1], C)
    for r, s in grid(range(R), range(S)):  # in a fixed order: no atomic additions
        down, right = r * dilation[0], s * dilation[1]
        rows = slice(down, down + stride[0] * out[0], stride[0])
        total[:, :, rows, right : right + stride[1] * out[1] : stride[1]] += spread[:, :, :, :, r, s]
    return total[:, :, padding[0] : padding[0] + H, padding[1] : padding[1] + W]


class Direct(torch.autograd.Function):
    """As Rows, by Triton without rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: How) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how = how
        taps = weight.permute(0, 3, 4, 1, 2).contiguous()  # (k, R, S, O, C)
        return _products(x, taps, outside(x, weight, how), how, back=False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        gx = gw = None
        if ctx.needs_input_grad[0]:
            taps = weight.permute(0, 3, 4, 2, 1).contiguous()  # (k, R, S, C, O)
            gx = _products(g, taps, cast(Pair, tuple(x.shape[2:4])), ctx.how, back=True)
        if ctx.needs_input_grad[1] and mode(x) == "tf32" and min(weight.shape[1:3]) > NARROW:
            # the matrix units read TF32 along what is summed over, here the pixels: the kernel below turns every tile,
            # which takes longer than rows and a product by cuBLAS
            gw = _weights_by_rows(x, g, weight, ctx.how)
        elif ctx.needs_input_grad[1]:
            gw = _weights(x, g, weight, ctx.how)
        return gx, gw, None


def _products(x: Tensor, taps: Tensor, out: Pair, how: How, back: bool) -> Tensor:
    from flrce.local.stacked import triton_last as kernels

    k, B, H, W, C = x.shape
    R, S, O = taps.shape[1:4]
    stride, padding, dilation = how
    z = torch.empty(k, B, *out, O, dtype=x.dtype, device=x.device)
    N = B * out[0] * out[1]
    most_o, block_n, most_c, warps, stages = forward_tile(O, C, mode(x))
    block_o, block_c = tile(O, 16, most_o), tile(C, 16, most_c)
    kernels.products[(-(-N // block_n), -(-O // block_o), k)](
        x, taps, z, N, C, H, W, O, *out, S, R * S, *stride, *padding, *dilation, BACK=back, HOW=mode(x),
        BLOCK_O=block_o, BLOCK_N=block_n, BLOCK_C=block_c, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return z


def _weights(x: Tensor, g: Tensor, weight: Tensor, how: How) -> Tensor:
    from flrce.local.stacked import triton_last as kernels

    k, B, H, W, C = x.shape
    O, _, R, S = weight.shape[1:]
    P, Q = g.shape[2:4]
    N = B * P * Q
    most_o, most_c, block_n, warps, stages = NARROW_WEIGHTS if max(O, C) <= NARROW else WEIGHTS
    block_o, block_c = tile(O, 16, most_o), tile(C, 16, most_c)
    tiles = -(-O // block_o) * -(-C // block_c)
    parts = max(1, min(-(-N // (8 * block_n)), BLOCKS // (tiles * R * S)))
    span = -(-N // (parts * block_n)) * block_n
    out = torch.empty(parts, k, R, S, O, C, dtype=torch.float32, device=x.device)
    kernels.weights[(tiles, R * S, parts * k)](
        x, g, out, N, k, span, C, H, W, O, P, Q, S, R * S, *how[0], *how[1], *how[2], HOW=mode(x), BLOCK_O=block_o,
        BLOCK_C=block_c, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    total = out[0] if parts == 1 else out.sum(0)
    return total.permute(0, 3, 4, 1, 2).to(weight.dtype).contiguous()


def convolve_last(x: Tensor, weight: Tensor, how: How, direct: bool) -> Tensor:
    """x (k, B, C, H, W) of any layout -> (k, B, O, P, Q) with channels last in memory."""
    seen = x.permute(0, 1, 3, 4, 2)
    way: Any = Direct if direct and fits(x) else Rows
    return cast(Tensor, way.apply(seen, weight, how)).permute(0, 1, 4, 2, 3)
