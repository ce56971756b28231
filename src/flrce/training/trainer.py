"""Local training in plain PyTorch: any network, any objective, any chain of links, on any device.

The reference for every faster trainer, and what does the work where they do not apply.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from flrce.core import tensor_bytes
from flrce.errors import BadInput, describe_exception
from flrce.models.abilities import limit_samples_per_pass
from flrce.models.drawing import get_rng_states, preserve_rng_states, use_seed
from flrce.models.flat import bind_to_vector, make_layout
from flrce.models.graph import build_layer_chain
from flrce.models.inputs import scale_inputs
from flrce.rng import make_stream
from flrce.training.batch_step import BoundNetwork, TrainingStep
from flrce.training.batches import SampleBatches, Samples
from flrce.training.cpu import Kernel
from flrce.training.cpu.compiled_calls import CompiledCalls, find_widest_layer, is_worth_compiling
from flrce.training.cpu.gru import compile_gru_layers
from flrce.training.links import ClientContext, Link, Tensors
from flrce.training.objectives import Classification, Objective, validate_per_sample
from flrce.training.pooling_layers import use_fast_pools
from flrce.training.precision import Precision, autocast_network, use_deterministic_kernels
from flrce.training.update_chain import UpdateChain

LinkStates = tuple[Tensors, ...]  # of each link of the update
# samples an evaluation looks at together: fits the cache, where one giant batch does not
EVALUATION_CHUNK_SAMPLES = 250


@dataclass(frozen=True)
class TrainingResult:
    """What came of a client's training."""

    w: Tensor  # (size,) the local vector after the last step, where the one was that it began with
    losses: Tensor  # (steps done,) mean loss of each batch before its step
    squares: Tensor  # (steps,) mean squared per-sample loss
    # what the links keep with the client
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what they send back


@dataclass(frozen=True, eq=False)
class LocalRound:
    """What stays the same over the steps of a client's round."""

    scene: BoundNetwork
    update: UpdateChain
    local: ClientContext
    augment: tuple[Any, ...]
    frozen: tuple[slice, ...]  # coordinates that do not move

    @cached_property
    def generator(self) -> torch.Generator:
        """What the transforms draw from."""
        return torch.Generator().manual_seed(_derive_seed(self.local.task, "augment"))

    def prepare_batch(self, step: int, x: Tensor, y: Tensor, states: LinkStates) -> TrainingStep:
        """Step number `step`: its transformed inputs, its rate, the links' terms of the loss."""
        for transform in self.augment:
            x = transform(x, self.generator)
        rate = self.update.compute_step_rate(step, self.local)
        terms = partial(self.update.compute_loss_terms, states=states)
        return TrainingStep(self.scene, x, y, step, rate, terms)


