"""How fast a metric still rises: a slope per doubling of rounds, with its error.

From what clients said of the models they were sent: clients differ more from one another than rounds do, so each is
compared with itself only, in a regression of their figures on log2 of the round with a mean of its own for every
client. Clients of one round judged the same model, so errors are counted by round. A hold-out counts by its size, up to
a limit, and nobody is believed further than others vary. Or from evaluations of the model that is handed back: the same
with one judge.

What a client says is its own word. `trend` with a `liars` share bounds what so many clients can do together: their
slopes and the scatter of their figures count as no more than those of honest clients (`bound_reports`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flrce.types import Record

MAX_HOLDOUT_RATIO = 2.0  # times the median hold-out: samples that are believed
CUT = 6.0  # times the usual deviation of a client's figures from its own mean: how far one is believed
STRIKES = 2  # flags that silence a client: an update out of line (round/trust.py)
FEWEST = 6  # rounds in a stretch: fewer have no error to speak of
Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Reports:
    """Figures of the record in the order of rounds: who said when how good the model was; more is better."""

    t: Rows  # (m,) rounds, counted from 1
    k: Rows  # (m,) who said it
    value: Floats  # (m,)
    n: Floats  # (m,) samples that it was found on
    sweep: float = 1.0  # rounds in which everybody could have had a turn: M / P

    def until(self, t: int) -> "Reports":
        """The same as it was after round t."""
        m = int(np.searchsorted(self.t, t, side="right"))
        return Reports(self.t[:m], self.k[:m], self.value[:m], self.n[:m], self.sweep)


@dataclass(frozen=True)
class Trend:
    """A rise in units of the metric per doubling of the rounds, with its standard error."""

    slope: float
    error: float
    rounds: int

    def per(self, unit: float) -> "Trend":
        return Trend(self.slope / unit, self.error / unit, self.rounds)


def heard(history: Sequence[Record]) -> Reports:
    """What clients said of the models they were sent.

    Whether a figure counts is decided by the record up to its round: a client whose updates were out of line twice is
    heard no more.
    """
    done = [h for h in history if h.outcome == "committed"]
    rows: dict[str, int] = {}
    strikes: dict[str, int] = {}
    found: list[tuple[int, int, float, int]] = []
    for h in done:
        for client in h.flagged:
            strikes[client] = strikes.get(client, 0) + 1
        sign = -1.0 if h.lower else 1.0
        counts = h.held or (1,) * len(h.holdouts)
        names = h.replied if len(h.replied) == len(h.holdouts) else ("",)  # one figure of all: sums only
        for client, value, n in zip(names, h.holdouts, counts, strict=False):
            if value is not None and strikes.get(client, 0) < STRIKES:
                found.append((h.t, rows.setdefault(client, len(rows)), sign * value, max(n, 1)))
    M = max((h.clients for h in done), default=0) or len(rows)
    P = sum(len(h.replied) for h in done) / max(len(done), 1)
    return _reports(found, max(M / max(P, 1.0), 1.0))


def evaluated(history: Sequence[Record]) -> Reports:
    """Evaluations of the model that would be handed back: one judge, in the rounds that had one."""
    done = [h for h in history if h.outcome == "committed"]
    return _reports([(h.t, 0, -h.handed if h.lower else h.handed, 1) for h in done if h.handed is not None], 1.0)


def _reports(found: Sequence[tuple[int, int, float, int]], sweep: float) -> Reports:
    t, k, value, n = zip(*found, strict=True) if found else ((), (), (), ())
    return Reports(np.array(t, np.int64), np.array(k, np.int64), np.array(value, float), np.array(n, float), sweep)


def trend(found: Reports, after: float, liars: float = 0.0) -> Trend | None:
    """The slope over the rounds after `after`; None where too few rounds have a client that spoke twice.

    `liars`: the share of the clients that may say anything while the slope stays among those of the others.
    """
    recent = found.t > after
    t, k, value, n = found.t[recent], found.k[recent], found.value[recent], found.n[recent]
    if not len(t):
        return None
    twice = np.bincount(k)[k] > 1
    t, k, value, n = t[twice], k[twice], value[twice], n[twice]
    rounds = np.unique(t)
    if len(rounds) < FEWEST:
        return None
    k = np.unique(k, return_inverse=True)[1]
    many = np.bincount(k)
    weight = weigh_holdouts(n)
    total = np.bincount(k, weight)
    x, y = np.log2(t), value
    x = x - (np.bincount(k, weight * x) / total)[k]
    y = y - (np.bincount(k, weight * y) / total)[k]
    most = CUT * _usual(y, k, many)
    y = bound_reports(x, np.clip(y, -most, most), k, weight, liars)
    spread = float(weight @ (x * x))
    if spread <= 0:
        return None
    slope = float(weight @ (x * y)) / spread
    rest = (y - slope * x) * (many / np.maximum(many - 1, 1))[k]  # a mean of few points takes part of their error
    scores = np.bincount(np.searchsorted(rounds, t), weight * x * rest)
    m = len(rounds)
    return Trend(slope, float(np.sqrt((scores @ scores) * m / (m - 1))) / spread, m)


def weigh_holdouts(n: Floats) -> Floats:
    """The weight of each report: beyond some samples a hold-out's own error is not what matters.

    n is the client's own claim, so no more than MAX_HOLDOUT_RATIO times the median is believed: the largest weight is
    4/3 of the median hold-out's.
    """
    usual = np.median(n)
    believed = np.minimum(n, MAX_HOLDOUT_RATIO * usual)
    weights: Floats = believed / (believed + usual)
    return weights


def bound_reports(x: Floats, y: Floats, k: Rows, weight: Floats, liars: float) -> Floats:
    """The figures y with every client's slope and scatter drawn into the range of the middle clients.

    Of m clients the floor(liars * m) largest and smallest slopes become the next one inwards, and the scatter about a
    client's own line is at most what it is for all but that many. So that many clients, whatever they say, move the
    pooled slope to no value outside the range of the honest clients' slopes.
    """
    many = np.bincount(k)
    cut = int(liars * len(many) + 1e-9)
    if not cut:
        return y
    slopes = np.bincount(k, weight * x * y) / np.maximum(np.bincount(k, weight * x * x), 1e-12)
    ordered = np.sort(slopes)
    bounded = np.clip(slopes, ordered[cut], ordered[-1 - cut])
    rest = y - slopes[k] * x
    scatter = np.sqrt(np.bincount(k, rest * rest) / many)
    shrink = np.minimum(1.0, np.sort(scatter)[-1 - cut] / np.maximum(scatter, 1e-12))
    figures: Floats = bounded[k] * x + shrink[k] * rest
    return figures


def _usual(y: Floats, k: Rows, many: Rows) -> float:
    """The deviation of the median client's figures from its mean, or half of everybody's where most never vary."""
    each = np.sqrt(np.bincount(k, y * y) / many)
    return max(float(np.median(each)), float(np.sqrt(np.mean(y * y))) / 2)
