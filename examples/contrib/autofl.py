"""In the manner of AutoFL (Kim and Wu, MICRO 2021): who trains and for how long, by Q-learning from
what it cost and brought.

Reconstructed from the abstract; reward and learning rule are recalled, not verified against the
authors' code (README.md beside this file).

    rounds = 20
    clients = 12
    per_round = 4
    [recipe]
    base = "fedavg"
    name = "autofl"
    selector = "autofl:QLearning"
    trainer = "autofl:QLearning"
    [fleet]
    profile = { phone = 0.5, raspberry-pi-5 = 0.5 }
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Lt, MinLen
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat, PositiveInt, PositiveProportion, Proportion
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView, Selector
from flrce.core.types import RoundEvent, RoundRecord, Selection, Task
from flrce.methods.catalogue.recipes import fedavg

METRIC_DIGITS = 3  # of a percent: engines that sum in another order see the same
NO_GAIN_PENALTY_PERCENT = (
    100.0  # what a round without a gain costs its clients, as AutoFL has it: percent
)


@dataclass(frozen=True)
class QLearningState:
    """Each client's table of actions, and its last work, whose reward may not be known yet."""

    Q: Tensor = field(metadata={"rows": "trained"})  # (M, A) float64
    visits: Tensor = field(metadata={"rows": "trained"})  # (M, A) int64: how often each was taken
    last: Tensor = field(
        metadata={"rows": "trained"}
    )  # (M,) int64: the round of the last work; 0: none is open
    action: Tensor = field(metadata={"rows": "trained"})  # (M,) int64: what was done then
    joules: Tensor = field(metadata={"rows": "trained"})  # (M,) float64: and what it took


