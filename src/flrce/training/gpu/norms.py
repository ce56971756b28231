"""Norms of many lanes: x (k, B, ...) with scale and shift (k, ...) of each lane.

In plain torch, or as one differentiable step of Triton kernels: one pair of kernels for norms over
the last dimensions, one set for norms over channels, whose x lies with channels last. Kernels cut
their work by the sizes of a sample, never by the number of lanes, so that bits do not depend on it.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.fused_block import next_power_of_two, supports_triton

PIXELS, PLACES = 32, 64  # pixels and channels of a program's tile
PART_PIXELS, MAX_PARTS = 1024, 64  # pixels of a part, which has sums of its own
MAX_ROW_VALUES = 4096  # values of a row that a program holds
ROW_TILE_VALUES, THREAD_VALUES = 2048, 16  # that a program holds at once; of one thread
ROW_PART_VALUES, MIN_PART_ROWS = 8192, 16  # of a part, whose sums are added to those of others
KERNEL_DTYPES = (torch.float32, torch.bfloat16)

Affine = Tensor | None


def supports_norm_kernels(x: Tensor) -> bool:
    return supports_triton(x.device) and x.dtype in KERNEL_DTYPES and x.numel() > 0


def row_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Affine,
    bias: Affine,
    eps: float | None,
    centred: bool,
    direct: bool = False,
) -> Tensor:
    """LayerNorm (`centred`) or RMSNorm of x (k, ..., *shape); weight and bias (k, *shape)."""
    width = math.prod(shape)
    if direct and supports_norm_kernels(x) and width <= MAX_ROW_VALUES:
        own = (None if each is None else each.reshape(len(each), -1) for each in (weight, bias))
        small = torch.finfo(torch.float32).eps if eps is None else eps
        y = RowNormFunction.apply(x.reshape(len(x), -1, width), *own, small, centred)
        return cast(Tensor, y).reshape(x.shape)
    y = F.layer_norm(x, shape, eps=cast(float, eps)) if centred else F.rms_norm(x, shape, eps=eps)
    wide = (len(x), *(1,) * (x.dim() - 1 - len(shape)), *shape)
    y = y if weight is None else y * weight.reshape(wide)
    return y if bias is None else y + bias.reshape(wide)


def group_norm(
    x: Tensor, weight: Affine, bias: Affine, groups: int, eps: float, direct: bool = False
) -> Tensor:
    """x (k, B, C, ...), weight and bias (k, C)."""
    if direct and supports_norm_kernels(x) and (weight is None) == (bias is None):
        count = torch.empty(1, dtype=torch.int32, device=x.device)  # not read: all samples count
        y = ChannelNormFunction.apply(_to_pixel_rows(x), weight, bias, count, groups, eps)[0]
        return _to_images(y, x)
    y = F.group_norm(x.flatten(0, 1), groups, eps=eps).unflatten(0, x.shape[:2])
    return _scale_channels(y, weight, bias)


def batch_norm(
    x: Tensor,
    running_mean: Affine,
    running_var: Affine,
    weight: Affine,
    bias: Affine,
    count: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    direct: bool = False,
) -> Tensor:
    """x (k, B, C, ...), the others (k, C); in training by statistics over the first `count` (k,)
    samples of each lane, and the running ones move in place.
    """
    if not training:
        assert running_mean is not None
        assert running_var is not None
        inverse = torch.rsqrt(running_var + eps)
        y = (x - broadcast_channels(running_mean, x)) * broadcast_channels(inverse, x)
        return _scale_channels(y, weight, bias)
    if direct and supports_norm_kernels(x) and (weight is None) == (bias is None):
        y, mean, scale = ChannelNormFunction.apply(_to_pixel_rows(x), weight, bias, count, 0, eps)
        y, var = _to_images(y, x), (scale**-2 - eps).clamp(min=0)
    else:
        y, mean, var = _normalise_batch(x, count, eps)
        y = _scale_channels(y, weight, bias)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            n = (count * x[0, 0, 0].numel()).clamp(min=1)[:, None]
            share = (momentum * (count > 0).to(mean.dtype))[:, None].expand_as(mean)
            running_mean.lerp_(mean, share)
            running_var.lerp_(var * n / (n - 1).clamp(min=1), share)
    return y


def _normalise_batch(x: Tensor, count: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised x, mean (k, C), variance (k, C)) over the first `count` samples of each lane."""
    x = x if x.dtype == torch.float64 else x.float()
    over = (1, *range(3, x.dim()))
    n = (count * x[0, 0, 0].numel()).clamp(min=1).to(x.dtype)[:, None]  # (k, 1)
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]  # (k, B)
    real = real.reshape(*real.shape, *(1,) * (x.dim() - 2))
    mean = x.where(real, 0).sum(over) / n
    # a padded sample counts nowhere, so 0 does for it
    away = (x - broadcast_channels(mean, x)).where(real, 0)
    var = away.square().sum(over) / n
    return away * broadcast_channels(torch.rsqrt(var + eps), x), mean, var


