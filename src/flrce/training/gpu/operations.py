"""Operations of many networks at once: x (k, B, ...) and weights (k, ...), one lane per network.

Weight gradients are contiguous and summed without atomic additions, so that a step adds no
transposing copy and gives the same bits each time.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.convolution import MAX_NARROW_CHANNELS, multiply_rows, supports_kernels
from flrce.training.precision import cast_like_autocast

MIN_DIRECT_ROWS = 256  # rows of a lane from which Triton's tiles of 128 pay for a linear layer
DROPOUT_VALUES = 1024  # of a program of the dropout kernel
MAX_ONE_HOT_ROWS = 1024  # rows of an embedding up to which its gradient is a one-hot product


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
        # (k, O, I), as the weight lies
        gw = torch.bmm(g.mT, x) if ctx.needs_input_grad[1] else None
        return gx, gw, g.sum(1) if ctx.needs_input_grad[2] else None


def batched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, min_direct_rows: int | None = None
) -> Tensor:
    """x (k, B, ..., I), weight (k, O, I), bias (k, O) -> (k, B, ..., O).

    Lanes with `min_direct_rows` rows or more go through the Triton kernel; None: no lane does.
    """
    if len(weight) == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    x, weight, bias = cast_like_autocast(x, weight, bias)
    flat = x.reshape(len(x), -1, x.shape[-1])
    many = min_direct_rows is not None and flat.shape[1] >= min_direct_rows
    if many and supports_kernels(x) and min(weight.shape[1:]) > MAX_NARROW_CHANNELS:
        y = multiply_rows(flat, weight, bias)
    else:
        y = cast(Tensor, _BatchedLinear.apply(flat, weight, bias))
    return y.reshape(*x.shape[:-1], -1)


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
            # (k, V, n)
            hot = (ids[:, None] == torch.arange(V, device=ids.device)[:, None]).to(g.dtype)
            return torch.bmm(hot, g), None, None
        at = ids + V * torch.arange(k, device=ids.device)[:, None]
        found = torch.ops.aten.embedding_dense_backward(g, at, k * V, -1, False)
        return found.reshape(k, V, -1), None, None


def lookup_embeddings(weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
    """weight (k, V, D), ids (k, ...) -> (k, ..., D)."""
    y = _EmbeddingLookup.apply(weight, ids.flatten(1), -1 if padding is None else padding)
    return cast(Tensor, y).reshape(*ids.shape, -1)


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
    x: Tensor,
    p: float,
    seeds: Tensor,
    step: Tensor,
    place: int,
    channels: bool = False,
    direct: bool = False,
) -> Tensor:
    """x (k, B, ...) with a share p of each lane's values at 0 and the others grown to keep the
    mean.

    Which ones is a function of (the lane's seed, the step, the layer's place, the value's
    position): the same for any number of lanes, on any device. `channels`: whole channels x[:, :,
    c] at once. `direct`: by a Triton kernel.
    """
    threshold = round(p * (1 << 24))
    if direct and not channels and supports_kernels(x):
        keys = make_lane_keys(seeds, step, place)
        return cast(Tensor, _Dropout.apply(x, keys, threshold, 1 / (1 - p)))
    shape = x.shape[:3] if channels else x.shape
    drawn = draw_random_integers(shape, seeds, step, place)
    kept = (drawn >= threshold).reshape(*shape, *(1,) * (x.dim() - len(shape)))
    return x * (kept.to(x.dtype) / (1 - p))


class _Dropout(torch.autograd.Function):
    """x (k, ...) of any layout, keys (k,); draws are made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, threshold: int, scale: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.how = (threshold, scale)
        return _run_dropout(x, keys, threshold, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _run_dropout(g, *ctx.saved_tensors, *ctx.how), None, None, None


def _run_dropout(x: Tensor, keys: Tensor, threshold: int, scale: float) -> Tensor:
    from flrce.training.gpu.triton_dropout import drop

    x = x.contiguous()
    y, n = torch.empty_like(x), x[0].numel()
    launch = (-(-n // DROPOUT_VALUES), len(x))
    drop[launch](x, keys, y, n, threshold, scale, SIZE=DROPOUT_VALUES, num_warps=4)
    return y


def draw_random_integers(shape: Sequence[int], seeds: Tensor, step: Tensor, place: int) -> Tensor:
    """Whole numbers of 24 bits (k, ...), as `drop_values` says."""
    n = int(torch.Size(shape[1:]).numel())
    key = make_lane_keys(seeds, step, place)[:, None]
    found = (
        _mix_splitmix64(key + torch.arange(1, n + 1, device=seeds.device) * SPLITMIX64_CONSTANTS[0])
        >> 40
        & 0xFFFFFF
    )
    return found.reshape(tuple(shape))


def make_lane_keys(seeds: Tensor, step: Tensor, place: int) -> Tensor:
    """(k,) where each lane's draws of one layer in one step begin."""
    return _mix_splitmix64(_mix_splitmix64(_mix_splitmix64(seeds) + place) + step)
