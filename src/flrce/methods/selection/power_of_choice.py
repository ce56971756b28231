"""Power-of-Choice (Cho, Wang & Joshi 2020): of some candidates, those with the largest loss."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import NonNegativeInt
from flrce.core.pieces import Recipe
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection
from flrce.rng import draw_weighted


@dataclass(frozen=True)
class PowerOfChoiceState:
    """Each client's loss when it last trained; infinite before that, so that everyone gets a
    turn.
    """

    loss: Tensor = field(metadata={"rows": "trained", "fill": math.inf})  # (M,)


def impute_sample_counts(n: Tensor) -> Tensor:
    """Samples of each client; whoever has not told (0) is taken for the mean of the others, or
    would never be drawn.

    >>> impute_sample_counts(torch.tensor([30, 0, 10]))
    tensor([30., 20., 10.], dtype=torch.float64)
    """
    counts = n.double()
    is_known = counts > 0
    return (
        torch.where(is_known, counts, counts[is_known].mean()) if bool(is_known.any()) else counts
    )


@dataclass(frozen=True)
class PowerOfChoice(Selector):
    """Draw `candidates` clients in proportion to n_k, ask them for the loss of w, train the P
    worst.

    A client whose n_k nobody knows yet counts as one of mean size. Every candidate downloads w and
    answers with one number; both are booked. `stale` asks nobody and uses the losses of the
    clients' last rounds instead, which is free. `candidates` = 0 draws twice P.
    """

    candidates: NonNegativeInt = 0
    stale: bool = False
    device_agnostic: ClassVar[bool] = True

    def check_recipe(self, recipe: Recipe) -> str:
        if 0 < self.candidates < recipe.P:
            return (
                f"candidates must be at least per_round = {recipe.P}, got {self.candidates}: P are"
                " chosen from them"
            )
        return ""

    def initial_state(self, M: int, d: int, D: int) -> PowerOfChoiceState:
        return PowerOfChoiceState(torch.full((M,), torch.inf, dtype=torch.float64))

    def select(self, state: PowerOfChoiceState, view: RoundView, rng: Generator) -> Selection:
        D = min(max(self.candidates or 2 * view.P, view.P), len(view.pool))
        rows = [
            view.pool[i]
            for i in draw_weighted(
                rng, impute_sample_counts(view.n[torch.tensor(view.pool)]).numpy(), D
            )
        ]
        loss = state.loss[torch.tensor(rows)] if self.stale else view.loss(rows)
        order = loss.argsort(descending=True, stable=True)[: view.P]
        return Selection(
            tuple(rows[i] for i in order),
            exploit=bool(loss.isfinite().any()),
            why={"candidates": D},
        )

    def observe(self, state: PowerOfChoiceState, event: RoundEvent) -> PowerOfChoiceState:
        assert event.updates.loss is not None
        loss = state.loss.clone()
        loss[event.updates.k] = event.updates.loss
        return PowerOfChoiceState(loss)
