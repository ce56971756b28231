"""Any network for many lanes at once: its own forward pass, over one long batch of all lanes'
samples.

Layers with weights are replaced by ones that hold a set for each lane (leaves.py); the rest is the
module's own code. That is right for code that treats samples alike and apart. Whether it does is
tried once, with lanes of different weights, against one lane after another; a network that gives
something else is not folded.
"""

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from flrce.errors import BadInput, format_one_line
from flrce.models.chain import LayerChain
from flrce.models.flat import list_model_tensors
from flrce.training.gpu.adapters import LaneAdapter, find_adapter_parts
from flrce.training.gpu.chain_net import DeviceSamples, SeedsAndStep, Tensors
from flrce.training.gpu.lane_layer import ForwardContext
from flrce.training.gpu.lane_layers import (
    LANE_LAYERS,
    LaneDropout,
    LaneSequential,
    choose_lane_layer,
)
from flrce.training.gpu.torch_functions import LaneFunctionMode
from flrce.training.gpu.verification import verify_network
from flrce.training.gpu.vmap_module import VmapModule, list_named_tensors


class FoldedNet:
    """A module whose lanes are folded into the batch. `links`: its chain of layers, where it is one
    and can freeze.
    """

    def __init__(
        self,
        module: nn.Module,
        samples: DeviceSamples,
        links: LayerChain | None = None,
        direct: bool = False,
    ) -> None:
        self.samples, self.links, self.direct, self.source = samples, links, direct, module
        try:
            self._build_and_verify(whole=False)
        except BadInput as why:
            # code that uses its layers' weights itself, or that must see one lane's samples alone
            try:
                self._build_and_verify(whole=True)
            except BadInput:
                raise why from None

    def _build_and_verify(self, whole: bool) -> None:
        """The module of many lanes, tried. `whole`: all of its own code as a Unit, and attention
        gives its weights.
        """
        self.now = ForwardContext(direct=self.direct, weights=whole)
        self.functions = LaneFunctionMode(self.now)
        self.module = _replace_layers(_copy_sharing_frozen(self.source), self.now, whole)
        self.trying = True
        verify_network(self, self.source)
        self.trying = False

    def find_first_trained_layer(self, first: int) -> int:
        """The place in the chain of the first layer that trains."""
        return (
            0
            if first == 0 or self.links is None
            else self.links.layers.index(self.links.weight_layers[first])
        )

    def compute_logits(
        self,
        t: Tensors,
        index: Tensor,
        count: Tensor,
        first: int,
        training: bool,
        draw: SeedsAndStep | None = None,
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, ...); `draw`: the lanes' seeds and the step, for
        random layers.
        """
        self.now.draw = draw
        frozen: frozenset[str] = frozenset()
        if first and self.links is not None:
            frozen = frozenset(
                layer.name
                for layer in self.links.layers[: self.find_first_trained_layer(first)]
                if layer.name
            )
        return self.compute_outputs(t, self.samples.gather_inputs(index), count, training, frozen)

    def compute_outputs(
        self,
        t: Tensors,
        x: Tensor,
        count: Tensor,
        training: bool,
        frozen: frozenset[str] = frozenset(),
    ) -> Tensor:
        """x (k, B, ...)."""
        now = self.now
        now.tensors, now.count, now.training, now.frozen = t, count, training, frozen
        now.k, now.batch = x.shape[:2]
        now.samples = now.batch
        now.learning = self.trying and training
        now.made.clear()
        self.module.train(training)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.set_grad_enabled(training), self.functions:
                y: Tensor = self.module(x.flatten(0, 1))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return y.reshape(*x.shape[:2], *y.shape[1:])

    @cached_property
    def bytes_per_sample(self) -> int:
        """Estimated bytes a sample needs while a step is under way, from the outputs of the
        module's leaves.
        """
        sizes = [self.samples.x[0].numel()]
        columns = [0]

        def record_output_size(layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            if isinstance(layer, nn.RNNBase):
                sizes.append(3 * out[0].numel() * layer.num_layers)  # gates and cells of every step
            elif isinstance(out, Tensor):
                sizes.append(out.numel())
            if self.direct:
                return
            if isinstance(layer, nn.Conv1d | nn.Conv2d):
                columns.append(3 * given[0].numel() * int(torch.Size(layer.kernel_size).numel()))
            elif isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
                # by each pixel that is made
                seen = layer.in_channels * int(torch.Size(layer.kernel_size).numel())
                columns.append(3 * out[0, 0].numel() * seen)

        module = _copy_sharing_frozen(self.source).eval()
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(record_output_size)
        with torch.no_grad():
            module(
                self.samples.gather_inputs(
                    torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device)
                )[0]
            )
        return 4 * (6 * sum(sizes) + max(columns))


def _copy_sharing_frozen(module: nn.Module) -> nn.Module:
    """A copy; what is fixed is held once, however many ways there are."""
    shared = {id(p): p for p in module.parameters() if not p.requires_grad}
    try:
        return copy.deepcopy(module, shared)
    except (
        RuntimeError
    ) as why:  # of a tensor with a history, such as a recurrent layer's remade weights
        raise BadInput(
            f"{type(module).__name__} cannot be copied: {format_one_line(why, 160)}"
        ) from why


def _replace_layers(module: nn.Module, now: ForwardContext, whole: bool) -> nn.Module:
    """The module with leaves in place of layers that hold tensors of a lane's own."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    names |= {id(b): name for name, b, trained in list_model_tensors(module) if not trained}
    made: dict[int, nn.Module] = {}

    def collect_lane_names(layer: nn.Module, deep: bool) -> dict[str, str]:
        return {name: names[id(x)] for name, x in list_named_tensors(layer, deep) if id(x) in names}

    def replace_layer(path: str, layer: nn.Module, within: bool) -> nn.Module:
        """`within`: a Unit, whose tensors outside of leaves are the Unit's."""
        if id(layer) in made:
            return made[id(layer)]
        some = collect_lane_names(
            layer, deep=type(layer) is nn.MultiheadAttention or is_parametrized(layer)
        )
        if some or LANE_LAYERS.get(type(layer)) is LaneDropout:
            leaf = choose_lane_layer(layer)
            if leaf is not VmapModule:
                made[id(layer)] = leaf(path, layer, collect_lane_names(layer, deep=True), now)
                return made[id(layer)]
            parts = find_adapter_parts(layer)
            if parts is not None:
                made[id(layer)] = LaneAdapter(
                    path, layer, collect_lane_names(layer, deep=True), now, parts
                )
                return made[id(layer)]
        unit = (
            VmapModule(path, layer, collect_lane_names(layer, deep=True), now)
            if (some or (whole and not path)) and not within
            else None
        )
        made[id(layer)] = unit or layer
        for name, child in layer._modules.items():
            if child is not None:
                layer._modules[name] = replace_layer(
                    f"{path}.{name}".lstrip("."), child, within or unit is not None
                )
        if type(layer) is nn.Sequential:
            layer.__class__ = LaneSequential
        if unit is not None:
            unit.bare = collect_lane_names(layer, deep=True)
        return made[id(layer)]

    return replace_layer("", module, within=False)
