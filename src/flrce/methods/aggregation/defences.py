"""Aggregators from the literature on attackers: geometric median, centred clipping, mixing,
bucketing.

All weigh replies alike, since n_k is the client's own claim, and compare whole updates, so every
client must hold the whole model. Trained parameters and BatchNorm statistics are no one vector:
each part is aggregated apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.bounds import NonNegativeInt, PositiveFloat
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import RoundEvent, Updates
from flrce.methods.aggregation.robust import TrimmedMean
from flrce.rng import make_stream

MIN_DISTANCE = 1e-12  # of a distance: the geometric median may lie on an update
IntUpTo100 = Annotated[int, Ge(1), Le(100)]


@dataclass(frozen=True)
class GeometricMedian(Aggregator):
    """RFA (Pillutla et al. 2022): the point with the least sum of distances to the updates, by
    Weiszfeld's steps.

    Up to half of the replies may be anything: each pulls with the same force, however far away it
    is. The steps begin at the coordinates' medians, not at the mean as in the paper, which a far
    update would drag along for many steps.
    """

    steps: IntUpTo100 = 8

    def check_recipe(self, recipe: Recipe) -> str:
        return _check_whole_updates(recipe, "geometric-median")

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        return _apply_rule_by_part(w, updates, lambda U, span: geometric_median(U, self.steps))


@dataclass(frozen=True)
class CentredClipState:
    """The last round's step, from which the next one's updates are measured."""

    v: Tensor  # (D,)


@dataclass(frozen=True)
class CentredClip(Aggregator):
    """Centred clipping (Karimireddy et al. 2021): v + mean of (u_k - v), each shortened to `tau`;
    `steps` times.

    v starts at the last round's step, so an attacker moves the model by at most tau / P a round
    from where honest clients went before. tau "median" is the median distance from v, which no
    minority sets.
    """

    tau: PositiveFloat | Literal["median"] = "median"
    steps: IntUpTo100 = 3

    def check_recipe(self, recipe: Recipe) -> str:
        return _check_whole_updates(recipe, "centred-clip")

    def initial_state(self, M: int, d: int, D: int) -> CentredClipState:
        return CentredClipState(torch.zeros(D))

    def observe(self, state: CentredClipState, event: RoundEvent) -> CentredClipState:
        return CentredClipState(event.w_next - event.w)

    def __call__(self, w: Tensor, updates: Updates, state: CentredClipState) -> Tensor:
        return _apply_rule_by_part(
            w,
            updates,
            lambda U, span: centred_clipping(U, state.v[span].double(), self.tau, self.steps),
        )


@dataclass(frozen=True)
class NearestNeighbourMixing(Aggregator):
    """Nearest-neighbour mixing (Allouah et al. 2023): each update becomes the mean of the P -
    attackers nearest to it.

    What differs among honest clients, because their data do, is evened out before the `inner` rule
    looks for liars.
    """

    inner: Aggregator = field(default=TrimmedMean(), metadata={"piece": True})
    attackers: NonNegativeInt = 2

    def check_recipe(self, recipe: Recipe) -> str:
        if self.inner.has_state:
            return (
                f"mixed cannot remember for {type(self.inner).__name__}; give it a rule without"
                " memory"
            )
        if 2 * self.attackers >= recipe.P:
            return (
                "mixed needs an honest majority: attackers must be below per_round / 2, got"
                f" {self.attackers}"
            )
        return _check_whole_updates(recipe, "mixed")

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        d, U = updates.trainable, updates.U
        parts = [
            mix_nearest_neighbours(part, self.attackers) if part.shape[1] else part
            for part in (U[:, :d], U[:, d:])
        ]
        alike = replace(updates, U=torch.cat(parts, 1).to(U.dtype), n=torch.ones_like(updates.n))
        return self.inner(w, alike, state)


@dataclass(frozen=True)
class BucketingState:
    """How many rounds were committed, so that each has buckets of its own."""

    t: int = 0


@dataclass(frozen=True)
class Bucketing(Aggregator):
    """Bucketing (Karimireddy et al. 2022): replies are shuffled into buckets of `size`, and the
    `inner` rule sees their means, which differ less than single clients do where data differ. At
    most as many buckets are bad as replies are.
    """

    inner: Aggregator = field(default=GeometricMedian(), metadata={"piece": True})
    size: IntUpTo100 = 2
    seed: NonNegativeInt = 0

    def check_recipe(self, recipe: Recipe) -> str:
        if self.inner.has_state:
            return (
                f"bucketed cannot remember for {type(self.inner).__name__}; give it a rule without"
                " memory"
            )
        return _check_whole_updates(recipe, "bucketed")

    def initial_state(self, M: int, d: int, D: int) -> BucketingState:
        return BucketingState()

    def observe(self, state: BucketingState, event: RoundEvent) -> BucketingState:
        return BucketingState(state.t + 1)

    def __call__(self, w: Tensor, updates: Updates, state: BucketingState) -> Tensor:
        order = make_stream(self.seed, "buckets", state.t).permutation(len(updates))
        parts = torch.from_numpy(order).split(self.size)
        means = torch.stack([updates.U[part].double().mean(0) for part in parts]).to(
            updates.U.dtype
        )
        alike = Updates(
            updates.k[: len(parts)],
            means,
            torch.ones(len(parts), dtype=torch.float64),
            updates.trainable,
        )
        return self.inner(w, alike, None)


def geometric_median(U: Tensor, steps: int) -> Tensor:
    """(d,) about the geometric median of the rows."""
    U = U.double()
    v = U.median(0)[0]
    for _ in range(steps):
        pull = 1 / torch.linalg.vector_norm(U - v, dim=1).clamp(min=MIN_DISTANCE)
        v = pull @ U / pull.sum()
    return v


def centred_clipping(U: Tensor, v: Tensor, tau: float | str, steps: int) -> Tensor:
    """(d,) v moved towards the rows, by no more than tau for each."""
    U = U.double()
    for _ in range(steps):
        away = U - v
        norms = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        radius = norms.median() if isinstance(tau, str) else torch.tensor(tau, dtype=torch.float64)
        v = v + (away * (radius / norms.clamp(min=MIN_DISTANCE)).clamp(max=1)).mean(0)
    return v


def mix_nearest_neighbours(U: Tensor, attackers: int) -> Tensor:
    """(P, d) the mean of each row's nearest, itself among them; of equally near ones the first."""
    U = U.double()
    count = max(len(U) - attackers, 1)
    near = [torch.linalg.vector_norm(U - u, dim=1).argsort(stable=True)[:count] for u in U]
    return torch.stack([U[rows].mean(0) for rows in near])


def _apply_rule_by_part(
    w: Tensor, updates: Updates, rule: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """w plus what the rule makes of the trained part and of the statistics."""
    d, step = updates.trainable, torch.zeros(len(w), dtype=torch.float64)
    for span in (slice(0, d), slice(d, len(w))):
        if span.start < span.stop:
            step[span] = rule(updates.U[:, span], span)
    return (w.double() + step).to(w.dtype)


def _check_whole_updates(recipe: Recipe, name: str) -> str:
    return recipe.explain_parts(f"{name} compares whole updates", "use trimmed means")
