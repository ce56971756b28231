"""Any module without BatchNorm through torch.func, for what leaves do not follow: vmap over the
lanes.
"""

from functools import cached_property

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.chain import find_hooks
from flrce.training.gpu.layers import DeviceSamples, SeedsAndStep, Tensors
from flrce.training.gpu.trial import verify_network
from flrce.training.gpu.units import call_with_tensors, list_named_tensors


class FunctionalNet:
    """One lane's forward pass, mapped over all lanes."""

    def __init__(self, module: nn.Module, samples: DeviceSamples):
        if found := find_hooks(module):  # it may leave a lane's tensors behind
            raise BadInput(f"{type(module).__name__} has {found}, which lanes do not follow")
        self.module, self.samples = module, samples
        first = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
        self.names = {name: first[id(x)] for name, x in list_named_tensors(module)}
        verify_network(self, module)

    def compute_logits(
        self,
        t: Tensors,
        index: Tensor,
        count: Tensor,
        first: int,
        training: bool,
        draw: SeedsAndStep | None = None,
    ) -> Tensor:
        """index (k, B) into the samples -> (k, B, ...)."""
        return self.compute_outputs(t, self.samples.gather_inputs(index), count, training)

    def compute_outputs(
        self,
        t: Tensors,
        x: Tensor,
        count: Tensor,
        training: bool,
        frozen: frozenset[str] = frozenset(),
    ) -> Tensor:
        """x (k, B, ...)."""

        def run_one_lane(tensors: Tensors, x: Tensor) -> Tensor:
            own = {name: tensors[first] for name, first in self.names.items() if first in tensors}
            y: Tensor = call_with_tensors(self.module, own, (x,), {})
            return y

        self.module.train(training)
        with torch.set_grad_enabled(training):
            y: Tensor = torch.vmap(run_one_lane)(t, x)
            return y

    @cached_property
    def bytes_per_sample(self) -> int:
        """As ChainNet's, from the outputs of the module's leaves for one sample."""
        sizes = [self.samples.x[0].numel()]

        def record_output_size(_: nn.Module, __: object, out: object) -> None:
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)

        leaves = [m for m in self.module.modules() if not list(m.children())]
        hooks = [m.register_forward_hook(record_output_size) for m in leaves]
        with torch.no_grad():
            self.module(
                self.samples.gather_inputs(
                    torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device)
                )[0]
            )
        for hook in hooks:
            hook.remove()
        return 4 * 6 * sum(sizes)
