"""The part of a model that a client holds and sends back: all of it, some units of each layer, or its last blocks."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.chain import Chain, chain
from flrce.models.flat import Layout

Names = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Part:
    """`held`: coordinates of w a client receives and trains in `net`; `sent`: positions in those it sends back."""

    net: nn.Module
    key: tuple[float | int, ...]  # (rate, first): parts of one key share shapes and work
    names: Names  # what is sent: tensors and their sizes, in order
    held: Tensor | None = None  # None: all
    sent: Tensor | None = None  # None: all
    first: int = 0  # blocks before it are frozen

    @property
    def coordinates(self) -> Tensor | None:
        """Coordinates of w that the reply covers; None: all."""
        if self.sent is None:
            return self.held
        return self.sent if self.held is None else self.held[self.sent]


def whole(net: nn.Module, where: Layout) -> Part:
    """The whole model."""
    return Part(net, (1.0, 0), tuple((s.name, s.size) for s in where.slots))


def frozen(part: Part, where: Layout, blocks: Chain, first: int) -> Part:
    """The part with its blocks before `first` frozen, and so not sent; `where` and `blocks` describe its net."""
    names = before(blocks, first)
    sent, told = [], []
    for slot, name in zip(where.slots, part.names, strict=True):
        if slot.name.rpartition(".")[0] not in names:
            sent.append(torch.arange(slot.offset, slot.offset + slot.size))
            told.append(name)
    return replace(part, key=(part.key[0], first), names=tuple(told), sent=torch.cat(sent), first=first)


def before(blocks: Chain, first: int) -> frozenset[str]:
    """Names of the layers that are frozen when training starts at block `first`; a block's BatchNorm belongs to it."""
    if not 0 <= first < len(blocks.trained):
        raise BadInput(f"first trained block {first}: must lie in 0..{len(blocks.trained) - 1}, the network's blocks")
    cut = blocks.layers.index(blocks.trained[first])
    return frozenset(layer.name for layer in blocks.layers[:cut] if layer.name) if first else frozenset()


def trainee(part: Part, shape: tuple[int, ...]) -> nn.Module:
    """A copy of the part's net as it trains: frozen blocks in eval mode and without gradients, so fewer FLOPs."""
    net = copy.deepcopy(part.net).train()
    if part.first:
        modules = dict(net.named_modules())
        for name in before(chain(net, shape), part.first):
            modules[name].eval().requires_grad_(False)
    return net


def portion(rate: float, size: int) -> int:
    """max(1, floor(rate * size)); rounding first, since .29 * 100 is 28.999..."""
    return max(1, math.floor(round(rate * size, 6)))
