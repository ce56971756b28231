"""A feed-forward module as a plain list of layers.

Sub-models, layer freezing and the stack on a GPU need to know which tensor feeds which. They ask here, once,
and a module that is not a chain (branches, shared layers, unknown operations) is refused with the reason.
"""

from dataclasses import dataclass

from torch import nn

from flrce.errors import BadInput
from flrce.models.abilities import Chained
from flrce.models.graph import Layer, graph
from flrce.models.kinds import KINDS, Kinds
from flrce.models.tracing import hooked

__all__ = ["Chain", "Layer", "chain", "hooked"]


@dataclass(frozen=True)
class Chain:
    """A module as a sequence of layers, input first."""

    layers: tuple[Layer, ...]

    @property
    def trained(self) -> tuple[Layer, ...]:
        """The layers that hold weights to multiply with: a block to freeze starts at each of them."""
        return tuple(layer for layer in self.layers if layer.kind in ("conv", "linear"))

    @property
    def normalised(self) -> bool:
        """Whether any layer needs statistics of a batch, so that a batch of one sample cannot be trained on."""
        return any(layer.kind == "batchnorm" for layer in self.layers)


def chain(module: nn.Module, shape: tuple[int, ...], kinds: Kinds = KINDS) -> Chain:
    """The module's layers for one sample of this shape; BadInput if it is no plain chain of layers of these kinds."""
    if isinstance(module, Chained) and not module.chained:
        raise BadInput(f"{type(module).__name__} branches; a chain feeds each layer from the last")
    return Chain(tuple(node.layer for node in graph(module, shape, kinds, branches=False).nodes))
