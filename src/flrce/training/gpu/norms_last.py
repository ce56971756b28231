"""GroupNorm and BatchNorm of many lanes with channels last, where the device has Triton.

GroupNorm in one pass over memory where a sample's group fits into one program's registers, all else
in two.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

PIXELS, PLACES = 32, 64  # pixels and channels of a tile
PART_PIXELS = 1024  # pixels of a part; not by the number of lanes, so that bits do not depend on it
MOST, LEAST = 8192, 2048  # values of a program that holds its groups whole, and what it should have
ROW, SECTOR = 16, 8  # channels that such a program should have, 64 bytes; at least, 32 bytes
VALUES_PER_THREAD = 32  # values of one thread: the way back holds two tensors' of them in registers

TensorTuple = tuple[Tensor, ...]
KernelFlags = dict[str, bool]


def is_channels_last(x: Tensor) -> bool:
    """Whether x (n, C, H, W) has its channels last in memory, and more than one pixel."""
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class ChannelsLastNormFunction(torch.autograd.Function):
    """x (k, B, n, C) normalised, scaled and shifted by weight and bias (k, C); `groups` 0: over a
    lane's batch.

    `relu`: what is negative becomes 0.

    Gives (y, mean, 1 / std), statistics (units, C): a unit is a sample, or where `groups` is 0 a
    lane.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        groups: int,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        C, units = x.shape[3], x.shape[1] if groups else 1  # of a lane
        y = torch.empty(x.shape, device=x.device)
        mean, scale = torch.empty(2, len(x) * units, C, device=x.device)
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        held = (mean if weight is None else weight, mean if bias is None else bias)
        how = {"AFFINE": weight is not None, "RELU": relu}
        tile = choose_one_pass_tiling(x.shape[2], C, groups)
        if tile is None:
            _normalise_in_two_passes(x, count, held, (y, mean, scale), groups, eps, how)
        else:
            from flrce.training.gpu import triton_norms_whole as kernels

            launch = (len(mean) * tile.programs,)
            kernels.forward[launch](
                x, *held, y, mean, scale, x.shape[2], units, eps, **tile.constants, **how
            )
        ctx.save_for_backward(x, weight, bias, mean, scale, count)
        ctx.groups, ctx.relu = groups, relu
        # statistics have none, and zeros for them would be two launches
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, scale)
        return y, mean, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, scale, count = ctx.saved_tensors
        C, units = x.shape[3], x.shape[1] if ctx.groups else 1
        given = (mean, scale, mean, mean) if weight is None else (mean, scale, weight, bias)
        how = {"AFFINE": weight is not None, "RELU": ctx.relu}
        g, gx = g.contiguous(), torch.empty_like(x)
        sums = torch.empty(2, len(mean), C, device=x.device)
        tile = choose_one_pass_tiling(x.shape[2], C, ctx.groups)
        if tile is None:
            _backpropagate_in_two_passes(
                x, g, count, given, (gx, sums[0], sums[1]), ctx.groups, how
            )
        else:
            from flrce.training.gpu import triton_norms_whole as kernels

            launch = (len(mean) * tile.programs,)
            kernels.backward[launch](
                x, g, *given, gx, sums[0], sums[1], x.shape[2], units, **tile.constants, **how
            )
        if weight is None:
            return gx, None, None, None, None, None, None
        gb, gw = sums.reshape(2, len(x), -1, C).sum(2) if ctx.groups else sums
        return gx, gw, gb, None, None, None, None


@dataclass(frozen=True)
class OnePassTiling:
    """How a unit is cut for the kernels of one pass: so many programs, and their constants."""

    programs: int
    constants: dict[str, int]


