"""A client's side of a round: take the model, train on one's own samples, send back what was asked
for.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.core.downlink import HeldPart
from flrce.core.types import Payload, Reply, Task
from flrce.errors import BadInput
from flrce.models.adapters import get_adapter_rank, make_low_rank_part
from flrce.models.flat import make_layout, pack_personal
from flrce.models.graph import LayerChain as Layers
from flrce.models.graph import build_layer_chain
from flrce.models.part import ModelPart, freeze_part_blocks, make_whole_part
from flrce.models.slicing import (
    SlicedNetwork,
    draw_random_units,
    select_prefix_units,
    slice_network,
)
from flrce.rng import make_stream
from flrce.training.batches import SampleBatches, Samples, compute_batch_sizes, draw_batches
from flrce.training.cpu import Kernel, KernelUnavailable, build_kernel
from flrce.training.links import PERSONAL_MODEL_KEY, ClientContext
from flrce.training.objectives import Classification, Objective
from flrce.training.precision import Precision
from flrce.training.trainer import TorchTrainer, TrainingResult
from flrce.training.update_chain import PlainSGD, UpdateChain, match_plain_sgd

IndexArray = NDArray[np.int64]
MAX_CACHED_PARTS = 1024  # parts remembered: a client's sub-model is asked for several times a round
LOSS_SMOOTHING = 0.2  # Oort's weight of a new batch in its running mean of squared losses
PERSONAL_FLOATS_KEY = "kept"  # the floats that stay with a client, among what it carries
LINK_STATE_PREFIX = "update."  # before the names of what its links carry


@dataclass(frozen=True)
class PreparedTask:
    """One task made ready: where a client starts, and its samples batch by batch."""

    task: Task
    part: ModelPart
    start: Tensor  # the local vector: what the client holds of w, and what it keeps
    batches: SampleBatches
    local: ClientContext
    update: UpdateChain

    @property
    def order(self) -> IndexArray:
        """Samples of all batches, concatenated."""
        return self.batches.order

    @property
    def sizes(self) -> IndexArray:
        """Of the batches."""
        return self.batches.sizes


class ClientRunner:
    """Everything needed to run tasks on samples at hand: one network, one pool of samples, a
    trainer for each shape.

    With `native`, shapes that have a fused kernel are trained by it, from any number of threads at
    once.
    """

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, ...],
        samples: Samples,
        native: bool = False,
        objective: Objective = Classification(),
        kept: Sequence[str] = (),
    ) -> None:
        self.native, self.lock, self.cutting = native, Lock(), Lock()
        self.precision: Precision = "float32"
        # whether layers that torch trains go by compiled code where there is some
        self.compiled = False
        self.net, self.shape, self.objective, self.kept = net, shape, objective, tuple(kept)
        self.samples, self.x, self.y = samples, samples.x, samples.y
        self.scale, self.shift = samples.scale, samples.shift
        self.layout = make_layout(net, kept)
        self.own = pack_personal(net, self.layout)  # what a client keeps before its first task
        self.normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
        self.trainers: dict[tuple[Any, ...], TorchTrainer | Kernel] = {}
        self.all = make_whole_part(net, self.layout)
        self.slices: dict[float, SlicedNetwork] = {}
        self.parts: dict[tuple[Any, ...], ModelPart] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is not forked: without locks, and with what it makes anew."""
        locks: dict[str, Any] = {"lock": None, "cutting": None}
        return {**self.__dict__, **locks, "trainers": {}, "slices": {}, "parts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=Lock(), cutting=Lock())

    @cached_property
    def chain(self) -> Layers:
        """The network as a chain of layers; BadInput where it is none."""
        return build_layer_chain(self.net, self.shape)

    @cached_property
    def blocks(self) -> int:
        """Blocks that can be frozen; 1 for a network that is no chain."""
        try:
            return len(self.chain.weight_layers)
        except BadInput:
            return 1

    def get_part(self, task: Task) -> ModelPart:
        """What the client holds and sends back under this task."""
        wanted = task.part
        if wanted.is_whole:
            return self.all
        key: tuple[Any, ...] = (wanted.rate, wanted.first)
        if wanted.rate < 1 and not wanted.ordered:
            key = (*key, task.seed, task.t, task.client)
        with self.cutting:
            if key not in self.parts:
                if len(self.parts) >= MAX_CACHED_PARTS:
                    self.parts.clear()
                self.parts[key] = self._build_part(task)
            return self.parts[key]

    def get_held_part(self, task: Task) -> HeldPart:
        """What the client is sent of the model under this task."""
        part = self.get_part(task)
        if part.held is None:
            return HeldPart(None, self.all.names, self.layout.trainable)
        where = make_layout(part.net)
        layout = tuple((slot.name, slot.size) for slot in where.slots)
        return HeldPart(part.held, layout, where.trainable)

    def _build_part(self, task: Task) -> ModelPart:
        if self.layout.personal:
            raise BadInput(
                "sub-models and frozen blocks do not go with parameters that stay with the client;"
                " drop one"
            )
        wanted = task.part
        if wanted.rate < 1 and not wanted.first and get_adapter_rank(self.net):
            rng = None if wanted.ordered else make_stream(task.seed, "units", task.t, task.client)
            return make_low_rank_part(self.net, self.layout, wanted.rate, rng)
        if wanted.rate == 1:
            return freeze_part_blocks(self.all, self.layout, self.chain, wanted.first)
        if wanted.rate not in self.slices:
            self.slices[wanted.rate] = slice_network(self.net, self.layout, self.chain, wanted.rate)
        small = self.slices[wanted.rate]
        rng = make_stream(task.seed, "units", task.t, task.client)
        if wanted.ordered:
            units = select_prefix_units(self.chain, wanted.rate)
        else:
            units = draw_random_units(self.chain, wanted.rate, rng)
        part = small.make_part(units)
        if not wanted.first:
            return part
        return freeze_part_blocks(part, small.where, small.blocks, wanted.first)

    def to_device(self, device: str) -> "ClientRunner":
        """The same on another device."""
        samples = replace(self.samples, x=self.x.to(device), y=self.y.to(device))
        there = ClientRunner(self.net, self.shape, samples, False, self.objective, self.kept)
        there.precision = self.precision
        return there

    def explain_unfused(self, task: Task, steps: int = 1) -> str:
        """Why such a task cannot be trained by a fused kernel; "" if it can."""
        if why := self.explain_unfused_gradients(task):
            return why
        if task.augment:
            return "batches are augmented"
        local = ClientContext(task, steps, 0, self.layout)
        sgd = match_plain_sgd(task.update or UpdateChain(), local)
        return sgd if isinstance(sgd, str) else ""

    def explain_unfused_gradients(self, task: Task | None = None) -> str:
        """Why a fused kernel cannot even find the gradients (of such a task); "" if it can."""
        if self.precision != "float32":
            return f"the fast kernels support float32 only, engine.precision is {self.precision}"
        if self.layout.personal:
            return "some parameters stay with the client"
        if not isinstance(self.objective, Classification):
            name = type(self.objective).__name__
            return f"the fast kernels support cross-entropy only, the objective is {name}"
        if not self.objective.is_plain_cross_entropy:
            return "the fast kernels support no class weights and no label smoothing"
        links = task.update.links if task is not None and task.update is not None else ()
        for link in links:
            if link.probes_batch or link.has_loss_term or link.estimates_gradient:
                return f"the update has {type(link).__name__}"
        return ""

    def get_trainer(self, part: ModelPart, fused: bool = True) -> TorchTrainer | Kernel:
        """Who trains parts of this shape, whatever they freeze: a fused kernel, or torch."""
        key = (part.key[0], self.native and fused)
        with self.lock:
            if key not in self.trainers:
                build = self._build_fused_trainer if key[1] else self._build_torch_trainer
                self.trainers[key] = build(part)
            return self.trainers[key]

    def _build_fused_trainer(self, part: ModelPart) -> TorchTrainer | Kernel:
        """A fused kernel, or torch for a part that has none: a sub-model may be too narrow for
        one.
        """
        try:
            return build_kernel(part.net, self.shape)
        except KernelUnavailable:
            return self._build_torch_trainer(part)

    def _build_torch_trainer(self, part: ModelPart) -> TorchTrainer:
        """Torch, with gradients by a fused kernel where there is one."""
        device, precision = self.x.device, self.precision
        trainer = TorchTrainer(
            part.net, self.shape, self.objective, self.kept, device, precision, self.compiled
        )
        if self.native and not self.explain_unfused_gradients():
            with suppress(KernelUnavailable):
                trainer.kernel = build_kernel(part.net, self.shape)
        return trainer

    def prepare_task(
        self, w: Tensor, task: Task, index: IndexArray, client_state: Mapping[str, Tensor]
    ) -> PreparedTask:
        """A task made ready; `index` are the client's samples."""
        part = self.get_part(task)
        start = w if part.held is None else w[part.held]
        if self.layout.personal:
            start = self.layout.join(w, client_state.get(PERSONAL_FLOATS_KEY, self.own))
        order, sizes = draw_batches(task, len(index), self.normalised)
        where = self.layout if part.held is None else make_layout(part.net)
        update = task.update or UpdateChain()
        batches = SampleBatches(self.samples, index[order], sizes)
        local = ClientContext(task, len(sizes), len(index), where, samples=index)
        return PreparedTask(task, part, start, batches, local, update)

    def build_reply(
        self,
        job: PreparedTask,
        done: TrainingResult,
        client_state: Mapping[str, Tensor],
        into: Tensor | None = None,
        payload: Payload | None = None,
    ) -> Reply:
        """What the client sends once its part is trained; `into`: where the difference of the
        models is written, `payload`: of this difference, where it is encoded already.
        """
        task, part = job.task, job.part
        (new, own), (old, _) = self.layout.split(done.w), self.layout.split(job.start)
        if payload is None:
            u = torch.sub(new, old, out=into)
            u = u if part.sent is None else u[part.sent]
            rng = make_stream(task.seed, "encode", task.t, task.client)
            encoded = task.compressor.encode(u, part.names, rng, client_state)
            payload, client_state = _validate_encoding(task.compressor, encoded)
        state = {
            name: value
            for name, value in client_state.items()
            if not name.startswith(LINK_STATE_PREFIX)
        }
        state |= {LINK_STATE_PREFIX + name: value for name, value in done.client_state.items()}
        if own is not None:
            state[PERSONAL_FLOATS_KEY] = own
        epoch = len(compute_batch_sizes(job.local.n, task.work.batch, self.normalised))
        return Reply(
            task.client,
            task.t,
            payload,
            n=job.local.n,
            loss=float(done.losses[:epoch].mean()),
            loss_square=_smooth_squares(done.squares[:epoch]),
            extras=done.extras,
            client_state=state,
            steps=len(done.losses) if len(done.losses) < len(job.sizes) else None,
        )

    def train(
        self, w: Tensor, task: Task, index: IndexArray, client_state: Mapping[str, Tensor]
    ) -> Reply:
        """The client's reply; `index` are its samples. What it cost is the engine's to say."""
        return self.train_and_reply(self.prepare_task(w, task, index, client_state), client_state)

    def train_and_reply(
        self, job: PreparedTask, client_state: Mapping[str, Tensor], into: Tensor | None = None
    ) -> Reply:
        """Train one job here and now; `into` as in `reply`."""
        if not len(job.sizes):
            return make_no_batch_reply(job)
        fused = self.native and not self.explain_unfused(job.task, len(job.sizes))
        trainer = self.get_trainer(job.part, fused)
        if isinstance(trainer, Kernel):
            sgd = match_plain_sgd(job.update, job.local)
            assert isinstance(sgd, PlainSGD)
            first = job.task.part.first
            new = trainer.train(job.start, job.batches, sgd.lr, sgd.mu, first, sgd.squared)
            return self.build_reply(job, TrainingResult(*new), client_state, into)
        state = {
            name.removeprefix(LINK_STATE_PREFIX): value
            for name, value in client_state.items()
            if name.startswith(LINK_STATE_PREFIX)
        }
        settings = (job.update, job.local, state, job.task.augment)
        with self.lock:
            done = trainer.train(job.start, job.batches, *settings)
        return self.build_reply(job, done, client_state, into)

    def evaluate(
        self, w: Tensor, index: IndexArray, own: Tensor | None = None
    ) -> dict[str, Tensor]:
        """ "loss" and the metrics' numbers of the whole model on these samples; `own`: what
        `find_personal_state` finds.
        """
        where = torch.from_numpy(index).to(self.x.device)
        counted = (
            isinstance(self.objective, Classification)
            and self.objective.supports_fused_evaluation
            and not self.layout.personal
        )
        trainer = self.get_trainer(self.all, counted)
        if own is not None and len(own) == self.layout.local_layout.size:
            whole = own
        else:
            whole = self.layout.join(w, self.own if own is None else own)
        samples = (self.x.index_select(0, where), self.y[where], self.scale, self.shift)
        with self.lock if isinstance(trainer, TorchTrainer) else nullcontext():
            numbers = trainer.evaluate(whole, *samples)
        if isinstance(numbers, dict):
            return numbers
        return {"loss": numbers[1], "accuracy": numbers[0]}


def find_personal_state(client_state: Mapping[str, Tensor]) -> Tensor | None:
    """What a client judges with besides w: a whole model of its own, or the floats that it keeps;
    None: neither.

    They cannot be mistaken for each other: at least one tensor travels, so that what is kept is
    never a whole model.
    """
    models = [
        x
        for name, x in client_state.items()
        if name.startswith(LINK_STATE_PREFIX) and name.endswith(f".{PERSONAL_MODEL_KEY}")
    ]
    return models[0] if models else client_state.get(PERSONAL_FLOATS_KEY)


def _validate_encoding(compressor: Any, encoded: Any) -> tuple[Payload, Mapping[str, Tensor]]:
    """What a compressor made, if it is a payload and what stays with the client."""
    if isinstance(encoded, tuple) and len(encoded) == 2 and isinstance(encoded[0], Payload):
        return encoded
    raise BadInput(
        f"{type(compressor).__name__}.encode returned a {type(encoded).__name__}; return a pair: a"
        " Payload, and what stays"
    )


def make_no_batch_reply(job: PreparedTask) -> Reply:
    """The reply of a client with too few samples to train on."""
    return Reply(job.task.client, job.task.t, error=f"{job.local.n} samples make no batch")


def _smooth_squares(squares: Tensor) -> float:
    """A running mean of the batches' mean squared losses, as Oort keeps it."""
    value = float(squares[0]) if len(squares) else 0.0
    for square in squares[1:].tolist():
        value = (1 - LOSS_SMOOTHING) * value + LOSS_SMOOTHING * square
    return value
