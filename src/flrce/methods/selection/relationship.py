"""FLrce's client selection h (Algorithm 2) over the relationship map."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core import relations, tensor_bytes
from flrce.core.bounds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveProportion,
    Proportion,
)
from flrce.core.relations import NEVER_SEEN, RelationshipState
from flrce.core.roles import RoundView, Selector
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Selection
from flrce.errors import BadInput


@dataclass(frozen=True)
class RelationshipSelector(Selector):
    """Explore with probability phi(t), else take the P largest H.

    `anchor` is where a stale client's line passes: "origin" (eq. 6 as printed) or "model" (as the
    authors' code). `blend` weighs a new relationship against the old, which is 0 before the first
    (1: overwrite; the authors' code .9). `space` is the vectors compared: "trainable" parameters,
    or all that is on the "wire", BatchNorm statistics included. Clients never heard from have H = 0
    and so outrank those with H < 0; `pessimistic` puts them last.

    Colluders that agree with one another gain a large H and would be chosen for ever
    (docs/robustness.md): `floor` is the least probability to explore, and a client that was chosen
    more than `most` times its fair share of the last `window` rounds waits behind all others when
    the round exploits (0: never; the paper has neither).

    For fleets whose V (M, d) or Omega (M, M) would not fit, `make_sketch` is the number of floats
    kept of each update: they and w pass through one random linear map (sketch.py), and of Omega
    only its sums H are kept (0: all is exact).
    """

    piece: ClassVar[str] = "relationship"
    decay: Proportion = 0.98  # phi(t) = decay ** (t - 1)
    warmup: NonNegativeInt = 0  # rounds that always explore
    anchor: Literal["origin", "model"] = "origin"
    blend: PositiveProportion = 1.0
    space: Literal["trainable", "wire"] = "trainable"
    pessimistic: bool = False
    floor: Proportion = 0.0
    most: NonNegativeFloat = 0.0
    window: PositiveInt = 10
    sketch: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.sketch and self.blend < 1:
            raise BadInput(
                f"selector.blend = {self.blend}: a sketched map keeps no old relationships; set"
                " blend = 1"
            )

    def with_sketch_size(self, size: int) -> "RelationshipSelector":
        """The same over a map that keeps `size` floats of each update."""
        return replace(self, sketch=size, blend=1.0)

    @property
    def device_agnostic(self) -> bool:
        """Whether updates may stay on a device: whole ones are remembered on the host."""
        return self.sketch > 0

    def exploration_probability(self, t: int) -> float:
        """Probability to explore in round t."""
        return 1.0 if t <= self.warmup else max(self.decay ** (t - 1), self.floor)

    def initial_state(self, M: int, d: int, D: int) -> RelationshipState:
        size = D if self.space == "wire" else d
        return relations.init_relationships(
            M, min(self.sketch or size, size), mapped=not self.sketch
        )

    def select(self, state: RelationshipState, view: RoundView, rng: Generator) -> Selection:
        phi = self.exploration_probability(view.t)
        pool = torch.tensor(view.pool)
        if rng.random() < phi:
            picked = pool[torch.from_numpy(rng.permutation(len(pool)))[: view.P]]
            return Selection(tuple(picked.tolist()), why={"phi": phi})
        H, R = state.H[pool], state.R[pool]
        if self.pessimistic:
            H = H.where(R > NEVER_SEEN, -torch.inf)
        order = H.argsort(descending=True, stable=True)  # ties: the lowest row
        if self.most:
            order = self._defer_frequent_clients(pool, order, view)
        picked = pool[order[: view.P]]
        return Selection(tuple(picked.tolist()), exploit=True, why={"phi": phi})

    def _defer_frequent_clients(self, pool: Tensor, order: Tensor, view: RoundView) -> Tensor:
        """The first of `order`, those last that have had their share of the last rounds; P of them
        or more.
        """
        last = view.history[-self.window :]
        recent = Counter(client for record in last for client in record.chosen)
        fair = view.P * len(last) / len(view.pool)
        # at most len(recent) clients wait, so nobody beyond is needed
        first = order[: view.P + len(recent)]
        clients = (view.draft(k).client for k in pool[first].tolist())
        waits = torch.tensor([recent[client] >= max(1.0, self.most * fair) for client in clients])
        return torch.cat([first[~waits], first[waits]])

    def observe(self, state: RelationshipState, event: RoundEvent) -> RelationshipState:
        """Steps 5, 7 and 8 of the paper's figure 4: write V and R, then the rows of Omega and H."""
        m, updates, anchored = state, event.updates, self.anchor == "model"
        size = updates.U.shape[1] if self.space == "wire" else updates.trainable
        sent = event.w if updates.sent is None else updates.sent
        U, w = updates.U[:, :size].float(), sent[:size].float()
        bases = tuple(base[:size].float() for base in updates.base or ())
        full = None
        if 0 < self.sketch < len(w):
            S = make_sketch(len(w), self.sketch)
            full = None if anchored else (w, U)  # of past models only sketches are kept
            U, w = S(U), S(w[None])[0]
            bases = tuple(S(base[None])[0] for base in bases)
        U, w = tensor_bytes.to_host(U), tensor_bytes.to_host(w)
        k = updates.k
        late = None if updates.age is None else (updates.age, bases)
        m = relations.record_updates(m, event.t, w, k, U, anchored, late)
        rows, H = relations.compute_relationships(m, event.t, w, k, U, anchored, full)
        if m.Omega is not None and rows is not None:
            if self.blend < 1:
                rows = (1 - self.blend) * m.Omega[k] + self.blend * rows
                H = rows.sum(1)
            m.Omega[k] = rows
        m.H[k] = H
        return m
