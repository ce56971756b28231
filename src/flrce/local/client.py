"""A client's side of a round: take the model, train on one's own samples, send back what was asked for."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.batches import batches, sizes_of
from flrce.local.link import PERSONAL, Adds, Estimates, Local, Probes
from flrce.local.native import Kernel, Unsupported, kernel
from flrce.local.objective import Classification, Objective
from flrce.local.precision import Precision
from flrce.local.trainer import Trained, Trainer
from flrce.local.updates import Chain, Simple, simple
from flrce.models.adapters import rank_of, ranked
from flrce.models.chain import Chain as Layers
from flrce.models.chain import chain
from flrce.models.flat import layout, pack_own
from flrce.models.part import Part, frozen, whole
from flrce.models.slicing import Slice, prefix_units, random_units, slice_of
from flrce.rng import stream
from flrce.types import Payload, Reply, Task

Index = NDArray[np.int64]
PARTS = 1024  # parts remembered: a client's sub-model is asked for several times a round
SMOOTHING = 0.2  # Oort's weight of a new batch in its running mean of squared losses
OWN = "kept"  # the floats that stay with a client, among what it carries
LINKS = "update."  # before the names of what its links carry


@dataclass(frozen=True)
class Job:
    """One task made ready: where a client starts, and its samples batch by batch."""

    task: Task
    part: Part
    start: Tensor  # the local vector: what the client holds of w, and what it keeps
    order: Index  # samples of all batches, concatenated
    sizes: Index  # of the batches
    local: Local
    update: Chain


class Runner:
    """Everything needed to run tasks on samples at hand: one network, one pool of samples, a trainer for each shape.

    With `native`, shapes that have a fused kernel are trained by it, from any number of threads at once.
    """

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, scale: float, shift: float,
        native: bool = False, objective: Objective = Classification(), kept: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.native, self.lock, self.cutting = native, Lock(), Lock()
        self.precision: Precision = "float32"
        self.compiled = False  # whether layers that torch trains go by compiled code where there is some
        self.net, self.shape, self.objective, self.kept = net, shape, objective, tuple(kept)
        self.x, self.y, self.scale, self.shift = x, y, scale, shift
        self.layout = layout(net, kept)
        self.own = pack_own(net, self.layout)  # what a client keeps before its first task
        self.normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
        self.trainers: dict[tuple[Any, ...], Trainer | Kernel] = {}
        self.all = whole(net, self.layout)
        self.slices: dict[float, Slice] = {}
        self.parts: dict[tuple[Any, ...], Part] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is not forked: without locks, and with what it makes anew."""
        fresh: dict[str, Any] = {"lock": None, "cutting": None, "trainers": {}, "slices": {}, "parts": {}}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=Lock(), cutting=Lock())

    @cached_property
    def chain(self) -> Layers:
        """The network as a chain of layers; BadInput where it is none."""
        return chain(self.net, self.shape)

    @cached_property
    def blocks(self) -> int:
        """Blocks that can be frozen; 1 for a network that is no chain."""
        try:
            return len(self.chain.trained)
        except BadInput:
            return 1

    def part(self, task: Task) -> Part:
        """What the client holds and sends back under this task."""
        wanted = task.part
        if wanted.whole:
            return self.all
        key: tuple[Any, ...] = (wanted.rate, wanted.first)
        if wanted.rate < 1 and not wanted.ordered:
            key = (*key, task.seed, task.t, task.client)
        with self.cutting:
            if key not in self.parts:
                if len(self.parts) >= PARTS:
                    self.parts.clear()
                self.parts[key] = self._part(task)
            return self.parts[key]

    def _part(self, task: Task) -> Part:
        if self.layout.kept:
            raise BadInput("sub-models and frozen blocks do not go with parameters that stay with the client; drop one")
        wanted = task.part
        if wanted.rate < 1 and not wanted.first and rank_of(self.net):
            rng = None if wanted.ordered else stream(task.seed, "units", task.t, task.client)
            return ranked(self.net, self.layout, wanted.rate, rng)
        if wanted.rate == 1:
            return frozen(self.all, self.layout, self.chain, wanted.first)
        if wanted.rate not in self.slices:
            self.slices[wanted.rate] = slice_of(self.net, self.layout, self.chain, wanted.rate)
        small = self.slices[wanted.rate]
        rng = stream(task.seed, "units", task.t, task.client)
        ordered = wanted.ordered
        units = prefix_units(self.chain, wanted.rate) if ordered else random_units(self.chain, wanted.rate, rng)
        part = small.part(units)
        return frozen(part, small.where, small.blocks, wanted.first) if wanted.first else part

    def on(self, device: str) -> "Runner":
        """The same on another device."""
        x, y = self.x.to(device), self.y.to(device)
        there = Runner(self.net, self.shape, x, y, self.scale, self.shift, False, self.objective, self.kept)
        there.precision = self.precision
        return there

    def unfused(self, task: Task, steps: int = 1) -> str:
        """Why such a task cannot be trained by a fused kernel; "" if it can."""
        if why := self.ungraded(task):
            return why
        if task.augment:
            return "batches are augmented"
        found = simple(task.update or Chain(), Local(task, steps, 0, self.layout))
        return found if isinstance(found, str) else ""

    def ungraded(self, task: Task | None = None) -> str:
        """Why a fused kernel cannot even find the gradients (of such a task); "" if it can."""
        if self.precision != "float32":
            return f"engine.precision is {self.precision}, fused kernels know float32"
        if self.layout.kept:
            return "some parameters stay with the client"
        if not isinstance(self.objective, Classification):
            return f"they know cross-entropy, and the objective is {type(self.objective).__name__}"
        if not self.objective.plain:
            return "they know cross-entropy without weights of classes or smoothing"
        links = task.update.links if task is not None and task.update is not None else ()
        more = [link for link in links if isinstance(link, Probes | Adds | Estimates)]
        return f"the update has {type(more[0]).__name__}" if more else ""

    def trainer(self, part: Part, fused: bool = True) -> Trainer | Kernel:
        """Who trains parts of this shape, whatever they freeze: a fused kernel, or torch."""
        key = (part.key[0], self.native and fused)
        with self.lock:
            if key not in self.trainers:
                self.trainers[key] = self._fused(part) if key[1] else self._torch(part)
            return self.trainers[key]

    def _fused(self, part: Part) -> Trainer | Kernel:
        """A fused kernel, or torch for a part that has none: a sub-model may be too narrow for one."""
        try:
            return kernel(part.net, self.shape)
        except Unsupported:
            return self._torch(part)

    def _torch(self, part: Part) -> Trainer:
        """Torch, with gradients by a fused kernel where there is one."""
        gradients = None
        if self.native and not self.ungraded():
            with suppress(Unsupported):
                gradients = kernel(part.net, self.shape)
        device = self.x.device
        return Trainer(
            part.net, self.shape, self.objective, self.kept, device, self.precision, gradients, self.compiled
        )  # fmt: skip

    def job(self, w: Tensor, task: Task, index: Index, carry: Mapping[str, Tensor]) -> Job:
        """A task made ready; `index` are the client's samples."""
        part = self.part(task)
        start = w if part.held is None else w[part.held]
        if self.layout.kept:
            start = self.layout.join(w, carry.get(OWN, self.own))
        order, sizes = batches(task, len(index), self.normalised)
        where = self.layout if part.held is None else layout(part.net)
        update = task.update or Chain()
        return Job(task, part, start, index[order], sizes, Local(task, len(sizes), len(index), where), update)

    def reply(self, job: Job, done: Trained, carry: Mapping[str, Tensor], into: Tensor | None = None) -> Reply:
        """What the client sends once its part is trained; `into`: where the difference of the models is written."""
        task, part = job.task, job.part
        (new, own), (old, _) = self.layout.split(done.w), self.layout.split(job.start)
        u = torch.sub(new, old, out=into)
        u = u if part.sent is None else u[part.sent]
        rng = stream(task.seed, "encode", task.t, task.client)
        payload, carry = _encoded(task.compressor, task.compressor.encode(u, part.names, rng, carry))
        carry = {name: value for name, value in carry.items() if not name.startswith(LINKS)}
        carry |= {LINKS + name: value for name, value in done.carry.items()}
        if own is not None:
            carry[OWN] = own
        epoch = len(sizes_of(job.local.n, task.work.batch, self.normalised))
        return Reply(
            task.client, task.t, payload, n=job.local.n, loss=float(done.losses[:epoch].mean()),
            loss_square=_smoothed(done.squares[:epoch]), extras=done.extras, carry=carry,
        )  # fmt: skip

    def train(self, w: Tensor, task: Task, index: Index, carry: Mapping[str, Tensor]) -> Reply:
        """The client's reply; `index` are its samples. What it cost is the engine's to say."""
        return self.finish(self.job(w, task, index, carry), carry)

    def finish(self, job: Job, carry: Mapping[str, Tensor], into: Tensor | None = None) -> Reply:
        """Train one job here and now; `into` as in `reply`."""
        if not len(job.sizes):
            return no_batch(job)
        found = simple(job.update, job.local)
        fused = not self.unfused(job.task, len(job.sizes))
        trainer = self.trainer(job.part, fused)
        samples = (self.x, self.y, self.scale, self.shift, job.order, job.sizes)
        if isinstance(trainer, Kernel):
            assert isinstance(found, Simple)
            first = job.task.part.first
            new = trainer.train(job.start, *samples, lr=found.lr, mu=found.mu, first=first, squared=found.squared)
            return self.reply(job, Trained(*new), carry, into)
        kept = {name.removeprefix(LINKS): value for name, value in carry.items() if name.startswith(LINKS)}
        with self.lock:
            done = trainer.train(job.start, *samples, job.update, job.local, kept, job.task.augment)
        return self.reply(job, done, carry, into)

    def evaluate(self, w: Tensor, index: Index, own: Tensor | None = None) -> dict[str, Tensor]:
        """ "loss" and the metrics' numbers of the whole model on these samples; `own`: what `own_of` finds."""
        where = torch.from_numpy(index).to(self.x.device)
        counted = isinstance(self.objective, Classification) and self.objective.counted and not self.layout.kept
        trainer = self.trainer(self.all, counted)
        if own is not None and len(own) == self.layout.local.size:
            whole = own
        else:
            whole = self.layout.join(w, self.own if own is None else own)
        samples = (self.x.index_select(0, where), self.y[where], self.scale, self.shift)
        with self.lock if isinstance(trainer, Trainer) else nullcontext():
            found = trainer.evaluate(whole, *samples)
        if isinstance(found, dict):
            return found
        return {"loss": found[1], "accuracy": found[0]}


def own_of(carry: Mapping[str, Tensor]) -> Tensor | None:
    """What a client judges with besides w: a whole model of its own, or the floats that it keeps; None: neither.

    They cannot be mistaken for each other: at least one tensor travels, so that what is kept is never a whole model.
    """
    models = [x for name, x in carry.items() if name.startswith(LINKS) and name.endswith(f".{PERSONAL}")]
    return models[0] if models else carry.get(OWN)


def _encoded(compressor: Any, found: Any) -> tuple[Payload, Mapping[str, Tensor]]:
    """What a compressor made, if it is a payload and what stays with the client."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Payload):
        name = type(compressor).__name__
        raise BadInput(f"{name}.encode returned a {type(found).__name__}; return a pair: a Payload, and what stays")
    return found


def no_batch(job: Job) -> Reply:
    """The reply of a client with too few samples to train on."""
    return Reply(job.task.client, job.task.t, error=f"{job.local.n} samples make no batch")


def _smoothed(squares: Tensor) -> float:
    """A running mean of the batches' mean squared losses, as Oort keeps it."""
    value = float(squares[0]) if len(squares) else 0.0
    for square in squares[1:].tolist():
        value = (1 - SMOOTHING) * value + SMOOTHING * square
    return value
