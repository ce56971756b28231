"""Clustered sampling (Fraboni et al., ICML 2021): one client from each of P urns, so that a round
is like the whole.

Client k puts P n_k balls into P urns of N = sum n balls each. A ball of each urn is drawn; its
client trains, and all replies count alike: in the mean over draws a client counts n_k / N, as in
sampling with replacement, but the variance is smaller the more alike the clients of an urn are.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.bounds import PositiveInt
from flrce.core.roles import RoundView, Selector
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Selection
from flrce.rng import draw_weighted

MAX_CLIENTS_CONSIDERED = 500  # clients considered at a time: their tree takes a cube of it
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class ClusteredSamplingState:
    """What each client last sent. Written in place."""

    # (M, sketch) last updates, sketched; 0: never heard from
    V: Tensor = field(metadata={"rows": "trained"})


@dataclass(frozen=True)
class ClusteredSampling(Selector):
    """Urns are filled `by`

    - "size": clients from the largest to the smallest (the paper's algorithm 1);
    - "similarity": groups of clients whose last updates point the same way, none above an urn's
      size; the P largest
      groups have an urn each, and the others fill them up (algorithm 2). Angles are taken between
      sketches of `make_sketch` floats; those with a client never heard from are 0, as in the
      released code.

    A client drawn from one urn is not drawn from another: the urn is asked again. Of more than
    MAX_CLIENTS_CONSIDERED clients, so many drawn at random are considered.
    """

    piece: ClassVar[str] = "clustered"
    device_agnostic: ClassVar[bool] = True
    by: Literal["size", "similarity"] = "size"
    sketch: PositiveInt = 2048

    def with_sketch_size(self, size: int) -> "ClusteredSampling":
        """The same with `size` floats of each update."""
        return replace(self, sketch=size)

    def initial_state(self, M: int, d: int, D: int) -> ClusteredSamplingState:
        return ClusteredSamplingState(
            torch.zeros(M, min(self.sketch, d) * (self.by == "similarity"))
        )

    def select(self, state: ClusteredSamplingState, view: RoundView, rng: Generator) -> Selection:
        pool = np.array(
            [view.pool[i] for i in rng.permutation(len(view.pool))[:MAX_CLIENTS_CONSIDERED]]
        )
        pool.sort()
        n = view.n[torch.from_numpy(pool)].numpy().astype(np.int64)
        n = n if n.any() else np.ones_like(n)  # nobody's samples are known
        P = min(view.P, int((n > 0).sum()))
        if self.by == "size":
            urns = fill_urns_by_size(n, P)
        else:
            V = state.V[torch.from_numpy(pool)]
            urns = fill_urns_by_similarity(n, P, build_ward_tree(pairwise_angles(V)), rng)
        picked = draw_from_urns(urns, n, rng)
        return Selection(
            tuple(int(pool[i]) for i in picked),
            exploit=self.by == "similarity",
            why={"by": self.by},
        )

    def observe(self, state: ClusteredSamplingState, event: RoundEvent) -> ClusteredSamplingState:
        V, u = state.V, event.updates.u
        if V.shape[1]:
            short = make_sketch(u.shape[1], V.shape[1])(u) if V.shape[1] < u.shape[1] else u
            V[event.updates.k] = tensor_bytes.to_host(short)
        return ClusteredSamplingState(V)


def fill_urns_by_size(n: IntArray, P: int) -> IntArray:
    """(P, L) balls of each client in each urn: the largest clients first, urn after urn (algorithm
    1).
    """
    urns = np.zeros((P, len(n)), np.int64)
    pour_balls(urns, np.argsort(-n, kind="stable"), P * n, int(n.sum()), 0)
    return urns


def fill_urns_by_similarity(
    n: IntArray, P: int, merges: NDArray[np.float64], rng: Generator
) -> IntArray:
    """(P, L) balls of each client in each urn, from a tree of the clients (algorithm 2)."""
    N = int(n.sum())
    own, balls = np.divmod(P * n, N)  # whoever fills urns alone has those
    urns = np.zeros((P, len(n)), np.int64)
    first = P - int(own.sum())  # urns to be shared
    urns[np.arange(first, P), np.repeat(np.arange(len(n)), own)] = N
    groups = sorted(
        cut_tree(merges, balls, N), key=lambda group: (int(balls[group].sum()), group[0])
    )
    groups, largest = groups[: len(groups) - first], groups[len(groups) - first :]
    for urn, group in zip(urns, largest, strict=False):
        urn[group] = balls[group]
    k = 0
    for group in groups:
        k = pour_balls(urns, rng.permutation(group), balls, N, k)
    return urns


def pour_balls(urns: IntArray, order: IntArray, balls: IntArray, N: int, k: int) -> int:
    """Fill the urns from the k-th on with these clients' balls, N at most in each; returns the one
    not yet full.
    """
    for client in order:
        left = int(balls[client])
        while left:
            fits = min(N - int(urns[k].sum()), left)
            urns[k, client] += fits
            left -= fits
            k += urns[k].sum() == N
    return k


def pairwise_angles(V: Tensor) -> NDArray[np.float64]:
    """(L, L) angles between rows; 0 with a zero row."""
    unit = torch.nn.functional.normalize(V.double(), dim=1)
    angles = (unit @ unit.T).clamp(-1, 1).arccos().fill_diagonal_(0)
    heard = (V != 0).any(1)
    return (angles * heard * heard[:, None]).numpy()


def build_ward_tree(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L - 1, 4) scipy's merges by Ward's criterion; as in the released code the matrix's rows are
    the points.
    """
    if len(similarity) < 2:
        return np.zeros((0, 4))
    from scipy.cluster.hierarchy import (
        linkage,
    )  # takes a second to load, and other recipes do without
    from scipy.spatial.distance import pdist

    return np.asarray(linkage(pdist(similarity), "ward"))


def cut_tree(merges: NDArray[np.float64], balls: IntArray, N: int) -> list[list[int]]:
    """The largest subtrees that hold at most N balls, as lists of clients in ascending order."""
    groups = {i: [i] for i in range(len(balls))}
    for step, (a, b) in enumerate(merges[:, :2].astype(int).tolist()):
        if a in groups and b in groups and balls[groups[a] + groups[b]].sum() <= N:
            groups[len(balls) + step] = sorted(groups.pop(a) + groups.pop(b))
    return list(groups.values())


def draw_from_urns(urns: IntArray, n: IntArray, rng: Generator) -> list[int]:
    """A client of each urn, nobody twice; where all of an urn's are taken, one of the others in
    proportion to n.
    """
    picked: list[int] = []
    for urn in urns:
        weights = urn.copy() if np.delete(urn, picked).any() else n.copy()
        weights[picked] = 0
        picked += draw_weighted(rng, weights, 1)
    return picked
