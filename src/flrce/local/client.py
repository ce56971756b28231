"""A client's side of a round: take the model, train on one's own samples, send back what was asked for."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.local.batches import batches, sizes_of
from flrce.local.sgd import Bench
from flrce.models.flat import layout
from flrce.models.part import Part, whole
from flrce.rng import stream
from flrce.types import Reply, Task

Index = NDArray[np.int64]
SMOOTHING = 0.2  # Oort's weight of a new batch in its running mean of squared losses


class Workshop:
    """Everything needed to run tasks on samples at hand: one network, one pool of samples, benches by shape."""

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, scale: float, shift: float
    ) -> None:
        self.net, self.shape = net, shape
        self.x, self.y, self.scale, self.shift = x, y, scale, shift
        self.layout = layout(net)
        self.normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
        self.benches: dict[tuple[float | int, ...], Any] = {}

    def part(self, task: Task) -> Part:
        """What the client holds and sends back under this task."""
        return whole(self.net, self.layout)

    def bench(self, part: Part) -> Any:
        """Where parts of this shape are trained."""
        if part.key not in self.benches:
            self.benches[part.key] = Bench(part.net, self.shape)
        return self.benches[part.key]

    def train(self, w: Tensor, task: Task, index: Index, carry: Mapping[str, Tensor]) -> Reply:
        """The client's reply; `index` are its samples. What it cost is the engine's to say."""
        part = self.part(task)
        start = w if part.held is None else w[part.held]
        order, sizes = batches(task, len(index), self.normalised)
        if not len(sizes):
            return Reply(task.client, task.t, error=f"{len(index)} samples make no batch")
        new, losses, squares = self.bench(part).train(
            start, self.x, self.y, self.scale, self.shift, index[order], sizes,
            lr=task.lr, mu=task.mu, first=task.first, squared=task.squared,
        )  # fmt: skip
        u = new - start if part.sent is None else (new - start)[part.sent]
        rng = stream(task.seed, "encode", task.t, task.client)
        payload, carry = task.compressor.encode(u, part.names, rng, carry)
        epoch = len(sizes_of(len(index), task.batch, self.normalised))
        return Reply(
            task.client, task.t, payload, n=len(index), loss=float(losses[:epoch].mean()),
            loss_square=_smoothed(squares[:epoch]), carry=carry,
        )  # fmt: skip

    def evaluate(self, w: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """(correct, loss) of the whole model on these samples."""
        where = torch.from_numpy(index)
        bench = self.bench(whole(self.net, self.layout))
        correct, loss = bench.evaluate(w, self.x[where], self.y[where], self.scale, self.shift)
        return correct, loss


def _smoothed(squares: Tensor) -> float:
    """A running mean of the batches' mean squared losses, as Oort keeps it."""
    value = float(squares[0]) if len(squares) else 0.0
    for square in squares[1:].tolist():
        value = (1 - SMOOTHING) * value + SMOOTHING * square
    return value
