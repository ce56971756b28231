"""The paper's one idea: how clients' updates relate (V, R, Omega, H), as algebra.

Algorithm 1 compares an update u_k with every client's last update v_j = V_j: by cosine if v_j is fresh (R_j >= t - 1),
else by how much w + u_k comes nearer to the line along v_j than w was (eq. 6). All of it follows from one product of
(u, w) with V^T; the rest is P x M.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.linalg import grown

NEVER = -(2**31)  # R of a client never heard from
TINY = 1e-12


@dataclass(frozen=True)
class Memory:
    """The server's maps. V and its norms are written in place: copying (M, d) would dwarf the product."""

    V: Tensor = field(metadata={"rows": True})  # (M, d) last update of each client
    R: Tensor = field(metadata={"rows": True})  # (M,) round of that update
    Omega: Tensor = field(metadata={"rows": True, "square": True})  # (M, M) relationship of k (row) with j (column)
    H: Tensor = field(metadata={"rows": True})  # (M,) sum of a row: the heuristic of eq. 7
    vv: Tensor = field(metadata={"rows": True})  # (M,) squared norms of V
    av: Tensor = field(metadata={"rows": True})  # (M,) <anchor_j, v_j>; zero for lines through the origin
    A: dict[int, Tensor] = field(default_factory=dict)  # round -> w it started from, while some R points to it


def empty(M: int, d: int, dtype: torch.dtype = torch.float32) -> Memory:
    """Nothing known of M clients. The tables' pages are not touched before they are written."""
    zeros = torch.zeros
    return Memory(
        V=zeros(M, d, dtype=dtype), R=torch.full((M,), NEVER), Omega=zeros(M, M, dtype=dtype),
        H=zeros(M, dtype=dtype), vv=zeros(M, dtype=torch.float64), av=zeros(M, dtype=torch.float64),
    )  # fmt: skip


def enlarge(m: Memory, M: int) -> Memory:
    """Room for clients that have appeared since."""
    if len(m.H) >= M:
        return m
    Omega = m.Omega.new_zeros(M, M)
    Omega[: len(m.H), : len(m.H)] = m.Omega
    return replace(
        m, V=grown(m.V, M), R=grown(m.R, M, NEVER), Omega=Omega, H=grown(m.H, M), vv=grown(m.vv, M), av=grown(m.av, M)
    )


def remember(m: Memory, t: int, w: Tensor, k: Tensor, U: Tensor, anchored: bool) -> Memory:
    """Write round t's updates into V and R (Algorithm 4, lines 9-10); with anchors, keep only the w's still in use."""
    U = U.to(m.V.dtype)
    m.V[k], m.R[k] = U, t
    m.vv[k] = torch.linalg.vecdot(U, U).double()
    if not anchored:
        return m
    m.av[k] = (U @ w.to(U.dtype)).double()
    used = set(m.R.tolist())
    return replace(m, A={r: a for r, a in {**m.A, t: w}.items() if r in used})


def relate(m: Memory, t: int, w: Tensor, k: Tensor, U: Tensor, anchored: bool = False) -> tuple[Tensor, Tensor]:
    """Rows k of Omega and H after round t (Algorithm 1, eq. 7); m already holds round t.

    The line of a stale v_j passes through the origin as eq. 6 prints it, or (`anchored`) through the model that j
    started from: with a = w - anchor_j, orthdist(w)^2 = aa - av^2/vv, and a step u changes it by
    2 ua + uu - uv (uv + 2 av)/vv. Keeping that ratio x to orthdist(w)^2 spares float32 the cancellation of 1 - d'/d.
    """
    P = len(k)
    w, U = w.to(m.V.dtype), U.to(m.V.dtype)
    uv, wv = torch.split(torch.cat([U, w[None]]) @ m.V.T, [P, 1])  # (P, M), (1, M)
    uu, vv, uv = m.vv[k, None], m.vv[None], uv.double()  # (P, 1), (1, M), (P, M)
    cossim = uv / (uu * vv).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    ua, aa = _offsets(m, w, U, anchored)  # (P, M) or (P, 1), (1, M) or (1, 1)
    av = wv.double() - m.av[None] if anchored else wv.double()
    safe = vv.clamp(min=torch.finfo(torch.float64).tiny)
    x = (2 * ua + uu - uv * (uv + 2 * av) / safe) / (aa - av.square() / safe).clamp(min=TINY)
    nearer = (-x / (1 + (1 + x).clamp(min=0).sqrt())).clamp(min=-1)  # max(1 - sqrt(1 + x), -1)
    rows = torch.where(m.R[None] >= t - 1, cossim, nearer).clamp(-1, 1)
    rows = rows.where((uu > 0) & (vv > 0) & (m.R[None] > NEVER), 0.0)  # never seen, or zero: no opinion
    rows[torch.arange(P), k] = 0.0  # j != k
    return rows.to(m.Omega.dtype), rows.sum(1).to(m.H.dtype)


def _offsets(m: Memory, w: Tensor, U: Tensor, anchored: bool) -> tuple[Tensor, Tensor]:
    """<u_k, a_j> and <a_j, a_j> for a_j = w - anchor_j; anchors repeat, so each past model is subtracted once."""
    if not anchored:
        return (U @ w).double()[:, None], torch.linalg.vector_norm(w, dtype=torch.float64).square().reshape(1, 1)
    past = sorted(m.A)
    ua = torch.zeros(len(U), len(m.R), dtype=torch.float64)
    aa = torch.zeros(1, len(m.R), dtype=torch.float64)
    for r in past:
        a = w - m.A[r].to(w.dtype)
        columns = r == m.R
        ua[:, columns] = (U @ a).double()[:, None]
        aa[:, columns] = torch.linalg.vector_norm(a, dtype=torch.float64).square()
    return ua, aa
