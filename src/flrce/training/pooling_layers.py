"""A 2 x 2 max-pool out of vectorised maxima: torch's walks its windows one by one, which is a
quarter of a CNN's step.

Values and gradients are torch's, bit for bit: of equal values in a window the first in reading
order gets the gradient.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from flrce.models.tracing import find_hooks

# (g, x, 0): g where x > 0, else 0; far faster than torch.where
threshold_backward = torch.ops.aten.threshold_backward
# layers whose output nobody else holds
FRESH_OUTPUT_LAYERS = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)


class FastMaxPool2x2(nn.MaxPool2d):
    """MaxPool2d(2) in training and evaluation; windows that do not tile the input are left to
    torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2 or x.shape[-2] % 2:
            return cast(Tensor, super().forward(x))
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _MaxPool2x2Function.apply(x))
        rows = torch.maximum(x[..., 0::2], x[..., 1::2])
        return torch.maximum(rows[..., 0::2, :], rows[..., 1::2, :])


class _MaxPool2x2Function(torch.autograd.Function):
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
        lower = threshold_backward(g, down, 0)
        rows = torch.stack((g - lower, lower), -2).flatten(-3, -2)
        right = threshold_backward(rows, across, 0)
        # interleaves the columns
        return torch.view_as_real(torch.complex(rows.sub_(right), right)).flatten(-2)


class DeferredReLUSequential(nn.Sequential):
    """A sequence in which a ReLU waits until the pool behind it is done, and so sees a quarter of
    the values.

    relu(max(x)) is max(relu(x)), and so are the gradients. Its layers stay where they are, for code
    that takes them one by one.
    """

    def forward(self, input: Any) -> Any:
        waiting, before = None, None
        for layer in self:
            if waiting is not None and (type(layer) is not FastMaxPool2x2 or find_hooks(layer)):
                input, waiting = waiting(input), None
            if _can_defer_relu(layer, before):
                waiting = layer
            else:
                input = layer(input)
            before = layer
        return input if waiting is None else waiting(input)


def _can_defer_relu(layer: nn.Module, before: nn.Module | None) -> bool:
    """Whether nobody sees what a layer makes of its input: of one that works in place, its input
    must be new.
    """
    if type(layer) is not nn.ReLU or find_hooks(layer):
        return False
    return not layer.inplace or (
        before is not None and type(before) in FRESH_OUTPUT_LAYERS and not find_hooks(before)
    )


def use_fast_pools(net: nn.Module) -> nn.Module:
    """The net, its 2 x 2 pools and its plain sequences by these classes from now on."""
    for module in net.modules():
        if _is_plain_2x2_pool(module):
            module.__class__ = FastMaxPool2x2
        elif type(module) is nn.Sequential:
            module.__class__ = DeferredReLUSequential
    return net


def _is_plain_2x2_pool(layer: nn.Module) -> bool:
    """Whether a layer is a pool of 2 x 2 tiles and nothing more."""
    if type(layer) is not nn.MaxPool2d or layer.return_indices or layer.ceil_mode:
        return False
    pairs = [(v, v) if isinstance(v, int) else tuple(v) for v in (layer.kernel_size, layer.stride)]
    return (
        pairs == [(2, 2), (2, 2)] and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
    )
