"""TiFL (Chai et al., HPDC 2020): clients of like speed train together, so that a round waits for nobody slower."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator

from flrce.bounds import Amount, Count
from flrce.errors import BadInput
from flrce.pieces import View
from flrce.types import Selection

#: the paper's policies: chances of the tiers, the fastest first
POLICIES = {
    "uniform": (0.2, 0.2, 0.2, 0.2, 0.2),
    "random": (0.7, 0.1, 0.1, 0.05, 0.05),
    "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
    "slow": (0.0, 0.0, 0.0, 0.0, 1.0),
}


@dataclass(frozen=True)
class Tiers:
    """Reachable clients by duration, in `tiers` parts of the same size; a round draws a tier, then P of its clients.

    `odds` are the tiers' chances, the fastest first (none: all alike). Where a tier has fewer than P clients, those
    nearest in speed fill up. Whoever was never measured is taken for the middle one.
    """

    piece: ClassVar[str] = "tiers"
    tiers: Count = 5
    odds: tuple[Amount, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "odds", tuple(self.odds))  # experiment files have lists
        if self.odds and len(self.odds) != self.tiers:
            raise BadInput(f"odds: {len(self.odds)} chances for {self.tiers} tiers; give one each")
        if self.odds and not (min(self.odds) >= 0 and 0 < sum(self.odds) < np.inf):
            raise BadInput(f"odds = {list(self.odds)}: must not be negative, and not all 0")

    def select(self, memory: Any, view: View, rng: Generator) -> Selection:
        seconds = durations(view)
        shuffled = rng.permutation(len(view.pool))  # equal durations are in no order
        order = shuffled[np.argsort(seconds[shuffled], kind="stable")]
        count = min(self.tiers, len(order))
        odds = np.array(self.odds[:count] or [1.0] * count)
        odds = odds if odds.any() else np.ones(count)  # fewer clients than tiers, and only the slower had a chance
        tier = int(rng.choice(count, p=odds / odds.sum()))
        edges = np.linspace(0, len(order), count + 1).round().astype(int)
        picked = members(order, int(edges[tier]), int(edges[tier + 1]), view.P, rng)
        return Selection(tuple(view.pool[i] for i in picked), why={"tier": tier + 1, "of": count})


def durations(view: View) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(pool,) seconds of a plain task; of whom they are not known, the median."""
    seconds = np.array([view.estimate(view.draft(k)).seconds for k in view.pool])
    known = seconds[seconds > 0]
    return np.where(seconds > 0, seconds, np.median(known) if len(known) else 0.0)


def members(order: np.ndarray[Any, np.dtype[np.int64]], start: int, stop: int, P: int, rng: Generator) -> list[int]:
    """P of order[start:stop] at random; where those are fewer, all of them and their neighbours on either side."""
    if stop - start >= P:
        return [int(i) for i in rng.permutation(order[start:stop])[:P]]
    start = min(max(start - (P - (stop - start)) // 2, 0), max(len(order) - P, 0))
    return [int(i) for i in order[start : start + P]]
