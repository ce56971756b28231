"""Layers of many networks at once as functions: x (k, B, ...) and weights (k, ...), a lane for each
network.

With one lane they are torch's own layers. Weight gradients come out contiguous and without atomic
additions, so that a step adds no transposing copy and gives the same bits each time.
"""

import math
from collections.abc import Sequence
from itertools import product as grid
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.last import (
    MAX_NARROW_CHANNELS,
    convolve_channels_last,
    multiply_channels_last,
)
from flrce.training.gpu.tiles import supports_channels_last_kernels

ConvolutionMethod = Literal["columns", "rows", "direct", "grouped", "each"]
CHANNELS_LAST_METHODS: tuple[ConvolutionMethod, ...] = (
    "rows",
    "direct",
)  # with channels last in memory
MIN_DIRECT_ROWS = (
    256  # rows of a lane from which Triton's tiles of 128 are worth it for a linear layer
)
MAX_ONE_HOT_ROWS = (
    1024  # rows of an embedding up to which its gradient is a product with one-hot rows
)


def cast_like_autocast(*tensors: Tensor | None) -> list[Any]:
    """Under autocast the tensors in its dtype, as torch's own layers would have them."""
    kind = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [None if x is None else x.to(torch.get_autocast_dtype(kind)) for x in tensors]


class _BatchedLinear(torch.autograd.Function):
    """x (k, n, I), weight (k, O, I), bias (k, O) -> (k, n, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gx = torch.bmm(g, weight) if ctx.needs_input_grad[0] else None
        gw = (
            torch.bmm(g.mT, x) if ctx.needs_input_grad[1] else None
        )  # (k, O, I), as the weight lies
        return gx, gw, g.sum(1) if ctx.needs_input_grad[2] else None


def batched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, direct: float = math.inf
) -> Tensor:
    """x (k, B, ..., I), weight (k, O, I); from `direct` rows of a lane on by Triton, bias and its
    gradient within.
    """
    if len(weight) == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    x, weight, bias = cast_like_autocast(x, weight, bias)
    flat = x.reshape(len(x), -1, x.shape[-1])
    if (
        flat.shape[1] >= direct
        and supports_channels_last_kernels(x)
        and min(weight.shape[1:]) > MAX_NARROW_CHANNELS
    ):
        y = multiply_channels_last(flat, weight, bias)
    else:
        y = cast(Tensor, _BatchedLinear.apply(flat, weight, bias))
    return y.reshape(*x.shape[:-1], -1)


class _ColumnsConvolution(torch.autograd.Function):
    """Convolution of padded x (k, B, C, H, W) as one product a lane: W (k, O, C R S) times columns
    (k, C R S, B P).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # columns are made again: they are R S times as large as x
        ctx.how = (stride, dilation)
        columns, (H, W) = _unfold_columns(x, weight, stride, dilation)
        y = torch.bmm(weight.flatten(2), columns)  # (k, O, B P)
        return y.reshape(len(x), -1, x.shape[1], H, W).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        stride, dilation = ctx.how
        k, B, C = x.shape[:3]
        R, S = weight.shape[3:]
        H, W = g.shape[3:]
        rows = g.transpose(1, 2).reshape(k, g.shape[2], -1)  # (k, O, B P)
        gw = gx = None
        if ctx.needs_input_grad[1]:
            gw = torch.bmm(rows, _unfold_columns(x, weight, stride, dilation)[0].mT).reshape(
                weight.shape
            )
        if ctx.needs_input_grad[0]:
            spread = torch.bmm(weight.flatten(2).mT, rows).reshape(k, C, R, S, B, H, W)
            total = x.new_zeros(k, C, B, *x.shape[3:])
            for r, s in grid(range(R), range(S)):  # in a fixed order: no atomic additions
                down, right = r * dilation[0], s * dilation[1]
                span = (
                    slice(down, down + stride[0] * H, stride[0]),
                    slice(right, right + stride[1] * W, stride[1]),
                )
                total[:, :, :, span[0], span[1]] += spread[:, :, r, s]
            gx = total.transpose(1, 2)
        return gx, gw, None, None


