"""Enough once the way from the initial model hardly grows: a rule that needs global models alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from flrce.bounds import Count, Positive
from flrce.types import Event, Record

PART = 2**20  # floats widened to float64 at a time
TINY = 1e-300


@dataclass(frozen=True)
class Origin:
    """The model before the first round, and how far the last one was from it."""

    model: Tensor  # (D,)
    known: bool = False
    way: float = 0.0


@dataclass(frozen=True)
class Growth:
    """Stop where the way from the initial model, |w_t - w_0|, grew by less than `rate` a round over the last `rounds`.

    After Lee et al. 2026 (arXiv 2601.22669), of which the abstract was read: the growth rate of the task vector, seen
    by the server without validation data. Their constants are not told there; ours did best in docs/beyond.md's study.
    """

    rate: Positive = 0.001
    rounds: Count = 10
    anywhere: ClassVar[bool] = True

    def init(self, M: int, d: int, D: int) -> Origin:
        return Origin(torch.zeros(D))

    def observe(self, memory: Origin, event: Event) -> Origin:
        start = memory.model if memory.known else event.w.clone()
        d = event.updates.trainable
        total = 0.0
        for before, now in zip(start[:d].split(PART), event.w_next[:d].split(PART), strict=True):
            total += float((now - before).double().square().sum())
        return replace(memory, model=start, known=True, way=total**0.5)

    def way(self, memory: Origin) -> float:
        """The length of w_t - w_0, of what trains."""
        return memory.way

    def __call__(self, history: Sequence[Record]) -> str:
        ways = [h.way for h in history if h.way is not None]
        if len(ways) <= self.rounds or history[-1].way is None:
            return ""
        before = ways[-self.rounds - 1]
        if not before:
            return ""
        grown = math.log(max(ways[-1], TINY) / before) / self.rounds
        if grown >= self.rate:
            return ""
        return f"the way from the initial model grew by {grown:.2g} a round < {self.rate:g} over {self.rounds} rounds"
