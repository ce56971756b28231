"""FedJoule (Banerjee et al., Euro-Par 2025): the best clients that a budget of joules pays for.

Reconstructed from the abstract; not verified against the authors' code (README.md beside this
file). A round's share of the budget, each client's value and what it will take in joules and
seconds make an integer programme, and a second one looks for the same in less time.

    rounds = 12
    clients = 12
    per_round = 4
    [recipe]
    base = "fedavg"
    name = "fedjoule"
    selector = { piece = "fedjoule:EnergyBudgetSelector", joules = 12.0 }
    [stop]
    joules = 12.0
    [fleet]
    profile = { phone = 0.5, raspberry-pi-5 = 0.5 }
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat, PositiveProportion, Proportion
from flrce.core.linalg import gram_matrix
from flrce.core.pieces import Recipe
from flrce.core.roles import RoundView, Selector
from flrce.core.types import ClientCost, RoundEvent, RoundRecord, Selection
from flrce.methods.catalogue.recipes import fedavg
from flrce.methods.selection.clustered import MAX_CLIENTS_CONSIDERED
from flrce.methods.stopping.budget import CostBudget

FloatArray = NDArray[np.float64]
DURATION_CUTS = 8  # durations at which the second programme looks
BUDGET_STEPS = 400  # parts of a round's joules that clients' are counted in
TIE_BREAK_NOISE = 1e-6  # of a value: equal ones are told apart by chance


@dataclass(frozen=True)
class EnergyBudgetState:
    """What each client's updates were worth, and when that was last seen."""

    value: Tensor = field(metadata={"rows": "trained"})  # (M,) float64 from 0 to 1
    seen: Tensor = field(metadata={"rows": "trained"})  # (M,) int64 rounds; 0: never


@dataclass(frozen=True)
class EnergyBudgetSelector(Selector):
    """At most P clients of the largest total value that a round's joules pay for, and among choices
    nearly as good (all but `slack` of the value) those that are done first.

    `joules` are for the whole run, shared out evenly over the rounds that are left; 0: each round
    may take `share` of what P clients take on average. A client's value is (1 + cosine of its
    update and the round's mean) / 2, smoothed by `keep`; it goes back to 1 with the rounds for
    which the client was not seen, by `forgets` a round.
    """

    joules: NonNegativeFloat = 0.0
    share: PositiveProportion = 0.5
    slack: Proportion = 0.1
    keep: Proportion = 0.5
    forgets: Proportion = 0.1

    def initial_state(self, M: int, d: int, D: int) -> EnergyBudgetState:
        return EnergyBudgetState(
            torch.ones(M, dtype=torch.float64), torch.zeros(M, dtype=torch.long)
        )

    def observe(self, state: EnergyBudgetState, event: RoundEvent) -> EnergyBudgetState:
        k, new = event.updates.k, alignment_scores(event.updates.u)
        value, seen = state.value.clone(), state.seen.clone()
        value[k] = torch.where(seen[k] > 0, self.keep * value[k] + (1 - self.keep) * new, new)
        seen[k] = event.t
        return EnergyBudgetState(value, seen)

    def compute_client_values(self, state: EnergyBudgetState, rows: Tensor, t: int) -> FloatArray:
        """(rows,) before round t."""
        since = t - 1 - state.seen[rows]
        lost = (1 - state.value[rows]) * (1 - self.forgets) ** since
        return torch.where(state.seen[rows] > 0, 1 - lost, 1.0).numpy()

    def select(self, state: EnergyBudgetState, view: RoundView, rng: Generator) -> Selection:
        pool = rng.permutation(np.array(view.pool, np.int64))[:MAX_CLIENTS_CONSIDERED]
        value = self.compute_client_values(
            state, torch.from_numpy(pool), view.t
        ) + TIE_BREAK_NOISE * rng.random(len(pool))
        tasks = [view.draft(k) for k in pool.tolist()]
        costs = [view.estimate(task) for task in tasks]
        limit = self.compute_energy_limit(view.history, costs, view.P, tasks[0].rounds, view.t)
        picked, lasts = select_quickest_cohort(value, costs, limit, view.P, self.slack)
        if not picked:  # nobody can be paid for: the cheapest, if the whole budget has that much
            picked = [int(np.argmin([cost.joules for cost in costs]))]
        why = {
            "joules_for_the_round": limit,
            "value": float(value[picked].sum()),
            "within_seconds": lasts,
        }
        return Selection(tuple(pool[picked].tolist()), exploit=True, why=why)

    def compute_energy_limit(
        self, history: Sequence[RoundRecord], costs: Sequence[ClientCost], P: int, T: int, t: int
    ) -> float:
        """Joules that round t of T may take."""
        if not self.joules:
            return self.share * P * float(np.mean([cost.joules for cost in costs]))
        left = self.joules - sum(record.joules for record in history)
        return max(left, 0.0) / max(T - t + 1, 1)