def _unfold_columns(
    x: Tensor, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """(k, C R S, B P): what each output pixel sees, and the output's height and width."""
    k, B, C, height, width = x.shape
    R, S = weight.shape[3:]
    H = (height - dilation[0] * (R - 1) - 1) // stride[0] + 1
    W = (width - dilation[1] * (S - 1) - 1) // stride[1] + 1
    a, b, c, d, e = x.stride()
    strides = (a, c, d * dilation[0], e * dilation[1], b, d * stride[0], e * stride[1])
    return x.as_strided((k, C, R, S, B, H, W), strides).reshape(k, C * R * S, B * H * W), (H, W)


def convolve_lanes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    way: ConvolutionMethod,
) -> Tensor:
    """One- or two-dimensional; x (k, B, C, [H,] W), weight (k, O, C / groups, [R,] S); `padding` as
    F.pad takes it.
    """
    k, flat = len(weight), weight.dim() == 4
    native: Any = F.conv1d if flat else F.conv2d
    plain = (
        tuple(padding[::-1][::2]) if padding[::2] == padding[1::2] else None
    )  # the same on both sides
    if plain is None:
        x, plain = F.pad(x, tuple(padding)), (0,) * (len(padding) // 2)
    more = (tuple(stride), plain, tuple(dilation))
    if k == 1:
        return cast(
            Tensor, native(x[0], weight[0], None if bias is None else bias[0], *more, groups)
        )[None]
    x, weight, bias = cast_like_autocast(x, weight, bias)
    if way == "each":
        biases: Any = [None] * k if bias is None else bias
        return torch.stack(
            [native(*lane, *more, groups) for lane in zip(x, weight, biases, strict=True)]
        )
    depthwise = (
        groups > 1 and weight.shape[2] == 1
    )  # one channel an output: torch's own kernels, no product
    if way == "grouped" or depthwise:
        side = x.transpose(0, 1).flatten(1, 2)  # (B, k C, ...)
        joined = None if bias is None else bias.flatten()
        y: Tensor = native(side, weight.flatten(0, 1), joined, *more, k * groups)
        return y.reshape(len(side), k, -1, *y.shape[2:]).transpose(0, 1)
    if flat:
        x, weight = x.unsqueeze(-2), weight.unsqueeze(-2)
        more = ((1, *more[0]), (0, *plain), (1, *more[2]))
    if way == "columns":
        x = F.pad(x, (more[1][1], more[1][1], more[1][0], more[1][0])) if any(more[1]) else x
    if groups > 1:  # groups are lanes of their own
        x = x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
        weight = weight.unflatten(1, (groups, -1)).flatten(0, 1)
    if way in CHANNELS_LAST_METHODS:
        inside = (
            way == "direct" and bias is not None and supports_channels_last_kernels(x)
        )  # its kernel adds the bias
        own = bias.reshape(len(weight), -1) if bias is not None and inside else None
        y = convolve_channels_last(x, weight, own, cast(Any, more), direct=way == "direct")
        bias = None if inside else bias
    else:
        y = cast(Tensor, _ColumnsConvolution.apply(x, weight, more[0], more[2]))
    if groups > 1:
        y = y.unflatten(0, (k, groups)).transpose(1, 2).flatten(2, 3)
    y = y.squeeze(-2) if flat else y
    return y if bias is None else y + broadcast_channels(bias, y)


def broadcast_channels(weight: Tensor, x: Tensor) -> Tensor:
    """(k, C) as it multiplies x (k, B, C, ...)."""
    return weight.reshape(len(weight), 1, -1, *(1,) * (x.dim() - 3))


class _EmbeddingLookup(torch.autograd.Function):
    """Rows of weight (k V, D) at ids (k, n)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int) -> Tensor:  # weight (k, V, D)
        k, V = weight.shape[:2]
        ctx.save_for_backward(ids)
        ctx.how = (V, padding)
        at = ids + V * torch.arange(k, device=ids.device)[:, None]
        return F.embedding(at, weight.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        V, padding = ctx.how
        k = len(ids)
        if padding >= 0:
            g = g * (ids != padding)[..., None]
        if V <= MAX_ONE_HOT_ROWS:
            hot = (ids[:, None] == torch.arange(V, device=ids.device)[:, None]).to(
                g.dtype
            )  # (k, V, n)
            return torch.bmm(hot, g), None, None
        at = ids + V * torch.arange(k, device=ids.device)[:, None]
        found = torch.ops.aten.embedding_dense_backward(g, at, k * V, -1, False)
        return found.reshape(k, V, -1), None, None


def lookup_embeddings(weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """weight (k, V, D), ids (k, ...) -> (k, ..., D)."""
    y = _EmbeddingLookup.apply(weight, ids.flatten(1), -1 if padding is None else padding)
    return cast(Tensor, y).reshape(*ids.shape, -1)


def normalise_batch(x: Tensor, count: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """BatchNorm's core over the first `count` samples of each lane: (normalised x, mean, variance,
    n).
    """
    over = (1, *range(3, x.dim()))
    wide = (len(x), 1, -1, *(1,) * (x.dim() - 3))
    n = (count * x[0, 0, 0].numel()).clamp(min=1).to(x.dtype)[:, None]  # (k, 1)
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]  # (k, B)
    real = real.reshape(*real.shape, *(1,) * (x.dim() - 2))
    mean = x.where(real, 0).sum(over) / n  # (k, C)
    away = (x - mean.reshape(wide)).where(
        real, 0
    )  # a padded sample counts nowhere, so 0 does for it
    var = away.square().sum(over) / n
    return away * torch.rsqrt(var + eps).reshape(wide), mean, var, n


def _to_signed_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


SPLITMIX64_CONSTANTS = tuple(
    map(_to_signed_int64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
)  # of splitmix64


def _mix_splitmix64(h: Tensor) -> Tensor:
    """splitmix64's finish on int64, whose products wrap; shifts are made logical by a mask."""
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * SPLITMIX64_CONSTANTS[1]
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * SPLITMIX64_CONSTANTS[2]
    return h ^ ((h >> 31) & ((1 << 33) - 1))


