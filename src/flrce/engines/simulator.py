"""The embedded engine: a whole federation on one machine, its costs modelled by the fleet's device profiles."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from flrce.costs import Profile, training_flops
from flrce.data.federation import Federation
from flrce.engines.crew import Dead, Processes
from flrce.local.batches import sizes_of
from flrce.local.client import Workshop
from flrce.types import Evaluation, Reply, Spent, Task

JUDGED = 1000  # hold-out samples in one job


class Simulator:
    """P clients of a federation trained by worker processes, one thread each; same bits whatever their number."""

    def __init__(
        self,
        federation: Federation,
        net: nn.Module,
        fleet: Mapping[str, Profile],
        workers: int = 0,
        eval_every: int = 1,
    ) -> None:
        source = federation.source
        self.federation, self.fleet, self.eval_every = federation, fleet, eval_every
        self.shop = Workshop(net, source.shape, federation.x, federation.y, source.scale, source.shift)
        self.trainable, self.size = self.shop.layout.trainable, self.shop.layout.size
        self.shared = torch.zeros(self.size).share_memory_()  # the model, where workers see it
        self.flops: dict[tuple[float | int, ...], float] = {}
        self.crew = Processes(self._job, workers or os.cpu_count() or 1)

    def clients(self) -> Sequence[str]:
        return self.federation.clients

    def samples(self, client: str) -> int:
        return len(self.federation.train[self.federation.row[client]])

    def holdings(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        part = self.shop.part(task)
        return part.coordinates, part.names

    def estimate(self, task: Task) -> Spent:
        """What a task will cost if its reply is dense."""
        held = self.shop.part(task).held
        names = self.holdings(task)[1]
        return self._spend(task, 4 * (self.size if held is None else len(held)), 4 * sum(size for _, size in names))

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Mapping[str, Mapping[str, Tensor]]) -> Sequence[Reply]:
        self.shared.copy_(w)
        first = sorted(range(len(tasks)), key=lambda i: -self.samples(tasks[i].client) * tasks[i].epochs)
        results = self.crew.run([("train", tasks[i], carry.get(tasks[i].client, {})) for i in first])
        replies = dict(zip(first, results, strict=True))
        return [self._booked(task, replies[i]) for i, task in enumerate(tasks)]

    def evaluate(self, w: Tensor, t: int) -> Evaluation | None:
        """The model on every client's hold-out, in one pass."""
        index, rows = self.federation.judges
        if t % self.eval_every or not len(index):
            return None
        correct, loss = self._judge(w, index)
        count = np.bincount(rows, minlength=len(self.federation.clients))
        right = np.bincount(rows, correct, minlength=len(count))
        judges = count > 0
        return Evaluation(
            accuracy=float((right[judges] / count[judges]).mean()), weighted=float(correct.mean()),
            loss=float(loss.mean()), nbytes=4 * self.size * int(judges.sum()),
        )  # fmt: skip

    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor:
        """Mean loss of w on each client's training samples."""
        parts = [self.federation.train[self.federation.row[client]] for client in clients]
        _, loss = self._judge(w, np.concatenate(parts))
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return torch.tensor([part.mean() for part in np.split(loss, ends)], dtype=torch.float64)

    def close(self) -> None:
        self.crew.close()

    def _job(self, kind: str, what: Task | np.ndarray, carry: Mapping[str, Tensor]) -> Reply | tuple[Tensor, Tensor]:
        """One job in a worker."""
        if isinstance(what, Task):
            return self.shop.train(self.shared, what, self.federation.train[self.federation.row[what.client]], carry)
        return self.shop.evaluate(self.shared, what)

    def _judge(self, w: Tensor, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.shared.copy_(w)
        chunks = np.split(index, range(JUDGED, len(index), JUDGED))
        results = self.crew.run([("evaluate", chunk, {}) for chunk in chunks])
        for result in results:
            if isinstance(result, Dead):
                raise result
        return (
            np.concatenate([correct.numpy() for correct, _ in results]).astype(np.float64),
            np.concatenate([loss.numpy() for _, loss in results]).astype(np.float64),
        )

    def _booked(self, task: Task, reply: Reply | Dead) -> Reply:
        held = self.shop.part(task).held
        down = 4 * (self.size if held is None else len(held)) + sum(4 * x.numel() for x in task.tensors.values())
        if isinstance(reply, Dead):
            reply = Reply(task.client, task.t, error=str(reply))
        up = reply.payload.nbytes if reply.payload else 0
        return replace(reply, spent=self._spend(task, down, up))

    def _spend(self, task: Task, down: int, up: int) -> Spent:
        n = self.samples(task.client)
        epoch = sizes_of(n, task.batch, self.shop.normalised)
        steps = task.epochs * len(epoch) if task.steps is None else task.steps
        samples = float(epoch.sum()) * steps / max(len(epoch), 1)
        return self.fleet[task.client].spend(down, up, samples * self._flops(task), steps, framing=8)

    def _flops(self, task: Task) -> float:
        """Training FLOPs of one sample under this task, counted once per shape."""
        part = self.shop.part(task)
        if part.key not in self.flops:
            self.flops[part.key] = training_flops(copy.deepcopy(part.net).train(), self.federation.source.shape)
        return self.flops[part.key]
