"""A chain of layers for many lanes: every tensor has the lane as its first dimension.

Runs of convolution, BatchNorm, ReLU and max-pool are fused where the device has Triton. A lane's
batch is padded to a common number of samples; `count` (k,) says how many of them are real, and only
BatchNorm needs to know.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.graph import LayerChain, LayerSpec
from flrce.models.inputs import scale_inputs
from flrce.training.gpu.convolution import ConvolutionGeometry, convolve_lanes
from flrce.training.gpu.fused_block import FusedBlock, fuse_layers, supports_triton
from flrce.training.gpu.norms import batch_norm

Tensors = dict[str, Tensor]
# (k,) seeds of the lanes, (1,) the step: what random layers draw from
SeedsAndStep = tuple[Tensor, Tensor]
DROPOUT_ERROR = "Dropout at {!r} draws at random, which a chain's kernels do not repeat; use p=0"


@dataclass(frozen=True)
class DeviceSamples:
    """All samples, resident on the device in their own dtype; an input is x * scale + shift."""

    x: Tensor
    y: Tensor
    scale: float
    shift: float

    def gather_inputs(self, index: Tensor) -> Tensor:
        """index (k, B) -> (k, B, *shape) float32, or token ids as they are."""
        x = scale_inputs(self.x.index_select(0, index.reshape(-1)), self.scale, self.shift)
        return x.reshape(*index.shape, *self.x.shape[1:])

    def gather_targets(self, index: Tensor) -> Tensor:
        """index (k, B) -> (k B, ...)."""
        return self.y.index_select(0, index.reshape(-1))


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer; x (k, B, ..., I), weight (k, O, I). W x^T, so that the weight's gradient has
    its strides; on an H200 an MLP's step takes two thirds of the time of x W^T.
    """
    flat = x.reshape(len(x), -1, x.shape[-1]).mT
    y = torch.bmm(weight, flat) if bias is None else torch.baddbmm(bias[:, :, None], weight, flat)
    return y.mT.reshape(*x.shape[:-1], -1)


def apply_layer(layer: LayerSpec, x: Tensor, t: Tensors, count: Tensor, training: bool) -> Tensor:
    """One layer of every lane."""
    weight, bias = (t.get(f"{layer.name}.{name}") for name in ("weight", "bias"))
    match layer.kind:
        case "conv":
            assert weight is not None
            geometry = ConvolutionGeometry(layer["stride"], layer["padding"], layer["dilation"])
            return convolve_lanes(x, weight, bias, geometry, layer["groups"])
        case "linear":
            assert weight is not None
            return apply_linear(x, weight, bias)
        case "batchnorm":
            mean, var = (t[f"{layer.name}.running_{name}"] for name in ("mean", "var"))
            how = (training, float(layer["momentum"]), float(layer["eps"]))
            return batch_norm(x, mean, var, weight, bias, count, *how)
        case "relu":
            return torch.relu(x)
        case "tanh":
            return torch.tanh(x)
        case "maxpool":
            sizes = [layer[name] for name in ("kernel", "stride", "padding", "dilation", "ceil")]
            y: Tensor = F.max_pool2d(x.flatten(0, 1), *sizes)
            return cast(Tensor, y.unflatten(0, x.shape[:2]))
        case "flatten":
            return x.flatten(2)
    return x  # a dropout layer that drops nothing


class ChainNet:
    """A chain of layers for k lanes."""

    def __init__(self, net: nn.Module, links: LayerChain, samples: DeviceSamples):
        for layer in links.layers:
            if layer.kind == "dropout" and layer["p"] > 0:
                raise BadInput(DROPOUT_ERROR.format(layer.name))
            if layer.kind == "batchnorm" and (layer["momentum"] is None or not layer["running"]):
                raise BadInput(
                    f"BatchNorm at {layer.name!r} needs running statistics and a momentum in"
                    " a client batch"
                )
        self.module, self.links, self.samples = net, links, samples
        #: parameters that do not train are the same for all lanes
        self.fixed = {
            name: p.detach()[None] for name, p in net.named_parameters() if not p.requires_grad
        }
        #: (place of the first layer, a fused block or one layer)
        self.parts: list[tuple[int, FusedBlock | LayerSpec]] = list(enumerate(links.layers))
        if supports_triton(samples.x.device):
            self.parts = fuse_layers(links.layers)

    @property
    def supports_float64(self) -> bool:
        return not any(isinstance(part, FusedBlock) for _, part in self.parts)

    def compute_logits(
        self,
        t: Tensors,
        index: Tensor,
        count: Tensor,
        first: int,
        training: bool,
        draw: SeedsAndStep | None = None,
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, classes); blocks before `first` are frozen."""
        head, samples = self.parts[0][1], self.samples
        if isinstance(head, FusedBlock):
            x = head.gather_inputs(samples.x, index, samples.scale, samples.shift)
        else:
            x = samples.gather_inputs(index)
        return self.compute_outputs(t, x, count, training, first)

    def compute_outputs(
        self, t: Tensors, x: Tensor, count: Tensor, training: bool, first: int = 0
    ) -> Tensor:
        """x (k, B, ...), with or without the border that a fused block wants."""
        cut = self.links.layers.index(self.links.weight_layers[first]) if first else 0
        t = {**{name: p.expand(len(x), *p.shape[1:]) for name, p in self.fixed.items()}, **t}
        for place, part in self.parts:
            live = training and place >= cut
            with torch.set_grad_enabled(live):
                if isinstance(part, FusedBlock):
                    if x.shape[-1] == part.conv.inside[-1]:  # not padded by the block before
                        x = F.pad(x, (part.padding,) * 4)
                    x = part(x, t, count, live)
                else:
                    x = apply_layer(part, x, t, count, live)
        return x

    @cached_property
    def bytes_per_sample(self) -> int:
        """Estimated bytes a sample needs while a step is under way: activations, their gradients,
        columns.
        """
        total = 0
        for _, part in self.parts:
            if isinstance(part, FusedBlock):
                total += 2 * part.activation_floats
                continue
            is_conv = part.kind == "conv"
            rows = torch.Size(part["kernel"]).numel() * part.inside[0] if is_conv else 0
            total += 3 * (torch.Size(part.out).numel() + rows * torch.Size(part.out[1:]).numel())
        return 4 * (total + 2 * self.samples.x[0].numel())
