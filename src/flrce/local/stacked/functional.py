"""Any module without BatchNorm through torch.func, for what leaves do not follow: vmap over the lanes."""

from functools import cached_property

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.stacked.layers import Draw, Samples, Tensors
from flrce.local.stacked.trial import agrees
from flrce.local.stacked.units import held, with_tensors
from flrce.models.chain import hooked


class FunctionalNet:
    """One lane's forward pass, mapped over all lanes."""

    def __init__(self, module: nn.Module, samples: Samples):
        if found := hooked(module):  # it may leave a lane's tensors behind
            raise BadInput(f"{type(module).__name__} has {found}, which lanes do not follow")
        self.module, self.samples = module, samples
        first = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        self.names = {name: first[id(x)] for name, x in held(module)}
        agrees(self, module)

    def logits(
        self, t: Tensors, index: Tensor, count: Tensor, first: int, training: bool, draw: Draw | None = None
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, ...)."""
        return self.outputs(t, self.samples.inputs(index), count, training)

    def outputs(
        self, t: Tensors, x: Tensor, count: Tensor, training: bool, frozen: frozenset[str] = frozenset()
    ) -> Tensor:
        """x (k, B, ...)."""

        def one(tensors: Tensors, x: Tensor) -> Tensor:
            own = {name: tensors[first] for name, first in self.names.items() if first in tensors}
            y: Tensor = with_tensors(self.module, own, (x,), {})
            return y

        self.module.train(training)
        with torch.set_grad_enabled(training):
            y: Tensor = torch.vmap(one)(t, x)
            return y

    @cached_property
    def bytes(self) -> int:
        """As ChainNet's, from the outputs of the module's leaves for one sample."""
        sizes = [self.samples.x[0].numel()]

        def note(_: nn.Module, __: object, out: object) -> None:
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)

        leaves = [m for m in self.module.modules() if not list(m.children())]
        hooks = [m.register_forward_hook(note) for m in leaves]
        with torch.no_grad():
            self.module(self.samples.inputs(torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device))[0])
        for hook in hooks:
            hook.remove()
        return 4 * 6 * sum(sizes)