def broadcast_channels(weight: Tensor, x: Tensor) -> Tensor:
    """(k, C) as it multiplies x (k, B, C, ...)."""
    return weight.reshape(len(weight), 1, -1, *(1,) * (x.dim() - 3))


def _scale_channels(y: Tensor, weight: Affine, bias: Affine) -> Tensor:
    y = y if weight is None else y * broadcast_channels(weight, y)
    return y if bias is None else y + broadcast_channels(bias, y)


def _to_pixel_rows(x: Tensor) -> Tensor:
    """(k, B, C, ...) as (k, B, pixels, C)."""
    return x.flatten(3).transpose(2, 3) if x.dim() > 3 else x[:, :, None]


def _to_images(y: Tensor, x: Tensor) -> Tensor:
    """(k, B, pixels, C) as x lies, (k, B, C, ...), with channels last in memory."""
    return y.transpose(2, 3).reshape(x.shape) if x.dim() > 3 else y[:, :, 0]


class ChannelNormFunction(torch.autograd.Function):
    """x (k, B, n, C) normalised, scaled and shifted by weight and bias (k, C); `groups` 0: over the
    first `count` samples of a lane's batch.

    Gives (y, mean, 1 / std), statistics (units, C): a unit is a sample, or where `groups` is 0 a
    lane.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Affine, bias: Affine, count: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flrce.training.gpu import triton_norms as kernels

        x = x.contiguous()
        launch, shape, sizes = _plan_launch(x, groups)
        units, parts, C = launch[0], launch[2], x.shape[3]
        y = torch.empty(x.shape, device=x.device)
        mean, scale = torch.empty(2, units, C, device=x.device)
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        given = (mean if weight is None else weight, mean if bias is None else bias)
        middle, spread = torch.empty(2, units, parts, C, device=x.device)
        kernels.compute_moments[launch](x, count, middle, spread, *sizes, parts, **shape)
        sizes, shape = (*sizes, parts, units // len(x)), {**shape, "AFFINE": weight is not None}
        kernels.normalise[launch](
            x, count, middle, spread, *given, y, mean, scale, *sizes, eps, **shape
        )
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.groups = groups
        # statistics have none, and zeros for them would be two launches
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, scale)
        return y, mean, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Any, ...]:
        from flrce.training.gpu import triton_norms as kernels

        x, weight, mean, scale, count = ctx.saved_tensors
        launch, shape, sizes = _plan_launch(x, ctx.groups)
        units, parts, C = launch[0], launch[2], x.shape[3]
        g, gx = g.contiguous(), torch.empty_like(x)
        by_bias, by_weight = torch.empty(2, units, parts, C, device=x.device)
        sums = torch.empty(2, units, C, device=x.device)
        given = (x, g, count, mean, scale)
        kernels.sum_gradients[launch](*given, by_bias, by_weight, *sizes, parts, **shape)
        sizes, shape = (*sizes, parts, units // len(x)), {**shape, "AFFINE": weight is not None}
        held = mean if weight is None else weight
        kernels.backward[launch](
            *given, held, by_bias, by_weight, gx, sums[0], sums[1], *sizes, **shape
        )
        if weight is None:
            return gx, None, None, None, None, None
        gb, gw = sums.reshape(2, len(x), -1, C).sum(2) if ctx.groups else sums
        return gx, gw, gb, None, None, None


def _plan_launch(
    x: Tensor, groups: int
) -> tuple[tuple[int, int, int], dict[str, Any], tuple[int, ...]]:
    """The kernels' grid (units, programs of a unit's channels, parts), their constants, and
    (pixels of a unit, of a sample, of a part).
    """
    k, B, n, C = x.shape
    units, full = (k * B, n) if groups else (k, B * n)
    width = C // (groups or C)
    slots = next_power_of_two(width)
    many = max(1, min(PLACES // slots, next_power_of_two(C // width)))  # groups of one program
    parts = min(MAX_PARTS, -(-full // PART_PIXELS))
    span = -(-full // (parts * PIXELS)) * PIXELS
    shape = {"C": C, "WIDTH": width, "SLOTS": slots, "GROUPS": many, "PIXELS": PIXELS}
    shape |= {"BATCH": not groups, "num_warps": 4}
    return (units, -(-C // (width * many)), -(-full // span)), shape, (full, n, span)


class RowNormFunction(torch.autograd.Function):
    """x (k, n, D), weight and bias (k, D) -> y; not `centred`: about 0, without a mean."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Affine, bias: Affine, eps: float, centred: bool
    ) -> Tensor:
        from flrce.training.gpu import triton_row_norms as kernels

        x = x.contiguous()
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        k, n, D = x.shape
        y = torch.empty(x.shape, device=x.device)
        mean, scale = torch.empty(2, k, n, device=x.device)
        held = (x if weight is None else weight, x if bias is None else bias)
        how = {"CENTRED": centred, "WEIGHT": weight is not None, "BIAS": bias is not None}
        tile = choose_row_tile(D)
        launch = (-(-n // tile["ROWS"]), k)
        kernels.forward[launch](x, *held, y, mean, scale, n, eps, **tile, **how)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.centred = centred
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        from flrce.training.gpu import triton_row_norms as kernels

        x, weight, mean, scale = ctx.saved_tensors
        _, by_weight, by_bias, *_ = ctx.needs_input_grad
        k, n, D = x.shape
        gx, tile = torch.empty_like(x), choose_row_tile(D)
        tiles = count_tiles_per_part(D)
        parts = -(-n // (tile["ROWS"] * tiles))
        sums = torch.empty(2, k, parts, D, device=x.device)
        held = x if weight is None else weight
        how = {"TILES": tiles, "CENTRED": ctx.centred, "WEIGHT": weight is not None}
        kernels.backward[(parts, k)](
            x, g.contiguous(), held, mean, scale, gx, sums[0], sums[1], n, **tile, **how
        )
        gw, gb = sums.sum(2)  # over the parts, in their order
        return gx, gw if by_weight else None, gb if by_bias else None, None, None


def choose_row_tile(width: int) -> dict[str, int]:
    """How the kernels cut rows of so many values."""
    columns = next_power_of_two(width)
    rows = max(1, ROW_TILE_VALUES // columns)
    warps = max(1, min(8, rows * columns // (32 * THREAD_VALUES)))
    return {"WIDTH": width, "COLS": columns, "ROWS": rows, "num_warps": warps}


def count_tiles_per_part(width: int) -> int:
    """Tiles of a part: at least 16 rows, since sums of each part are written."""
    tile = choose_row_tile(width)
    rows, values = tile["ROWS"], tile["ROWS"] * tile["COLS"]
    return max(1, ROW_PART_VALUES // values, MIN_PART_ROWS // rows)
