"""A mean that believes clients to whom someone relates: against wrong labels, noise and free-riders.

FLrce's relationships say who is like whom. Whatever a client truly learns, some others learn too, and their updates
point the same way: those of a client with rare classes hardly relate to most, but strongly to the few that hold them
as well. Wrong labels and noise point where nobody else goes. So a client counts by its *kin*, the mean of the largest
few cosines between its update and the last ones of all others; not by how like the majority it is. Whoever sends
nothing, or what the model itself did since it was last asked (a free-rider's cheapest update), counts nothing.

It is no defence against clients that work together: liars who agree are each other's kin. And a client that alone holds
a class looks like noise.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce import crossing
from flrce.aggregators.mean import step, weights
from flrce.bounds import Amount, Count, Part, Share
from flrce.linalg import directions
from flrce.pieces import Recipe
from flrce.relations import NEVER
from flrce.sketch import sketch
from flrce.types import Event, Updates

NOTHING = 1e-3  # of the round's median length: an update of zeros
FEW = 4  # times `kin` clients must have been heard from before anyone is judged


@dataclass(frozen=True)
class Kinship:
    """What is kept of each client. Written in place."""

    V: Tensor = field(metadata={"rows": "trained"})  # (M, sketch) direction of its last update, sketched: length 1
    W: Tensor = field(metadata={"rows": "trained"})  # (M, sketch) the model that it started from then
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER})  # (M,) round of that update
    kin: Tensor = field(metadata={"rows": "trained"})  # (M,) running mean of its kin
    left: tuple[float, ...] = ()  # of the last round's replies: the share of its weight that each kept


@dataclass(frozen=True)
class RelatedMean:
    """The mean over replies by "samples" (at most `cap` times their median) or "equal"ly, times how related they are:
    1 from `level` times the median client's kin on, below that (kin / (level * median))^power.

    Kin is the mean of the `kin` largest cosines, and of a client's values the newest counts `blend`. `copies`: the
    cosine with the model's way since its last task from which on an update is taken for a copy of that.
    """

    kin: Count = 3
    level: Part = 0.75
    power: Annotated[float, Ge(0), Le(16)] = 4.0
    blend: Part = 0.5
    copies: Share = 0.9
    by: Literal["samples", "equal"] = "samples"
    cap: Amount = 5.0
    sketch: Count = 2048
    anywhere: ClassVar[bool] = True

    def objection(self, recipe: Recipe) -> str:
        if not recipe.partial:
            return ""
        return f"related compares whole updates, but {recipe.partial} lets clients send parts; use another aggregator"

    def init(self, M: int, d: int, D: int) -> Kinship:
        size = min(self.sketch, d)
        return Kinship(torch.zeros(M, size), torch.zeros(M, size), torch.full((M,), NEVER), torch.zeros(M))

    def __call__(self, w: Tensor, updates: Updates, memory: Kinship) -> Tensor:
        trust = self.trust(w, updates, memory)
        return step(w, updates, weights(updates.n, self.by, self.cap) * trust)

    def trust(self, w: Tensor, updates: Updates, memory: Kinship) -> Tensor:
        """(P,) from 0 to 1: how much of its weight each reply keeps; 1 for all where nobody would count."""
        return self._trust(*self._sketched(w, updates, memory), updates.k, memory)

    def _trust(self, v: Tensor, start: Tensor, length: Tensor, k: Tensor, memory: Kinship) -> Tensor:
        kin = self._kin(v, k, memory)
        heard = memory.R > NEVER
        heard[k] = True
        everyone = memory.kin.clone()
        everyone[k] = kin
        usual = float(everyone[heard].median())
        trust = torch.ones(len(kin), dtype=torch.float64)
        if int(heard.sum()) > FEW * self.kin and usual > 0:
            trust = (kin.double() / (self.level * usual)).clamp(0, 1) ** self.power
        before = memory.R[k] > NEVER
        copied = before & (torch.nn.functional.cosine_similarity(v, start - memory.W[k], dim=1) >= self.copies)
        trust = trust.where(~copied & (length > NOTHING * length.median()), 0.0)
        return trust if bool((trust > 0).any()) else torch.ones_like(trust)

    def observe(self, memory: Kinship, event: Event) -> Kinship:
        m, k = memory, event.updates.k
        sent = event.updates.sent
        v, start, length = self._sketched(event.w if sent is None else sent, event.updates, m)
        left = tuple(round(share, 4) for share in self._trust(v, start, length, k, m).tolist())
        m.kin[k] = self._kin(v, k, m)
        m.V[k], m.W[k], m.R[k] = v, start.expand(len(k), -1), event.t
        return replace(m, left=left)

    def left(self, memory: Kinship) -> tuple[float, ...]:
        return memory.left

    def _kin(self, v: Tensor, k: Tensor, m: Kinship) -> Tensor:
        """(P,) the running means with this round's updates in them."""
        heard = m.R > NEVER
        cosines = (v @ m.V.T).where(heard, -torch.inf)  # (P, M)
        cosines[:, k] = v @ v.T
        cosines[torch.arange(len(k)), k] = -torch.inf
        best = cosines.topk(min(self.kin, cosines.shape[1]), dim=1)[0]
        new = best.where(best.isfinite(), 0.0).mean(1)
        return torch.where(heard[k], (1 - self.blend) * m.kin[k] + self.blend * new, new)

    def _sketched(self, w: Tensor, updates: Updates, m: Kinship) -> tuple[Tensor, Tensor, Tensor]:
        """Directions (P, sketch) of the updates, the model (1, sketch) they start from, and their lengths (P,)."""
        u, start = updates.u, w[None, : updates.trainable].float()
        if m.V.shape[1] < u.shape[1]:
            S = sketch(u.shape[1], m.V.shape[1])
            u, start = S(u), S(start)
        u, start = crossing.home(u), crossing.home(start)
        return directions(u), start, torch.linalg.vector_norm(u.double(), dim=1)
