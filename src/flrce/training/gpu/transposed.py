"""Transposed convolutions, one set of weights for each lane."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from flrce.training.gpu.convolution import ConvolutionGeometry, convolve_lanes
from flrce.training.gpu.lane_layer import LaneLayer


class LaneTransposedConv(LaneLayer):
    """In one or two dimensions; weight (k, C, O / groups, [R,] S).

    Computed as a convolution of x with zeros between its pixels, by kernels that are turned round.
    """

    def run(self, live: bool, x: Tensor, output_size: Any = None) -> Tensor:
        layer, weight = self.layer, self.get_lane_tensor("weight")
        assert weight is not None
        plane = weight.dim() - 3
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, plane, layer.dilation
        )
        sides: list[int] = []  # as F.pad takes them, last dimension first
        for d in reversed(range(plane)):
            side = layer.dilation[d] * (weight.shape[3 + d] - 1) - layer.padding[d]
            sides += [side, side + extra[d]]
        turned = weight.unflatten(1, (layer.groups, -1)).transpose(2, 3).flatten(1, 2)
        turned = turned.flip(tuple(range(3, weight.dim())))  # (k, O, C / groups, ...)
        wide = F.pad(insert_zeros(self.split_lanes(x), layer.stride), sides)
        dilation = layer.dilation
        if plane == 1:
            wide, turned, dilation = wide.unsqueeze(-2), turned.unsqueeze(-2), (1, *dilation)
        y = convolve_lanes(
            wide,
            turned,
            self.get_lane_tensor("bias"),
            ConvolutionGeometry(dilation=tuple(dilation)),
            layer.groups,
            self.now.direct,
        )
        return self.merge_lanes(y.squeeze(-2) if plane == 1 else y)


def insert_zeros(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x (k, B, C, ...) with stride - 1 zeros between any two neighbours."""
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[3:], stride, strict=True)]
    wide = x.new_zeros(*x.shape[:3], *sizes)
    places: list[Any] = [..., *(slice(None, None, s) for s in stride)]
    wide[tuple(places)] = x
    return wide
