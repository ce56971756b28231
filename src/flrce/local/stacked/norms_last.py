"""GroupNorm and BatchNorm of many lanes with channels last, where the device has Triton."""

from typing import Any, cast

import torch
from torch import Tensor

PIXELS, PLACES = 32, 64  # pixels and channels of a tile
LONG = 1024  # pixels of a part; not by the number of lanes, so that bits do not depend on it


def lies_last(x: Tensor) -> bool:
    """Whether x (n, C, H, W) has its channels last in memory, and more than one pixel."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class NormalisedLast(torch.autograd.Function):
    """x (k, B, n, C) normalised, scaled and shifted by weight and bias (k, C); `groups` 0: over a lane's batch.

    `relu`: what is negative becomes 0.

    Gives (y, mean, 1 / std), statistics (units, C): a unit is a sample, or where `groups` is 0 a lane.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, groups: int,
                eps: float, relu: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from flrce.local.stacked import triton_norms_last as kernels

        x = x.contiguous()
        launch, shape, sizes = _cut(x, groups)
        C, parts = x.shape[3], launch[2]
        y = torch.empty(x.shape, device=x.device)
        middle, spread = torch.empty(2, launch[0], parts, C, device=x.device)
        mean, scale = torch.empty(2, launch[0], C, device=x.device)
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        kernels.moments[launch](x, count, middle, spread, *sizes, parts, **shape, num_warps=4)
        kernels.normalise[launch](
            x, count, middle, spread, mean if weight is None else weight, mean if bias is None else bias,
            y, mean, scale, *sizes, parts, x.shape[1] if groups else 1, eps, **shape, AFFINE=weight is not None,
            RELU=relu, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, mean, scale, count)
        ctx.groups, ctx.relu = groups, relu
        ctx.set_materialize_grads(False)  # statistics have none, and zeros for them would be two launches
        ctx.mark_non_differentiable(mean, scale)
        return y, mean, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Any, ...]:
        from flrce.local.stacked import triton_norms_last as kernels

        x, weight, bias, mean, scale, count = ctx.saved_tensors
        launch, shape, sizes = _cut(x, ctx.groups)
        C, parts, units = x.shape[3], launch[2], x.shape[1] if ctx.groups else 1
        held = (mean, mean) if weight is None else (weight, bias)
        how = {**shape, "AFFINE": weight is not None, "RELU": ctx.relu, "num_warps": 4}
        g, gx = g.contiguous(), torch.empty_like(x)
        by_bias, by_weight = torch.empty(2, launch[0], parts, C, device=x.device)
        sums = torch.empty(2, launch[0], C, device=x.device)
        kernels.pushes[launch](x, g, count, mean, scale, *held, by_bias, by_weight, *sizes, parts, units, **how)
        kernels.back[launch](
            x, g, count, mean, scale, *held, by_bias, by_weight, gx, sums[0], sums[1], *sizes, parts, units, **how
        )
        if weight is None:
            return gx, None, None, None, None, None, None
        gb, gw = sums.reshape(2, len(x), -1, C).sum(2) if ctx.groups else sums
        return gx, gw, gb, None, None, None, None


def _cut(x: Tensor, groups: int) -> tuple[tuple[int, int, int], dict[str, Any], tuple[int, int, int]]:
    """The kernels' grid, their constants, and (pixels of a unit, of a sample, of a part)."""
    k, B, n, C = x.shape
    units, full = (k * B, n) if groups else (k, B * n)
    width = C // (groups or C)
    slots = 1 << (width - 1).bit_length()
    many = max(1, min(PLACES // slots, 1 << (C // width - 1).bit_length()))  # groups of one program
    parts = min(64, -(-full // LONG))
    span = -(-full // (parts * PIXELS)) * PIXELS
    shape = {"C": C, "WIDTH": width, "SLOTS": slots, "GROUPS": many, "PIXELS": PIXELS, "BATCH": not groups}
    return (units, -(-C // (width * many)), -(-full // span)), shape, (full, n, span)


def group_norm_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool = False
) -> Tensor:
    """x (k, B, C, H, W) -> the same, channels last in memory."""
    count = torch.empty(1, dtype=torch.int32, device=x.device)  # not read: all samples count
    y = NormalisedLast.apply(_pixels(x), weight, bias, count, groups, eps, relu)[0]
    return _image(cast(Tensor, y), x)


def batch_norm_last(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean (k, C), variance (k, C)) over the first `count` samples of each lane; what is padded becomes 0."""
    y, mean, scale = NormalisedLast.apply(_pixels(x), weight, bias, count, 0, eps, relu)
    return _image(y, x), mean, (scale**-2 - eps).clamp(min=0)


def _pixels(x: Tensor) -> Tensor:
    """(k, B, C, H, W) as (k, B, H W, C)."""
    return x.permute(0, 1, 3, 4, 2).flatten(2, 3)


def _image(y: Tensor, x: Tensor) -> Tensor:
    shape = (*y.shape[:2], *x.shape[3:], y.shape[-1])
    return y.reshape(shape).permute(0, 1, 4, 2, 3)
