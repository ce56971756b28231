"""The embedded engine: a whole federation on one machine, its costs modelled by the fleet's device profiles."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.data.federation import Federation
from flrce.engine import Near, Staffed
from flrce.engines.judging import breakdown, evaluation, per_client, yardstick
from flrce.engines.pool import Dead
from flrce.engines.workers import Numbers, Workers
from flrce.fleet.costs import Profile, inference_flops, training_flops
from flrce.fleet.life import Life
from flrce.local.batches import sizes_of, steps_of
from flrce.local.client import Runner, own_of
from flrce.local.freeride import ride
from flrce.local.link import Estimates
from flrce.local.objective import Classification, Objective
from flrce.local.trainer import CHUNK
from flrce.models.part import trainee
from flrce.payload_bytes import count_bytes, count_value_bytes
from flrce.round.uploads import estimate_upload_bytes
from flrce.types import Carry, Evaluation, Judged, Laid, Reply, Spent, Task, Yardstick

MOST = 100_000  # clients of whom each gets a figure at the end


class Simulator:
    """P clients of a federation trained by whatever workers there are; same bits whatever their number."""

    def __init__(
        self, federation: Federation, net: nn.Module, fleet: Mapping[str, Profile], hire: Callable[[Runner], Workers],
        eval_every: int = 1, objective: Objective = Classification(), kept: Sequence[str] = (),
        there: Callable[[str, int], bool] | None = None, life: Life | None = None,
    ) -> None:  # fmt: skip
        source = federation.source
        self.life = life  # by the clock; None: everyone is there all the time
        self.there = there  # (client, round) -> whether it can be reached; None: always
        self.federation, self.fleet, self.eval_every, self.tokens = federation, fleet, eval_every, source.tokens
        self.runner = Runner(
            net, source.shape, federation.x, federation.y, source.scale, source.shift, objective=objective, kept=kept
        )
        self.trainable, self.size = self.runner.layout.trainable, self.runner.layout.size
        self.shapes = tuple((slot.name, slot.shape) for slot in self.runner.layout.slots)
        self.blocks = self.runner.blocks
        self.flops: dict[tuple[float | int, ...], float] = {}
        self.workers = hire(self.runner)

    judges_once = False

    @property
    def near(self) -> bool:
        """Whether a round's updates stay on the device."""
        return isinstance(self.workers, Near) and self.workers.near

    @property
    def turn(self) -> AbstractContextManager[Any]:
        return self.workers.turn if isinstance(self.workers, Near) else nullcontext()

    @property
    def staff(self) -> tuple[int, int]:
        """Worker processes, and bytes that each takes."""
        return self.workers.staff if isinstance(self.workers, Staffed) else (0, 0)

    def hold(self, w: Tensor, there: Tensor) -> None:
        if isinstance(self.workers, Near):
            self.workers.hold(w, there)

    @property
    def model_bytes(self) -> int:
        """Bytes of the model as clients receive it."""
        return count_value_bytes(self.size)

    def clients(self, t: int = 1) -> Sequence[str]:
        if self.there is None or t < 1:
            return self.federation.clients
        return [client for client in self.federation.clients if self.there(client, t)]

    def samples(self, client: str) -> int:
        return len(self._own(client))

    def holdings(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        part = self.runner.part(task)
        return part.coordinates, part.names

    def estimate(self, task: Task) -> Spent:
        """What a task will cost; its reply counts as dense where its compressor does not know what it will weigh."""
        up = estimate_upload_bytes(task, self.holdings(task)[1], self.trainable)
        return self._spend(task, self._down(task), up)

    def accept(self, task: Task) -> Task:
        return task

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Carry, keep: int | None = None) -> Sequence[Reply]:
        judged = self._judged(w, [task for task in tasks if self._held(task)], carry)
        riding = self.federation.trouble.riding
        honest = [task for task in tasks if task.client not in riding]
        orders = [(task, self._own(task.client, task.t), carry.get(task.client, {})) for task in honest]
        trained = self.workers.train(w, orders)
        replies = dict(zip((task.client for task in honest), trained, strict=True))
        for task in tasks:
            if task.client in riding:
                n, own = self.samples(task.client), carry.get(task.client, {})
                replies[task.client] = ride(self.runner, w, task, riding[task.client], n, own)
        booked = [self._booked(task, replies[task.client]) for task in tasks]
        found = [replace(reply, judged=judged.get(reply.client)) for reply in booked]
        if not isinstance(trained, Laid):
            return found
        return Laid(found, trained.table if len(honest) == len(tasks) else None, trained.sent)

    def evaluate(self, w: Tensor, t: int, last: bool = False, carry: Carry | None = None) -> Evaluation | None:
        """The model on every client's hold-out, in one pass; in the rounds that are due, and in the `last` one."""
        index, rows = self.federation.judges
        if (t % self.eval_every and not last) or not len(index):
            return None
        numbers = self._judge(w, carry or {}, index, rows)
        return evaluation(self.runner.objective, numbers, rows, self.model_bytes)

    def breakdown(self, w: Tensor, carry: Carry) -> dict[str, Any] | None:
        """The headline metric of w for each client and, where labels are classes, each class; None: no hold-outs."""
        index, rows = self.federation.judges
        source, head = self.federation.source, self.runner.objective.judges[0]
        if not len(index) or len(self.federation.clients) > MOST:
            return None
        numbers = self._judge(w, carry, index, rows)[head.name]
        by_client = breakdown(head, numbers, rows, len(self.federation.clients))
        found: dict[str, Any] = {"metric": head.name, "clients": by_client}
        if source.kind == "classes":
            labels = np.asarray(source.y)[index]
            found["classes"] = breakdown(head, numbers, labels, len(source.classes))
            found["held"] = np.bincount(labels, minlength=len(source.classes)).tolist()
        return found

    def _judge(self, w: Tensor, carry: Carry, index: NDArray[np.int64], rows: NDArray[np.int64]) -> Numbers:
        """Numbers of every sample: in one pass, or client by client where some have parameters of their own."""
        owns = {client: own for client, kept in carry.items() if (own := own_of(kept)) is not None}
        if not self.runner.layout.kept and not owns:
            return self.workers.judge(w, index)
        parts = []
        for row in np.unique(rows):
            parts.append(self.workers.judge(w, index[rows == row], owns.get(self.federation.clients[row])))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @property
    def yardstick(self) -> Yardstick:
        return yardstick(self.runner.objective)

    def _held(self, task: Task) -> int:
        """Samples on which a client judges the model it is sent: none where it is sent only a part."""
        if not task.judge or self.runner.part(task).held is not None:
            return 0
        return len(self.federation.held[self.federation.row[task.client]])

    def _judged(self, w: Tensor, tasks: Sequence[Task], carry: Carry) -> dict[str, Judged]:
        """What each of these clients makes of w on its hold-out, all in one pass; a figure that is none is left out."""
        if not tasks:
            return {}
        order = sorted(self.federation.row[task.client] for task in tasks)
        held = [self.federation.held[row] for row in order]
        rows = np.repeat(order, [len(part) for part in held])
        head = self.runner.objective.judges[0]
        numbers = self._judge(w, carry, np.concatenate(held), rows)[head.name]
        figures = zip(order, held, per_client(head, numbers, rows).tolist(), strict=True)
        return {
            self.federation.clients[row]: Judged(value, len(part))
            for row, part, value in figures
            if math.isfinite(value)
        }

    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor:
        """Mean loss of w on each client's training samples."""
        parts = [self._own(client) for client in clients]
        loss = self.workers.judge(w, np.concatenate(parts))["loss"]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return torch.tensor([part.mean() for part in np.split(loss, ends)], dtype=torch.float64)

    def inquiry(self, client: str, down: int) -> Spent:
        """What it costs a client to receive `down` bytes and judge w on its training samples."""
        n = self.samples(client)
        return self.fleet[client].spend(down, 0, n * self._look, -(-n // CHUNK))

    def close(self) -> None:
        self.workers.close()

    def _own(self, client: str, t: int = 1) -> NDArray[np.int64]:
        """A client's training samples in round t."""
        return self.federation.samples(client, t)

    def _booked(self, task: Task, reply: Reply | Dead) -> Reply:
        if isinstance(reply, Dead):
            reply = Reply(task.client, task.t, error=str(reply))
        up = (reply.payload.nbytes if reply.payload else 0) + count_bytes(reply.extras)
        return replace(reply, spent=self._spend(task, self._down(task), up))

    def _down(self, task: Task) -> int:
        """Bytes that a client receives: what it holds of the model, and the task's further tensors."""
        held = self.runner.part(task).held
        model = self.model_bytes if held is None else count_value_bytes(len(held))
        return model + count_bytes(task.tensors)

    def _spend(self, task: Task, down: int, up: int) -> Spent:
        n = self.samples(task.client)
        epoch = sizes_of(n, task.work.batch, self.runner.normalised)
        steps = steps_of(task, len(epoch))
        epochs, rest = divmod(steps, max(len(epoch), 1))
        passes = 1.0 if task.update is None else task.update.passes
        samples = float(epochs * epoch.sum() + epoch[:rest].sum())  # an epoch's last batch is smaller than the others
        flops, held = samples * self._flops(task) * passes, self._held(task)
        if not held:
            return self.fleet[task.client].spend(down, up, flops, steps, framing=8)
        look = held * self._look  # the model is judged first; the figure and its count are eight bytes more
        return self.fleet[task.client].spend(down, up, flops + look, steps + -(-held // CHUNK), framing=16)

    @property
    def _look(self) -> float:
        """FLOPs to judge one sample."""
        if (1.0, -1) not in self.flops:
            self.flops[(1.0, -1)] = inference_flops(self.runner.net, self.runner.shape, tokens=self.tokens)
        return self.flops[(1.0, -1)]

    def _flops(self, task: Task) -> float:
        """Training FLOPs of one sample under this task, counted once per shape."""
        part, shape = self.runner.part(task), self.runner.shape
        looks = sum(link.looks for link in task.update.links if isinstance(link, Estimates)) if task.update else 0
        key = (*part.key, looks)
        if key not in self.flops and looks:
            self.flops[key] = looks * inference_flops(part.net, shape, tokens=self.tokens)
        elif key not in self.flops:
            self.flops[key] = training_flops(trainee(part, shape), shape, tokens=self.tokens)
        return self.flops[key]
