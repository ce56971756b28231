"""A feed-forward module as a plain list of layers.

Sub-models, layer freezing and the stack on a GPU need to know which tensor feeds which. They ask
here, once, and a module that is not a chain (branches, shared layers, unknown operations) is
refused with the reason.
"""

from dataclasses import dataclass

from torch import nn

from flrce.errors import BadInput
from flrce.models.abilities import ChainDeclaringNetwork
from flrce.models.graph import LayerSpec, build_layer_graph
from flrce.models.kinds import BASIC_KINDS, LayerKinds
from flrce.models.tracing import find_hooks

__all__ = ["LayerChain", "LayerSpec", "build_layer_chain", "find_hooks"]


@dataclass(frozen=True)
class LayerChain:
    """A module as a sequence of layers, input first."""

    layers: tuple[LayerSpec, ...]

    @property
    def weight_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that hold weights to multiply with: a block to freeze starts at each of
        them.
        """
        return tuple(layer for layer in self.layers if layer.kind in ("conv", "linear"))


def build_layer_chain(
    module: nn.Module, shape: tuple[int, ...], kinds: LayerKinds = BASIC_KINDS
) -> LayerChain:
    """The module's layers for one sample of this shape; BadInput if it is no plain chain of layers
    of these kinds.
    """
    if isinstance(module, ChainDeclaringNetwork) and not module.chained:
        raise BadInput(f"{type(module).__name__} branches; a chain feeds each layer from the last")
    return LayerChain(
        tuple(node.layer for node in build_layer_graph(module, shape, kinds, branches=False).nodes)
    )
