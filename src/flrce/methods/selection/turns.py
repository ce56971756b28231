"""Everyone once before anyone twice; the relationships between last updates say who goes together.

With few labels each, clients pull the model to and fro. Nobody is left out of a sweep, nobody can
capture it by agreeing with friends (research/docs/robustness.md). What grouping by directions adds
to turns by chance: research/docs/selection.md.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt
from flrce.core.linalg import normalize_rows
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import RoundView, Selector
from flrce.core.sketch import make_sketch
from flrce.core.state_values import RelationshipMap
from flrce.core.types import RoundEvent, Selection
from flrce.methods.selection.client_groups import (
    cap_sample_counts,
    cosines_with_others,
    mean_cosines,
    select_balanced,
    select_stratified,
)

MAX_CLIENTS_CONSIDERED = 1_000  # clients considered at a time
MAX_MAPPED_CLIENTS = 2_000  # clients up to which all their relationships are kept, for reports


@dataclass(frozen=True)
class RoundRobinState(RelationshipMap):
    """Who has had how many turns, where they last pointed, and how that relates. All but `turn` is
    written in place.
    """

    # (M,) the last sweep in which a client was asked
    turn: Tensor = field(metadata={"rows": "trained"})
    # (M,) round of its last update
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER_SEEN})
    # (M, sketch) direction of that update, sketched: length 1
    V: Tensor = field(metadata={"rows": "trained"})
    # (M, M) cosines when k last reported
    Omega: Tensor | None = field(metadata={"rows": "trained", "square": True})
    H: Tensor | None = field(metadata={"rows": "trained"})  # (M,) sum of a row, as eq. 7
    sweep: int = 1


@dataclass(frozen=True)
class RoundRobinSelector(Selector):
    """Of those who are due in this sweep, the P that go `by`:

    - "balance": one of each of P parts of them by samples, whose last updates' directions cancel
      out what the others
      have too much of (groups.balanced);
    - "agreement": the largest mean cosine with the others' last updates first (FLrce's idea of H),
      and before them
      whoever was never heard from;
    - "sizes": one of each of P parts of them, from the fewest samples to the most (stratified by
      n);
    - "chance": whoever is drawn.

    Samples are a client's own claim: "balance" believes no more than `cap` times the median (0:
    any). Of each part it compares only `tries` clients drawn at random (0: all): whatever a client
    sends, it goes along with a victim of its choice with probability `tries` / (clients of its
    part) at most. Updates are compared by sketches of `make_sketch` floats (sketch.py), so the
    server keeps M x sketch of them, whatever the model's size.
    """

    piece: ClassVar[str] = "in-turn"
    device_agnostic: ClassVar[bool] = True
    by: Literal["balance", "agreement", "sizes", "chance"] = "balance"
    sketch: PositiveInt = 2048
    cap: NonNegativeFloat = 5.0
    tries: NonNegativeInt = 2

    @property
    def compares_updates(self) -> bool:
        """Whether updates are looked at."""
        return self.by in ("balance", "agreement")

    @property
    def reads_clients(self) -> bool:
        return self.by != "chance"

    def with_sketch_size(self, size: int) -> "RoundRobinSelector":
        """The same with `size` floats of each update."""
        return replace(self, sketch=size)

    def initial_state(self, M: int, d: int, D: int) -> RoundRobinState:
        turn, R = torch.zeros(M, dtype=torch.long), torch.full((M,), NEVER_SEEN)
        if not self.compares_updates:
            return RoundRobinState(turn, R, torch.zeros(M, 0), None, None)
        Omega = torch.zeros(M, M) if M <= MAX_MAPPED_CLIENTS else None
        return RoundRobinState(turn, R, torch.zeros(M, min(self.sketch, d)), Omega, torch.zeros(M))

    def select(self, state: RoundRobinState, view: RoundView, rng: Generator) -> Selection:
        pool = torch.tensor(view.pool)[torch.from_numpy(rng.permutation(len(view.pool)))]
        served = state.turn[pool] >= state.sweep
        due = pool[~served]
        if len(due) >= view.P:
            last, rest = due[:0], due
        else:  # all who are left of this sweep, and the first of the next
            last, rest = due, pool[served]
        rest = rest[: max(MAX_CLIENTS_CONSIDERED, view.P)]
        count = min(view.P - len(last), len(rest))
        picked = self._choose_next(state, last, rest, count, view.n, rng) if count else rest[:0]
        by_size = self.by == "sizes" and count > 0
        by_updates = self.compares_updates and bool((state.R[rest] > NEVER_SEEN).any())
        exploit = by_size or by_updates
        why = {"due": len(due), "by": self.by if exploit else "chance"}
        return Selection((*last.tolist(), *picked.tolist()), exploit, why=why)

    def _choose_next(
        self, m: RoundRobinState, last: Tensor, rest: Tensor, count: int, n: Tensor, rng: Generator
    ) -> Tensor:
        """`count` of the rest, who come in random order, to go along with the last of a sweep."""
        if self.by == "sizes":
            return rest[select_stratified(n[rest], count)]
        if self.by == "balance":
            everyone = torch.cat([last, rest])
            counts = cap_sample_counts(n[everyone], self.cap)
            return everyone[
                select_balanced(m.V[everyone], counts, count, rng, range(len(last)), self.tries)
            ]
        if self.by == "agreement":
            score = mean_cosines(m.V[rest]).where(m.R[rest] > NEVER_SEEN, torch.inf)
            return rest[score.argsort(descending=True, stable=True)[:count]]
        return rest[:count]

    def observe(self, state: RoundRobinState, event: RoundEvent) -> RoundRobinState:
        m, k, u = state, event.updates.k, event.updates.u
        chosen = torch.tensor(event.chosen, dtype=torch.long)
        again = m.turn[chosen] >= m.sweep  # the first of the next sweep
        turn = m.turn.clone()
        turn[chosen] = m.sweep + again.long()
        m.R[k] = event.t
        if m.H is not None:
            size = m.V.shape[1]
            short = make_sketch(u.shape[1], size)(u) if size < u.shape[1] else u
            m.V[k] = normalize_rows(tensor_bytes.to_host(short))
            rows = cosines_with_others(m.V, k)
            m.H[k] = rows.sum(1)
            if m.Omega is not None:
                m.Omega[k] = rows
        return replace(m, turn=turn, sweep=m.sweep + bool(again.any()))
