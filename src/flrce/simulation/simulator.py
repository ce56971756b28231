"""The embedded engine: a whole federation on one machine, its costs modelled by the fleet's device
profiles.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.core.downlink import HeldPart
from flrce.core.engine import Engine
from flrce.core.types import (
    ClientCost,
    ClientEvaluation,
    ClientStates,
    Evaluation,
    PendingTask,
    PrimaryMetric,
    RepliesWithTable,
    Reply,
    Task,
)
from flrce.data.federation import Federation
from flrce.devices.cost_models import CostModel
from flrce.devices.costs import DeviceProfile
from flrce.devices.fleet_model import FleetDynamics
from flrce.errors import BadInput, format_one_line
from flrce.simulation.cost_model import FleetCostModel
from flrce.simulation.workers import SampleScores, TaskInputs, WorkerFailure, Workers
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner, find_personal_state
from flrce.training.free_riders import make_free_rider_reply
from flrce.training.metrics import BoundedMetric, MeanMetric, MetricLike
from flrce.training.objectives import Classification, Objective

#: a model, samples, and the client of each sample
ScoringJob = tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]
MAX_BREAKDOWN_CLIENTS = 100_000  # clients of whom each gets a figure at the end


@dataclass(frozen=True, eq=False)
class SimulatedFleet:
    """The devices of the clients."""

    devices: Mapping[str, DeviceProfile]  # client -> the device that it trains on
    dynamics: FleetDynamics | None = None  # None: everyone can be reached all the time
    cost_model: CostModel | None = None  # has the last word on costs


class Simulator(Engine):
    """P clients of a federation trained by whatever workers there are; same bits whatever their
    number.
    """

    def __init__(
        self,
        federation: Federation,
        net: nn.Module,
        fleet: SimulatedFleet,
        make_workers: Callable[[ClientRunner], Workers],
        eval_every: int = 1,
        objective: Objective = Classification(),
        personal: Sequence[str] = (),
    ) -> None:
        source = federation.source
        self.fleet_dynamics = fleet.dynamics
        self.federation, self.fleet, self.eval_every = federation, fleet.devices, eval_every
        samples = Samples(federation.x, federation.y, source.scale, source.shift)
        self.runner = ClientRunner(net, source.shape, samples, objective=objective, kept=personal)
        self.trainable, self.size = self.runner.layout.trainable, self.runner.layout.size
        self.shapes = tuple((slot.name, slot.shape) for slot in self.runner.layout.slots)
        self.blocks = self.runner.blocks
        self.costs = FleetCostModel(self.runner, federation, fleet.devices, fleet.cost_model)
        self.workers = make_workers(self.runner)

    @property
    def updates_on_device(self) -> bool:
        """Whether a round's updates stay on the device."""
        return self.workers.updates_on_device

    @property
    def code_device(self) -> torch.device:
        return self.workers.code_device

    @property
    def device_lock(self) -> AbstractContextManager[Any]:
        return self.workers.device_lock

    @property
    def worker_processes(self) -> tuple[int, int]:
        """Worker processes, and bytes that each takes."""
        return self.workers.worker_processes

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:
        self.workers.remember_device_copy(w, there)

    @property
    def model_bytes(self) -> int:
        """Bytes of the model as clients receive it."""
        return self.costs.model_bytes

    def clients(self, t: int = 1) -> Sequence[str]:
        return self.federation.clients

    def count_samples(self, client: str) -> int:
        return len(self._get_client_samples(client))

    def get_task_layout(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        part = self.runner.get_part(task)
        return part.coordinates, part.names

    def estimate(self, task: Task) -> ClientCost:
        return self.costs.estimate(task)

    def begin_round(self, now: float) -> None:
        self.costs.now = now

    def estimate_round(self, tasks: Sequence[Task]) -> Sequence[ClientCost]:
        return self.costs.estimate_round(tasks)

    def train(
        self, pending: Sequence[PendingTask], client_states: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        judged = self._evaluate_on_clients(
            [one for one in pending if self.costs.count_holdout_samples(one.task)], client_states
        )
        riding = self.federation.trouble.riding
        honest = [one for one in pending if one.task.client not in riding]
        trained = self.workers.train([self._collect_inputs(one, client_states) for one in honest])
        replies = dict(zip((one.task.client for one in honest), trained, strict=True))
        for one in pending:
            task = one.task
            if task.client in riding:
                n, own = self.count_samples(task.client), client_states.get(task.client, {})
                replies[task.client] = make_free_rider_reply(
                    self.runner, one.w, task, riding[task.client], n, own
                )
        answers = [_to_reply(one.task, replies[one.task.client]) for one in pending]
        booked = self.costs.book_costs(pending, answers)
        evaluated = [replace(reply, judged=judged.get(reply.client)) for reply in booked]
        if not isinstance(trained, RepliesWithTable):
            return evaluated
        return RepliesWithTable(
            evaluated, trained.table if len(honest) == len(pending) else None, trained.sent
        )

    def _collect_inputs(self, one: PendingTask, client_states: ClientStates) -> TaskInputs:
        task = one.task
        samples = self._get_client_samples(task.client, task.t)
        return one.w, task, samples, client_states.get(task.client, {})

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, client_states: ClientStates | None = None
    ) -> Evaluation | None:
        """The model on every client's hold-out, in one pass; in the rounds that are due, and in the
        `last` one.
        """
        index, rows = self.federation.holdout_index
        if (t % self.eval_every and not last) or not len(index):
            return None
        numbers = self._score_samples(w, client_states or {}, index, rows)
        return build_evaluation(self.runner.objective, numbers, rows, self.model_bytes)

    def break_down_metric(self, w: Tensor, client_states: ClientStates) -> dict[str, Any] | None:
        """The primary metric of w for each client and, where labels are classes, each class; None:
        no hold-outs.
        """
        index, rows = self.federation.holdout_index
        source, head = self.federation.source, self.runner.objective.evaluation_metrics[0]
        if not len(index) or len(self.federation.clients) > MAX_BREAKDOWN_CLIENTS:
            return None
        numbers = self._score_samples(w, client_states, index, rows)[head.name]
        by_client = compute_group_metrics(head, numbers, rows, len(self.federation.clients))
        table: dict[str, Any] = {"metric": head.name, "clients": by_client}
        if source.kind == "classes":
            labels = np.asarray(source.y)[index]
            table["classes"] = compute_group_metrics(head, numbers, labels, len(source.classes))
            table["held"] = np.bincount(labels, minlength=len(source.classes)).tolist()
        return table

    def _score_samples(
        self,
        w: Tensor,
        client_states: ClientStates,
        index: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> SampleScores:
        """Numbers of every sample; rows: the client of each."""
        return self._score_models([(w, index, rows)], client_states)[0]

    def _score_models(
        self, jobs: Sequence[ScoringJob], client_states: ClientStates
    ) -> list[SampleScores]:
        """Numbers of every sample of each job: at once, or client by client where some have
        parameters of their own.
        """
        owns = {
            client: own
            for client, kept in client_states.items()
            if (own := find_personal_state(kept)) is not None
        }
        if not self.runner.layout.personal and not owns:
            return self.workers.score_models([(w, index) for w, index, _ in jobs])
        scores = []
        for w, index, rows in jobs:
            parts = [
                self.workers.score_samples(
                    w, index[rows == row], owns.get(self.federation.clients[row])
                )
                for row in np.unique(rows)
            ]
            scores.append(
                {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            )
        return scores

    @property
    def primary_metric(self) -> PrimaryMetric:
        return build_primary_metric(self.runner.objective)

    def _evaluate_on_clients(
        self, pending: Sequence[PendingTask], client_states: ClientStates
    ) -> dict[str, ClientEvaluation]:
        """What each of these clients makes of the model that it starts from on its hold-out; a
        figure that is none is left out.
        """
        groups = group_by_identity([one.w for one in pending])
        jobs = [
            self._list_holdouts(pending[group[0]].w, [pending[i].task.client for i in group])
            for group in groups
        ]
        head = self.runner.objective.evaluation_metrics[0]
        evaluations: dict[str, ClientEvaluation] = {}
        scores = self._score_models(jobs, client_states)
        for (_, _, rows), numbers in zip(jobs, scores, strict=True):
            values = compute_client_metrics(head, numbers[head.name], rows).tolist()
            for row, value in zip(dict.fromkeys(rows.tolist()), values, strict=True):
                if math.isfinite(value):
                    held = len(self.federation.held[row])
                    evaluations[self.federation.clients[row]] = ClientEvaluation(value, held)
        return evaluations

    def _list_holdouts(self, w: Tensor, clients: Sequence[str]) -> ScoringJob:
        """w on the hold-outs of these clients."""
        order = sorted(self.federation.client_indices[client] for client in clients)
        held = [self.federation.held[row] for row in order]
        return w, np.concatenate(held), np.repeat(order, [len(part) for part in held])

    def losses(self, models: Sequence[Tensor], clients: Sequence[str]) -> Tensor:
        """Mean loss of each client's model on its training samples."""
        losses = torch.zeros(len(clients), dtype=torch.float64)
        groups = group_by_identity(models)
        parts = [[self._get_client_samples(clients[i]) for i in group] for group in groups]
        scores = self.workers.score_models(
            [
                (models[group[0]], np.concatenate(mine))
                for group, mine in zip(groups, parts, strict=True)
            ]
        )
        for group, mine, numbers in zip(groups, parts, scores, strict=True):
            ends = np.cumsum([len(part) for part in mine])[:-1]
            for i, part in zip(group, np.split(numbers["loss"], ends), strict=True):
                losses[i] = part.mean()
        return losses

    def estimate_inquiry(self, client: str, down: int) -> ClientCost:
        return self.costs.estimate_inquiry(client, down)

    def estimate_evaluation(self, t: int) -> list[tuple[str, ClientCost]]:
        return [] if t % self.eval_every else self.costs.estimate_evaluation()

    def close(self) -> None:
        self.workers.close()

    def _get_client_samples(self, client: str, t: int = 1) -> NDArray[np.int64]:
        """A client's training samples in round t."""
        return self.federation.get_client_samples(client, t)

    def get_held_part(self, task: Task) -> HeldPart:
        return self.runner.get_held_part(task)


def _to_reply(task: Task, reply: Reply | WorkerFailure) -> Reply:
    if isinstance(reply, WorkerFailure):
        return Reply(task.client, task.t, error=str(reply))
    return reply


def group_by_identity(values: Sequence[object]) -> list[list[int]]:
    """Places of values that are one object, in the order of their first places."""
    groups: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(id(value), []).append(i)
    return list(groups.values())


def build_evaluation(
    objective: Objective, numbers: SampleScores, rows: NDArray[np.int64], model: int
) -> Evaluation:
    """`rows` says whose sample each is, `model` what it costs to send the model to one client that
    judges it.
    """
    judges = objective.evaluation_metrics
    metrics = {
        judge.name: _mean_of_finite(compute_client_metrics(judge, numbers[judge.name], rows))
        for judge in judges
    }
    pooled = {judge.name: compute_metric(judge, numbers[judge.name]) for judge in judges}
    head = judges[0]
    return Evaluation(
        metrics[head.name],
        pooled[head.name],
        float(numbers["loss"].mean()),
        model * len(np.unique(rows)),
        head.name,
        head.better == "lower",
        metrics,
        pooled,
    )


def build_primary_metric(objective: Objective) -> PrimaryMetric:
    """The objective's primary metric."""
    head = objective.evaluation_metrics[0]
    low, high = (head.low, head.high) if isinstance(head, BoundedMetric) else (-math.inf, math.inf)
    return PrimaryMetric(head.name, head.better == "lower", float(low), float(high))


def compute_client_metrics(
    judge: MetricLike, numbers: NDArray[np.float64], rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """A figure for each client that has samples, in the order of their rows."""
    if isinstance(judge, MeanMetric) and judge.mean:
        count = np.bincount(rows)
        return (np.bincount(rows, numbers) / np.maximum(count, 1))[count > 0]
    edges = np.flatnonzero(np.diff(rows)) + 1  # rows are in order
    return np.array([compute_metric(judge, part) for part in np.split(numbers, edges)])


def compute_metric(judge: MetricLike, numbers: NDArray[np.float64]) -> float:
    """A metric of these samples' numbers; BadInput names one that fails."""
    try:
        return float(judge.value(numbers))
    except Exception as why:  # the user's own code
        raise BadInput(
            f"the metric {judge.name!r} fails on {len(numbers)} samples: {type(why).__name__}:"
            f" {format_one_line(why, 160)}; let its value give a number, NaN where there is none"
        ) from why


def compute_group_metrics(
    judge: MetricLike, numbers: NDArray[np.float64], groups: NDArray[np.int64], count: int
) -> list[float | None]:
    """A metric for each of `count` groups of samples, by client or by class; None for a group
    without samples.
    """
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(1, count))
    parts = np.split(numbers[order], edges)
    values = [compute_metric(judge, part) if len(part) else math.nan for part in parts]
    return [value if math.isfinite(value) else None for value in values]


def _mean_of_finite(values: NDArray[np.float64]) -> float:
    """Over the clients that have a figure: an area under a curve needs both classes."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
