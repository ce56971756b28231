"""Layers of many networks at once: every tensor has the lane as its first dimension.

The plain path, written for clearness and as the fused kernels' oracle. A lane's batch is padded to
a common number of samples; `count` (k,) says how many of them are real, and only BatchNorm needs to
know.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.models.chain import LayerChain, LayerSpec
from flrce.models.inputs import scale_inputs
from flrce.training.gpu.fused_block import FusedBlock, fuse_layers, supports_triton

Tensors = dict[str, Tensor]
# (k,) seeds of the lanes, (1,) the step: what random layers draw from
SeedsAndStep = tuple[Tensor, Tensor]
DROPOUT_ERROR = (
    "Dropout at {!r} draws at random, which the stacked trainer does not repeat; use p=0"
)


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


def convolve_by_im2col(x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec) -> Tensor:
    """im2col and one small product per sample; x (k, B, C, H, W), weight (k, O, C/groups, R, S)."""
    k, B = x.shape[:2]
    groups, O = layer["groups"], weight.shape[1]
    columns = F.unfold(
        x.flatten(0, 1), layer["kernel"], layer["dilation"], layer["padding"], layer["stride"]
    )
    # (k, B, groups, C/groups*R*S, pixels)
    columns = columns.reshape(k, B, groups, -1, columns.shape[-1])
    y = weight.reshape(k, 1, groups, O // groups, -1) @ columns
    y = y.reshape(k, B, *layer.out)
    return y if bias is None else y + bias[:, None, :, None, None]


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer; x (k, B, ..., I), weight (k, O, I). W x^T, so that the weight's gradient has
    its strides.
    """
    flat = x.reshape(len(x), -1, x.shape[-1]).mT
    y = torch.bmm(weight, flat) if bias is None else torch.baddbmm(bias[:, :, None], weight, flat)
    return y.mT.reshape(*x.shape[:-1], -1)


def apply_batch_norm(
    x: Tensor, t: Tensors, layer: LayerSpec, count: Tensor, training: bool
) -> Tensor:
    """BatchNorm over the first `count` samples of each lane; running statistics are updated in
    place.
    """
    over = (1, *range(3, x.dim()))
    channel = (len(x), 1, -1) + (1,) * (x.dim() - 3)
    mean, var = t[f"{layer.name}.running_mean"], t[f"{layer.name}.running_var"]
    if training:
        n = (count * (x[0, 0, 0].numel())).clamp(min=1).float()[:, None]  # (k, 1)
        real = torch.arange(x.shape[1], device=x.device) < count[:, None]  # (k, B)
        real = real.reshape(*real.shape, *(1,) * (x.dim() - 2))
        now = x.where(real, 0).sum(over) / n  # (k, C)
        spread = (x - now.reshape(channel)).where(real, 0).square().sum(over) / n
        with torch.no_grad():
            share = layer["momentum"] * (count > 0).float()[:, None]
            mean.lerp_(now, share.expand_as(now))
            var.lerp_(spread * n / (n - 1).clamp(min=1), share.expand_as(now))
        mean, var = now, spread
    y = (x - mean.reshape(channel)) * torch.rsqrt(var + layer["eps"]).reshape(channel)
    if layer["affine"]:
        y = y * t[f"{layer.name}.weight"].reshape(channel) + t[f"{layer.name}.bias"].reshape(
            channel
        )
    return y


def apply_layer(layer: LayerSpec, x: Tensor, t: Tensors, count: Tensor, training: bool) -> Tensor:
    """One layer of every lane."""
    match layer.kind:
        case "conv":
            return convolve_by_im2col(
                x, t[f"{layer.name}.weight"], t.get(f"{layer.name}.bias"), layer
            )
        case "linear":
            return apply_linear(x, t[f"{layer.name}.weight"], t.get(f"{layer.name}.bias"))
        case "batchnorm":
            return apply_batch_norm(x, t, layer, count, training)
        case "relu":
            return torch.relu(x)
        case "tanh":
            return torch.tanh(x)
        case "maxpool":
            y = F.max_pool2d(
                x.flatten(0, 1),
                layer["kernel"],
                layer["stride"],
                layer["padding"],
                layer["dilation"],
                ceil_mode=layer["ceil"],
            )
            return y.reshape(*x.shape[:2], *y.shape[1:])
        case "flatten":
            return x.flatten(2)
    return x  # a dropout layer that drops nothing


class ChainNet:
    """A chain of layers for k lanes; conv-BatchNorm-ReLU-pool runs are fused where the device has
    Triton.
    """

    def __init__(self, net: nn.Module, links: LayerChain, samples: DeviceSamples):
        for layer in links.layers:
            if layer.kind == "dropout" and layer["p"] > 0:
                raise BadInput(DROPOUT_ERROR.format(layer.name))
            if layer.kind == "batchnorm" and (layer["momentum"] is None or not layer["running"]):
                raise BadInput(
                    f"BatchNorm at {layer.name!r} needs running statistics and a momentum to be"
                    " stacked"
                )
        self.links, self.samples = links, samples
        #: parameters that do not train are the same for all lanes
        self.fixed = {
            name: p.detach()[None] for name, p in net.named_parameters() if not p.requires_grad
        }
        #: (place of the first layer, a fused block or one layer)
        self.parts: list[tuple[int, FusedBlock | LayerSpec]] = list(enumerate(links.layers))
        if supports_triton(samples.x.device):
            self.parts = fuse_layers(links.layers)

    def find_first_trained_layer(self, first: int) -> int:
        """The place in the chain of the first layer that trains."""
        return 0 if first == 0 else self.links.layers.index(self.links.weight_layers[first])

    def compute_logits(
        self,
        t: Tensors,
        index: Tensor,
        count: Tensor,
        first: int,
        training: bool,
        draw: SeedsAndStep | None = None,
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, classes)."""
        cut, samples = self.find_first_trained_layer(first), self.samples
        t = {**{name: p.expand(len(index), *p.shape[1:]) for name, p in self.fixed.items()}, **t}
        x: Tensor | None = None
        for place, part in self.parts:
            live = training and place >= cut
            with torch.set_grad_enabled(live):
                if isinstance(part, FusedBlock):
                    if x is None:
                        x = part.gather_inputs(samples.x, index, samples.scale, samples.shift)
                    elif x.shape[-1] == part.conv.inside[-1]:  # not padded yet by the block before
                        x = F.pad(x, (part.padding,) * 4)
                    x = part(x, t, count, live)
                else:
                    x = apply_layer(
                        part, samples.gather_inputs(index) if x is None else x, t, count, live
                    )
        return samples.gather_inputs(index) if x is None else x

    @cached_property
    def bytes_per_sample(self) -> int:
        """Estimated bytes a sample needs while a step is under way: activations, their gradients,
        columns.
        """
        total = 0
        for _, part in self.parts:
            if isinstance(part, FusedBlock):
                total += 2 * part.activation_floats
            else:
                rows = (
                    torch.Size(part["kernel"]).numel() * part.inside[0]
                    if part.kind == "conv"
                    else 0
                )
                total += 3 * (
                    torch.Size(part.out).numel() + rows * torch.Size(part.out[1:]).numel()
                )
        return 4 * (total + 2 * self.samples.x[0].numel())
