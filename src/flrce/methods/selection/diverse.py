"""DivFL (Balakrishnan et al., ICLR 2022): P clients whose last updates stand for everyone's.

It maximises -sum_k min_{i in S} |V_k - V_i| greedily over FLrce's own table V, for no further
bytes: the direct rival of selection by relationships.
"""

from dataclasses import dataclass, field

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection


@dataclass(frozen=True)
class DivFLState:
    """Last updates and their products. Row k is written when k reports, so of (k, j) and (j, k) the
    fresher one counts.

    V is written in place, as in `relations`.
    """

    V: Tensor = field(metadata={"rows": "trained"})  # (M, d) last update of each client
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER_SEEN})  # (M,) round of that update
    # (M, M) <V_k, V_j> when k last reported
    G: Tensor = field(metadata={"rows": "trained", "square": True})


@dataclass(frozen=True)
class DivFL(Selector):
    """Clients never heard from go first, at random; the others by greedy facility location."""

    def initial_state(self, M: int, d: int, D: int) -> DivFLState:
        return DivFLState(
            torch.zeros(M, d), torch.full((M,), NEVER_SEEN), torch.zeros(M, M, dtype=torch.float64)
        )

    def select(self, state: DivFLState, view: RoundView, rng: Generator) -> Selection:
        pool = torch.tensor(view.pool)
        m = state
        heard = m.R[pool] > NEVER_SEEN
        unseen = pool[~heard].tolist()
        first = [unseen[i] for i in rng.permutation(len(unseen))[: view.P]]
        heard_rows = pool[heard]
        picked = select_facilities(
            pairwise_distances(m)[heard_rows][:, heard_rows],
            min(view.P - len(first), len(heard_rows)),
        )
        return Selection(
            (*first, *heard_rows[picked].tolist()), exploit=not first, why={"unseen": len(unseen)}
        )

    def observe(self, state: DivFLState, event: RoundEvent) -> DivFLState:
        m, k, u = state, event.updates.k, event.updates.u
        m.V[k], m.R[k] = u, event.t
        m.G[k] = (u @ m.V.T).double()
        m.G[k, k] = torch.linalg.vector_norm(u, dim=1, dtype=torch.float64).square()
        return m


def pairwise_distances(m: DivFLState) -> Tensor:
    """(M, M) |V_k - V_j|."""
    G = torch.where(m.R[:, None] >= m.R[None], m.G, m.G.T)
    norms = m.G.diagonal()
    return (norms[:, None] + norms[None] - 2 * G).clamp(min=0).sqrt().fill_diagonal_(0)


def select_facilities(D: Tensor, count: int) -> list[int]:
    """`count` positions chosen one by one, each to lower sum_k min_{i in S} D_ki most; ties: the
    lowest.
    """
    picked: list[int] = []
    nearest = torch.full((len(D),), torch.inf, dtype=D.dtype)
    for _ in range(count):
        cost = torch.minimum(nearest[:, None], D).sum(0)
        cost[picked] = torch.inf
        best = int((cost == cost.min()).nonzero()[0, 0])
        picked.append(best)
        nearest = torch.minimum(nearest, D[:, best])
    return picked
