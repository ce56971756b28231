"""TiFL (Chai et al., HPDC 2020): clients of like speed train together, so that a round waits for
nobody slower.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator

from flrce.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from flrce.core.roles import RoundView, Selector
from flrce.core.types import Selection
from flrce.errors import BadInput

IndexArray = np.ndarray[Any, np.dtype[np.int64]]

#: the paper's policies: chances of the tiers, the fastest first
TIER_POLICIES = {
    "uniform": (0.2, 0.2, 0.2, 0.2, 0.2),
    "random": (0.7, 0.1, 0.1, 0.05, 0.05),
    "fast": (1.0, 0.0, 0.0, 0.0, 0.0),
    "slow": (0.0, 0.0, 0.0, 0.0, 1.0),
}


@dataclass(frozen=True)
class TierSelector(Selector):
    """Reachable clients by duration, in `tiers` parts of the same size; a round draws a tier, then
    P of its clients.

    `odds` are the tiers' chances, the fastest first (none: all alike). Where a tier has fewer than
    P clients, those nearest in speed fill up. Whoever was never measured is taken for the middle
    one.
    """

    piece: ClassVar[str] = "tiers"
    tiers: PositiveInt = 5
    odds: tuple[NonNegativeFloat, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "odds", tuple(self.odds))  # experiment files have lists
        if self.odds and len(self.odds) != self.tiers:
            raise BadInput(f"odds: {len(self.odds)} chances for {self.tiers} tiers; give one each")
        if self.odds and not (min(self.odds) >= 0 and 0 < sum(self.odds) < np.inf):
            raise BadInput(f"odds = {list(self.odds)}: must not be negative, and not all 0")

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        order, edges = sort_into_tiers(view, self.tiers, rng)
        count = len(edges) - 1
        odds = np.array(self.odds[:count] or [1.0] * count)
        # fewer clients than tiers, and only the slower had a chance
        odds = odds if odds.any() else np.ones(count)
        tier = int(rng.choice(count, p=odds / odds.sum()))
        picked = draw_tier_members(order, edges[tier], edges[tier + 1], view.P, rng)
        return Selection(tuple(view.pool[i] for i in picked), why={"tier": tier + 1, "of": count})


@dataclass(frozen=True)
class AdaptiveTierSelector(Selector):
    """Tiers whose chances follow how well the model serves them: the worse, the likelier, the best
    not at all.

    Every `every` rounds up to P clients of each tier are asked for their loss (booked as any
    question); if the last round's tier has not become better since it was asked before, the tiers'
    chances become n, n - 1, ..., 1 less one each, from the largest loss to the smallest. A tier is
    taken `credits` times at most (0: any). What was found stands in the record (`why`), and is read
    there again: there is no other memory.
    """

    piece: ClassVar[str] = "adaptive-tiers"
    tiers: PositiveInt = 5
    every: PositiveInt = 10
    credits: NonNegativeInt = 0

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        order, edges = sort_into_tiers(view, self.tiers, rng)
        count = len(edges) - 1
        past = [record.why for record in view.history if record.why.get("of") == count]
        odds = [float(x) for x in past[-1]["odds"]] if past else [1.0] * count
        found: dict[str, Any] = {}
        if view.t > 1 and (view.t - 1) % self.every == 0:
            found["losses"] = self._query_tier_losses(view, order, edges, rng)
            if past and not _has_improved(found["losses"], past):
                odds = compute_tier_odds(found["losses"])
        likely = np.array(odds)
        for tier in range(count):
            taken = sum(why["tier"] == tier + 1 for why in past)
            if self.credits and taken >= self.credits:
                likely[tier] = 0.0
        likely = likely if likely.any() else np.ones(count)  # every credit is spent
        tier = int(rng.choice(count, p=likely / likely.sum()))
        picked = draw_tier_members(order, edges[tier], edges[tier + 1], view.P, rng)
        found |= {"tier": tier + 1, "of": count, "odds": odds}
        return Selection(tuple(view.pool[i] for i in picked), why=found)

    def _query_tier_losses(
        self, view: RoundView, order: IndexArray, edges: list[int], rng: Generator
    ) -> list[float]:
        """The mean loss of each tier, from up to P of its clients; all are asked at once."""
        asked = [rng.permutation(order[a:b])[: view.P] for a, b in itertools.pairwise(edges)]
        losses = view.loss([view.pool[i] for part in asked for i in part]).tolist()
        ends = np.cumsum([0, *(len(part) for part in asked)]).tolist()
        return [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]


def compute_tier_odds(losses: list[float]) -> list[float]:
    """Chances by rank: n - 1 for the tier with the largest loss, ..., 0 for the one with the
    smallest (TiFL, alg. 2).

    >>> compute_tier_odds([0.3, 0.9, 0.5])
    [0.0, 2.0, 1.0]
    """
    ranks = np.argsort(np.argsort(losses, kind="stable"), kind="stable")
    return [float(rank) for rank in ranks] if len(losses) > 1 else [1.0]


def _has_improved(losses: list[float], past: list[Mapping[str, Any]]) -> bool:
    """Whether the tier of the last round has a smaller loss than when it was asked before."""
    tier = past[-1]["tier"] - 1
    before = [why["losses"][tier] for why in past if "losses" in why]
    return bool(before) and losses[tier] < before[-1]


def sort_into_tiers(view: RoundView, tiers: int, rng: Generator) -> tuple[IndexArray, list[int]]:
    """Positions in the pool from fast to slow, and where each tier begins and the last one ends."""
    seconds = estimate_durations(view)
    shuffled = rng.permutation(len(view.pool))  # equal durations are in no order
    order = shuffled[np.argsort(seconds[shuffled], kind="stable")]
    edges = np.linspace(0, len(order), min(tiers, len(order)) + 1).round().astype(int)
    return order, [int(edge) for edge in edges]


def estimate_durations(view: RoundView) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(pool,) seconds of a plain task; of whom they are not known, the median."""
    seconds = np.array([view.estimate(view.draft(k)).seconds for k in view.pool])
    positive = seconds[seconds > 0]
    return np.where(seconds > 0, seconds, np.median(positive) if len(positive) else 0.0)


def draw_tier_members(
    order: IndexArray, start: int, stop: int, P: int, rng: Generator
) -> list[int]:
    """P of order[start:stop] at random; where those are fewer, all of them and their neighbours on
    either side.
    """
    if stop - start >= P:
        return [int(i) for i in rng.permutation(order[start:stop])[:P]]
    start = min(max(start - (P - (stop - start)) // 2, 0), max(len(order) - P, 0))
    return [int(i) for i in order[start : start + P]]
