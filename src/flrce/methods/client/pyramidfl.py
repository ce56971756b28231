"""PyramidFL's client side (Li et al., MobiCom 2022): how much each chosen client trains and
uploads.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat, Percent, Proportion
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.methods.client.workload import with_epochs

# times its steps that a client gets on top of them at most, whatever `most` says (released code)
MAX_EXTRA_STEPS_RATIO = 10


@dataclass(frozen=True)
class PyramidState:
    """How much each client's last update mattered."""

    # (M,) |u| n; -1: never seen
    utility: Tensor = field(metadata={"rows": "trained", "fill": -1.0})


@dataclass(frozen=True)
class PyramidTraining(LocalTrainer):
    """The original: clients that would wait train longer instead, and unimportant ones upload less.

    The P fastest are ranked by |u| n (by n where never seen): rank r drops each tensor of its
    upload with probability low + r (high - low) / P, through a compressor with a `rate`. Whoever is
    done before the slowest of them trains on until then, up to `most` times its own steps
    (research/docs/departures.md says how this reads the released code's cap).
    """

    low: Proportion = 0.1
    high: Proportion = 0.6
    beta: NonNegativeFloat = 1.0
    most: Annotated[float, Ge(1), Le(1000)] = 5.0  # times the steps of a plain task

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < 1:
            raise ValueError(
                f"0 <= low <= high < 1 must hold, got low {self.low}, high {self.high}"
            )

    def check_recipe(self, recipe: Recipe) -> str:
        if self.high > 0 and recipe.compressor.rate is None:
            return (
                'upload dropout needs a compressor with a rate; add compressor = "drop-tensors", or'
                " set high = 0"
            )
        return ""

    def initial_state(self, M: int, d: int, D: int) -> PyramidState:
        return PyramidState(torch.full((M,), -1.0, dtype=torch.float64))

    def observe(self, state: PyramidState, event: RoundEvent) -> PyramidState:
        utility = state.utility.clone()
        norms = torch.linalg.vector_norm(event.updates.u, dim=1, dtype=torch.float64)
        utility[event.updates.k] = norms * event.updates.n
        return PyramidState(utility)

    def assign(self, tasks: list[Task], state: PyramidState, view: RoundView) -> list[Task]:
        # of whole uploads
        costs = {task.k: view.estimate(with_compressor_rate(task, 0.0)) for task in tasks}
        running = sorted(costs, key=lambda k: (costs[k].seconds, k))[: view.P]
        utility = state.utility
        matters = {k: float(utility[k]) if utility[k] >= 0 else float(view.n[k]) for k in running}
        ranks = {k: r for r, k in enumerate(sorted(running, key=lambda k: (-matters[k], k)))}
        rates = {
            k: self.low + ranks.get(k, len(running) - 1) * (self.high - self.low) / len(running)
            for k in costs
        }
        seconds = {
            k: c.compute_seconds + (1 - rates[k]) * c.transfer_seconds for k, c in costs.items()
        }
        end = max((seconds[k] for k in running), default=0.0)
        done = []
        for task in tasks:
            steps = costs[task.k].batches
            extra_steps = (
                self._count_extra_steps(end - seconds[task.k], costs[task.k].compute_seconds, steps)
                if task.k in ranks
                else 0
            )
            if extra_steps:
                max_steps = int(self.most * steps)
                task = replace(
                    task, work=replace(task.work, steps=min(steps + extra_steps, max_steps))
                )
            done.append(with_compressor_rate(task, rates[task.k]))
        return done

    def _count_extra_steps(self, spare: float, compute: float, steps: int) -> int:
        """Further steps that fit into the seconds to spare."""
        if not steps or not compute or spare <= 0:
            return 0
        return int(
            min(MAX_EXTRA_STEPS_RATIO * steps, self.beta * math.floor(spare / (compute / steps)))
        )


@dataclass(frozen=True)
class FewerEpochs(LocalTrainer):
    """As FLrce's authors describe PyramidFL: E_i = clip(floor(E T / t_i), 1, E), and whole uploads.

    T is the `percentile` of the durations of all reachable clients that are known. Who was never
    measured trains E.
    """

    percentile: Percent = 10.0

    def assign(self, tasks: list[Task], state: object, view: RoundView) -> list[Task]:
        estimates = [view.estimate(view.draft(k)).seconds for k in view.pool]
        seconds = sorted(one for one in estimates if one > 0)  # 0: not known
        preferred = (
            seconds[min(int(len(seconds) * self.percentile / 100), len(seconds) - 1)]
            if seconds
            else 0.0
        )
        return [
            with_epochs(
                task, self._count_epochs(task.work.epochs, preferred, view.estimate(task).seconds)
            )
            for task in tasks
        ]

    def _count_epochs(self, most: int, preferred: float, seconds: float) -> int:
        return min(max(int(most * preferred / seconds), 1), most) if seconds > 0 else most


def with_compressor_rate(task: Task, rate: float) -> Task:
    """The task with its compressor's rate set, where it has one."""
    compressor: Any = task.compressor
    if compressor is not None and compressor.rate is not None:
        tuned: Any = replace(compressor, rate=rate)
        return replace(task, compressor=tuned)
    return task
