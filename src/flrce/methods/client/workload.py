"""How much a client trains, and how."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from flrce.core.bounds import (
    EpochCount,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveProportion,
    Proportion,
)
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import Task
from flrce.models.part import floor_share
from flrce.rng import make_stream
from flrce.training.optimizers import ProximalTerm

# share of a second or an epoch by which float arithmetic may miss an exact fit
ROUNDING_TOLERANCE = 1e-9


@dataclass(frozen=True)
class PlainTraining(LocalTrainer):
    """Everyone trains as the recipe says."""

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        return tasks


@dataclass(frozen=True)
class ProximalTraining(LocalTrainer):
    """FedProx (Li et al. 2020): training on F_k + mu/2 |w_k - w|^2, or mu |.| per tensor where not
    `squared`.

    Everyone draws an epoch count from `epochs_from` (none: the recipe's) by client and round alone,
    so that methods stay comparable. Of each round's clients the share `stragglers` manages only
    1..E-1 epochs, and still counts.
    """

    mu: NonNegativeFloat = 0.01
    epochs_from: tuple[EpochCount, ...] = ()
    squared: bool = True
    stragglers: Proportion = 0.0

    def __post_init__(self) -> None:
        # experiment files have lists
        object.__setattr__(self, "epochs_from", tuple(self.epochs_from))

    @property
    def links(self) -> tuple[ProximalTerm, ...]:
        return (ProximalTerm(self.mu, self.squared),) if self.mu else ()

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        slow = self._draw_stragglers(tasks)
        return [with_epochs(task, self._draw_epochs(task, task.client in slow)) for task in tasks]

    def _draw_epochs(self, task: Task, slow: bool) -> int:
        rng = make_stream(task.seed, "epochs", task.t, task.client)
        if slow and task.work.epochs > 1:
            return int(rng.integers(1, task.work.epochs))
        return int(rng.choice(self.epochs_from)) if self.epochs_from else task.work.epochs

    def _draw_stragglers(self, tasks: list[Task]) -> set[str]:
        """This round's stragglers: an exact share, as in the authors' code."""
        count = round(self.stragglers * len(tasks))
        if not count:
            return set()
        clients = sorted(task.client for task in tasks)
        return {
            clients[i]
            for i in make_stream(tasks[0].seed, "stragglers", tasks[0].t).permutation(len(clients))[
                :count
            ]
        }


@dataclass(frozen=True)
class FrozenBlocksTraining(LocalTrainer):
    """Blocks before `first` stay as they are: not trained, not sent, their BatchNorms in eval mode.

    With `seconds`, only for clients whose device would take longer than that to train everything.
    """

    first: NonNegativeInt = 1
    seconds: NonNegativeFloat = 0.0

    @property
    def needs_layer_chain(self) -> bool:
        return self.first > 0

    @property
    def frozen_blocks(self) -> int:
        return self.first

    @property
    def partial(self) -> bool:
        return self.first > 0

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        if not self.first:
            return tasks
        return [
            with_frozen_blocks(task, self.first)
            if not self.seconds or view.estimate(task).seconds > self.seconds
            else task
            for task in tasks
        ]


@dataclass(frozen=True)
class DeadlineTraining(LocalTrainer):
    """TimelyFL (Zhang et al. 2023): whoever is slow trains less, so that all report by T_k.

    T_k is the k-th shortest estimate of a whole task, k = share * n. A client runs the epochs that
    fit, at most the recipe's where `clip` is set (as FLrce describes the method) and at least one.
    One that cannot finish an epoch freezes input-side blocks: as few as bring its FLOPs down to
    alpha = T_k / (t_cmp + t_com), but never the last, and none of a network that is no chain of
    layers. Later replies are refused; where durations are measured they vary, and `grace` is the
    share of T_k by which a reply may miss it. A client of unknown pace trains as planned, without a
    deadline, and is measured by that.
    """

    share: PositiveProportion = 0.5
    clip: bool = True
    grace: NonNegativeFloat = 0.0
    partial: ClassVar[bool] = True  # a reply may cover only some coordinates
    changes_coordinates: ClassVar[bool] = True  # and others in the next round

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        estimates = [view.estimate(with_epochs(task, 1)) for task in tasks]
        totals = sorted(
            task.work.epochs * one.compute_seconds + one.transfer_seconds
            for task, one in zip(tasks, estimates, strict=True)
            if one.seconds > 0
        )
        if not totals:
            return tasks  # nobody's pace is known yet
        T_k = totals[floor_share(self.share, len(totals)) - 1]
        return [
            self._fit_to_deadline(task, one.compute_seconds, one.transfer_seconds, T_k, view)
            if one.seconds > 0
            else task
            for task, one in zip(tasks, estimates, strict=True)
        ]

    def _fit_to_deadline(
        self, task: Task, t_cmp: float, t_com: float, T_k: float, view: RoundView
    ) -> Task:
        """The task cut down to T_k."""
        fits = int((T_k - t_com) / t_cmp + ROUNDING_TOLERANCE) if t_cmp else task.work.epochs
        alpha = min(T_k / (t_cmp + t_com), 1.0) if t_cmp + t_com else 1.0
        first = find_first_trained_block(with_epochs(task, 1), alpha, view) if alpha < 1 else 0
        many = max(min(fits, task.work.epochs) if self.clip else fits, 1)
        return replace(
            with_frozen_blocks(with_epochs(task, many), first),
            deadline=T_k * (1 + self.grace + ROUNDING_TOLERANCE),
        )


def with_epochs(task: Task, many: int) -> Task:
    """The task with so many epochs."""
    return replace(task, work=replace(task.work, epochs=many))


def with_frozen_blocks(task: Task, first: int) -> Task:
    """The task with the blocks before `first` frozen."""
    return replace(task, part=replace(task.part, first=first))


def find_first_trained_block(task: Task, alpha: float, view: RoundView) -> int:
    """The first trained block: the lowest whose share of the FLOPs is at most alpha, or else the
    last one.
    """
    full = view.estimate(task).flops
    fits = (
        first
        for first in range(view.blocks)
        if view.estimate(with_frozen_blocks(task, first)).flops <= alpha * full
    )
    return next(fits, view.blocks - 1)
