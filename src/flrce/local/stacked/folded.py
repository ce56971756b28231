"""Any network for many lanes at once: its own forward pass, over one long batch of all lanes' samples.

Layers with weights are replaced by ones that hold a set for each lane (leaves.py); the rest is the module's own code.
That is right for code that treats samples alike and apart. Whether it does is tried once, with lanes of different
weights, against one lane after another; a network that gives something else is not folded.
"""

import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from flrce.errors import BadInput, brief
from flrce.local.stacked.adapters import Adapted, adapter
from flrce.local.stacked.batched import Convolving
from flrce.local.stacked.functions import Functions
from flrce.local.stacked.layers import Draw, Samples, Tensors
from flrce.local.stacked.leaf import Pass
from flrce.local.stacked.leaves import LEAVES, Dropout, Sequence, known
from flrce.local.stacked.trial import agrees
from flrce.local.stacked.units import Unit, held
from flrce.models.chain import Chain
from flrce.models.flat import tensors


class FoldedNet:
    """A module whose lanes are folded into the batch. `links`: its chain of layers, where it is one and can freeze."""

    def __init__(self, module: nn.Module, samples: Samples, links: Chain | None = None,
                 convolving: Convolving = "columns", lanes: int = 2) -> None:  # fmt: skip
        self.samples, self.links = samples, links
        self.convolving, self.source = convolving, module
        try:
            self._make(lanes, whole=False)
        except BadInput as why:
            try:  # code that uses its layers' weights itself, or that must see one lane's samples alone
                self._make(lanes, whole=True)
            except BadInput:
                raise why from None

    def _make(self, lanes: int, whole: bool) -> None:
        """The module of many lanes, tried. `whole`: all of its own code as a Unit, and attention gives its weights."""
        self.now = Pass(convolving=self.convolving, alone=lanes == 1, weights=whole)
        self.functions = Functions(self.now)
        self.module = _replaced(_copied(self.source), self.now, whole)
        self.trying = True
        agrees(self, self.source, lanes)
        self.trying = False

    def cut(self, first: int) -> int:
        """The place in the chain of the first layer that trains."""
        return 0 if first == 0 or self.links is None else self.links.layers.index(self.links.trained[first])

    def logits(
        self, t: Tensors, index: Tensor, count: Tensor, first: int, training: bool, draw: Draw | None = None
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, ...); `draw`: the lanes' seeds and the step, for random layers."""
        self.now.draw = draw
        frozen: frozenset[str] = frozenset()
        if first and self.links is not None:
            frozen = frozenset(layer.name for layer in self.links.layers[: self.cut(first)] if layer.name)
        return self.outputs(t, self.samples.inputs(index), count, training, frozen)

    def outputs(
        self, t: Tensors, x: Tensor, count: Tensor, training: bool, frozen: frozenset[str] = frozenset()
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
    def bytes(self) -> int:
        """Estimated bytes a sample needs while a step is under way, from the outputs of the module's leaves."""
        sizes = [self.samples.x[0].numel()]
        columns = [0]

        def note(layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            if isinstance(layer, nn.RNNBase):
                sizes.append(3 * out[0].numel() * layer.num_layers)  # gates and cells of every step
            elif isinstance(out, Tensor):
                sizes.append(out.numel())
            if self.now.convolving not in ("columns", "rows"):
                return
            if isinstance(layer, nn.Conv1d | nn.Conv2d):
                columns.append(3 * given[0].numel() * int(torch.Size(layer.kernel_size).numel()))
            elif isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
                seen = layer.in_channels * int(torch.Size(layer.kernel_size).numel())  # by each pixel that is made
                columns.append(3 * out[0, 0].numel() * seen)

        module = _copied(self.source).eval()
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(note)
        with torch.no_grad():
            module(self.samples.inputs(torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device))[0])
        return 4 * (6 * sum(sizes) + max(columns))


def _copied(module: nn.Module) -> nn.Module:
    """A copy; what is fixed is held once, however many ways there are."""
    shared = {id(p): p for p in module.parameters() if not p.requires_grad}
    try:
        return copy.deepcopy(module, shared)
    except RuntimeError as why:  # of a tensor with a history, such as a recurrent layer's remade weights
        raise BadInput(f"{type(module).__name__} cannot be copied: {brief(why, 160)}") from why


def _replaced(module: nn.Module, now: Pass, whole: bool) -> nn.Module:
    """The module with leaves in place of layers that hold tensors of a lane's own."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    names |= {id(b): name for name, b, trained in tensors(module) if not trained}
    made: dict[int, nn.Module] = {}

    def own(layer: nn.Module, deep: bool) -> dict[str, str]:
        return {name: names[id(x)] for name, x in held(layer, deep) if id(x) in names}

    def visit(path: str, layer: nn.Module, within: bool) -> nn.Module:
        """`within`: a Unit, whose tensors outside of leaves are the Unit's."""
        if id(layer) in made:
            return made[id(layer)]
        some = own(layer, deep=type(layer) is nn.MultiheadAttention or is_parametrized(layer))
        if some or LEAVES.get(type(layer)) is Dropout:
            leaf = known(layer)
            if leaf is not Unit:
                made[id(layer)] = leaf(path, layer, own(layer, deep=True), now)
                return made[id(layer)]
            parts = adapter(layer)
            if parts is not None:
                made[id(layer)] = Adapted(path, layer, own(layer, deep=True), now, parts)
                return made[id(layer)]
        unit = Unit(path, layer, own(layer, deep=True), now) if (some or (whole and not path)) and not within else None
        made[id(layer)] = unit or layer
        for name, child in layer._modules.items():
            if child is not None:
                layer._modules[name] = visit(f"{path}.{name}".lstrip("."), child, within or unit is not None)
        if type(layer) is nn.Sequential:
            layer.__class__ = Sequence
        if unit is not None:
            unit.bare = own(layer, deep=True)
        return made[id(layer)]

    return visit("", module, within=False)
