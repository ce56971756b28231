"""The paper's one idea: how clients' updates relate (V, R, Omega, H), as algebra.

Algorithm 1 compares an update u_k with every client's last update v_j = V_j: by cosine if v_j is
fresh (R_j >= t - 1), else by how much w + u_k comes nearer to the line along v_j than w was (eq.
6). All of it follows from one product of (u, w) with V^T; the rest is P x M, a block of clients at
a time. Fleets too large for Omega keep only its sums H.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.state_values import RelationshipMap

NEVER_SEEN = -(2**31)  # R of a client never heard from
SMALLEST_NORM = torch.finfo(torch.float64).tiny  # in place of a length of 0
MIN_SQUARED_DISTANCE = 1e-12
# clients compared at a time: what is kept meanwhile is P x BLOCK, not P x M
CLIENTS_PER_BLOCK = 2**10
FLOATS_PER_CAST = 2**20  # floats widened to float64 at a time
# coordinates multiplied at a time: half the time of one long skinny product, and no copy of U
PRODUCT_COLUMNS = 2**10


@dataclass(frozen=True)
class RelationshipState(RelationshipMap):
    """The server's maps. V and its norms are written in place: copying (M, d) would dwarf the
    product.
    """

    V: Tensor = field(metadata={"rows": "trained"})  # (M, d) last update of each client
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER_SEEN})  # (M,) round of that update
    # (M, M) of k (row) with j, if kept
    Omega: Tensor | None = field(metadata={"rows": "trained", "square": True})
    H: Tensor = field(metadata={"rows": "trained"})  # (M,) sum of a row: the heuristic of eq. 7
    vv: Tensor = field(metadata={"rows": "trained"})  # (M,) squared norms of V
    # (M,) <anchor_j, v_j>; zero for lines through the origin
    av: Tensor = field(metadata={"rows": "trained"})
    # round -> w it started from, while some R points to it
    A: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


class AnchorOffsets(NamedTuple):
    """a = w - anchor for the model of every round that some stale client started from."""

    rounds: Tensor  # (A,) ascending
    ua: Tensor  # (P, A) <u_k, a>
    aa: Tensor  # (1, A) <a, a>


def init_relationships(
    M: int, d: int, dtype: torch.dtype = torch.float32, mapped: bool = True
) -> RelationshipState:
    """Nothing known of M clients. The tables' pages are not touched before they are written."""
    zeros = torch.zeros
    return RelationshipState(
        V=zeros(M, d, dtype=dtype),
        R=torch.full((M,), NEVER_SEEN),
        Omega=zeros(M, M, dtype=dtype) if mapped else None,
        H=zeros(M, dtype=dtype),
        vv=zeros(M, dtype=torch.float64),
        av=zeros(M, dtype=torch.float64),
    )


def record_updates(
    m: RelationshipState,
    t: int,
    w: Tensor,
    k: Tensor,
    U: Tensor,
    anchored: bool,
    late: tuple[Tensor, Sequence[Tensor]] | None = None,
) -> RelationshipState:
    """Write round t's updates into V and R (Algorithm 4, lines 9-10); with anchors, keep only the
    w's still in use.

    `late` is (rounds that each update is old, the model that each started from): an update is of
    the round whose model it started from, and as stale. None: all are of round t.
    """
    U = U.to(m.V.dtype)
    m.V.index_copy_(0, k, U)
    m.R[k] = t if late is None else t - late[0]
    # by rows: it makes a copy
    m.vv[k] = torch.cat([torch.linalg.vecdot(u, u) for u in U.split(1)]).double()
    if not anchored:
        return m
    if late is None:
        starts = {t: w}
        m.av[k] = (U @ w.to(U.dtype)).double()
    else:
        age, bases = late
        starts = dict(zip((t - age).tolist(), bases, strict=True))
        m.av[k] = torch.stack(
            [u @ base.to(u.dtype) for u, base in zip(U, bases, strict=True)]
        ).double()
    anchors, used = {**m.A, **starts}, set(m.R.unique().tolist())
    return replace(m, A={r: anchor for r, anchor in anchors.items() if r in used})


