"""FLrce's client selection h (Algorithm 2) over the relationship map."""

from collections import Counter
from dataclasses import dataclass

import torch
from numpy.random import Generator

from flrce import relations
from flrce.pieces import View
from flrce.relations import NEVER, Memory
from flrce.types import Event, Selection


@dataclass(frozen=True)
class ByRelationship:
    """Explore with probability phi(t), else take the P largest H.

    `anchor` is where a stale client's line passes: "origin" (eq. 6 as printed) or "model" (as the authors' code).
    `blend` weighs a new relationship against the old (1: overwrite; the authors' code .9). `space` is the vectors
    compared: "trainable" parameters, or all that is on the "wire", BatchNorm statistics included. Clients never heard
    from have H = 0 and so outrank those with H < 0; `pessimistic` puts them last.

    Colluders that agree with one another gain a large H and would be chosen for ever (docs/robustness.md): `floor` is
    the least probability to explore, and a client chosen `most` times in the last `window` rounds waits behind all
    others when the round exploits (0: never; the paper has neither).
    """

    decay: float = 0.98  # phi(t) = decay ** (t - 1)
    warmup: int = 0  # rounds that always explore
    anchor: str = "origin"
    blend: float = 1.0
    space: str = "trainable"
    pessimistic: bool = False
    floor: float = 0.0
    most: int = 0
    window: int = 10

    def phi(self, t: int) -> float:
        """Probability to explore in round t."""
        return 1.0 if t <= self.warmup else max(self.decay ** (t - 1), self.floor)

    def init(self, M: int, d: int, D: int) -> Memory:
        return relations.empty(M, D if self.space == "wire" else d)

    def select(self, memory: Memory, view: View, rng: Generator) -> Selection:
        phi, draw = self.phi(view.t), rng.random()
        pool = torch.tensor(view.pool)
        if draw < phi:
            picked = pool[torch.from_numpy(rng.permutation(len(pool)))[: view.P]]
            return Selection(tuple(picked.tolist()), why={"phi": phi})
        m = relations.enlarge(memory, int(pool.max()) + 1 if len(pool) else 0)
        H = m.H[pool]
        if self.pessimistic:
            H = H.where(m.R[pool] > NEVER, -torch.inf)
        order = H.argsort(descending=True, stable=True)  # ties: the lowest row
        if self.most:
            waits = torch.tensor(self._waiting(view))[order]
            order = torch.cat([order[~waits], order[waits]])
        picked = pool[order[: view.P]]
        return Selection(tuple(picked.tolist()), exploit=True, why={"phi": phi})

    def _waiting(self, view: View) -> list[bool]:
        """Which clients of the pool have had their share of the last rounds."""
        recent = Counter(client for record in view.history[-self.window :] for client in record.chosen)
        return [recent[view.draft(k).client] >= self.most for k in view.pool]

    def observe(self, memory: Memory, event: Event) -> Memory:
        """Steps 5, 7 and 8 of the paper's figure 4: write V and R, then the rows of Omega and H."""
        k, wire = event.updates.k, self.space == "wire"
        U = event.updates.U if wire else event.updates.u
        w = event.w if wire else event.w[: event.updates.trainable]
        m = relations.enlarge(memory, event.M)
        m = relations.remember(m, event.t, w, k, U, self.anchor == "model")
        rows, H = relations.relate(m, event.t, w, k, U, self.anchor == "model")
        if self.blend < 1:
            known = (m.Omega[k] != 0) & (rows != 0)
            rows = torch.where(known, (1 - self.blend) * m.Omega[k] + self.blend * rows, rows)
            H = rows.sum(1)
        m.Omega[k], m.H[k] = rows, H
        return m