@dataclass(frozen=True)
class QLearning(Selector, LocalTrainer):
    """Q-learning with a table for each client; its actions are the `shares` of the recipe's epochs.

    As a selector it takes the P clients of the largest max_a Q(a), with chance `epsilon` any P; as
    a trainer it has each train the share of the largest Q, every share once at first and the least
    tried again every `every`-th time. Q(a) += rate (R + discount max_a Q - Q(a)), with R =
    `accuracy` A + `gain` (A - A') - e - e_round where the headline metric rose from A' to A
    (percent), and A - 100 where it did not. e are the client's joules and e_round the round's mean,
    both as multiples of the first round's mean.
    """

    shares: Annotated[tuple[PositiveProportion, ...], MinLen(1)] = (1.0, 0.6, 0.2)
    epsilon: Proportion = 0.1
    every: PositiveInt = 10
    rate: PositiveProportion = 0.9
    discount: Annotated[float, Ge(0), Lt(1)] = 0.1
    accuracy: NonNegativeFloat = 1.0
    gain: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", tuple(self.shares))  # experiment files have lists

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.pace.buffer_size is not None:
            return (
                "rewards are given round by round, and a buffered pace has replies of several; set"
                " another pace"
            )
        chooser: Any = recipe.selector
        if isinstance(chooser, QLearning) and len(chooser.shares) > 1 and recipe.trainer != chooser:
            return (
                'selector = "autofl:QLearning" wants the same piece, set alike, as trainer; or set shares ='
                " [1.0]"
            )
        return ""

    def initial_state(self, M: int, d: int, D: int) -> QLearningState:
        shape, whole = (M, len(self.shares)), torch.zeros(M, dtype=torch.long)
        Q, visits = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.long)
        return QLearningState(Q, visits, whole, whole.clone(), torch.zeros(M, dtype=torch.float64))

    def select(self, state: QLearningState, view: RoundView, rng: Generator) -> Selection:
        pool = rng.permutation(np.array(view.pool, np.int64))  # equal values are in no order
        if rng.random() < self.epsilon:
            return Selection(tuple(pool[: view.P].tolist()))
        value = self.compute_q_values(state, torch.from_numpy(pool), view.history).amax(1)
        best = value.argsort(descending=True, stable=True)[: view.P]
        return Selection(
            tuple(pool[best.numpy()].tolist()),
            exploit=True,
            why={"least_value": round(float(value[best[-1]]), METRIC_DIGITS)},
        )

    def assign(self, tasks: list[Task], state: QLearningState, view: RoundView) -> list[Task]:
        if not tasks:
            return tasks
        actions = self.choose_actions(state, torch.tensor([task.k for task in tasks]), view.history)
        return [
            _with_epoch_share(task, self.shares[a])
            for task, a in zip(tasks, actions.tolist(), strict=True)
        ]

    def observe(self, state: QLearningState, event: RoundEvent) -> QLearningState:
        """Only rows of those who replied change: what is open of the others is settled when they
        are looked at.
        """
        k = event.updates.k
        did = self.choose_actions(state, k, event.history)
        Q, visits = state.Q.clone(), state.visits.clone()
        last, action, joules = state.last.clone(), state.action.clone(), state.joules.clone()
        Q[k] = self.compute_q_values(state, k, event.history)
        visits[k, did] += 1
        last[k] = event.t
        action[k] = did
        joules[k] = torch.tensor(
            [spent.joules for spent in event.updates.spent], dtype=torch.float64
        )
        return QLearningState(Q, visits, last, action, joules)

    def choose_actions(
        self, state: QLearningState, rows: Tensor, history: Sequence[RoundRecord]
    ) -> Tensor:
        """(rows,) what each of these clients does next: a function of its own row, so that it need
        not be kept.
        """
        visits, times = state.visits[rows], state.visits[rows].sum(1)
        best = self.compute_q_values(state, rows, history).argmax(1)
        tries = (times < len(self.shares)) | (times % self.every == 0)
        return torch.where(tries, visits.argmin(1), best)

    def compute_q_values(
        self, state: QLearningState, rows: Tensor, history: Sequence[RoundRecord]
    ) -> Tensor:
        """(rows, A) Q with the rewards that are known by now."""
        Q = state.Q[rows].clone()
        committed = [record for record in history if record.outcome == "committed"]
        given: dict[int, tuple[float, float] | None] = {}
        for i, (k, t) in enumerate(zip(rows.tolist(), state.last[rows].tolist(), strict=True)):
            if not t:
                continue
            if t not in given:
                given[t] = self._compute_round_reward(committed, t)
            known = given[t]
            if known is None:
                continue
            fixed, per_joule = known
            a = int(state.action[k])
            R = fixed - per_joule * float(state.joules[k])
            Q[i, a] += self.rate * (R + self.discount * float(Q[i].max()) - float(Q[i, a]))
        return Q

    def _compute_round_reward(
        self, committed: Sequence[RoundRecord], t: int
    ) -> tuple[float, float] | None:
        """Round t's reward: what all of its clients get, less so much for each joule; None: it was
        not judged yet.
        """
        before, after = (
            get_metric_percent(committed, t, ahead=False),
            get_metric_percent(committed, t, ahead=True),
        )
        if after is None:
            return None
        if before is not None and after <= before:
            return after - NO_GAIN_PENALTY_PERCENT, 0.0
        rise = 0.0 if before is None else after - before
        unit, mean = (
            joules_per_reply(committed[0]),
            joules_per_reply(next(record for record in committed if record.t == t)),
        )
        fixed = self.accuracy * after + self.gain * rise
        return (fixed - mean / unit, 1 / unit) if unit else (fixed, 0.0)


def get_metric_percent(committed: Sequence[RoundRecord], t: int, ahead: bool) -> float | None:
    """The headline in percent, more being better, of the last model that was judged before round t;
    `ahead`: of the first from then on.
    """
    some = [
        record
        for record in committed
        if (record.t >= t) == ahead and record.last_model_metric is not None
    ]
    if not some:
        return None
    record = some[0] if ahead else some[-1]
    assert record.last_model_metric is not None
    percent = round(100 * record.last_model_metric, METRIC_DIGITS)
    return -percent if record.lower else percent


def joules_per_reply(record: RoundRecord) -> float:
    """Joules a reply."""
    return record.joules / max(len(record.replied), 1)


def _with_epoch_share(task: Task, share: float) -> Task:
    """The task with this share of its epochs, at least one."""
    return replace(task, work=replace(task.work, epochs=max(round(share * task.work.epochs), 1)))


def autofl(
    shares: Sequence[float] = (1.0, 0.6, 0.2),
    epsilon: float = 0.1,
    accuracy: float = 1.0,
    gain: float = 1.0,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FedAvg whose clients, and which of the `shares` of the epochs they train, are learned."""
    learner = QLearning(tuple(shares), epsilon, accuracy=accuracy, gain=gain)
    return replace(fedavg(P, **local), selector=learner, trainer=learner, name="autofl")
