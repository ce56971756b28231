"""Aggregators that a minority of bad updates cannot steer: trimmed mean, median, Multi-Krum,
clipped mean.

None of them believes more of a reply than its direction: the first three weigh all replies alike,
since n_k is the client's own claim. Where clients hold different coordinates, the coordinate-wise
ones work among those that hold each; Krum compares whole updates and refuses.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat
from flrce.core.linalg import split_coordinates
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.tensor_bytes import allocate_like
from flrce.core.types import Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import CHUNK_COLUMNS, compute_reply_weights


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Per coordinate, the mean without the largest and the smallest `share` of the values (Yin et
    al. 2018).

    Rounded up, so that it holds against up to `share` attackers; at least one value always stays.
    """

    share: Annotated[float, Ge(0), Lt(0.5)] = 0.2
    blockwise: ClassVar[bool] = True
    device_agnostic: ClassVar[bool] = True

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        return add_trimmed_mean(w, updates, self.share)


@dataclass(frozen=True)
class CoordinateMedian(Aggregator):
    """Per coordinate, the median: of an even number of values, the mean of the middle two."""

    blockwise: ClassVar[bool] = True
    device_agnostic: ClassVar[bool] = True

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        return add_trimmed_mean(w, updates, 0.5)


@dataclass(frozen=True)
class Krum(Aggregator):
    """The mean of the `keep` updates with the nearest neighbours (Blanchard et al. 2017; Multi-Krum
    for keep > 1).

    An update's score is the sum of the squared distances to its P - attackers - 2 nearest, over
    trained coordinates: BatchNorm statistics are no gradients, and would outweigh them. The
    guarantee needs P >= 2 attackers + 3; with fewer replies the neighbours shrink to at least one.
    keep = 0: all but the attackers.
    """

    attackers: NonNegativeInt = 1
    keep: NonNegativeInt = 0
    blockwise: ClassVar[bool] = True
    device_agnostic: ClassVar[bool] = True

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("krum compares whole updates", "use trimmed means"):
            return why
        if 2 * self.attackers + 3 > recipe.P:
            limit = max(recipe.P - 3, 0) // 2
            return (
                f"krum can tell apart at most (P - 3) / 2 = {limit} attackers, got"
                f" {self.attackers}; raise per_round"
            )
        return ""

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        if updates.covered is not None:
            raise BadInput(
                "krum compares whole updates; give every client the whole model, or aggregate by"
                " trimmed mean"
            )
        P = len(updates)
        chosen = rank_by_krum_score(updates.u, self.attackers)[
            : min(self.keep or max(P - self.attackers, 1), P)
        ]
        made, rows = allocate_like(w), sorted(chosen)
        for part in split_coordinates(w, CHUNK_COLUMNS):
            made[part] = (w[part].double() + updates.U[rows, part].double().mean(0)).to(w.dtype)
        return made


@dataclass(frozen=True)
class ClippedMean(Aggregator):
    """The weighted mean of updates shortened to at most `norm`; "median": to the median length of
    the round's updates.

    BatchNorm statistics are no gradients, so they are clipped apart, to their own median. `by`
    weighs clients by "samples", of which no more than `cap` times the round's median are believed
    (0: any), or all "equal"ly, so that a claimed n cannot dominate either.
    """

    norm: PositiveFloat | Literal["median"] = "median"
    by: Literal["samples", "equal"] = "samples"
    cap: NonNegativeFloat = 0.0
    blockwise: ClassVar[bool] = True
    device_agnostic: ClassVar[bool] = True

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        n = compute_reply_weights(updates.n, self.by, self.cap)
        made, d = allocate_like(w), updates.trainable
        for span, norm in ((slice(0, d), self.norm), (slice(d, len(w)), "median")):
            U = updates.U[:, span]
            share = tensor_bytes.to_device_of(
                n[:, None] * self._compute_clip_factors(U, norm), w
            )  # (P, 1)
            held = None if updates.covered is None else updates.covered[:, span]
            for part in split_coordinates(w[span], CHUNK_COLUMNS):
                total = (share * U[:, part].double()).sum(0)
                weight = n[:, None] * (1 if held is None else held[:, part])
                mean = total / tensor_bytes.to_device_of(
                    weight.sum(0).clamp(min=torch.finfo(torch.float64).tiny), w
                )
                made[span][part] = (w[span][part].double() + mean).to(w.dtype)
        return made

    def _compute_clip_factors(self, U: Tensor, norm: float | str) -> Tensor:
        """(P, 1) what each row is multiplied by."""
        norms = tensor_bytes.to_host(update_norms(U))[:, None]
        limit = (
            norms.quantile(0.5)
            if isinstance(norm, str)
            else torch.tensor(norm, dtype=torch.float64)
        )
        return (limit / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)


def update_norms(U: Tensor) -> Tensor:
    """(P,) norms in float64; of large models only parts are widened at a time."""
    parts = split_coordinates(U[0], CHUNK_COLUMNS)
    if len(parts) < 2:
        norms: Tensor = torch.linalg.vector_norm(U, dim=1, dtype=torch.float64)
        return norms
    total = U.new_zeros(len(U), dtype=torch.float64)
    for part in parts:
        total += U[:, part].double().square_().sum(1)
    return total.sqrt()


def add_trimmed_mean(w: Tensor, updates: Updates, share: float) -> Tensor:
    """w plus, per coordinate, the mean of the values left when `share` of them is cut at either
    end.

    Clients that do not hold a coordinate sort last and are not counted; one that nobody holds keeps
    its bits.
    """
    P, made = len(updates), allocate_like(w)
    for part in split_coordinates(w, CHUNK_COLUMNS):
        held = None if updates.covered is None else updates.covered[:, part]
        U = updates.U[:, part] if held is None else updates.U[:, part].where(held, torch.inf)
        count = torch.full((1,), P) if held is None else held.sum(0)  # (1,) or (d,)
        cut = torch.minimum((share * count - 1e-9).ceil().long(), (count - 1) // 2).clamp(min=0)
        place = torch.arange(P)[:, None]
        kept = (place >= cut) & (place < count - cut)  # (P, 1) or (P, d)
        many = tensor_bytes.to_device_of(kept.sum(0).clamp(min=1), w)
        total = U.sort(0)[0].double().where(tensor_bytes.to_device_of(kept, w), 0.0).sum(0)
        made[part] = (w[part].double() + total / many).to(w.dtype)
    return made


def rank_by_krum_score(U: Tensor, attackers: int) -> list[int]:
    """Rows from the smallest score to the largest; ties: the lowest row first."""
    P = len(U)
    if P == 1:
        return [0]
    D = U.new_zeros(P, P, dtype=torch.float64)
    for part in split_coordinates(U[0], CHUNK_COLUMNS):
        wide = U[:, part].double()
        D += torch.stack([(wide - u).square().sum(1) for u in wide])
    D = tensor_bytes.to_host(D).fill_diagonal_(torch.inf)
    nearest = D.sort(1)[0][:, : min(max(P - attackers - 2, 1), P - 1)]
    return nearest.sum(1).argsort(stable=True).tolist()
