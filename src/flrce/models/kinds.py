"""Kinds of layers that a network may have, functions that stand for them, their options.

Layers in one dimension are those in two on planes of one row.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flrce.errors import BadInput

LayerKinds = dict[type[nn.Module], str]

#: what sub-models, freezing and every engine know
BASIC_KINDS: LayerKinds = {
    **{nn.Conv2d: "conv", nn.Linear: "linear"},
    **dict.fromkeys((nn.BatchNorm2d, nn.BatchNorm1d), "batchnorm"),
    **{nn.ReLU: "relu", nn.Tanh: "tanh", nn.MaxPool2d: "maxpool"},
    **{nn.Flatten: "flatten", nn.Dropout: "dropout", nn.Identity: "identity"},
}
#: what the fused CPU kernels know beside these
FUSED_KINDS: LayerKinds = {
    **BASIC_KINDS,
    **{nn.Conv1d: "conv", nn.MaxPool1d: "maxpool"},
    **dict.fromkeys((nn.GroupNorm, nn.LayerNorm), "groupnorm"),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), "avgpool"),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), "avgpool"),
}


class MeanLayer(nn.Module):
    """x.mean(dims), as a layer."""

    def __init__(self, dims: int | Sequence[int], keepdim: bool = False) -> None:
        super().__init__()
        self.dims, self.keepdim = (dims,) if isinstance(dims, int) else tuple(dims), keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims, self.keepdim)


class AddLayer(nn.Module):
    """a + b, as a layer: where a skip meets what it skips."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape != b.shape:
            raise BadInput(
                f"{tuple(a.shape[1:])} + {tuple(b.shape[1:])}: only outputs of one shape are added"
            )
        return a + b


#: the same where layers may be skipped, as in residual networks
RESIDUAL_KINDS: LayerKinds = {**FUSED_KINDS, AddLayer: "add"}
#: functions and methods that stand for a layer without parameters
FUNCTION_KINDS: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), "relu"),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh"), "tanh"),
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), "maxpool"),
    **dict.fromkeys((torch.flatten, "flatten"), "flatten"),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, torch.mean, "mean"), "avgpool"),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
}
ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def format_layer_kinds(kinds: LayerKinds) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def get_layer_options(kind: str, layer: Any, inside: tuple[int, ...]) -> dict[str, Any]:
    """What a layer does with one sample of this shape, beside its weights."""
    name = type(layer).__name__
    if kind == "conv":
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise BadInput(
                f"{name} with padding={layer.padding!r}, mode {layer.padding_mode!r}; use integers"
                " and zeros"
            )
        window = _get_window_options(layer, isinstance(layer, nn.Conv1d))
        return {**window, "bias": layer.bias is not None, "groups": layer.groups}
    if kind == "linear":
        return {"bias": layer.bias is not None}
    if kind == "batchnorm":
        return {
            "eps": layer.eps,
            "momentum": layer.momentum,
            "affine": layer.affine,
            "running": layer.track_running_stats,
        }
    if kind == "maxpool":
        window = _get_window_options(layer, isinstance(layer, nn.MaxPool1d))
        return {**window, "ceil": layer.ceil_mode}
    if kind == "groupnorm":
        if isinstance(layer, nn.LayerNorm) and len(inside) != 1:
            raise BadInput(f"LayerNorm on samples of shape {inside}; flatten first")
        groups = 1 if isinstance(layer, nn.LayerNorm) else layer.num_groups
        return {
            "groups": groups,
            "eps": layer.eps,
            "weight": layer.weight is not None,
            "bias": layer.bias is not None,
        }
    if kind == "avgpool":
        return _get_average_pool_options(layer, inside)
    if kind == "dropout":
        return {"p": layer.p}
    return {}


def _get_window_options(layer: Any, flat: bool) -> dict[str, Any]:
    """The window that a convolution or pool slides over its input."""
    return {
        "kernel": _to_pair(layer.kernel_size, 1, flat),
        "stride": _to_pair(layer.stride, 1, flat),
        "padding": _to_pair(layer.padding, 0, flat),
        "dilation": _to_pair(layer.dilation, 1, flat),
    }


def _get_average_pool_options(layer: Any, inside: tuple[int, ...]) -> dict[str, Any]:
    """The window of an average pool. An adaptive pool needs windows of one size."""
    plane = inside[1:]
    if isinstance(layer, MeanLayer):
        if sorted(dim % (1 + len(inside)) for dim in layer.dims) != list(range(2, 1 + len(inside))):
            raise BadInput(
                f"mean over dimensions {layer.dims} of samples of shape {inside}; only over whole"
                " planes"
            )
        return {"kernel": (1, *plane)[-2:], "stride": (1, *plane)[-2:]}
    if isinstance(layer, ADAPTIVE_POOLS):
        out = layer.output_size
        wanted = tuple(out) if isinstance(out, tuple) else (out,) * len(plane)
        counts = [n if w is None else w for n, w in zip(plane, wanted, strict=True)]
        if any(n % count for n, count in zip(plane, counts, strict=True)):
            raise BadInput(
                f"{type(layer).__name__}({out}) on a plane of {plane}: its windows differ in size"
            )
        window = tuple(n // count for n, count in zip(plane, counts, strict=True))
        return {"kernel": (1, *window)[-2:], "stride": (1, *window)[-2:]}
    flat = isinstance(layer, nn.AvgPool1d)
    padding, divisor = _to_pair(layer.padding, 0, flat), getattr(layer, "divisor_override", None)
    if padding != (0, 0) or layer.ceil_mode or divisor is not None:
        raise BadInput(f"{type(layer).__name__} with padding, ceil_mode or a divisor of its own")
    return {
        "kernel": _to_pair(layer.kernel_size, 1, flat),
        "stride": _to_pair(layer.stride, 1, flat),
    }


def _to_pair(value: Any, other: int, flat: bool) -> tuple[int, int]:
    """(rows, columns); `other` stands for the rows of a layer in one dimension."""
    if flat:
        return (other, value if isinstance(value, int) else value[0])
    return (value, value) if isinstance(value, int) else tuple(value)
