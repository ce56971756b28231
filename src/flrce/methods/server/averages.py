"""The final model: the last model, an exponential average of the models, or the mean of the
last few.

An average costs the server one vector and the clients nothing; BatchNorm statistics are averaged
along.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from flrce.core.bounds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveProportion,
    Proportion,
)
from flrce.core.linalg import LARGE_MODEL_FLOATS
from flrce.core.roles import ServerAverage
from flrce.core.tensor_bytes import allocate_like
from flrce.core.types import RoundEvent

FLOATS_PER_CAST = 2**20  # floats widened to float64 at a time: models can be large
# the same where nothing is summed over them, so that any number gives the same bits
FLOATS_PER_CACHE_BLOCK = 2**16


@dataclass(frozen=True)
class RunningMeanState:
    """A running weighted sum of models."""

    total: Tensor  # (d,) float64
    weight: float = 0.0
    headway: float | None = None  # of the last round
    straight: float = 0.0  # decayed sum of the headways so far
    known: float = 0.0  # and of their weights


@dataclass(frozen=True)
class EMA(ServerAverage):
    """sum decay^(t-s) w_s, divided by the sum of its weights, so that early rounds are not biased
    towards nothing.

    A young average lags behind a model that still learns fast. With `ease` above 0 the way from the
    last model to the average is gone only in part, (1 - decay^t)^ease of it: almost the last model
    at first, the average later. A model that goes straight on leaves its average behind too: with a
    `level` above 0 all of the way is gone only while the mean headway of the rounds is below it,
    less and less of it above, and nothing from twice the level on.
    """

    decay: Annotated[float, Ge(0), Lt(1)] = 0.9
    ease: NonNegativeFloat = 0.0
    level: Proportion = 0.0
    device_agnostic: ClassVar[bool] = True

    def initial_state(self, M: int, d: int, D: int) -> RunningMeanState:
        return RunningMeanState(torch.zeros(D, dtype=torch.float64))

    def observe(self, state: RunningMeanState, event: RoundEvent) -> RunningMeanState:
        total, products = allocate_like(state.total), torch.zeros(3, dtype=torch.float64)
        has_way = state.weight > 1 - self.decay  # after one round the average is w itself
        d = event.updates.trainable
        part = FLOATS_PER_CACHE_BLOCK if d > LARGE_MODEL_FLOATS else FLOATS_PER_CAST
        for start in range(0, len(total), part):  # both sums while a block is in the cache
            block, trained = slice(start, start + part), slice(start, min(start + part, d))
            if has_way and start < d:
                average = state.total[trained] / state.weight
                way = event.w[trained] - average
                step = (event.w_next[trained] - event.w[trained]).double()
                products += torch.stack([way @ step, way @ way, step @ step])
            torch.mul(state.total[block], self.decay, out=total[block])
            total[block].add_(event.w_next[block], alpha=1 - self.decay)
        headway = _compute_headway(products)
        straight, weight = state.straight, state.known
        if headway is not None:
            straight = self.decay * straight + (1 - self.decay) * headway
            weight = self.decay * weight + (1 - self.decay)
        return RunningMeanState(
            total, self.decay * state.weight + 1 - self.decay, headway, straight, weight
        )

    def model(self, state: RunningMeanState, w: Tensor) -> Tensor:
        if not state.weight:
            return w
        share = self._compute_average_share(state)
        if not share:
            return w
        model = allocate_like(w)
        for part, last, total in zip(
            model.split(FLOATS_PER_CACHE_BLOCK),
            w.split(FLOATS_PER_CACHE_BLOCK),
            state.total.split(FLOATS_PER_CACHE_BLOCK),
            strict=True,
        ):
            average = total / state.weight
            part.copy_(torch.lerp(last.double(), average, share) if share < 1 else average)
        return model

    def _compute_average_share(self, state: RunningMeanState) -> float:
        """How much of the way from the last model to the average is gone."""
        eased = float(state.weight**self.ease)
        if not self.level:
            return eased
        if not state.known:  # nothing is known of the way yet
            return 0.0
        return eased * min(max(2 - state.straight / state.known / self.level, 0.0), 1.0)

    def get_headway(self, state: RunningMeanState) -> float | None:
        """Of the round that was observed last."""
        return state.headway


def _compute_headway(products: Tensor) -> float | None:
    """Cosine between a round's step and the way from the average before it to w, from <way, step>,
    <way, way> and <step, step>; None where there is no way.

    w - average is the decayed sum of the past steps: 1 means straight on, below 0 back towards the
    average. What is left of the way after one round is rounding.
    """
    length = math.sqrt(float(products[1] * products[2]))
    return float(products[0]) / length if length else None


#: the final model of our presets: the average, unless it is young or rounds go straight on
#: (research/docs/average.md)
FLRCE_EMA = EMA(ease=4.0, level=0.15)


@dataclass(frozen=True)
class SWA(ServerAverage):
    """The mean of every `every`-th model after the first `after` rounds (Izmailov et al. 2018); the
    last before that.

    One vector, however many models it is of.
    """

    after: NonNegativeInt = 0
    every: PositiveInt = 1
    device_agnostic: ClassVar[bool] = True

    def initial_state(self, M: int, d: int, D: int) -> RunningMeanState:
        return RunningMeanState(torch.zeros(D, dtype=torch.float64))

    def observe(self, state: RunningMeanState, event: RoundEvent) -> RunningMeanState:
        late = event.t - self.after
        if late <= 0 or late % self.every:
            return state
        return RunningMeanState(state.total + event.w_next, state.weight + 1)

    def model(self, state: RunningMeanState, w: Tensor) -> Tensor:
        return (state.total / state.weight).to(w.dtype) if state.weight else w


@dataclass(frozen=True)
class TailState:
    """The last models, oldest first."""

    models: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


@dataclass(frozen=True)
class TailMean(ServerAverage):
    """The mean of the last `last` models."""

    last: Annotated[int, Ge(1), Le(10_000)] = 10
    device_agnostic: ClassVar[bool] = True

    def initial_state(self, M: int, d: int, D: int) -> TailState:
        return TailState()

    def observe(self, state: TailState, event: RoundEvent) -> TailState:
        kept = deque([*state.models.items(), (event.t, event.w_next)], maxlen=self.last)
        return TailState(dict(kept))

    def model(self, state: Any, w: Tensor) -> Tensor:
        return _compute_mean_model(state, w)


@dataclass(frozen=True)
class GrowingTailMean(ServerAverage):
    """The mean of the last `share` of all models so far, rounded up: a window that grows with the
    run (t / 4).

    A fixed tail is a smaller share the longer a run is. It keeps as many models as it averages.
    """

    share: PositiveProportion = 0.25
    device_agnostic: ClassVar[bool] = True

    def initial_state(self, M: int, d: int, D: int) -> TailState:
        return TailState()

    def observe(self, state: TailState, event: RoundEvent) -> TailState:
        oldest = event.t - math.ceil(self.share * event.t - 1e-9) + 1
        kept = {t: model for t, model in state.models.items() if t >= oldest}
        return TailState({**kept, event.t: event.w_next})

    def model(self, state: Any, w: Tensor) -> Tensor:
        return _compute_mean_model(state, w)


def _compute_mean_model(state: TailState, w: Tensor) -> Tensor:
    """The models' mean; w where there are none."""
    if not state.models:
        return w
    total = torch.zeros_like(w, dtype=torch.float64)
    for model in state.models.values():
        total += model.double()
    return (total / len(state.models)).to(w.dtype)
