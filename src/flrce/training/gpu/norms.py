"""GroupNorm and BatchNorm of many lanes as one differentiable step each, where the device has
Triton.
"""

from typing import Any, cast

import torch
from torch import Tensor

from flrce.training.gpu.fused_block import supports_triton

BLOCK_SIZE = 1024


def supports_norm_kernels(x: Tensor) -> bool:
    return supports_triton(x.device) and x.dtype in (torch.float32, torch.bfloat16)


class NormFunction(torch.autograd.Function):
    """x (k, B, C, ...) normalised, scaled and shifted by weight and bias (k, C); `groups` 0: over a
    lane's batch.

    Gives (y, mean, 1 / std) with statistics for every (lane, sample, group), or for every (lane,
    channel).
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flrce.training.gpu import triton_norms as kernels

        x = x.contiguous()
        y = torch.empty(x.shape, device=x.device)
        shape, rows = _build_kernel_constants(x, groups)
        mean, scale = torch.empty(2, rows, device=x.device)
        weight = None if weight is None else weight.contiguous()
        ctx.how = (groups, shape, rows, bias is not None)
        kernels.forward[(rows,)](
            x,
            mean if weight is None else weight,
            mean if bias is None else bias.contiguous(),
            y,
            mean,
            scale,
            count,
            eps,
            x.shape[1],
            **shape,
            AFFINE=weight is not None,
            BLOCK=BLOCK_SIZE,
        )
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, scale)
        return y, mean, scale

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Any, ...]:
        from flrce.training.gpu import triton_norms as kernels

        x, weight, mean, scale, count = ctx.saved_tensors
        groups, shape, rows, _biased = ctx.how
        k, B, C = x.shape[:3]
        channels = shape["WIDTH"] // shape["AREA"]
        gx = torch.empty_like(x)
        by_weight, by_bias = torch.empty(2, rows, channels, device=x.device)
        kernels.backward[(rows,)](
            x,
            g.contiguous(),
            mean if weight is None else weight,
            mean,
            scale,
            gx,
            by_weight,
            by_bias,
            count,
            B,
            **shape,
            CHANNELS=channels,
            AFFINE=weight is not None,
            BLOCK=BLOCK_SIZE,
        )
        if weight is None:
            return gx, None, None, None, None, None
        if groups:
            by_weight, by_bias = (each.reshape(k, B, C).sum(1) for each in (by_weight, by_bias))
        return gx, by_weight.reshape(k, C), by_bias.reshape(k, C), None, None, None


def _build_kernel_constants(x: Tensor, groups: int) -> tuple[dict[str, Any], int]:
    """What the kernels need to know of x, and the number of rows."""
    k, B, C = x.shape[:3]
    area = int(torch.Size(x.shape[3:]).numel())
    rows = groups or C
    shape = {
        "ROWS": rows,
        "C": C,
        "WIDTH": C // rows * area,
        "STRIDE": C * area,
        "AREA": area,
        "BATCH": not groups,
    }
    return shape, k * rows * (B if groups else 1)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> Tensor:
    """x (k, B, C, ...)."""
    count = torch.ones(1, dtype=torch.int32, device=x.device)
    return cast(Tensor, NormFunction.apply(x, weight, bias, count, groups, eps)[0])


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean (k, C), variance (k, C)) over the first `count` samples of each lane; what is padded
    becomes 0.
    """
    y, mean, scale = cast(
        tuple[Tensor, Tensor, Tensor], NormFunction.apply(x, weight, bias, count, 0, eps)
    )
    shape = (len(x), x.shape[2])
    return y, mean.reshape(shape), (scale.reshape(shape) ** -2 - eps).clamp(min=0)
