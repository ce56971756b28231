"""Candidates for a selection by relationships that does not hurt; the study decides which of them ship."""

from dataclasses import dataclass, field, replace

import torch
from flrce import relations
from flrce.linalg import grown
from flrce.pieces import View
from flrce.relations import NEVER, Memory
from flrce.types import Event, Selection
from numpy.random import Generator
from torch import Tensor


@dataclass(frozen=True)
class MeanRelationship:
    """Algorithm 2 with H as the mean over known peers instead of the sum, and an exploration floor."""

    decay: float = 0.98
    floor: float = 0.0

    def init(self, M: int, d: int, D: int) -> Memory:
        return relations.empty(M, d)

    def select(self, memory: Memory, view: View, rng: Generator) -> Selection:
        draw, pool = rng.random(), torch.tensor(view.pool)
        if draw < max(self.decay ** (view.t - 1), self.floor):
            picked = pool[torch.from_numpy(rng.permutation(len(pool)))[: view.P]]
            return Selection(tuple(picked.tolist()))
        known = (memory.Omega[pool] != 0).sum(1).clamp(min=1)
        picked = pool[(memory.H[pool] / known).argsort(descending=True, stable=True)[: view.P]]
        return Selection(tuple(picked.tolist()), exploit=True)

    def observe(self, memory: Memory, event: Event) -> Memory:
        k, u, w = event.updates.k, event.updates.u, event.w[: event.updates.trainable]
        m = relations.remember(memory, event.t, w, k, u, False)
        m.Omega[k], m.H[k] = relations.relate(m, event.t, w, k, u)
        return m


@dataclass(frozen=True)
class Products:
    """Last updates, when they came, and their products."""

    V: Tensor = field(metadata={"rows": True})
    R: Tensor = field(metadata={"rows": True})
    G: Tensor = field(metadata={"rows": True, "square": True})
    turn: Tensor = field(metadata={"rows": True})  # (M,) times a client was chosen


@dataclass(frozen=True)
class Rotation:
    """Everyone once before anyone twice. Who goes next of those due: by "chance", by "agreement" with all last updates
    (the relationship map's idea), or so that the round's mean update is nearest to everyone's ("balance")."""

    by: str = "chance"

    def init(self, M: int, d: int, D: int) -> Products:
        return Products(torch.zeros(M, d), torch.full((M,), NEVER), torch.zeros(M, M, dtype=torch.float64), torch.zeros(M))

    def select(self, memory: Products, view: View, rng: Generator) -> Selection:
        pool = torch.tensor(view.pool)
        order = pool[torch.from_numpy(rng.permutation(len(pool)))]
        turns = memory.turn[order]
        due = order[turns == turns.min()]
        if len(due) <= view.P:  # the sweep ends: all that are left, then the first of the next
            rest = order[turns > turns.min()]
            return Selection(tuple(torch.cat([due, rest])[: view.P].tolist()))
        if self.by == "chance" or bool((memory.R[due] == NEVER).any()):
            return Selection(tuple(due[: view.P].tolist()))
        return Selection(tuple(self._chosen(memory, due, view)), exploit=True)

    def _chosen(self, m: Products, due: Tensor, view: View) -> list[int]:
        everyone = torch.tensor(view.pool)
        n = view.n[everyone] / view.n[everyone].sum()
        G = torch.where(m.R[:, None] >= m.R[None], m.G, m.G.T)
        if self.by == "agreement":
            norm = G.diagonal().clamp(min=1e-30).sqrt()
            C = G / norm[:, None] / norm[None]
            score = C[due][:, everyone].mean(1)
            return due[score.argsort(descending=True, stable=True)[: view.P]].tolist()
        target = G[:, everyone] @ n  # <V_k, sum p_j V_j>
        picked: list[int] = []
        total, weight = torch.zeros(len(G), dtype=torch.float64), 0.0  # <V_k, sum of picked n V>, sum n
        square = 0.0
        left = due.tolist()
        while len(picked) < view.P:
            nk = view.n[left]
            w2 = (weight + nk) ** 2
            own = G.diagonal()[left]
            norm2 = (square + 2 * nk * total[left] + nk**2 * own) / w2
            along = (sum(view.n[k] * target[k] for k in picked) + nk * target[left]) / (weight + nk)
            best = int((norm2 - 2 * along).argmin())
            k = left.pop(best)
            square += float(2 * view.n[k] * total[k] + view.n[k] ** 2 * G[k, k])
            total += view.n[k] * G[:, k]
            weight += float(view.n[k])
            picked.append(k)
        return picked

    def observe(self, memory: Products, event: Event) -> Products:
        m, k, u = memory, event.updates.k, event.updates.u
        if len(m.R) < event.M:
            G = m.G.new_zeros(event.M, event.M)
            G[: len(m.R), : len(m.R)] = m.G
            m = replace(m, V=grown(m.V, event.M), R=grown(m.R, event.M, NEVER), G=G, turn=grown(m.turn, event.M))
        m.V[k], m.R[k] = u, event.t
        m.G[k] = (u @ m.V.T).double()
        chosen = torch.tensor(event.chosen or k.tolist())
        m.turn[chosen] += 1
        return m
