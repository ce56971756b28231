"""What is handed back: the last model, an exponential average of the models, or the mean of the last few.

An average costs the server one vector and the clients nothing; BatchNorm statistics are averaged along.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flrce.types import Event


@dataclass(frozen=True)
class Mean:
    """A running weighted sum of models."""

    total: Tensor  # (d,) float64
    weight: float = 0.0


@dataclass(frozen=True)
class EMA:
    """sum decay^(t-s) w_s, divided by the sum of its weights, so that early rounds are not biased towards nothing."""

    decay: float = 0.9

    def init(self, M: int, d: int, D: int) -> Mean:
        return Mean(torch.zeros(D, dtype=torch.float64))

    def observe(self, memory: Mean, event: Event) -> Mean:
        w = event.w_next.double()
        return Mean(self.decay * memory.total + (1 - self.decay) * w, self.decay * memory.weight + 1 - self.decay)

    def model(self, memory: Mean, w: Tensor) -> Tensor:
        return (memory.total / memory.weight).to(w.dtype) if memory.weight else w

    def headway(self, memory: Mean, event: Event) -> float | None:
        """Cosine between the round's step and the way from the average before it to w; None where there is no way.

        w - average is the decayed sum of the past steps: 1 means straight on, below 0 back towards the average.
        """
        d = event.updates.trainable
        way = event.w[:d] - memory.total[:d] / (memory.weight or 1.0)
        step = (event.w_next - event.w)[:d].to(way.dtype)
        length = float(way.norm() * step.norm())
        return float(way @ step) / length if memory.weight and length else None


@dataclass(frozen=True)
class Tail:
    """The last models, oldest first."""

    models: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TailMean:
    """The mean of the last `last` models."""

    last: int = 10

    def init(self, M: int, d: int, D: int) -> Tail:
        return Tail()

    def observe(self, memory: Tail, event: Event) -> Tail:
        kept = deque([*memory.models.items(), (event.t, event.w_next)], maxlen=self.last)
        return Tail(dict(kept))

    def model(self, memory: Any, w: Tensor) -> Tensor:
        if not memory.models:
            return w
        total = torch.zeros_like(w, dtype=torch.float64)
        for model in memory.models.values():
            total += model.double()
        return (total / len(memory.models)).to(w.dtype)
