"""A client's side of a round: take the model, train on one's own samples, send back what was asked for."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local import drift
from flrce.local.batches import batches, sizes_of
from flrce.local.native import kernel
from flrce.local.sgd import Bench
from flrce.models.chain import Chain, chain
from flrce.models.flat import layout
from flrce.models.part import Part, frozen, whole
from flrce.models.slicing import Slice, prefix_units, random_units, slice_of
from flrce.rng import stream
from flrce.types import Reply, Task

Index = NDArray[np.int64]
PARTS = 1024  # parts remembered: a client's sub-model is asked for several times a round
SMOOTHING = 0.2  # Oort's weight of a new batch in its running mean of squared losses


@dataclass(frozen=True)
class Lesson:
    """One task made ready: where a client starts, and its samples batch by batch."""

    task: Task
    part: Part
    start: Tensor  # what the client holds of w
    order: Index  # samples of all batches, concatenated
    sizes: Index  # of the batches
    n: int
    delta: Tensor | None = None  # FedCOMGATE's correction


class Workshop:
    """Everything needed to run tasks on samples at hand: one network, one pool of samples, benches by shape.

    With `native`, shapes that have a fused kernel are trained by it, from any number of threads at once.
    """

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, scale: float, shift: float,
        native: bool = False,
    ) -> None:  # fmt: skip
        self.native, self.lock, self.cutting = native, Lock(), Lock()
        self.net, self.shape = net, shape
        self.x, self.y, self.scale, self.shift = x, y, scale, shift
        self.layout = layout(net)
        self.normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
        self.benches: dict[tuple[float | int, bool], Any] = {}
        self.all = whole(net, self.layout)
        self.slices: dict[float, Slice] = {}
        self.parts: dict[tuple[Any, ...], Part] = {}

    @cached_property
    def chain(self) -> Chain:
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
        if task.rate == 1 and not task.first:
            return self.all
        key: tuple[Any, ...] = (task.rate, task.first)
        if task.rate < 1 and not task.ordered:
            key = (*key, task.seed, task.t, task.client)
        with self.cutting:
            if key not in self.parts:
                if len(self.parts) >= PARTS:
                    self.parts.clear()
                self.parts[key] = self._part(task)
            return self.parts[key]

    def _part(self, task: Task) -> Part:
        if task.rate == 1:
            return frozen(self.all, self.layout, self.chain, task.first)
        if task.rate not in self.slices:
            self.slices[task.rate] = slice_of(self.net, self.layout, self.chain, task.rate)
        small = self.slices[task.rate]
        rng = stream(task.seed, "units", task.t, task.client)
        units = prefix_units(self.chain, task.rate) if task.ordered else random_units(self.chain, task.rate, rng)
        part = small.part(units)
        return frozen(part, small.where, small.blocks, task.first) if task.first else part

    def bench(self, part: Part, fused: bool = True) -> Any:
        """Where parts of this shape are trained, whatever they freeze: a fused kernel, or torch's bench."""
        key = (part.key[0], self.native and fused)
        with self.lock:
            if key not in self.benches:
                found = kernel(part.net, self.shape) if key[1] else ""
                self.benches[key] = Bench(part.net, self.shape) if isinstance(found, str) else found
            return self.benches[key]

    def lesson(self, w: Tensor, task: Task, index: Index, carry: Mapping[str, Tensor]) -> Lesson:
        """A task made ready; `index` are the client's samples."""
        part = self.part(task)
        start = w if part.held is None else w[part.held]
        order, sizes = batches(task, len(index), self.normalised)
        delta = drift.settled(task, carry, self.layout.trainable)
        return Lesson(task, part, start, index[order], sizes, len(index), delta)

    def reply(self, done: Lesson, new: Tensor, losses: Tensor, squares: Tensor, carry: Mapping[str, Tensor]) -> Reply:
        """What the client sends once its part is trained to `new`."""
        task, part = done.task, done.part
        u = new - done.start if part.sent is None else (new - done.start)[part.sent]
        rng = stream(task.seed, "encode", task.t, task.client)
        payload, carry = task.compressor.encode(u, part.names, rng, carry)
        if done.delta is not None:
            carry = {**carry, **drift.kept(task, done.delta, u[: len(done.delta)], len(done.sizes))}
        epoch = len(sizes_of(done.n, task.batch, self.normalised))
        return Reply(
            task.client, task.t, payload, n=done.n, loss=float(losses[:epoch].mean()),
            loss_square=_smoothed(squares[:epoch]), carry=carry,
        )  # fmt: skip

    def train(self, w: Tensor, task: Task, index: Index, carry: Mapping[str, Tensor]) -> Reply:
        """The client's reply; `index` are its samples. What it cost is the engine's to say."""
        return self.finish(self.lesson(w, task, index, carry), carry)

    def finish(self, lesson: Lesson, carry: Mapping[str, Tensor]) -> Reply:
        """Train one lesson here and now."""
        task = lesson.task
        if not len(lesson.sizes):
            return no_batch(lesson)
        more = {} if lesson.delta is None else {"drift": -lesson.delta}
        bench = self.bench(lesson.part, fused=not more)
        with self.lock if isinstance(bench, Bench) else nullcontext():
            new, losses, squares = bench.train(
                lesson.start, self.x, self.y, self.scale, self.shift, lesson.order, lesson.sizes,
                lr=task.lr, mu=task.mu, first=task.first, squared=task.squared, **more,
            )  # fmt: skip
        return self.reply(lesson, new, losses, squares, carry)

    def evaluate(self, w: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """(correct, loss) of the whole model on these samples."""
        where = torch.from_numpy(index)
        bench = self.bench(self.all)
        with self.lock if isinstance(bench, Bench) else nullcontext():
            correct, loss = bench.evaluate(w, self.x.index_select(0, where), self.y[where], self.scale, self.shift)
        return correct, loss


def no_batch(lesson: Lesson) -> Reply:
    """The reply of a client with too few samples to train on."""
    return Reply(lesson.task.client, lesson.task.t, error=f"{lesson.n} samples make no batch")


def _smoothed(squares: Tensor) -> float:
    """A running mean of the batches' mean squared losses, as Oort keeps it."""
    value = float(squares[0]) if len(squares) else 0.0
    for square in squares[1:].tolist():
        value = (1 - SMOOTHING) * value + SMOOTHING * square
    return value
