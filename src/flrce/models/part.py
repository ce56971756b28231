"""The part of a model that a client trains and sends: all, some units, or the last blocks."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.flat import ModelLayout
from flrce.models.graph import LayerChain, build_layer_chain
from flrce_client.bits import floor_share as floor_share

TensorSizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class ModelPart:
    """`held`: coordinates of w that a client receives; `sent`: positions in those it sends."""

    net: nn.Module
    key: tuple[float | int, ...]  # (rate, first): parts of one key share shapes and work
    names: TensorSizes  # what is sent: tensors and their sizes, in order
    held: Tensor | None = None  # None: all
    sent: Tensor | None = None  # None: all
    first: int = 0  # blocks before it are frozen

    @property
    def coordinates(self) -> Tensor | None:
        """Coordinates of w that the reply covers; None: all."""
        if self.sent is None:
            return self.held
        return self.sent if self.held is None else self.held[self.sent]


def make_whole_part(net: nn.Module, where: ModelLayout) -> ModelPart:
    """The whole model."""
    return ModelPart(net, (1.0, 0), tuple((s.name, s.size) for s in where.slots))


def freeze_part_blocks(
    part: ModelPart, where: ModelLayout, blocks: LayerChain, first: int
) -> ModelPart:
    """The part with its blocks before `first` frozen and not sent."""
    names = list_frozen_layers(blocks, first)
    sent, names_sent = [], []
    for slot, name in zip(where.slots, part.names, strict=True):
        if slot.name.rpartition(".")[0] not in names:
            sent.append(torch.arange(slot.offset, slot.offset + slot.size))
            names_sent.append(name)
    return replace(
        part, key=(part.key[0], first), names=tuple(names_sent), sent=torch.cat(sent), first=first
    )


def list_frozen_layers(blocks: LayerChain, first: int) -> frozenset[str]:
    """Names of the frozen layers if training starts at block `first`, BatchNorm included."""
    if not 0 <= first < len(blocks.weight_layers):
        raise BadInput(
            f"first trained block {first}: must lie in 0..{len(blocks.weight_layers) - 1}, the"
            " network's blocks"
        )
    cut = blocks.layers.index(blocks.weight_layers[first])
    if first:
        return frozenset(layer.name for layer in blocks.layers[:cut] if layer.name)
    return frozenset()


def copy_for_training(part: ModelPart, shape: tuple[int, ...]) -> nn.Module:
    """A copy of the part's net for training, with frozen blocks in eval mode."""
    net = copy.deepcopy(part.net).train()
    if part.first:
        modules = dict(net.named_modules())
        for name in list_frozen_layers(build_layer_chain(net, shape), part.first):
            modules[name].eval().requires_grad_(False)
    return net
