"""Enough once the way from the initial model hardly grows: a rule that needs global models
alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.bounds import PositiveFloat, PositiveInt
from flrce.core.roles import StopRule
from flrce.core.types import RoundEvent, RoundRecord

FLOATS_PER_CAST = 2**20  # floats widened to float64 at a time
SMALLEST_DISTANCE = 1e-300


@dataclass(frozen=True)
class DistanceGrowthState:
    """The model before the first round, and how far the last one was from it."""

    model: Tensor  # (D,)
    known: bool = False
    way: float = 0.0


@dataclass(frozen=True)
class DistanceGrowth(StopRule):
    """Stop where the way from the initial model, |w_t - w_0|, grew by less than `rate` a round over
    the last `rounds`.

    After Lee et al. 2026 (arXiv 2601.22669), of which the abstract was read: the growth rate of the
    task vector, seen by the server without validation data. Their constants are not told there;
    ours did best in the study of research/docs/stop.md.
    """

    rate: PositiveFloat = 0.001
    rounds: PositiveInt = 10
    device_agnostic: ClassVar[bool] = True
    reads_evaluations: ClassVar[bool] = False

    @property
    def required_fields(self) -> tuple[str, ...]:
        return ("way",)

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        return self.rounds + 1

    def initial_state(self, M: int, d: int, D: int) -> DistanceGrowthState:
        return DistanceGrowthState(torch.zeros(D))

    def observe(self, state: DistanceGrowthState, event: RoundEvent) -> DistanceGrowthState:
        start = state.model if state.known else event.w.clone()
        d = event.updates.trainable
        total = 0.0
        for before, now in zip(
            start[:d].split(FLOATS_PER_CAST), event.w_next[:d].split(FLOATS_PER_CAST), strict=True
        ):
            total += float((now - before).double().square().sum())
        return replace(state, model=start, known=True, way=total**0.5)

    def distance_from_start(self, state: DistanceGrowthState) -> float:
        """The length of w_t - w_0, of what trains."""
        return state.way

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        ways = [h.diagnostics.way for h in history if h.diagnostics.way is not None]
        if len(ways) <= self.rounds or history[-1].diagnostics.way is None:
            return ""
        before = ways[-self.rounds - 1]
        if not before:
            return ""
        grown = math.log(max(ways[-1], SMALLEST_DISTANCE) / before) / self.rounds
        if grown >= self.rate:
            return ""
        return (
            f"the way from the initial model grew by {grown:.2g} a round < {self.rate:g} over"
            f" {self.rounds} rounds"
        )
