"""Any network for many lanes at once: its own forward pass under torch.vmap, a set of weights for
each lane.

Calls of torch's functions that take weights are made once for all lanes (lane_functions.py); the
rest is the module's own code. What vmap cannot do, such as decisions by numbers of a tensor, or
draws at random, is an error, and the network trains one client after another. Whether lanes
together give what each gives alone is tried once (verification.py).
"""

import copy
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flrce.errors import BadInput, format_one_line
from flrce.models.flat import list_model_tensors
from flrce.models.graph import LayerChain
from flrce.training.gpu.chain_net import DeviceSamples, SeedsAndStep
from flrce.training.gpu.lane_functions import ForwardContext, LaneFunctions, Tensors
from flrce.training.gpu.sequences import replace_sequence_layers
from flrce.training.gpu.verification import verify_network

# of networks of ours and of transformers: whether blocks run again in the backward pass, which is
# outside of vmap
RECOMPUTE_ATTRIBUTES = ("recompute", "gradient_checkpointing")


class VmapNet:
    """A module of many lanes. `links`: its chain of layers, where it is one and can freeze."""

    supports_float64 = True

    def __init__(
        self,
        module: nn.Module,
        samples: DeviceSamples,
        links: LayerChain | None = None,
        direct: bool = False,
    ) -> None:
        self.samples, self.links, self.source = samples, links, module
        self.now = ForwardContext(direct=direct)
        self.functions = LaneFunctions(self.now)
        self.module = _copy_sharing_frozen(module)
        for layer, name in product(self.module.modules(), RECOMPUTE_ATTRIBUTES):
            if getattr(layer, name, False):
                setattr(layer, name, False)
        self.aliases = _find_aliases(self.module)
        norms = _drop_batch_counters(self.module)
        replace_sequence_layers(self.module, self.now)
        #: statistics that the module's own code changes, noted by the verification
        self.moving = {
            name
            for name, _, trained in list_model_tensors(module)
            if not trained and name.rpartition(".")[0] not in norms
        }
        self.now.learning = True
        verify_network(self, module)
        self.now.learning = False

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
        random layers. Blocks of the chain before `first` are frozen.
        """
        self.now.draw = draw
        frozen: list[str] = []
        if first and self.links is not None:
            layers = self.links.layers
            before = layers[: layers.index(self.links.weight_layers[first])]
            frozen = [layer.name for layer in before if layer.name]
        return self.compute_outputs(t, self.samples.gather_inputs(index), count, training, frozen)

    def compute_outputs(
        self, t: Tensors, x: Tensor, count: Tensor, training: bool, frozen: list[str] | None = None
    ) -> Tensor:
        """x (k, B, ...)."""
        now = self.now
        (now.k, now.batch), now.count, now.training, now.draws = x.shape[:2], count, training, 0
        self.module.train(training)
        for path in frozen or ():
            self.module.get_submodule(path).eval()
        before = {name: t[name].clone() for name in self.moving} if training else {}
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            given = {alias: t[name] for alias, name in self.aliases.items()}
            with torch.set_grad_enabled(training):
                y: Tensor = torch.vmap(self._run_one_lane)(given, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        self._restore_finished_lanes(t, before)
        return y

    def _run_one_lane(self, tensors: Tensors, x: Tensor) -> Any:
        self.now.lane = next(iter(tensors.values()), x)
        with self.functions:
            # torch ties by names, and leaves tensors behind in a module that has two
            return functional_call(self.module, tensors, (x,), tie_weights=False)

    def _restore_finished_lanes(self, t: Tensors, before: Tensors) -> None:
        """Statistics of lanes that have finished stand still."""
        if self.now.learning and before:
            self.moving = {name for name, x in before.items() if not torch.equal(x, t[name])}
        running = self.now.count > 0
        for name, x in before.items():
            live = running.reshape(-1, *(1,) * (x.dim() - 1))
            t[name].copy_(torch.where(live, t[name], x))

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
            if self.now.direct:
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
        index = torch.zeros(1, 1, dtype=torch.int32, device=self.samples.x.device)
        with torch.no_grad():
            module(self.samples.gather_inputs(index)[0])
        return 4 * (6 * sum(sizes) + max(columns))


def _copy_sharing_frozen(module: nn.Module) -> nn.Module:
    """A copy; what is fixed is held once, however many variants there are."""
    shared = {id(p): p for p in module.parameters() if not p.requires_grad}
    try:
        return copy.deepcopy(module, shared)
    except RuntimeError as why:  # of a tensor with a history, such as a recurrent layer's weights
        what = type(module).__name__
        raise BadInput(f"{what} cannot be copied: {format_one_line(why, 160)}") from why


def _find_aliases(module: nn.Module) -> dict[str, str]:
    """Names of all places of the tensors that lanes have, and the name of each in w; a tied one
    has several places.
    """
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    names |= {id(b): name for name, b, trained in list_model_tensors(module) if not trained}
    return {
        f"{path}.{name}".lstrip("."): names[id(x)]
        for path, part in module.named_modules()
        for name, x in (*part._parameters.items(), *part._buffers.items())
        if id(x) in names
    }


def _drop_batch_counters(module: nn.Module) -> set[str]:
    """BatchNorms with a momentum have no use for the number of batches that they count. Returns the
    BatchNorms' paths.
    """
    norms = {
        path: layer
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    }
    for layer in norms.values():
        if layer.momentum is not None:
            layer.num_batches_tracked = None
    return set(norms)
