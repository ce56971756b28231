"""A mean that believes clients to whom someone relates: against wrong labels, noise and
free-riders.

FLrce's relationships say who is like whom. Whatever a client truly learns, some others learn too,
and their updates point the same way: those of a client with rare classes hardly relate to most, but
strongly to the few that hold them as well. Wrong labels and noise point where nobody else goes. So
a client counts by its *kin*, the mean of the largest few cosines between its update and the last
ones of all others; not by how like the majority it is. Whoever sends nothing, or what the model
itself did since it was last asked (a free-rider's cheapest update), counts nothing.

It is no defence against clients that work together: liars who agree are each other's kin. And a
client that alone holds a class looks like noise.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.bounds import NonNegativeFloat, PositiveInt, PositiveProportion, Proportion
from flrce.core.linalg import normalize_rows
from flrce.core.pieces import Recipe
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import Aggregator
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Updates
from flrce.methods.aggregation.mean import add_weighted_mean, compute_reply_weights

MIN_RELATIVE_NORM = 1e-3  # of the round's median length: an update of zeros
MIN_CLIENTS_PER_KIN = 4  # times `kin` clients must have been heard from before anyone is judged


@dataclass(frozen=True)
class RelatedMeanState:
    """What is kept of each client. Written in place."""

    # (M, sketch) direction of its last update, sketched: length 1
    V: Tensor = field(metadata={"rows": "trained"})
    # (M, sketch) the model that it started from then
    W: Tensor = field(metadata={"rows": "trained"})
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER_SEEN})  # (M,) round of that update
    kin: Tensor = field(metadata={"rows": "trained"})  # (M,) running mean of its kin
    # of the last round's replies: the share of its weight that each kept
    left: tuple[float, ...] = ()


@dataclass(frozen=True)
class RelatedMean(Aggregator):
    """The mean over replies by "samples" (at most `cap` times their median) or "equal"ly, times how
    related they are: 1 from `level` times the median client's kin on, below that (kin / (level *
    median))^power.

    Kin is the mean of the `kin` largest cosines, and of a client's values the newest counts
    `blend`. `copies`: the cosine with the model's way since its last task from which on an update
    is taken for a copy of that.
    """

    kin: PositiveInt = 3
    level: PositiveProportion = 0.75
    power: Annotated[float, Ge(0), Le(16)] = 4.0
    blend: PositiveProportion = 0.5
    copies: Proportion = 0.9
    by: Literal["samples", "equal"] = "samples"
    cap: NonNegativeFloat = 5.0
    sketch: PositiveInt = 2048
    device_agnostic: ClassVar[bool] = True

    def check_recipe(self, recipe: Recipe) -> str:
        return recipe.explain_parts("related compares whole updates", "use another aggregator")

    def initial_state(self, M: int, d: int, D: int) -> RelatedMeanState:
        size = min(self.sketch, d)
        return RelatedMeanState(
            torch.zeros(M, size), torch.zeros(M, size), torch.full((M,), NEVER_SEEN), torch.zeros(M)
        )

    def __call__(self, w: Tensor, updates: Updates, state: RelatedMeanState) -> Tensor:
        trust = self.compute_trust(w, updates, state)
        return add_weighted_mean(
            w, updates, compute_reply_weights(updates.n, self.by, self.cap) * trust
        )

    def compute_trust(self, w: Tensor, updates: Updates, state: RelatedMeanState) -> Tensor:
        """(P,) from 0 to 1: how much of its weight each reply keeps; 1 for all where nobody would
        count.
        """
        return self._compute_trust_from_sketches(
            *self._sketch_updates(w, updates, state), updates.k, state
        )

    def _compute_trust_from_sketches(
        self, v: Tensor, start: Tensor, length: Tensor, k: Tensor, state: RelatedMeanState
    ) -> Tensor:
        kin = self._compute_running_kin(v, k, state)
        heard = state.R > NEVER_SEEN
        heard[k] = True
        everyone = state.kin.clone()
        everyone[k] = kin
        usual = float(everyone[heard].median())
        trust = torch.ones(len(kin), dtype=torch.float64)
        if int(heard.sum()) > MIN_CLIENTS_PER_KIN * self.kin and usual > 0:
            trust = (kin.double() / (self.level * usual)).clamp(0, 1) ** self.power
        before = state.R[k] > NEVER_SEEN
        copied = before & (
            torch.nn.functional.cosine_similarity(v, start - state.W[k], dim=1) >= self.copies
        )
        trust = trust.where(~copied & (length > MIN_RELATIVE_NORM * length.median()), 0.0)
        return trust if bool((trust > 0).any()) else torch.ones_like(trust)

    def observe(self, state: RelatedMeanState, event: RoundEvent) -> RelatedMeanState:
        m, k = state, event.updates.k
        sent = event.updates.sent
        v, start, length = self._sketch_updates(event.w if sent is None else sent, event.updates, m)
        left = tuple(
            round(share, 4)
            for share in self._compute_trust_from_sketches(v, start, length, k, m).tolist()
        )
        m.kin[k] = self._compute_running_kin(v, k, m)
        m.V[k], m.W[k], m.R[k] = v, start.expand(len(k), -1), event.t
        return replace(m, left=left)

    def downweights(self, state: RelatedMeanState) -> tuple[float, ...]:
        return state.left

    def _compute_running_kin(self, v: Tensor, k: Tensor, m: RelatedMeanState) -> Tensor:
        """(P,) the running means with this round's updates in them."""
        heard = m.R > NEVER_SEEN
        cosines = (v @ m.V.T).where(heard, -torch.inf)  # (P, M)
        cosines[:, k] = v @ v.T
        cosines[torch.arange(len(k)), k] = -torch.inf
        best = cosines.topk(min(self.kin, cosines.shape[1]), dim=1)[0]
        new = best.where(best.isfinite(), 0.0).mean(1)
        return torch.where(heard[k], (1 - self.blend) * m.kin[k] + self.blend * new, new)

    def _sketch_updates(
        self, w: Tensor, updates: Updates, m: RelatedMeanState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Directions (P, sketch) of the updates, the model (1, sketch) they start from, and their
        lengths (P,).
        """
        u, start = updates.u, w[None, : updates.trainable].float()
        if m.V.shape[1] < u.shape[1]:
            S = make_sketch(u.shape[1], m.V.shape[1])
            u, start = S(u), S(start)
        u, start = tensor_bytes.to_host(u), tensor_bytes.to_host(start)
        return normalize_rows(u), start, torch.linalg.vector_norm(u.double(), dim=1)