def compute_relationships(
    m: RelationshipState,
    t: int,
    w: Tensor,
    k: Tensor,
    U: Tensor,
    anchored: bool = False,
    full: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Rows k of Omega (None where it is not kept) and H after round t (Algorithm 1, eq. 7); m
    already holds round t.

    The line of a stale v_j passes through the origin as eq. 6 prints it, or (`anchored`) through
    the model that j started from: with a = w - anchor_j, orthdist(w)^2 = aa - av^2/vv, and a step u
    changes it by 2 ua + uu - uv (uv + 2 av)/vv. Keeping that ratio x to orthdist(w)^2 spares
    float32 the cancellation of 1 - d'/d. Where w, U and V are sketched, `full` may give w and U as
    they were: the error of <u, w> would reach all of H.
    """
    w, U = w.to(m.V.dtype), U.to(m.V.dtype)
    rows = None if m.Omega is None else m.V.new_zeros(len(k), len(m.H))
    H = torch.zeros(len(k), dtype=torch.float64)
    whole_w, whole_U = full or (w, U)
    offsets = _compute_offsets(m, whole_w, whole_U, anchored)
    for start in range(0, len(m.H), CLIENTS_PER_BLOCK):
        j = slice(start, start + CLIENTS_PER_BLOCK)
        block = _relate_block(m, t, w, k, U, offsets, j)
        H += block.sum(1)
        if rows is not None:
            rows[:, j] = block
    return rows, H.to(m.H.dtype)


def _relate_block(
    m: RelationshipState, t: int, w: Tensor, k: Tensor, U: Tensor, offsets: AnchorOffsets, j: slice
) -> Tensor:
    """(P, len(j)) relationships of clients k with clients j, in float64: cosines if fresh, eq. 6 if
    stale.
    """
    R = m.R[j]  # (j,)
    uu, vv = m.vv[k, None], m.vv[None, j]  # (P, 1), (1, j)
    uv, wv = torch.split(_multiply_with_map(U, w, m.V[j]), [len(k), 1])  # (P, j), (1, j)
    ua, aa = _select_anchor_products(offsets, R)  # (P, j) or (P, 1), (1, j) or (1, 1)
    relations = _relative_approach(uu, vv, uv, ua, aa, wv - m.av[None, j])
    fresh = t - 1 <= R
    relations[:, fresh] = uv[:, fresh] / (uu * vv[:, fresh]).sqrt().clamp(
        min=SMALLEST_NORM
    )  # cossim
    # of one never seen, or an update of zeros, there is no opinion
    heard = (uu > 0) & (vv > 0) & (R[None] > NEVER_SEEN)
    relations = relations.clamp(-1, 1).where(heard, 0.0)
    own = (k >= j.start) & (k < j.stop)
    relations[own, k[own] - j.start] = 0.0  # j != k
    return relations


def _relative_approach(
    uu: Tensor, vv: Tensor, uv: Tensor, ua: Tensor, aa: Tensor, av: Tensor
) -> Tensor:
    """(P, j) 1 - orthdist(w + u, v) / orthdist(w, v): by which share a step u comes nearer to the
    line of a stale v.
    """
    safe = vv.clamp(min=SMALLEST_NORM)
    x = (2 * ua + uu - uv * (uv + 2 * av) / safe) / (aa - av.square() / safe).clamp(
        min=MIN_SQUARED_DISTANCE
    )
    return -x / (1 + (1 + x).clamp(min=0).sqrt())  # 1 - sqrt(1 + x)


def _select_anchor_products(offsets: AnchorOffsets, R: Tensor) -> tuple[Tensor, Tensor]:
    """<u_k, a_j> and <a_j, a_j> with the anchor that each client j started from; one anchor is
    everybody's.
    """
    if len(offsets.rounds) == 1:
        return offsets.ua, offsets.aa
    at = torch.searchsorted(offsets.rounds, R)
    return offsets.ua[:, at], offsets.aa[:, at]


def _multiply_with_map(U: Tensor, w: Tensor, V: Tensor) -> Tensor:
    """(P + 1, j) products of the rows of U, and of w, with those of V; partial sums are added up in
    float64.
    """
    total = torch.zeros(len(U) + 1, len(V), dtype=torch.float64)
    for u, a, v in zip(
        U.split(PRODUCT_COLUMNS, 1),
        w.split(PRODUCT_COLUMNS),
        V.split(PRODUCT_COLUMNS, 1),
        strict=True,
    ):
        total += torch.cat([u, a[None]]) @ v.T
    return total


def _compute_offsets(m: RelationshipState, w: Tensor, U: Tensor, anchored: bool) -> AnchorOffsets:
    """How far w is from every anchor in use, and how far the updates go along; the origin is one
    anchor for all.
    """
    rounds = sorted(m.A) if anchored else [NEVER_SEEN]
    offsets = [w - m.A[r].to(w.dtype) for r in rounds] if anchored else [w]
    ua = torch.stack([_dot_products(U, a) for a in offsets], 1)
    aa = torch.stack([_norm_float64(a).square() for a in offsets])
    return AnchorOffsets(
        torch.tensor(rounds), tensor_bytes.to_host(ua), tensor_bytes.to_host(aa[None])
    )


def _dot_products(U: Tensor, a: Tensor) -> Tensor:
    """(P,) products with a in float64; on a device they are summed in it too."""
    if tensor_bytes.is_on_host(U):
        return (U @ a).double()
    parts = zip(U.split(FLOATS_PER_CAST, 1), a.split(FLOATS_PER_CAST), strict=True)
    return torch.stack([(u.double() * part).sum(1) for u, part in parts]).sum(0)


def _norm_float64(a: Tensor) -> Tensor:
    """|a| in float64; only parts of a are widened at a time."""
    parts = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in a.split(FLOATS_PER_CAST)
    ]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return whole
