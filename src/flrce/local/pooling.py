"""A 2 x 2 max-pool out of vectorised maxima: torch's walks its windows one by one, which is a quarter of a CNN's step.

Values and gradients are torch's, bit for bit: of equal values in a window the first in reading order gets the gradient.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

gate = torch.ops.aten.threshold_backward  # (g, x, 0): g where x > 0, else 0; far faster than torch.where


class Halve(nn.MaxPool2d):
    """MaxPool2d(2) in training and evaluation; windows that do not tile the input are left to torch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 or x.shape[-2] % 2:
            return cast(Tensor, super().forward(x))
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _Halved.apply(x))
        rows = torch.maximum(x[..., 0::2], x[..., 1::2])
        return torch.maximum(rows[..., 0::2, :], rows[..., 1::2, :])


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x[..., 0::2], x[..., 1::2]
        rows = torch.maximum(left, right)  # (..., H, W / 2)
        upper, lower = rows[..., 0::2, :], rows[..., 1::2, :]
        ctx.save_for_backward(right - left, lower - upper)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        across, down = ctx.saved_tensors
        lower = gate(g, down, 0)
        rows = torch.stack((g - lower, lower), -2).flatten(-3, -2)
        right = gate(rows, across, 0)
        return torch.view_as_real(torch.complex(rows.sub_(right), right)).flatten(-2)  # interleaves the columns


def quicken(net: nn.Module) -> nn.Module:
    """Replace the net's 2 x 2 pools in place, and in plain sequences put a ReLU before one behind it.

    relu(max(x)) is max(relu(x)), and so are the gradients: the ReLU then sees a quarter of the values.
    """
    for module in list(net.modules()):
        layers = module._modules
        for name, layer in layers.items():
            if _plain(layer):
                layers[name] = Halve(2)
        names = list(layers) if type(module) is nn.Sequential else []
        for one, two in pairwise(names):
            if type(layers[one]) is nn.ReLU and type(layers[two]) is Halve:
                layers[one], layers[two] = layers[two], layers[one]
    return net


def _plain(layer: nn.Module | None) -> bool:
    """Whether a layer is a pool of 2 x 2 tiles and nothing more."""
    if type(layer) is not nn.MaxPool2d or layer.return_indices or layer.ceil_mode:
        return False
    pairs = [(v, v) if isinstance(v, int) else tuple(v) for v in (layer.kernel_size, layer.stride)]
    return pairs == [(2, 2), (2, 2)] and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
