"""Selections that were tried and not shipped; importing this names them in experiment files."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.random import Generator

from flrce import Selector
from flrce.core import relations
from flrce.core.linalg import normalize_rows
from flrce.core.relations import NEVER_SEEN, RelationshipState
from flrce.core.roles import RoundView
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Selection
from flrce.methods.registry import PIECES


@dataclass(frozen=True)
class ByMeanRelationship(Selector):
    """Algorithm 2 with H as the mean over known peers, each counting `fade` as much for every round
    since it reported; explores with probability `floor` at least.
    """

    decay: float = 0.98
    floor: float = 0.2
    fade: float = 0.95

    def initial_state(self, M: int, d: int, D: int) -> RelationshipState:
        return relations.init_relationships(M, d)

    def select(self, memory: RelationshipState, view: RoundView, rng: Generator) -> Selection:
        draw, pool = rng.random(), torch.tensor(view.pool)
        if draw < max(self.decay ** (view.t - 1), self.floor):
            return Selection(
                tuple(pool[torch.from_numpy(rng.permutation(len(pool)))[: view.P]].tolist())
            )
        weight = (self.fade ** (view.t - memory.R.double())).where(
            memory.R > NEVER_SEEN, 0.0
        )  # (M,)
        H = (memory.Omega.double() @ weight) / weight.sum()
        return Selection(
            tuple(pool[H[pool].argsort(descending=True, stable=True)[: view.P]].tolist()),
            exploit=True,
        )

    def observe(self, memory: RelationshipState, event: RoundEvent) -> RelationshipState:
        k, u, w = event.updates.k, event.updates.u, event.w[: event.updates.trainable]
        m = relations.record_updates(memory, event.t, w, k, u, False)
        m.Omega[k], m.H[k] = relations.compute_relationships(m, event.t, w, k, u)
        return m


PIECES["selector"]["mean-relationship"] = ByMeanRelationship

#: "cell/seed" -> what only an oracle or a client's own statement can know; filled by
#: research/studies/selection.py
LABELS: dict[str, np.ndarray] = {}  # (M, classes) training samples of each class, as they truly are
TROUBLED: dict[str, set[int]] = {}  # rows of clients with wrong labels, and of free-riders


@dataclass(frozen=True)
class Served:
    """Who has had a turn in this sweep."""

    turn: torch.Tensor = field(metadata={"rows": True})
    sweep: int = 1


@dataclass(frozen=True)
class Oracle(Selector):
    """Turns in groups whose labels together are most like the fleet's, without those who harm; it
    is told both.
    """

    key: str = ""

    def initial_state(self, M: int, d: int, D: int) -> Served:
        return Served(torch.zeros(M, dtype=torch.long))

    def select(self, memory: Served, view: RoundView, rng: Generator) -> Selection:
        bad, H = TROUBLED[self.key], LABELS[self.key].astype(float)
        pool = [k for k in rng.permutation(view.pool).tolist() if k not in bad]
        due = [k for k in pool if memory.turn[k] < memory.sweep]
        rest = [k for k in pool if memory.turn[k] >= memory.sweep]
        chosen, left = ([], due) if len(due) >= view.P else (due, rest)
        fleet = H[pool].sum(0) / H[pool].sum()
        while len(chosen) < view.P and left:
            together = H[chosen].sum(0) + H[left]  # (L, classes)
            far = np.square(together / together.sum(1, keepdims=True) - fleet).sum(1)
            chosen = [*chosen, left.pop(int(far.argmin()) if chosen else 0)]
        return Selection(tuple(chosen), exploit=True)

    def observe(self, memory: Served, event: RoundEvent) -> Served:
        chosen = torch.tensor(event.chosen)
        again = memory.turn[chosen] >= memory.sweep
        memory.turn[chosen] = memory.sweep + again.long()
        return Served(memory.turn, memory.sweep + bool(again.any()))


@dataclass(frozen=True)
class Order:
    """The order of the next sweep, as it is found out in this one."""

    place: torch.Tensor = field(
        metadata={"rows": True}
    )  # (M,) the next sweep's order; ties by chance
    turn: torch.Tensor = field(metadata={"rows": True})
    s: torch.Tensor  # (size,) signed sum of differences so far
    sweep: int = 1
    count: int = 0  # pairs placed in this sweep


@dataclass(frozen=True)
class Herded(Selector):
    """Turns in the order of CD-GraB (Cooper et al. 2023): of two clients of a round that differ,
    the one goes early and the other late in the next sweep, so that the signed sum of their
    differences stays short.
    """

    sketch: int = 2048

    def initial_state(self, M: int, d: int, D: int) -> Order:
        zeros = torch.zeros(M, dtype=torch.double)
        return Order(zeros, torch.zeros(M, dtype=torch.long), torch.zeros(min(self.sketch, d)))

    def select(self, memory: Order, view: RoundView, rng: Generator) -> Selection:
        pool = torch.tensor(rng.permutation(view.pool))
        served = memory.turn[pool] >= memory.sweep
        due, rest = pool[~served], pool[served]
        order = torch.cat([part[memory.place[part].argsort(stable=True)] for part in (due, rest)])
        return Selection(tuple(order[: view.P].tolist()), exploit=memory.sweep > 1)

    def observe(self, memory: Order, event: RoundEvent) -> Order:
        k, u = event.updates.k, event.updates.u
        v = normalize_rows(
            make_sketch(u.shape[1], len(memory.s))(u) if len(memory.s) < u.shape[1] else u
        )
        s, count = memory.s, memory.count
        for a, b in zip(range(0, len(k) - 1, 2), range(1, len(k), 2), strict=False):
            c = v[a] - v[b]
            plus = bool((s + c).norm() <= (s - c).norm())
            s, count = s + c if plus else s - c, count + 1
            early, late = (a, b) if plus else (b, a)
            memory.place[k[early]], memory.place[k[late]] = count, 10**6 - count
        chosen = torch.tensor(event.chosen)
        again = memory.turn[chosen] >= memory.sweep
        memory.turn[chosen] = memory.sweep + again.long()
        if again.any():
            return Order(memory.place, memory.turn, torch.zeros_like(s), memory.sweep + 1, 0)
        return Order(memory.place, memory.turn, s, memory.sweep, count)


@dataclass(frozen=True)
class Losses:
    loss: torch.Tensor = field(
        metadata={"rows": True, "fill": float("inf")}
    )  # (M,) as last reported


@dataclass(frozen=True)
class LikeFedLECC(Selector):
    """After FedLECC (arXiv 2603.08911): clients in clusters by their label histograms (Hellinger's
    distance); clusters with the largest mean loss first, and of each the clients with the largest
    loss. Losses are the last reported ones, where the paper asks everyone; clusters are by average
    linkage, where it has OPTICS.
    """

    key: str = ""
    clusters: int = 10
    some: int = 5  # clusters of a round

    def initial_state(self, M: int, d: int, D: int) -> Losses:
        return Losses(torch.full((M,), torch.inf))

    def select(self, memory: Losses, view: RoundView, rng: Generator) -> Selection:
        pool = rng.permutation(view.pool)
        group = clusters_of(self.key, self.clusters)[pool]
        loss = memory.loss.numpy()[pool]
        finite = np.where(np.isfinite(loss), loss, 1e9)
        means = {g: finite[group == g].mean() for g in np.unique(group)}
        best = sorted(means, key=lambda g: -means[g])[: self.some]
        each, chosen = -(-view.P // len(best)), []
        for g in best:
            mine = pool[group == g]
            chosen += mine[np.argsort(-finite[group == g], kind="stable")][:each].tolist()
        chosen = chosen[: view.P]
        others = [k for k in pool[np.argsort(-finite, kind="stable")].tolist() if k not in chosen]
        return Selection((*chosen, *others[: view.P - len(chosen)]), exploit=True)

    def observe(self, memory: Losses, event: RoundEvent) -> Losses:
        if event.updates.loss is not None:
            memory.loss[event.updates.k] = event.updates.loss.float()
        return memory


@cache
def clusters_of(key, count):
    from scipy.cluster.hierarchy import fcluster, linkage

    H = LABELS[key] / LABELS[key].sum(1, keepdims=True)
    return fcluster(linkage(np.sqrt(H), "average"), count, "maxclust")


PIECES["selector"] |= {"label-oracle": Oracle, "herded": Herded, "like-fedlecc": LikeFedLECC}
