"""Any network for many lanes at once: its own forward pass, over one long batch of all lanes' samples.

Layers with weights are replaced by ones that hold a set for each lane (leaves.py); the rest is the module's own code.
That is right for code that treats samples alike and apart. Whether it does is tried once, with lanes of different
weights, against one lane after another; a network that gives something else is not folded.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.stacked.batched import Convolving
from flrce.local.stacked.layers import Draw, Samples, Tensors
from flrce.local.stacked.leaf import Pass
from flrce.local.stacked.leaves import LEAVES, Dropout, Sequence, known
from flrce.local.stacked.trial import agrees
from flrce.models.chain import Chain
from flrce.models.flat import tensors


class FoldedNet:
    """A module whose lanes are folded into the batch. `links`: its chain of layers, where it is one and can freeze."""

    def __init__(self, module: nn.Module, samples: Samples, links: Chain | None = None,
                 convolving: Convolving = "columns", lanes: int = 2) -> None:  # fmt: skip
        self.samples, self.links = samples, links
        self.now = Pass(convolving=convolving)
        self.source = module
        shared = {id(p): p for p in module.parameters() if not p.requires_grad}  # held once, however many ways
        self.module = _replaced(copy.deepcopy(module, shared), self.now)
        self.now.learning = True
        try:
            agrees(self, module, lanes)
        finally:
            self.now.learning = False

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
        now.made.clear()
        self.module.train(training)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.set_grad_enabled(training):
                y: Tensor = self.module(x.flatten(0, 1))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return y.reshape(*x.shape[:2], *y.shape[1:])

    def bytes(self) -> int:
        """Estimated bytes a sample needs while a step is under way, from the outputs of the module's leaves."""
        sizes = [self.samples.x[0].numel()]
        columns = [0]

        def note(layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            if isinstance(layer, nn.RNNBase):
                sizes.append(3 * out[0].numel() * layer.num_layers)  # gates and cells of every step
            elif isinstance(out, Tensor):
                sizes.append(out.numel())
            if isinstance(layer, nn.Conv1d | nn.Conv2d) and self.now.convolving in ("columns", "rows"):
                columns.append(3 * given[0].numel() * int(torch.Size(layer.kernel_size).numel()))

        module = copy.deepcopy(self.source, {id(p): p for p in self.source.parameters() if not p.requires_grad}).eval()
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(note)
        with torch.no_grad():
            module(self.samples.inputs(torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device))[0])
        return 4 * (6 * sum(sizes) + max(columns))


def _replaced(module: nn.Module, now: Pass) -> nn.Module:
    """The module with leaves in place of layers that hold tensors of a lane's own."""
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    names |= {id(b): name for name, b, trained in tensors(module) if not trained}
    made: dict[int, nn.Module] = {}

    def own(layer: nn.Module, deep: bool) -> dict[str, str]:
        held = (*layer.named_parameters(recurse=deep), *layer.named_buffers(recurse=deep))
        return {name: names[id(x)] for name, x in held if id(x) in names}

    def visit(path: str, layer: nn.Module) -> nn.Module:
        if id(layer) in made:
            return made[id(layer)]
        whole = type(layer) is nn.MultiheadAttention and own(layer, deep=True)
        if own(layer, deep=False) or whole or LEAVES.get(type(layer)) is Dropout:
            leaf = known(layer)
            made[id(layer)] = leaf(path, layer, own(layer, deep=True), now)
            for inner in layer.modules():
                if inner is not layer and isinstance(inner, nn.modules.batchnorm._BatchNorm):
                    raise BadInput(f"BatchNorm at {path!r} lies within a module with weights of its own")
            return made[id(layer)]
        made[id(layer)] = layer
        for name, child in layer.named_children():
            layer._modules[name] = visit(f"{path}.{name}".lstrip("."), child)
        if type(layer) is nn.Sequential:
            layer.__class__ = Sequence
        return layer

    return visit("", module)
