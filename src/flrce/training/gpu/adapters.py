"""Adapters of all lanes beside a fixed linear layer (LoRA): base(x) + scale up(down(x)), each
product into the last.

A module of anybody's is taken for one by its tensors, and tried with numbers.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.chain import find_hooks
from flrce.training.gpu.lane_layer import ForwardContext, LaneLayer
from flrce.training.precision import cast_like_autocast


@dataclass(frozen=True)
class AdapterParts:
    """A module's parts by name: its base, the parameters down (R, I) and up (O, R), and what their
    product is times.
    """

    base: str
    down: str
    up: str
    scale: float


def find_adapter_parts(layer: nn.Module) -> AdapterParts | None:
    """What a module is made of that gives base(x) + scale up(down(x)), in training and evaluation;
    None for others.
    """
    children, own = list(layer.named_children()), list(layer.named_parameters(recurse=False))
    if len(children) != 1 or len(own) != 2 or list(layer.buffers()) or find_hooks(layer):
        return None
    name, base = children[0]
    if type(base) is not nn.Linear or any(
        p.requires_grad or p.dtype != torch.float32 for p in base.parameters()
    ):
        return None
    if not all(p.requires_grad and p.dim() == 2 and p.dtype == torch.float32 for _, p in own):
        return None
    for (down, a), (up, b) in permutations(own):
        if a.shape[1] == base.in_features and b.shape == (base.out_features, len(a)):
            scales = [
                _measure_adapter_scale(layer, name, down, up, training)
                for training in (True, False)
            ]
            if scales[0] is not None and scales[0] == scales[1]:
                return AdapterParts(name, down, up, scales[0])
    return None


@torch.no_grad()
def _measure_adapter_scale(
    layer: nn.Module, base: str, down: str, up: str, training: bool
) -> float | None:
    """What up(down(x)) is times in the module's output; None where that does something else."""
    layer = copy.deepcopy(layer).double().train(training)
    rng = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.copy_(torch.randn(p.shape, generator=rng))
    a, b = layer.get_parameter(down), layer.get_parameter(up)
    x = torch.randn(2, 3, a.shape[1], generator=rng).to(a)
    try:
        with torch.random.fork_rng(devices=[]):
            added = layer(x) - layer.get_submodule(base)(x)
        product = x @ a.T @ b.T
        scale = float((added * product).sum() / product.square().sum())
    except Exception:  # a module's own code raises many kinds
        return None
    same = added.shape == product.shape and float(
        (added - scale * product).norm()
    ) <= 1e-10 * float(product.norm())
    return float(f"{scale:.12g}") if same and abs(scale) > 1e-9 else None


class LaneAdapter(LaneLayer):
    """In place of an adapter with its base."""

    def __init__(
        self,
        path: str,
        layer: nn.Module,
        names: Mapping[str, str],
        now: ForwardContext,
        parts: AdapterParts,
    ) -> None:
        super().__init__(path, layer, names, now)
        self.parts = parts

    def run(self, live: bool, x: Tensor) -> Tensor:
        parts = self.parts
        base: Any = self.layer.get_submodule(parts.base)
        down, up, given = (
            self.get_lane_tensor(parts.down),
            self.get_lane_tensor(parts.up),
            self.split_lanes(x),
        )
        given, weight, bias, down, up = cast_like_autocast(given, base.weight, base.bias, down, up)
        flat = given.reshape(len(given), -1, given.shape[-1])
        y = cast(Tensor, _AdapterSum.apply(flat, weight, bias, down, up, parts.scale))
        return self.merge_lanes(y.reshape(*given.shape[:-1], -1))


class _AdapterSum(torch.autograd.Function):
    """x (k, n, I), weight (O, I) and bias (O,) of all lanes, down (k, R, I), up (k, O, R) -> (k, n,
    O).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        low = torch.bmm(x, down.mT)  # (k, n, R)
        y: Tensor = F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale = scale
        y.baddbmm_(low, up.mT, alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        g = g.contiguous()
        back = torch.bmm(g, up) * ctx.scale  # (k, n, R)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = torch.mm(g.flatten(0, 1), weight).unflatten(0, x.shape[:2]).baddbmm_(back, down)
        by_down, by_up = ctx.needs_input_grad[3:5]
        gd = torch.bmm(back.mT, x) if by_down else None
        gu = torch.bmm(g.mT, low) * ctx.scale if by_up else None
        return gx, None, None, gd, gu, None
