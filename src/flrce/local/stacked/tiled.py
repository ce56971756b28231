"""Convolutions of any width for many lanes through Triton (triton_convolution.py), with their gradients."""

from typing import Any, cast

import torch
from torch import Tensor

from flrce.local.stacked.triton_block import usable

Pair = tuple[int, int]
BLOCKS = 128  # programs of one lane's weight gradient; not by the number of lanes, so that bits do not depend on it
FORWARD = (64, 128, 32, 4, 3)  # outputs, pixels and channels of a tile, warps, stages
WEIGHTS = (64, 64, 32, 4, 3)  # outputs, channels and pixels of a tile, warps, stages


def fits(x: Tensor) -> bool:
    """Whether these kernels can run on the tensor's device."""
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


class Tiled(torch.autograd.Function):
    """x (k, B, C, H, W), weight (k, O, C, R, S), bias (k, O) -> (k, B, O, P, Q); zeros around x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair,
                dilation: Pair) -> Tensor:  # fmt: skip
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how = (stride, padding, dilation)
        sizes = [
            (x.shape[3 + i] + 2 * padding[i] - dilation[i] * (weight.shape[3 + i] - 1) - 1) // stride[i] + 1
            for i in range(2)
        ]
        taps = weight.permute(0, 3, 4, 1, 2).contiguous()  # (k, R, S, O, C)
        return _products(x, taps, bias, (sizes[0], sizes[1]), ctx.how, back=False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        g = g.contiguous()
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            taps = weight.permute(0, 3, 4, 2, 1).contiguous()  # (k, R, S, C, O)
            gx = _products(g, taps, None, cast(Pair, tuple(x.shape[3:])), ctx.how, back=True)
        if ctx.needs_input_grad[1]:
            gw = _weights(x, g, weight, ctx.how)
        if ctx.needs_input_grad[2]:
            gb = g.sum((1, 3, 4))
        return gx, gw, gb, None, None, None


def _products(x: Tensor, taps: Tensor, bias: Tensor | None, out: Pair, how: tuple[Pair, Pair, Pair],
              back: bool) -> Tensor:  # fmt: skip
    from flrce.local.stacked import triton_convolution as kernels

    k, B, C, H, W = x.shape
    R, S, O = taps.shape[1:4]
    stride, padding, dilation = how
    z = torch.empty(k, B, O, *out, dtype=x.dtype, device=x.device)
    N = B * out[0] * out[1]
    most_o, block_n, most_c, warps, stages = FORWARD
    block_o, block_c = tile(O, 16, most_o), tile(C, 16, most_c)
    grid = (-(-N // block_n), -(-O // block_o), k)
    kernels.products[grid](
        x, taps, z if bias is None else bias, z, N, C, H, W, O, out[0], out[1], S, R * S, *stride, *padding, *dilation,
        BACK=back, BIAS=bias is not None, HOW=mode(x), BLOCK_O=block_o, BLOCK_N=block_n, BLOCK_C=block_c,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return z


def _weights(x: Tensor, g: Tensor, weight: Tensor, how: tuple[Pair, Pair, Pair]) -> Tensor:
    from flrce.local.stacked import triton_convolution as kernels

    k, B, C, H, W = x.shape
    O, _, R, S = weight.shape[1:]
    P, Q = g.shape[3:]
    N = B * P * Q
    most_o, most_c, block_n, warps, stages = WEIGHTS
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