def drop_values(
    x: Tensor, p: float, seeds: Tensor, step: Tensor, place: int, channels: bool = False
) -> Tensor:
    """x (k, B, ...) with a share p of each lane's values at 0 and the others grown to keep the
    mean.

    Which ones is a function of (the lane's seed, the step, the layer's place, the value's
    position): the same for any number of lanes, on any device. `channels`: whole channels x[:, :,
    c] at once.
    """
    shape = x.shape[:3] if channels else x.shape
    drawn = draw_random_integers(shape, seeds, step, place)
    kept = (drawn >= round(p * (1 << 24))).reshape(*shape, *(1,) * (x.dim() - len(shape)))
    return x * (kept.to(x.dtype) / (1 - p))


def draw_random_integers(shape: Sequence[int], seeds: Tensor, step: Tensor, place: int) -> Tensor:
    """Whole numbers of 24 bits (k, ...), as `drop_values` says."""
    n = int(torch.Size(shape[1:]).numel())
    key = _mix_splitmix64(_mix_splitmix64(_mix_splitmix64(seeds) + place) + step)[:, None]  # (k, 1)
    found = (
        _mix_splitmix64(key + torch.arange(1, n + 1, device=seeds.device) * SPLITMIX64_CONSTANTS[0])
        >> 40
        & 0xFFFFFF
    )
    return found.reshape(tuple(shape))
