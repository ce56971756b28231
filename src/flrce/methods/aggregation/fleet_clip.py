"""Clipping with the fleet as its witness: a round in which liars are the majority is only one
round.

Of P = 10 clients out of a fleet with 40 % attackers, one round in seven has more attackers than
honest clients, and a rule that looks at that round alone must follow them. The server has met
others before, and FLrce keeps what each sent last: so a reply is measured by what most of the
*fleet* sent. How long it may be is the median distance of everybody's last update; how much it
counts is whether most of the others' last updates go its way, and how many send the same.

Steps start from no step at all, not from the last one as in centred clipping (Karimireddy et al.
2021): clients that send the model's own way back (stale free-riders) and clients that send nothing
would keep the last step going for ever.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.bounds import NonNegativeInt, PositiveInt, PositiveProportion
from flrce.core.linalg import normalize_rows
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import Aggregator
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Updates

# clients heard from before directions are judged: three have no majority worth the name
MIN_CLIENTS_FOR_TRUST = 4
MIN_DISTANCE = 1e-12


@dataclass(frozen=True)
class FleetClipState:
    """What is kept of each client. Written in place."""

    # (M, d or sketch) direction of a client's last update: length 1
    V: Tensor = field(metadata={"rows": "trained"})
    # (M,) its median cosine with the others' last ones
    score: Tensor = field(metadata={"rows": "trained"})
    # (M, 2) its lengths: trained part, statistics
    far: Tensor = field(metadata={"rows": "trained"})
    R: Tensor = field(metadata={"rows": "trained", "fill": NEVER_SEEN})  # (M,) round of that update


@dataclass(frozen=True)
class FleetClip(Aggregator):
    """w + v, where v goes from 0 towards the mean of t_k (u_k - v), each shortened to tau, `steps`
    times.

    tau is the median distance from v in this round, and no more than the median length of the
    `witnesses` who were heard last. t_k compares the median cosine s_k between u_k and the
    witnesses' last updates with the median s of them all: 1 from `level` times s on, 0 where s_k <=
    0; and 1 for all where s <= 0, as then data differ too much to tell. Where nobody is believed,
    the model stays.

    Replies that are alike share their weight: t_k is divided by the sum of max(cosine,
    0)^`crowding` over the round's replies, and multiplied by the least such sum (0: off). Honest
    clients differ from one another; clients that work together and send one update count about as
    one. If they hide it by noise, tau shortens the rest.

    The mean is over the sum of t_k, or P / 2 where that is more: whatever a reply holds, each step
    moves the model by at most 2 tau / P towards it. Clients count as v where they hold nothing;
    what nobody holds keeps its bits.

    All directions are kept, M x d floats, as the published map does. `make_sketch` keeps so many
    floats of each (sketch.py), by the map that follows from `seed`: whoever knows that can send
    what it does not see, so tell nobody.
    """

    piece: ClassVar[str] = "fleet-clip"
    steps: Annotated[int, Ge(1), Le(100)] = 3
    level: PositiveProportion = 0.5
    witnesses: PositiveInt = 200
    crowding: Annotated[float, Ge(0), Le(16)] = 2.0
    sketch: NonNegativeInt = 0
    seed: NonNegativeInt = 0

    def with_sketch_size(self, size: int) -> "FleetClip":
        """The same with `size` floats of each update."""
        return replace(self, sketch=size)

    def initial_state(self, M: int, d: int, D: int) -> FleetClipState:
        far = torch.zeros(M, 2, dtype=torch.float64)
        V = torch.zeros(M, min(self.sketch or d, d))
        return FleetClipState(V, torch.zeros(M), far, torch.full((M,), NEVER_SEEN))

    def __call__(self, w: Tensor, updates: Updates, state: FleetClipState) -> Tensor:
        _, trust = self.score_replies(updates, state)
        if not bool((trust > 0).any()):
            return w
        trust = share_weight(self._compute_directions(updates, state), trust, self.crowding)
        rows = self._find_recent_clients(state, updates.k)
        step = torch.zeros(len(w), dtype=torch.float64)
        for part, span in enumerate(_split_statistics(updates, len(w))):
            U, start = updates.U[:, span].double(), step[span]
            held = None if updates.covered is None else updates.covered[:, span]
            far = torch.cat([state.far[rows, part], _row_norms(_subtract_center(U, start, held))])
            if len(start):
                step[span] = trusted_centred_clipping(
                    U, start, trust, held, float(far.median()), self.steps
                )
        moved = (w.double() + step).to(w.dtype)
        return moved if updates.covered is None else torch.where(updates.covered.any(0), moved, w)

    def score_replies(self, updates: Updates, state: FleetClipState) -> tuple[Tensor, Tensor]:
        """(P,) each reply's median cosine with the others, and (P,) from 0 to 1 how far it is
        believed.
        """
        v, rows = (
            self._compute_directions(updates, state),
            self._find_recent_clients(state, updates.k),
        )
        cosines = torch.cat([v @ v.T, v @ state.V[rows].T], 1)  # (P, P + witnesses)
        cosines.fill_diagonal_(torch.nan)
        score = cosines.nanmedian(1)[0].nan_to_num(0.0)  # alone in the first round: no opinion
        everyone = torch.cat([score, state.score[rows]])
        usual = float(everyone.median())
        if len(everyone) < MIN_CLIENTS_FOR_TRUST or usual <= 0:
            return score, torch.ones(len(v), dtype=torch.float64)
        return score, (score.double() / (self.level * usual)).clamp(0, 1)

    def observe(self, state: FleetClipState, event: RoundEvent) -> FleetClipState:
        m, updates = state, event.updates
        m.score[updates.k] = self.score_replies(updates, m)[0]
        for part, span in enumerate(_split_statistics(updates, len(event.w))):
            held = None if updates.covered is None else updates.covered[:, span]
            U = updates.U[:, span].double()
            m.far[updates.k, part] = _row_norms(_subtract_center(U, torch.zeros_like(U[0]), held))
        m.V[updates.k], m.R[updates.k] = self._compute_directions(updates, m), event.t
        return m

    def _find_recent_clients(self, m: FleetClipState, k: Tensor) -> Tensor:
        """Rows of those who were heard last, without this round's; of equally recent ones the
        first.
        """
        R = m.R.clone()
        R[k] = NEVER_SEEN
        heard = int((R > NEVER_SEEN).sum())
        return R.argsort(descending=True, stable=True)[: min(heard, self.witnesses)]

    def _compute_directions(self, updates: Updates, m: FleetClipState) -> Tensor:
        u, size = updates.u, m.V.shape[1]
        return normalize_rows(
            make_sketch(u.shape[1], size, self.seed)(u) if size < u.shape[1] else u
        )


def share_weight(directions: Tensor, trust: Tensor, crowding: float) -> Tensor:
    """(P,) trust, divided among believed replies whose directions (P, d) are alike; the least
    crowded keeps its own.

    Rows of zeros are alike to nothing, themselves included, and count as one.
    """
    if not crowding:
        return trust
    alike = (directions @ directions.T).clamp(0, 1).double() ** crowding
    crowd = (alike @ (trust > 0).double()).clamp(min=1.0)
    return trust * crowd[trust > 0].min() / crowd


def trusted_centred_clipping(
    U: Tensor, v: Tensor, trust: Tensor, held: Tensor | None, most: float, steps: int
) -> Tensor:
    """(d,) v moved towards the believed rows, each shortened to their median distance, or `most`
    where that is less.
    """
    total = max(float(trust.sum()), len(U) / 2)
    for _ in range(steps):
        away = _subtract_center(U, v, held)
        norms = _row_norms(away)
        tau = norms[trust > 0].median().clamp(max=most)
        v = v + (trust * (tau / norms.clamp(min=MIN_DISTANCE)).clamp(max=1)) @ away / total
    return v


def _subtract_center(U: Tensor, v: Tensor, held: Tensor | None) -> Tensor:
    return U - v if held is None else (U - v).where(held, 0.0)


def _row_norms(away: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(away, dim=1)
    return lengths


def _split_statistics(updates: Updates, D: int) -> tuple[slice, slice]:
    """The trained floats and BatchNorm's statistics, which are no gradients: each is clipped
    apart.
    """
    return slice(0, updates.trainable), slice(updates.trainable, D)
