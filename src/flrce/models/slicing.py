"""A smaller network from a chain of layers: some units of every hidden layer.

Dropping a unit of one layer drops the inputs that it feeds in the next: a channel's BatchNorm, and
after a flattening its whole block of H x W inputs. The small network is built anew from the chain,
so that a forward() with sizes written into it does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn

from flrce.core.pieces import Recipe
from flrce.errors import BadInput
from flrce.models.adapters import get_adapter_rank
from flrce.models.flat import ModelLayout, make_layout
from flrce.models.graph import LayerChain, LayerSpec, build_layer_chain
from flrce.models.part import ModelPart, floor_share, list_frozen_layers


@dataclass(frozen=True, eq=False)
class SlicedNetwork:
    """The small network of one rate. Its units are known by their coordinates in w."""

    rate: float
    net: nn.Sequential
    where: ModelLayout  # of the small net
    blocks: LayerChain  # of the small net
    source: LayerChain
    layout: ModelLayout  # of the whole net

    def make_part(self, units: Sequence[Tensor]) -> ModelPart:
        """The part that holds these units of the hidden layers, input side first."""
        positions = find_kept_positions(self.layout, self.source, units)
        held, names = [], []
        for slot in self.where.slots:
            position, _, tensor = slot.name.partition(".")
            name = f"{self.source.layers[int(position)].name}.{tensor}"
            held.append(positions[name] + self.layout[name].offset)
            names.append((name, slot.size))
        return ModelPart(self.net, (self.rate, 0), tuple(names), torch.cat(held))


def slice_network(
    net: nn.Module, where: ModelLayout, blocks: LayerChain, rate: float
) -> SlicedNetwork:
    """The small network that keeps max(1, floor(rate * width)) units of every hidden layer."""
    validate_sliceable(blocks)
    narrow = _narrow_chain(
        blocks, [floor_share(rate, width) for width in list_hidden_widths(blocks)]
    )
    small = _build_sliced_network(net, blocks, narrow)
    return SlicedNetwork(rate, small, make_layout(small), narrow, blocks, where)


def list_hidden_widths(blocks: LayerChain) -> tuple[int, ...]:
    """Units of each hidden layer: every trained one but the last, which makes the logits."""
    return tuple(layer.out[0] for layer in blocks.weight_layers[:-1])


def select_prefix_units(blocks: LayerChain, rate: float) -> list[Tensor]:
    """The first units of each hidden layer (HeteroFL, FjORD)."""
    return [torch.arange(floor_share(rate, width)) for width in list_hidden_widths(blocks)]


def draw_random_units(blocks: LayerChain, rate: float, rng: Generator) -> list[Tensor]:
    """Random units of each hidden layer (Federated Dropout), in ascending order."""
    drawn = [
        rng.permutation(width)[: floor_share(rate, width)] for width in list_hidden_widths(blocks)
    ]
    return [torch.from_numpy(units).sort().values for units in drawn]


def validate_sliceable(blocks: LayerChain) -> None:
    """BadInput with the reason where units cannot be dropped."""
    for layer in blocks.weight_layers:
        if layer.kind == "conv" and layer["groups"] != 1:
            raise BadInput(
                f"sub-models: {layer.name!r} convolves in {layer['groups']} groups; only 1 can"
                " be cut"
            )
        if layer.kind == "linear" and len(layer.inside) != 1:
            raise BadInput(
                f"sub-models: {layer.name!r} gets {layer.inside}; flatten before a linear layer"
            )


def validate_recipe_network(recipe: Recipe, net: nn.Module, shape: tuple[int, ...]) -> None:
    """BadInput if pieces need a plain chain of layers, or more blocks, than the network has."""
    roles = {role: piece for role, piece in recipe.iter_pieces() if piece.needs_layer_chain}
    needing = list(roles.values())
    if not needing:
        return
    if get_adapter_rank(net) and set(roles) == {"submodel"}:
        return  # adapters have inner units to leave out, whatever they stand beside
    try:
        blocks = build_layer_chain(net, shape)
        list_frozen_layers(blocks, recipe.trainer.frozen_blocks)
        if recipe.submodel.needs_layer_chain:
            validate_sliceable(blocks)
            if not all(p.requires_grad for p in net.parameters()):
                raise BadInput(
                    "sub-models: some of its parameters are fixed, and only trained ones can be cut"
                )
    except BadInput as why:
        raise BadInput(f"{type(needing[0]).__name__} does not go with this network: {why}") from why


def find_kept_positions(
    where: ModelLayout, blocks: LayerChain, units: Sequence[Tensor]
) -> dict[str, Tensor]:
    """For each tensor of the chain, the flat positions within it that these hidden units keep."""
    positions: dict[str, Tensor] = {}
    hidden = iter(units)
    # channels or units that reach the next layer
    flowing = torch.arange(blocks.layers[0].inside[0])
    for layer in blocks.layers:
        if layer.kind in ("conv", "linear"):
            out = next(hidden, torch.arange(layer.out[0]))
            weight = where[f"{layer.name}.weight"]
            grid = torch.arange(weight.size).reshape(weight.shape)  # (out, in, ...)
            positions[weight.name] = grid[out][:, flowing].flatten()
            if layer["bias"]:
                positions[f"{layer.name}.bias"] = out
            flowing = out
        elif layer.kind == "batchnorm":
            for name in ("weight", "bias", "running_mean", "running_var"):
                positions[f"{layer.name}.{name}"] = flowing
        elif layer.kind == "flatten":
            block = _count_inputs_per_channel(layer)
            flowing = (flowing[:, None] * block + torch.arange(block)).flatten()
    return positions


def _count_inputs_per_channel(layer: LayerSpec) -> int:
    """Flattened inputs per channel."""
    return int(torch.Size(layer.inside[1:]).numel())


def _narrow_chain(blocks: LayerChain, keep: Sequence[int]) -> LayerChain:
    """The chain of the small network, whose layers are numbered.

    It is told, not traced: torch.fx patches nn.Module for all threads while it traces.
    """
    hidden, flowing, layers = iter(keep), blocks.layers[0].inside[0], []
    for position, layer in enumerate(blocks.layers):
        inside = (flowing, *layer.inside[1:])
        if layer.kind in ("conv", "linear"):
            flowing = next(hidden, layer.out[0])
        elif layer.kind == "flatten":
            flowing *= _count_inputs_per_channel(layer)
        layers.append(
            replace(layer, name=str(position), inside=inside, out=(flowing, *layer.out[1:]))
        )
    return LayerChain(tuple(layers))


def _build_sliced_network(net: nn.Module, source: LayerChain, narrow: LayerChain) -> nn.Sequential:
    """The small network, untrained."""
    modules, layers = dict(net.named_modules()), []
    with torch.random.fork_rng(devices=[]):
        for layer, small in zip(source.layers, narrow.layers, strict=True):
            layers.append(_build_layer(small, modules.get(layer.name)))
    return nn.Sequential(*layers)


def _build_layer(layer: LayerSpec, like: nn.Module | None) -> nn.Module:
    options, inside, out = dict(layer.options), layer.inside[0], layer.out[0]
    keys = {"kernel": "kernel_size", "stride": "stride", "padding": "padding"}
    keys |= {"dilation": "dilation", "bias": "bias", "ceil": "ceil_mode"}
    known: Any = {keys[key]: value for key, value in options.items() if key in keys}
    if layer.kind == "conv":
        return nn.Conv2d(inside, out, **known)
    if layer.kind == "linear":
        return nn.Linear(inside, out, bias=options["bias"])
    if layer.kind == "batchnorm":
        assert like is not None
        kind: type[nn.Module] = type(like)
        return kind(out, options["eps"], options["momentum"], options["affine"], options["running"])
    if layer.kind == "maxpool":
        return nn.MaxPool2d(**known)
    if layer.kind == "dropout":
        return nn.Dropout(options["p"])
    plain: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "flatten": nn.Flatten}
    return plain[layer.kind]()
