"""Weights that a layer makes of other parameters whenever it runs: torch's parametrizations, weight
norm's hooks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm


def compute_parametrized_tensor(
    layer: nn.Module, name: str, own: Mapping[str, Tensor]
) -> Tensor | None:
    """(k, ...) the layer's tensor of this name, made of its `own` (k, ...); None where none of them
    is in it.
    """
    if is_parametrized(layer, name):
        steps: Any = layer.parametrizations[name]  # type: ignore[index]
        start = f"parametrizations.{name}."
        held = {key.removeprefix(start): x for key, x in own.items() if key.startswith(start)}
        if not held:
            return None
        plain = len(steps) == 1 and type(steps[0]) is _WeightNorm and steps[0].dim >= 0
        if plain and held.keys() == {"original0", "original1"}:
            return apply_weight_norm(held["original1"], held["original0"], steps[0].dim)
        found: Tensor = torch.vmap(lambda tensors: functional_call(steps, tensors, ()))(held)
        return found
    for hook in layer._forward_pre_hooks.values():  # older weight norm
        if (
            isinstance(hook, WeightNorm)
            and hook.name == name
            and hook.dim is not None
            and hook.dim >= 0
        ):
            return apply_weight_norm(own[f"{name}_v"], own[f"{name}_g"], hook.dim)
    return None


def apply_weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    """Directions v (k, ...), each slice along `dim` of a lane scaled to the length that g (k, ...)
    has for it.
    """
    over = [d for d in range(1, v.dim()) if d != dim + 1]
    return (
        v * (g / torch.linalg.vector_norm(v, dim=over, keepdim=True)) if over else v * (g / v.abs())
    )
