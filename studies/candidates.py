"""Selections that were tried and not shipped; importing this names them in experiment files."""

from dataclasses import dataclass

import torch
from numpy.random import Generator

from flrce import relations
from flrce.names import PIECES
from flrce.pieces import View
from flrce.relations import NEVER, Memory
from flrce.types import Event, Selection


@dataclass(frozen=True)
class ByMeanRelationship:
    """Algorithm 2 with H as the mean over known peers, each counting `fade` as much for every round since it reported;
    explores with probability `floor` at least."""

    decay: float = 0.98
    floor: float = 0.2
    fade: float = 0.95

    def init(self, M: int, d: int, D: int) -> Memory:
        return relations.empty(M, d)

    def select(self, memory: Memory, view: View, rng: Generator) -> Selection:
        draw, pool = rng.random(), torch.tensor(view.pool)
        if draw < max(self.decay ** (view.t - 1), self.floor):
            return Selection(tuple(pool[torch.from_numpy(rng.permutation(len(pool)))[: view.P]].tolist()))
        weight = (self.fade ** (view.t - memory.R.double())).where(memory.R > NEVER, 0.0)  # (M,)
        H = (memory.Omega.double() @ weight) / weight.sum()
        return Selection(tuple(pool[H[pool].argsort(descending=True, stable=True)[: view.P]].tolist()), exploit=True)

    def observe(self, memory: Memory, event: Event) -> Memory:
        k, u, w = event.updates.k, event.updates.u, event.w[: event.updates.trainable]
        m = relations.remember(memory, event.t, w, k, u, False)
        m.Omega[k], m.H[k] = relations.relate(m, event.t, w, k, u)
        return m


PIECES["selector"]["mean-relationship"] = ByMeanRelationship
