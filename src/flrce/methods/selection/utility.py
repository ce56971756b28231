"""Oort (Lai et al., OSDI 2021): clients whose samples are still badly learnt and who are fast
enough.

The formulas are those of its released code; research/docs/departures.md says where they differ from
the printed paper.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import NonNegativeInt, Percent, PositiveInt, Proportion
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection
from flrce.rng import draw_weighted

STALENESS_WEIGHT = 0.1  # weight of ln t / L_i under the root
UTILITY_FLOOR_RATIO = 0.999  # of the smallest utility, so that nobody scores nothing
SCORE_CUTOFF_RATIO = 0.7  # of the score at the edge: who comes this near may still be drawn
CANDIDATES_PER_PLACE = 5  # unseen clients looked at per place to explore


@dataclass(frozen=True)
class UtilityState:
    """What is known of each client, and how patient the pacer is."""

    # (M,) statistical utility n sqrt(mean squared loss)
    U: Tensor = field(metadata={"rows": "trained"})
    # (M,) last round a client took part in; 0: never
    L: Tensor = field(metadata={"rows": "trained"})
    seconds: Tensor = field(metadata={"rows": "trained"})  # (M,) its duration then
    threshold: float  # percentile of the durations that a round would like to take
    before: float = 0.0  # exploited utility over the pacer's last window
    current: float = 0.0  # and over the one under way


@dataclass(frozen=True)
class CountedUtilityState(UtilityState):
    """The same with how often each client was asked, for a blacklist."""

    count: Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.long), metadata={"rows": "trained"}
    )


@dataclass(frozen=True)
class UtilitySelector(Selector):
    """Oort's selection: (1 - epsilon) of the places go by score, the others to clients never seen.

    The score is the clipped, scaled utility plus sqrt(0.1 ln t / L_i), times (T/t_i)^alpha for
    clients slower than the preferred duration T. Clip and scale are taken `over` "all" clients,
    where one never seen counts n_i as in the released code, or over those "seen". The first round
    is drawn uniformly. `overcommit` P are asked and the P fastest replies count; the rest are
    credited the mean utility. Once nobody is unseen, every place goes by score. Clients of unknown
    duration are taken for the middle one of those known. With `power` full batteries
    count too, where devices report them (examples/contrib/eafl.py). A client that was asked more
    than `blacklist` times (0: no limit) is no longer chosen; at most the share `blacklist_share` of
    all clients, those asked most, and nobody in a round in which fewer than P others are there.
    """

    epsilon: Proportion = 0.9
    decay: Proportion = 0.95
    floor: Proportion = 0.2
    alpha: Annotated[float, Ge(0), Le(100)] = 2.0
    percentile: Percent = 10.0  # where the preferred duration starts; 100: no preference
    clip: Proportion = 0.98
    over: Literal["all", "seen"] = "all"
    overcommit: Annotated[float, Ge(1), Le(100)] = 1.1
    pace: PositiveInt = 20  # rounds of the pacer's window
    delta: Percent = 5.0  # percentiles that it moves by
    power: Proportion = 0.0  # weight of the battery's level against the score, taken from 0 to 1
    blacklist: NonNegativeInt = 0
    blacklist_share: Proportion = 0.3
    device_agnostic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.epsilon <= 1:
            raise ValueError(
                f"0 <= floor <= epsilon <= 1 must hold, got floor {self.floor}, epsilon"
                f" {self.epsilon}"
            )

    def initial_state(self, M: int, d: int, D: int) -> UtilityState:
        zeros, never = torch.zeros(M, dtype=torch.float64), torch.zeros(M, dtype=torch.long)
        if self.blacklist:
            return CountedUtilityState(
                zeros, never, zeros.clone(), self.percentile, count=never.clone()
            )
        return UtilityState(zeros, never, zeros.clone(), self.percentile)

    def exploration_probability(self, t: int) -> float:
        """epsilon in round t."""
        return max(self.epsilon * self.decay ** (t - 1), self.floor)

    def select(self, state: UtilityState, view: RoundView, rng: Generator) -> Selection:
        pool = torch.tensor(view.pool)
        m = state
        if not bool(m.L.any()):
            return self._select_first_cohort(view, rng)
        seconds = estimate_durations(m, view)
        preferred = duration_percentile(seconds, m.threshold)
        slow = slowness_penalty(seconds, preferred, self.alpha)
        allowed = self._find_allowed(m, pool, view.P)
        K = min(int(self.overcommit * view.P + 1e-9), int(allowed.sum()))
        seen = m.L[pool] > 0
        explored, unseen = (seen & allowed).nonzero()[:, 0], (~seen & allowed).nonzero()[:, 0]
        epsilon = self.exploration_probability(view.t)
        places = min(max(int((1 - epsilon) * K), K - len(unseen)), len(explored))
        picked = []
        if places:
            beside = view.n[pool[unseen]] if self.over == "all" else None
            score = (
                utility_scores(m.U[pool[explored]], m.L[pool[explored]], view.t, self.clip, beside)
                * slow[explored]
            )
            score = self._weigh_by_battery(score, pool[explored], view)
            picked += [int(explored[i]) for i in draw_near_top(score, places, rng)]
        if K - places:
            # the only thing known of them is how much they have
            hope = view.n[pool[unseen]] * slow[unseen]
            hope = self._weigh_by_battery(hope, pool[unseen], view)
            top = hope.argsort(descending=True, stable=True)[: CANDIDATES_PER_PLACE * (K - places)]
            picked += [
                int(unseen[top[i]]) for i in draw_weighted(rng, hope[top].numpy(), K - places)
            ]
        why = {
            "epsilon": epsilon,
            "percentile": m.threshold,
            "preferred_seconds": finite_or_none(preferred),
            "by_score": places,
        }
        if self.blacklist:
            why["blacklisted"] = int((~allowed).sum())
        return Selection(
            tuple(int(pool[i]) for i in picked), exploit=places > 0, keep=view.P, why=why
        )

    def _find_allowed(self, m: UtilityState, pool: Tensor, P: int) -> Tensor:
        """(pool,) bool: who may be chosen."""
        if not isinstance(m, CountedUtilityState):
            return torch.ones(len(pool), dtype=torch.bool)
        allowed = ~find_blacklisted(m.count, self.blacklist, self.blacklist_share)[pool]
        enough = int(allowed.sum()) >= min(P, len(pool))
        return allowed if enough else torch.ones_like(allowed)

    def _weigh_by_battery(self, score: Tensor, rows: Tensor, view: RoundView) -> Tensor:
        """The score, or a weighted mean of score and battery."""
        if not self.power or view.battery is None or not len(rows):
            return score
        level = view.battery(rows.tolist()).to(score.dtype)
        return (1 - self.power) * score / score.max().clamp(min=1e-12) + self.power * level

    def _select_first_cohort(self, view: RoundView, rng: Generator) -> Selection:
        """Nobody has been seen: anybody may go."""
        K = min(int(self.overcommit * view.P + 1e-9), len(view.pool))
        picked = rng.permutation(len(view.pool))[:K]
        return Selection(
            tuple(view.pool[i] for i in picked), keep=view.P, why={"epsilon": 1.0, "by_score": 0}
        )

    def observe(self, state: UtilityState, event: RoundEvent) -> UtilityState:
        m, updates, k = state, event.updates, event.updates.k
        assert updates.loss_square is not None
        assert updates.seconds is not None
        exploited = m.L[k] > 0
        U, L, seconds = m.U.clone(), m.L.clone(), m.seconds.clone()
        U[k] = updates.n * updates.loss_square.clamp(min=0).sqrt()
        rest = torch.tensor(
            [row for row in event.chosen if row not in set(k.tolist())], dtype=torch.long
        )
        U[rest] = U[k].mean()
        L[k], L[rest], seconds[k] = event.t, event.t, updates.seconds
        if isinstance(m, CountedUtilityState):
            count = m.count.clone()
            count[list(event.chosen)] += 1
            m = replace(m, count=count)
        gained = float(U[k][exploited].mean()) if bool(exploited.any()) else 0.0
        return self.update_pacer(
            replace(m, U=U, L=L, seconds=seconds, current=m.current + gained), event.t
        )

    def update_pacer(self, m: UtilityState, t: int) -> UtilityState:
        """The pacer, after round t: accept slower clients once the utility is flat, fewer when it
        leaps.
        """
        if t % self.pace:
            return m
        change, threshold = abs(m.current - m.before), m.threshold
        if t >= 2 * self.pace and change <= 0.1 * m.before:
            threshold = min(100.0, threshold + self.delta)
        elif t >= 2 * self.pace and change >= 5 * m.before:
            threshold = max(self.delta, threshold - self.delta)
        return replace(m, threshold=threshold, before=m.current, current=0.0)


def estimate_durations(m: UtilityState, view: RoundView) -> Tensor:
    """(pool,) seconds that a plain task takes each client: as the engine estimates, else as last
    seen.

    Of whom neither is known, the median of the others; infinite where nobody's is, which penalises
    nobody.
    """
    estimates = torch.tensor(
        [view.estimate(view.draft(k)).seconds for k in view.pool], dtype=torch.float64
    )
    seconds = torch.where(estimates > 0, estimates, m.seconds[torch.tensor(view.pool)])
    positive = seconds[seconds > 0]
    return seconds.where(seconds > 0, positive.quantile(0.5) if len(positive) else torch.inf)


def find_blacklisted(count: Tensor, rounds: int, share: float) -> Tensor:
    """(M,) bool: those asked more than `rounds` times; of more than `share` of all, those asked
    most (lower ids first).
    """
    by_count = count.argsort(descending=True, stable=True)
    listed = by_count[count[by_count] > rounds][: int(share * len(count))]
    return torch.zeros(len(count), dtype=torch.bool).index_fill(0, listed, True)


def duration_percentile(seconds: Tensor, threshold: float) -> float:
    """The duration that `threshold` percent of the clients beat; from 100 on, any will do."""
    if threshold >= 100:
        return math.inf
    return float(seconds.sort()[0][min(int(len(seconds) * threshold / 100), len(seconds) - 1)])


def slowness_penalty(seconds: Tensor, preferred: float, alpha: float) -> Tensor:
    """(T/t_i)^alpha for clients slower than T, else 1."""
    return (preferred / seconds.clamp(min=1e-4)).pow(alpha).where(seconds > preferred, 1.0)


def utility_scores(
    U: Tensor, L: Tensor, t: int, clip: float = 0.98, beside: Tensor | None = None
) -> Tensor:
    """Scaled utility, clipped at the `clip` quantile, plus what staleness adds.

    Quantile, least and range are those of U and of the utilities `beside` it, which are not scored
    themselves.
    """
    every = U if beside is None else torch.cat([U, beside.to(U.dtype)])
    positive = every[every > 0] if bool((every > 0).any()) else every
    ordered = positive.sort()[0]
    least = UTILITY_FLOOR_RATIO * ordered[0]
    clipped = U.clamp(max=ordered[min(int(len(ordered) * clip), len(ordered) - 1)])
    scaled = (clipped - least) / (ordered[-1] - least).clamp(min=1e-4)
    return (scaled + (STALENESS_WEIGHT * math.log(t) / L.double()).sqrt()).clamp(min=0)


def draw_near_top(score: Tensor, places: int, rng: Generator) -> list[int]:
    """`places` positions drawn in proportion to their score, from those within
    SCORE_CUTOFF_RATIO of the first that misses the top.
    """
    edge = SCORE_CUTOFF_RATIO * float(score.sort(descending=True)[0][min(places, len(score) - 1)])
    within = (score >= edge).nonzero()[:, 0]
    return [int(within[i]) for i in draw_weighted(rng, score[within].numpy(), places)]


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