def choose_one_pass_tiling(n: int, C: int, groups: int) -> OnePassTiling | None:
    """For samples of n pixels x C channels; None where one pass is not for them: over a batch, or
    for large images.

    As few groups a program as give it whole sectors of memory and enough to do; by nothing but a
    sample's shape.
    """
    if not groups:
        return None
    width = C // groups
    pixels, slots = _next_power_of_two(n), _next_power_of_two(width)
    many, size = 1, pixels * slots
    while many < groups and 2 * size <= MOST and (many * slots < ROW or size < LEAST):
        many, size = 2 * many, 2 * size
    narrow = many * slots < SECTOR and many < groups  # its rows would be parts of sectors
    if size > MOST or narrow:
        return None
    shape = {"C": C, "WIDTH": width, "SLOTS": slots, "GROUPS": many, "PIXELS": pixels}
    return OnePassTiling(
        -(-groups // many), {**shape, "num_warps": max(1, size // (32 * VALUES_PER_THREAD))}
    )


def _normalise_in_two_passes(
    x: Tensor,
    count: Tensor,
    held: TensorTuple,
    out: TensorTuple,
    groups: int,
    eps: float,
    how: KernelFlags,
) -> None:
    from flrce.training.gpu import triton_norms_last as kernels

    launch, shape, sizes = _plan_launch(x, groups)
    parts = launch[2]
    middle, spread = torch.empty(2, launch[0], parts, x.shape[3], device=x.device)
    kernels.compute_moments[launch](x, count, middle, spread, *sizes, parts, **shape)
    units = x.shape[1] if groups else 1
    kernels.normalise[launch](
        x, count, middle, spread, *held, *out, *sizes, parts, units, eps, **shape, **how
    )


def _backpropagate_in_two_passes(
    x: Tensor,
    g: Tensor,
    count: Tensor,
    given: TensorTuple,
    out: TensorTuple,
    groups: int,
    how: KernelFlags,
) -> None:
    from flrce.training.gpu import triton_norms_last as kernels

    launch, shape, sizes = _plan_launch(x, groups)
    parts, units = launch[2], x.shape[1] if groups else 1
    by_bias, by_weight = torch.empty(2, launch[0], parts, x.shape[3], device=x.device)
    kernels.sum_gradients[launch](
        x, g, count, *given, by_bias, by_weight, *sizes, parts, units, **shape, **how
    )
    kernels.backward[launch](
        x, g, count, *given, by_bias, by_weight, *out, *sizes, parts, units, **shape, **how
    )


def _plan_launch(
    x: Tensor, groups: int
) -> tuple[tuple[int, int, int], dict[str, Any], tuple[int, int, int]]:
    """The kernels' grid, their constants, and (pixels of a unit, of a sample, of a part)."""
    k, B, n, C = x.shape
    units, full = (k * B, n) if groups else (k, B * n)
    width = C // (groups or C)
    slots = _next_power_of_two(width)
    many = max(1, min(PLACES // slots, _next_power_of_two(C // width)))  # groups of one program
    parts = min(64, -(-full // PART_PIXELS))
    span = -(-full // (parts * PIXELS)) * PIXELS
    shape = {
        "C": C,
        "WIDTH": width,
        "SLOTS": slots,
        "GROUPS": many,
        "PIXELS": PIXELS,
        "BATCH": not groups,
    }
    shape["num_warps"] = 4
    return (units, -(-C // (width * many)), -(-full // span)), shape, (full, n, span)


def _next_power_of_two(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << (n - 1).bit_length()


def group_norm_channels_last(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    relu: bool = False,
) -> Tensor:
    """x (k, B, C, H, W) -> the same, channels last in memory."""
    count = torch.empty(1, dtype=torch.int32, device=x.device)  # not read: all samples count
    y = ChannelsLastNormFunction.apply(_to_pixel_rows(x), weight, bias, count, groups, eps, relu)[0]
    return _to_images(cast(Tensor, y), x)


def batch_norm_channels_last(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    count: Tensor,
    eps: float,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean (k, C), variance (k, C)) over the first `count` samples of each lane; what is padded
    becomes 0.
    """
    y, mean, scale = ChannelsLastNormFunction.apply(
        _to_pixel_rows(x), weight, bias, count, 0, eps, relu
    )
    return _to_images(y, x), mean, (scale**-2 - eps).clamp(min=0)


def _to_pixel_rows(x: Tensor) -> Tensor:
    """(k, B, C, H, W) as (k, B, H W, C)."""
    return x.permute(0, 1, 3, 4, 2).flatten(2, 3)


def _to_images(y: Tensor, x: Tensor) -> Tensor:
    shape = (*y.shape[:2], *x.shape[3:], y.shape[-1])
    return y.reshape(shape).permute(0, 1, 4, 2, 3)