class TorchTrainer:
    """One network bound to one flat vector, reused for every client that a worker trains."""

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, ...],
        objective: Objective = Classification(),
        kept: Sequence[str] = (),
        device: str | torch.device = "cpu",
        precision: Precision = "float32",
        compiled: bool = False,
    ) -> None:
        # finds gradients faster than autograd, where links want nothing else of a batch
        self.kernel: Kernel | None = None
        self.layout, self.objective, self.shape = make_layout(net, kept), objective, shape
        self.where = self.layout.local_layout
        self.w = torch.zeros(self.where.size, device=device)
        self.g = torch.zeros(self.where.trainable, device=device)
        self.precision: Precision = precision
        self.net = use_fast_pools(copy.deepcopy(net).to(device))
        if compiled:
            self.net = compile_gru_layers(self.net)
        self.widest = find_widest_layer(self.net) if compiled else 0  # weights of one layer
        self.net = bind_to_vector(self.net, self.w, self.where)
        self.net = autocast_network(self.net, self.w.device, precision)
        self.given = net  # with the layers that a chain knows
        self.learning = [p for p in self.net.parameters() if p.requires_grad]
        self.buffers = [
            (m, name, b) for m in self.net.modules() for name, b in m.named_buffers(recurse=False)
        ]
        self.counts = [(b, b.clone()) for _, _, b in self.buffers if not b.is_floating_point()]
        # whether it draws in training, in evaluation; the first batch tells
        self.random: dict[bool, bool] = {}
        # modules may note things as they run
        self.fresh = [(m, dict(vars(m))) for m in self.net.modules()]

    def train(
        self,
        w: Tensor,
        batches: SampleBatches,
        update: UpdateChain,
        local: ClientContext,
        client_state: Mapping[str, Tensor] = {},
        augment: Sequence[Any] = (),
    ) -> TrainingResult:
        """Train from the local vector w (size,) on these batches.

        Blocks before the task's first one are frozen, their BatchNorms in eval mode.
        """
        self.w.copy_(w)
        samples = batches.samples
        local = self._move_context(local, samples)
        client_state = self._to_own_device(client_state)
        task = local.task
        frozen = self._freeze_blocks(task.part.first)
        states = update.begin_round(self.w[: self.where.trainable], local, client_state)
        two = scale_inputs(samples.x[:2], samples.scale, samples.shift)
        with (
            self._use_trainer_kernels(samples.x, max(batches.sizes, default=0)),
            self._seed_random_layers(two, _derive_seed(task, "layers")),
        ):
            self._reset_module_state()
            scene = self._bind_client(task)
            this_round = LocalRound(scene, update, local, tuple(augment), tuple(frozen))
            with scene.record_features() if update.needs_batch else nullcontext():
                losses, squares, states = self._take_steps(this_round, batches, states)
        self._unfreeze_blocks()
        self._rebind_buffers()
        stays, sent = update.end_round(self.w[: self.where.trainable], states)
        sent = {name: value.cpu() for name, value in sent.items()}
        stays = {name: value.cpu() for name, value in stays.items()}
        done = self.w.clone() if w.device == self.w.device else tensor_bytes.to_host(self.w)
        return TrainingResult(done, losses.cpu(), squares.cpu(), stays, sent)

    def _bind_client(self, task: Any) -> BoundNetwork:
        """The network with this task's randomness."""
        named = dict(self.net.named_parameters())
        parameters = [named[slot.name] for slot in self.where.slots if slot.trainable]
        seed = partial(_derive_seed, task, "links")
        random = self.random[True]
        return BoundNetwork(self.net, parameters, self.w, self.g, self.objective, random, seed)

    def _take_steps(
        self, this_round: LocalRound, batches: SampleBatches, states: LinkStates
    ) -> tuple[Tensor, Tensor, LinkStates]:
        """(mean loss of each batch before its step, mean squared loss, the links' last states)."""
        losses, squares = torch.zeros(2, len(batches.sizes), device=self.w.device)
        update, done_steps = this_round.update, 0
        for step, (x, y) in enumerate(batches.iter_batches()):
            batch = this_round.prepare_batch(step, x, y, states)
            loss = self._compute_gradient(this_round, batch, states)
            with torch.no_grad():
                losses[step], squares[step] = loss.mean(), loss.square().mean()
                states = self._move_weights(this_round, batch, states)
            done_steps = step + 1
            if update.ends_training(states):
                break
        return losses[:done_steps], squares[:done_steps], states

    def _move_weights(
        self, this_round: LocalRound, batch: TrainingStep, states: LinkStates
    ) -> LinkStates:
        """One step along what the links make of the gradient; their states after it."""
        weights = self.w[: self.where.trainable]
        direction, states = this_round.update.step(self.g, weights, states, batch)
        for span in this_round.frozen:
            direction[span] = 0
        for mask in this_round.update.frozen_coordinates(states):
            direction = direction.masked_fill(mask, 0)
        weights.sub_(direction, alpha=batch.rate)
        return states

    def _compute_gradient(
        self, this_round: LocalRound, batch: TrainingStep, states: LinkStates
    ) -> Tensor:
        """(n,) losses; the gradient of their mean, or what a link estimates, is in g."""
        update = this_round.update
        for link, state in zip(update.links, states, strict=True):
            if link.estimates_gradient:
                return self._estimate_gradient(link, batch, state)
        if self.kernel is not None and not update.needs_batch:
            first = this_round.local.task.part.first
            return self.kernel.gradient(self.w, batch.x, batch.y, self.g, first)
        return self._backpropagate(batch)

    def _backpropagate(self, batch: TrainingStep) -> Tensor:
        """(n,) losses; their mean's gradient is in g."""
        try:
            loss = batch.losses()
            batch.scene.write_gradient(batch.compute_total_loss(loss))
        except (BadInput, torch.OutOfMemoryError):
            raise
        except Exception as why:  # whatever a network of the user's may raise
            shape, name = tuple(batch.x.shape), type(self.given).__name__
            raise BadInput(
                f"{name} cannot be trained on a batch of shape {shape}: {describe_exception(why)}"
            ) from why
        return loss

    def _estimate_gradient(self, link: Link, batch: TrainingStep, state: Any) -> Tensor:
        """(n,) losses; the gradient that the link found is in g."""
        with torch.no_grad():
            loss, g = link.estimate(batch.losses, self.w[: self.where.trainable], state)
            self.g.copy_(g)
        return loss

    def _reset_module_state(self) -> None:
        """What modules counted or noted before, such as BatchNorm's batches: no client goes on with
        another's.
        """
        for count, first in self.counts:
            count.copy_(first)
        for module, attributes in self.fresh:
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: value for name, value in attributes.items() if name != "training"})

    def _rebind_buffers(self) -> None:
        """Buffers that a forward replaced by new tensors: their values go into w, and w is what
        they are again.
        """
        for module, name, bound in self.buffers:
            found = module._buffers[name]
            if found is not bound and found is not None:
                bound.copy_(found)
                module._buffers[name] = bound

    def _to_own_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.w.device) for name, value in tensors.items()}

    def _move_context(self, local: ClientContext, samples: Samples) -> ClientContext:
        """What the client knows, with its model and the tensors of its task on this device."""
        task = local.task
        task = replace(task, tensors=self._to_own_device(task.tensors)) if task.tensors else task
        local = replace(local, task=task, whole=self.w)
        if local.samples is None:
            return local
        index = torch.from_numpy(local.samples).to(samples.x.device)
        return replace(local, mean_loss=partial(self._compute_mean_loss, samples, index))

    def evaluate(
        self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float
    ) -> dict[str, Tensor]:
        """ "loss" (n,), and the numbers of each metric (n, ...), in eval mode."""
        self.w.copy_(w)
        self.net.eval()
        objective, metrics = self.objective, self.objective.evaluation_metrics
        numbers: dict[str, list[Tensor]] = {"loss": [], **{metric.name: [] for metric in metrics}}
        chunk = self._count_chunk_samples()
        with (
            self._use_trainer_kernels(x, min(chunk, len(x))),
            torch.inference_mode(),
            self._seed_random_layers(scale_inputs(x[:2], scale, shift), 0),
        ):
            self._reset_module_state()
            for part, target in zip(x.split(chunk), y.split(chunk), strict=True):
                out = self.net(scale_inputs(part, scale, shift))
                losses = objective.losses(out, target)
                numbers["loss"].append(validate_per_sample(losses, target, objective, "losses"))
                for metric in metrics:
                    values, name = metric.of(out, target), f"{metric.name}.of"
                    numbers[metric.name].append(validate_per_sample(values, target, metric, name))
        self._rebind_buffers()
        return {name: torch.cat(parts) for name, parts in numbers.items()}

    def _compute_mean_loss(self, samples: Samples, index: Tensor) -> float:
        """The mean loss of these samples at w as it is now, in eval mode; nothing changes."""
        x, y, scale, shift = samples.x, samples.y, samples.scale, samples.shift
        modes = [(module, module.training) for module in self.net.modules()]
        self.net.eval()
        total = 0.0
        with torch.no_grad(), self._seed_random_layers(scale_inputs(x[:2], scale, shift), 0):
            for some in index.split(self._count_chunk_samples()):
                out = self.net(scale_inputs(x.index_select(0, some), scale, shift))
                total += float(self.objective.losses(out, y[some]).double().sum())
        for module, mode in modes:
            module.training = mode
        return total / len(index)

    def _count_chunk_samples(self) -> int:
        """Samples to look at together: fewer where the network says that its answers are large."""
        room = 4 if self.w.device.type == "cuda" else 1
        return limit_samples_per_pass(self.given, self.shape, EVALUATION_CHUNK_SAMPLES, room)

    @contextmanager
    def _use_trainer_kernels(self, x: Tensor, n: int) -> Iterator[None]:
        """While batches of n samples train or are judged: the same bits twice, by compiled layers
        where these pay.
        """
        with (
            use_deterministic_kernels(self.w.device, self.precision),
            CompiledCalls() if is_worth_compiling(self.widest, x, n) else nullcontext(),
        ):
            yield

    def _seed_random_layers(self, batch: Tensor, seed: int) -> AbstractContextManager[None]:
        """Random layers draw from this seed; a network without them needs no turn."""
        mode = self.net.training
        if mode not in self.random:
            self.random[mode] = self._uses_randomness(batch)
        return use_seed(seed, self.w.device) if self.random[mode] else nullcontext()

    def _uses_randomness(self, batch: Tensor) -> bool:
        """Whether a forward pass in this mode takes numbers from a generator."""
        if not len(batch):
            return False
        with preserve_rng_states(self.w.device), torch.no_grad():
            state = self.w.clone()  # BatchNorm moves its statistics
            before = get_rng_states(self.w.device)
            # two samples at least, for BatchNorm
            self.net(batch.repeat(2, *(1,) * (batch.dim() - 1)))
            after = get_rng_states(self.w.device)
            self._rebind_buffers()
            self.w.copy_(state)
        return before != after

    def _freeze_blocks(self, first: int) -> list[slice]:
        """Freeze the blocks before `first`; returns the spans of w that must not move."""
        self.net.train()
        if not first:
            return []
        blocks = build_layer_chain(self.given, self.shape)
        if first >= len(blocks.weight_layers):
            count = len(blocks.weight_layers)
            raise BadInput(f"first trained block {first}: the network has only {count}")
        cut = blocks.layers.index(blocks.weight_layers[first])
        modules = dict(self.net.named_modules())
        names = {layer.name for layer in blocks.layers[:cut] if layer.name}
        for name in names:
            modules[name].eval().requires_grad_(False)
        slots = (slot for slot in self.where.slots if slot.trainable)
        return [slot.span for slot in slots if slot.name.rpartition(".")[0] in names]

    def _unfreeze_blocks(self) -> None:
        for p in self.learning:
            p.requires_grad_(True)


def _derive_seed(task: Any, purpose: str) -> int:
    return int(make_stream(task.seed, purpose, task.t, task.client).integers(2**63))


def derive_layer_seed(task: Any) -> int:
    """What a task's random layers draw from."""
    return _derive_seed(task, "layers")
