"""Everyone once before anyone twice; the relationships between last updates say who goes together.

With few labels each, clients pull the model to and fro. Nobody is left out of a sweep, nobody can capture it by
agreeing with friends (docs/robustness.md). What "balance" adds to turns by chance is not known: updates are nearly
orthogonal, so the shortest ones, those of small clients, go first (docs/beyond.md).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.bounds import Count
from flrce.errors import BadInput, nearest
from flrce.pieces import View
from flrce.relations import NEVER
from flrce.selectors.sketch import sketch
from flrce.types import Event, Selection

ORDERS = ("balance", "agreement", "sizes", "chance")
CROWD = 1_000  # clients considered at a time
MAPPED = 2_000  # clients up to which all their relationships are kept, for reports


@dataclass(frozen=True)
class Turns:
    """Who has had how many turns, what they last sent, and how that relates. All but `turn` is written in place."""

    turn: Tensor = field(metadata={"rows": True})  # (M,) the last sweep in which a client was asked
    R: Tensor = field(metadata={"rows": True, "fill": NEVER})  # (M,) round of its last update
    V: Tensor = field(metadata={"rows": True})  # (M, sketch) that update, sketched, times its samples
    Omega: Tensor | None = field(metadata={"rows": True, "square": True})  # (M, M) cosines when k (row) last reported
    H: Tensor | None = field(metadata={"rows": True})  # (M,) sum of a row, as eq. 7
    sweep: int = 1


@dataclass(frozen=True)
class InTurn:
    """Of those who are due, the P that go `by`:

    - "balance": one is drawn, the others bring the group's mean last update nearest to that of all who are due;
    - "agreement": the largest mean cosine with the others' last updates first (FLrce's idea of H);
    - "sizes": one of each of P parts of them, from the fewest samples to the most (stratified by n);
    - "chance": whoever is drawn.

    But for "sizes", whoever was never heard from goes first, drawn at random. Updates are compared by sketches of
    `sketch` floats (sketch.py), so the server keeps M x sketch of them, whatever the model's size.
    """

    piece: ClassVar[str] = "in-turn"
    by: Literal["balance", "agreement", "sizes", "chance"] = "balance"
    sketch: Count = 2048

    def __post_init__(self) -> None:
        if self.by not in ORDERS:
            raise BadInput(f"selector.by = {self.by!r}: {nearest(self.by, ORDERS)}")
        if type(self.sketch) is not int or self.sketch < 1:
            raise BadInput(f"selector.sketch = {self.sketch!r}: must be a number of floats above 0")

    def sketched(self, size: int) -> "InTurn":
        """The same with `size` floats of each update."""
        return replace(self, sketch=size)

    def init(self, M: int, d: int, D: int) -> Turns:
        turn, R, mapped = torch.zeros(M, dtype=torch.long), torch.full((M,), NEVER), self.by in ("balance", "agreement")
        Omega = torch.zeros(M, M) if mapped and M <= MAPPED else None
        return Turns(turn, R, torch.zeros(M, min(self.sketch, d) * mapped), Omega, torch.zeros(M) if mapped else None)

    def select(self, memory: Turns, view: View, rng: Generator) -> Selection:
        pool = torch.tensor([view.pool[i] for i in rng.permutation(len(view.pool))])
        m = memory
        served, known = m.turn[pool] >= m.sweep, (m.R[pool] > NEVER) | (self.by == "sizes")
        due = int((~served).sum())
        chosen, rest = (pool[~served], served) if due < view.P else (pool[:0], ~served)  # the last, and some anew
        chosen = torch.cat([chosen, pool[rest & ~known]])[: view.P]
        count = min(view.P - len(chosen), int((rest & known).sum()))
        if count:
            crowd = pool[rest & known][: max(CROWD, count)]
            chosen = torch.cat([chosen, self._next(m, chosen, crowd, count, view.n)])
        by = self.by if count else "chance"
        return Selection(tuple(chosen.tolist()), exploit=by != "chance", why={"due": due, "by": by})

    def _next(self, m: Turns, chosen: Tensor, rest: Tensor, count: int, n: Tensor) -> Tensor:
        """Who of the rest, who come in random order, goes along with the chosen."""
        if self.by == "sizes":
            return rest[stratified(n[rest], count)]
        if self.by == "balance":
            return rest[balanced(m.V[rest], m.V[chosen[m.R[chosen] > NEVER]], count)]
        if self.by == "agreement":
            return rest[agreement(m.V[rest]).argsort(descending=True, stable=True)[:count]]
        return rest[:count]

    def observe(self, memory: Turns, event: Event) -> Turns:
        m, k, u = memory, event.updates.k, event.updates.u
        chosen = torch.tensor(event.chosen, dtype=torch.long)
        turn, again = m.turn.clone(), m.turn[chosen] >= m.sweep
        turn[chosen], m.R[k] = m.sweep + again.long(), event.t
        if m.H is not None:
            sent = sketch(u.shape[1], m.V.shape[1])(u) if m.V.shape[1] < u.shape[1] else u
            m.V[k] = sent * event.updates.n[:, None].to(sent.dtype)
            rows = related(m.V, k)
            m.H[k] = rows.sum(1)
            if m.Omega is not None:
                m.Omega[k] = rows
        return replace(m, turn=turn, sweep=m.sweep + bool(again.any()))


def related(V: Tensor, k: Tensor) -> Tensor:
    """(P, M) cosines of the rows k with all others; 0 with those never heard from."""
    norms = V.norm(dim=1).clamp(min=torch.finfo(V.dtype).tiny)
    found: Tensor = (V[k] @ V.T / norms[k, None] / norms).clamp(-1, 1)
    found[torch.arange(len(k)), k] = 0.0
    return found


def agreement(V: Tensor) -> Tensor:
    """(L,) mean cosine of each row with all; 0 for a zero update."""
    unit = torch.nn.functional.normalize(V, dim=1)
    return unit @ unit.mean(0)


def stratified(n: Tensor, count: int) -> list[int]:
    """`count` positions: the first of each of `count` parts, as equal as can be, of those sorted by n."""
    parts = n.argsort(stable=True).tensor_split(count)
    return [int(part.min()) for part in parts]


def balanced(S: Tensor, chosen: Tensor, count: int) -> list[int]:
    """`count` rows of S (L, size): the first one unless some are chosen, then one by one whichever brings the sum of
    chosen and picked nearest to their share of the sum of all. What is left then has its share too.
    """
    left, total, have = torch.ones(len(S), dtype=torch.bool), chosen.sum(0), len(chosen)
    mean = (S.sum(0) + total) / (len(S) + have)
    picked: list[int] = []
    for _ in range(count):
        have += 1
        distance = (total + S - have * mean).square().sum(1)
        best = int(distance.where(left, torch.inf).argmin()) if have > 1 else 0
        picked.append(best)
        left[best] = False
        total = total + S[best]
    return picked
