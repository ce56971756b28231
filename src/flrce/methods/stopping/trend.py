"""How fast a metric still rises: a slope per doubling of rounds, with its error.

From what clients said of the models they were sent: clients differ more from one another than
rounds do, so each is compared with itself only, in a regression of their figures on log2 of the
round with a mean of its own for every client. Clients of one round judged the same model, so errors
are counted by round. A hold-out counts by its size, up to a limit, and nobody is believed further
than others vary. Or from evaluations of the model that is handed back: the same with one judge.

What a client says is its own word. `fit_trend` with a `liars` share bounds what so many clients can
do together: their slopes and the scatter of their figures count as no more than those of honest
clients (`bound_reports`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import RoundRecord

MAX_HOLDOUT_RATIO = 2.0  # times the median hold-out: samples that are believed
# times the usual deviation of a client's figures from its own mean: how far one is believed
OUTLIER_DEVIATIONS = 6.0
MAX_FLAGS_PER_CLIENT = 2  # flags that silence a client: an update out of line (core/trust.py)
MIN_TREND_ROUNDS = 6  # rounds in a stretch: fewer have no error to speak of
FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.int64]


@dataclass(frozen=True)
class MetricReports:
    """Figures of the record in the order of rounds: who said when how good the model was; more is
    better.
    """

    t: IndexArray  # (m,) rounds, counted from 1
    k: IndexArray  # (m,) who said it
    value: FloatArray  # (m,)
    n: FloatArray  # (m,) samples that it was found on
    sweep: float = 1.0  # rounds in which everybody could have had a turn: M / P

    def truncate_after(self, t: int) -> "MetricReports":
        """The same as it was after round t."""
        m = int(np.searchsorted(self.t, t, side="right"))
        return MetricReports(self.t[:m], self.k[:m], self.value[:m], self.n[:m], self.sweep)


@dataclass(frozen=True)
class MetricTrend:
    """A rise in units of the metric per doubling of the rounds, with its standard error."""

    slope: float
    error: float
    rounds: int

    def divide_by(self, unit: float) -> "MetricTrend":
        return MetricTrend(self.slope / unit, self.error / unit, self.rounds)


def collect_client_reports(history: Sequence[RoundRecord]) -> MetricReports:
    """What clients said of the models they were sent.

    Whether a figure counts is decided by the record up to its round: a client whose updates were
    out of line twice is heard no more.
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
        names = (
            h.replied if len(h.replied) == len(h.holdouts) else ("",)
        )  # one figure of all: sums only
        for client, value, n in zip(names, h.holdouts, counts, strict=False):
            if value is not None and strikes.get(client, 0) < MAX_FLAGS_PER_CLIENT:
                found.append((h.t, rows.setdefault(client, len(rows)), sign * value, max(n, 1)))
    M = max((h.clients for h in done), default=0) or len(rows)
    P = sum(len(h.replied) for h in done) / max(len(done), 1)
    return _make_reports(found, max(M / max(P, 1.0), 1.0))


def collect_evaluations(history: Sequence[RoundRecord]) -> MetricReports:
    """Evaluations of the model that would be handed back: one judge, in the rounds that had one."""
    done = [h for h in history if h.outcome == "committed"]
    return _make_reports(
        [
            (h.t, 0, -h.final_model_metric if h.lower else h.final_model_metric, 1)
            for h in done
            if h.final_model_metric is not None
        ],
        1.0,
    )


def _make_reports(found: Sequence[tuple[int, int, float, int]], sweep: float) -> MetricReports:
    t, k, value, n = zip(*found, strict=True) if found else ((), (), (), ())
    return MetricReports(
        np.array(t, np.int64),
        np.array(k, np.int64),
        np.array(value, float),
        np.array(n, float),
        sweep,
    )


def fit_trend(found: MetricReports, after: float, liars: float = 0.0) -> MetricTrend | None:
    """The slope over the rounds after `after`; None where too few rounds have a client that spoke
    twice.

    `liars`: the share of the clients that may say anything while the slope stays among those of the
    others.
    """
    recent = found.t > after
    t, k, value, n = found.t[recent], found.k[recent], found.value[recent], found.n[recent]
    if not len(t):
        return None
    twice = np.bincount(k)[k] > 1
    t, k, value, n = t[twice], k[twice], value[twice], n[twice]
    rounds = np.unique(t)
    if len(rounds) < MIN_TREND_ROUNDS:
        return None
    k = np.unique(k, return_inverse=True)[1]
    many = np.bincount(k)
    weight = weigh_holdouts(n)
    total = np.bincount(k, weight)
    x, y = np.log2(t), value
    x = x - (np.bincount(k, weight * x) / total)[k]
    y = y - (np.bincount(k, weight * y) / total)[k]
    most = OUTLIER_DEVIATIONS * _typical_deviation(y, k, many)
    y = bound_reports(x, np.clip(y, -most, most), k, weight, liars)
    spread = float(weight @ (x * x))
    if spread <= 0:
        return None
    slope = float(weight @ (x * y)) / spread
    rest = (y - slope * x) * (many / np.maximum(many - 1, 1))[
        k
    ]  # a mean of few points takes part of their error
    scores = np.bincount(np.searchsorted(rounds, t), weight * x * rest)
    m = len(rounds)
    return MetricTrend(slope, float(np.sqrt((scores @ scores) * m / (m - 1))) / spread, m)


def weigh_holdouts(n: FloatArray) -> FloatArray:
    """The weight of each report: beyond some samples a hold-out's own error is not what matters.

    n is the client's own claim, so no more than MAX_HOLDOUT_RATIO times the median is believed: the
    largest weight is 4/3 of the median hold-out's.
    """
    usual = np.median(n)
    believed = np.minimum(n, MAX_HOLDOUT_RATIO * usual)
    weights: FloatArray = believed / (believed + usual)
    return weights


def bound_reports(
    x: FloatArray, y: FloatArray, k: IndexArray, weight: FloatArray, liars: float
) -> FloatArray:
    """The figures y with every client's slope and scatter drawn into the range of the middle
    clients.

    Of m clients the floor(liars * m) largest and smallest slopes become the next one inwards, and
    the scatter about a client's own line is at most what it is for all but that many. So that many
    clients, whatever they say, move the pooled slope to no value outside the range of the honest
    clients' slopes.
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
    figures: FloatArray = bounded[k] * x + shrink[k] * rest
    return figures


def _typical_deviation(y: FloatArray, k: IndexArray, many: IndexArray) -> float:
    """The deviation of the median client's figures from its mean, or half of everybody's where most
    never vary.
    """
    each = np.sqrt(np.bincount(k, y * y) / many)
    return max(float(np.median(each)), float(np.sqrt(np.mean(y * y))) / 2)
