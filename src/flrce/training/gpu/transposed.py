"""Transposed convolutions, one set of weights for each lane."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.training.gpu.batched import cast_like_autocast, convolve_lanes
from flrce.training.gpu.leaf import LaneLayer


class LaneTransposedConv(LaneLayer):
    """In one or two dimensions; weight (k, C, O / groups, [R,] S)."""

    def run(self, live: bool, x: Tensor, output_size: Any = None) -> Tensor:
        layer, now, weight, bias = (
            self.layer,
            self.now,
            self.get_lane_tensor("weight"),
            self.get_lane_tensor("bias"),
        )
        assert weight is not None
        plane = weight.dim() - 3
        more = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, plane, layer.dilation
        )
        x = self.split_lanes(x)
        if now.k > 1 and now.convolving not in ("grouped", "each"):
            return self.merge_lanes(self._convolve_upsampled(x, weight, bias, more))
        native: Any = (
            F.conv_transpose1d if isinstance(layer, nn.ConvTranspose1d) else F.conv_transpose2d
        )
        x, weight, bias = cast_like_autocast(x, weight, bias)
        how = (layer.stride, layer.padding, more)
        if now.convolving == "grouped":
            side = x.transpose(0, 1).flatten(1, 2)  # (B, k C, ...)
            joined = None if bias is None else bias.flatten()
            y = native(
                side, weight.flatten(0, 1), joined, *how, now.k * layer.groups, layer.dilation
            )
            return self.merge_lanes(y.unflatten(1, (now.k, -1)).transpose(0, 1))
        biases: Any = [None] * now.k if bias is None else bias
        lanes = zip(x, weight, biases, strict=True)
        return self.merge_lanes(
            torch.stack([native(*lane, *how, layer.groups, layer.dilation) for lane in lanes])
        )

    def _convolve_upsampled(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, more: Sequence[int]
    ) -> Tensor:
        """As a convolution of x with zeros between its pixels, the kernels turned round."""
        layer, plane = self.layer, weight.dim() - 3
        sides: list[int] = []  # as F.pad takes them, last dimension first
        for d in reversed(range(plane)):
            side = layer.dilation[d] * (weight.shape[3 + d] - 1) - layer.padding[d]
            sides += [side, side + more[d]]
        turned = (
            weight.unflatten(1, (layer.groups, -1)).transpose(2, 3).flatten(1, 2)
        )  # (k, O, C / groups, ...)
        turned = turned.flip(tuple(range(3, weight.dim())))
        wide, one, none = (
            F.pad(insert_zeros(x, layer.stride), sides),
            (1,) * plane,
            (0,) * (2 * plane),
        )
        return convolve_lanes(
            wide, turned, bias, one, none, layer.dilation, layer.groups, self.now.convolving
        )


def insert_zeros(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x (k, B, C, ...) with stride - 1 zeros between any two neighbours."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[3:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:3], *sizes)
    places: list[Any] = [..., *(slice(None, None, s) for s in stride)]
    wide[tuple(places)] = x
    return wide