def alignment_scores(u: Tensor) -> Tensor:
    """(P,) (1 + cos(u_k, sum of all)) / 2; one half for updates that are nothing.

    The cosine stands for the Shapley value, after Xu et al. 2021 ("gradient-driven rewards").
    """
    G = gram_matrix(u)
    size = (G.diagonal() * G.sum().clamp(min=0)).sqrt()
    return (1 + torch.where(size > 0, G.sum(1) / size.clamp(min=1e-300), 0.0).clamp(-1, 1)) / 2


def select_quickest_cohort(
    value: FloatArray, costs: Sequence[ClientCost], limit: float, P: int, slack: float
) -> tuple[list[int], float | None]:
    """Who trains, and by when they are done: the first of some durations by which nearly the best
    value can be had.

    Whoever is done sooner idles until then, and that is paid for too.
    """
    seconds = np.array([cost.seconds for cost in costs])
    joules = np.array([cost.joules for cost in costs])
    idle = np.array([cost.idle_watts for cost in costs])
    cuts = np.unique(
        np.quantile(seconds, np.linspace(0, 1, DURATION_CUTS + 1)[1:], method="higher")
    )
    found: list[tuple[float, float, list[int]]] = []  # duration, value, who
    for cut in cuts.tolist():
        some = np.flatnonzero(seconds <= cut)
        needs = joules[some] + idle[some] * (cut - seconds[some])
        chosen = [int(some[i]) for i in solve_knapsack(value[some], needs, limit, P)]
        found.append((cut, float(value[chosen].sum()), chosen))
    most = max(total for _, total, _ in found)
    _, _, chosen = next(one for one in found if one[1] >= (1 - slack) * most)
    return sorted(chosen), float(seconds[chosen].max()) if chosen else None


def solve_knapsack(value: FloatArray, joules: FloatArray, limit: float, P: int) -> list[int]:
    """At most P positions of the largest total value whose joules stay within the limit: a knapsack
    with P places.

    Joules are rounded up to a GRID-th of the limit, so that it is kept, and what is chosen is the
    best but for that.
    """
    fits = np.flatnonzero(joules <= limit)
    best = fits[np.argsort(-value[fits], kind="stable")[:P]]
    if joules[best].sum() <= limit:  # the P best can be paid for
        return [int(i) for i in best]
    steps = np.ceil(joules[fits] / limit * BUDGET_STEPS - 1e-9).astype(int)
    # most[c, b]: the largest value of c clients at most that take b steps of the limit at most
    most, takes = (
        np.zeros((P + 1, BUDGET_STEPS + 1)),
        np.zeros((len(fits), P + 1, BUDGET_STEPS + 1), bool),
    )
    for i, (gain, step) in enumerate(zip(value[fits].tolist(), steps.tolist(), strict=True)):
        better = most[:-1, : BUDGET_STEPS + 1 - step] + gain
        takes[i, 1:, step:] = better > most[1:, step:]
        most[1:, step:] = np.maximum(better, most[1:, step:])
    chosen, count, left = [], P, BUDGET_STEPS
    for i in reversed(range(len(fits))):
        if takes[i, count, left]:
            chosen.append(int(fits[i]))
            count, left = count - 1, left - int(steps[i])
    return chosen


def fedjoule(
    joules: float = 0.0, share: float = 0.5, slack: float = 0.1, P: int = 10, **local: Any
) -> Recipe:
    """FedAvg with this selection; a run with `joules` ends with them."""
    base = replace(
        fedavg(P, **local), selector=EnergyBudgetSelector(joules, share, slack), name="fedjoule"
    )
    return replace(base, stop=CostBudget(joules=joules)) if joules else base
