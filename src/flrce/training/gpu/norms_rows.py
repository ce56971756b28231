"""LayerNorm and RMSNorm of many lanes as one differentiable step, where the device has Triton.

A kernel is tried before its first use on a few rows. Where it cannot be made, or gives something
else than torch, the log says so once and torch's own functions do.
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flrce.errors import format_one_line
from flrce.training.gpu.fused_block import supports_triton

log = logging.getLogger("flrce")
MAX_ROW_VALUES = 4096  # values of a row that a program holds
TILE, EACH = 2048, 16  # values that a program holds at once, if a row is no longer; of one thread
# values of a part, whose sums are added to those of others; not by the number of lanes
VALUES_PER_PART = 8192
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)

KernelConstants = dict[str, int]


def choose_row_tile(width: int) -> KernelConstants:
    """How the kernels cut rows of so many values."""
    cols = 1 << (width - 1).bit_length()
    rows = max(1, TILE // cols)
    return {
        "WIDTH": width,
        "COLS": cols,
        "ROWS": rows,
        "num_warps": max(1, min(8, rows * cols // (32 * EACH))),
    }


def count_tiles_per_part(width: int) -> int:
    """Tiles of a part: at least 16 rows, since sums of each part are written."""
    held = choose_row_tile(width)
    return max(1, VALUES_PER_PART // (held["ROWS"] * held["COLS"]), 16 // held["ROWS"])


def normalise_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, 1 / std) of x (k, n, D), contiguous; weight, bias (k, D). Not `centred`: about 0,
    without a mean.
    """
    from flrce.training.gpu import triton_norms_rows as kernels

    k, n, D = x.shape
    given = [each for each in (weight, bias) if each is not None]
    like = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    for each in given:
        like = torch.promote_types(like, each.dtype)  # as torch's norm, then a product and a sum
    y = torch.empty_like(x, dtype=like)
    mean, scale = torch.empty(2, k, n, device=x.device)
    held = (x if weight is None else weight, x if bias is None else bias)
    how = {"CENTRED": centred, "WEIGHT": weight is not None, "BIAS": bias is not None}
    shape = choose_row_tile(D)
    kernels.forward[(-(-n // shape["ROWS"]), k)](x, *held, y, mean, scale, n, eps, **shape, **how)
    return y, mean, scale


def backpropagate_rows(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    centred: bool,
    sums: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients by x (k, n, D), weight and bias (k, D); the last two None without `sums`."""
    from flrce.training.gpu import triton_norms_rows as kernels

    k, n, D = x.shape
    gx, shape, many = torch.empty_like(x), choose_row_tile(D), count_tiles_per_part(D)
    parts = -(-n // (shape["ROWS"] * many))
    found = (
        torch.empty(2, k, parts, D, device=x.device) if sums else torch.empty(2, 1, device=x.device)
    )
    how = {"TILES": many, "CENTRED": centred, "WEIGHT": weight is not None, "SUMS": sums}
    held = x if weight is None else weight
    kernels.backward[(parts, k)](x, g, held, mean, scale, gx, found[0], found[1], n, **shape, **how)
    if not sums:
        return gx, None, None
    gw, gb = found.sum(2)  # over the parts, in their order
    return gx, gw, gb


class RowNormFunction(torch.autograd.Function):
    """x (k, n, D) -> y, as `normalise_rows`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
    ) -> Tensor:
        x = x.contiguous()
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        y, mean, scale = normalise_rows(x, weight, bias, eps, centred)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.centred = centred
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        _, by_weight, by_bias, *_ = ctx.needs_input_grad
        gx, gw, gb = backpropagate_rows(
            x, g.contiguous(), weight, mean, scale, ctx.centred, by_weight or by_bias
        )
        return gx, gw if by_weight else None, gb if by_bias else None, None, None


def supports_row_norm(x: Tensor, shape: Sequence[int], eps: float | None) -> bool:
    """Whether the kernels normalise x (..., *shape) here."""
    width = math.prod(shape)
    if (
        not supports_triton(x.device)
        or x.dtype not in SUPPORTED_DTYPES
        or not 0 < width <= MAX_ROW_VALUES
    ):
        return False
    if x.numel() == 0 or tuple(x.shape[-len(shape) :]) != tuple(shape):
        return False
    return (eps is not None or x.dtype == torch.float32) and is_row_kernel_correct(
        width, x.dtype, x.device
    )


def apply_row_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centred: bool,
) -> Tensor:
    """x (k, ..., *shape), weight and bias (k, *shape); `centred`: a LayerNorm, else an RMSNorm."""
    own = (None if each is None else each.reshape(len(each), -1) for each in (weight, bias))
    small = torch.finfo(torch.float32).eps if eps is None else eps
    y = RowNormFunction.apply(x.reshape(len(x), -1, math.prod(shape)), *own, small, centred)
    return cast(Tensor, y).reshape(x.shape)


@functools.cache
def is_row_kernel_correct(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels can be made for such rows, and give what they should."""
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            far = max(
                _measure_kernel_error(width, dtype, device, centred) for centred in (True, False)
            )
        if far < (1e-4 if dtype == torch.float32 else 2e-2):
            return True
        why = f"off by {far:.1e}"
    except Exception as error:  # compilers and launchers raise many kinds
        why = format_one_line(error, 120)
    _warn_once(device, f"of {width} values: {why}")
    return False


@functools.cache
def _get_reported_problems(device: torch.device) -> list[str]:
    return []


def _warn_once(device: torch.device, what: str) -> None:
    """One line for each device."""
    if not _get_reported_problems(device):
        log.warning("norms run without their fused kernels, which is slower; rows %s", what)
    _get_reported_problems(device).append(what)


def _measure_kernel_error(
    width: int, dtype: torch.dtype, device: torch.device, centred: bool
) -> float:
    """How far the kernels are from float64, for two lanes of three rows: y and all gradients, as
    shares of norms.
    """
    at = torch.arange(16 * width, dtype=torch.float64)
    x, g = at.mul(0.7).sin().to(dtype)[: 12 * width].reshape(2, 2, 3, width)
    weight, bias = at.mul(1.3).cos().float()[12 * width :].reshape(2, 2, width)
    there = _compute_reference_norm(x.double(), g.double(), weight.double(), bias.double(), centred)
    x, g, weight, bias = (each.to(device) for each in (x, g.float(), weight, bias))
    y, mean, scale = normalise_rows(x, weight, bias, 1e-5, centred)
    here = (y, *backpropagate_rows(x, g, weight, mean, scale, centred, sums=True))
    pairs = [(cast(Tensor, a).double().cpu(), b) for a, b in zip(here, there, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1)) for a, b in pairs)


def _compute_reference_norm(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor, centred: bool
) -> tuple[Tensor, ...]:
    """y and the gradients by x, weight and bias, as written in books."""
    off = x - x.mean(-1, keepdim=True) if centred else x
    inverse = (off.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    hat, push = off * inverse, g * weight[:, None]
    moved = push - hat * (push * hat).mean(-1, keepdim=True)
    moved = moved - push.mean(-1, keepdim=True) if centred else moved
    return hat * weight[:, None] + bias[:, None], moved * inverse, (g * hat).sum(1), g.sum(1)
