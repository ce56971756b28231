"""The rule `marginal-gain` as it was before it knew serial correlation, to be replayed beside the one
that ships (research/docs/stop.md). It regresses the metric on log2 of the round and takes successive
evaluations for independent, so its error depends on `eval_every`.
"""

import math
from dataclasses import dataclass

import numpy as np

from flrce.methods.stopping.marginal_gain import ProgressReports
from flrce.methods.stopping.trend import MIN_TREND_ROUNDS, FloatArray, IndexArray, MetricReports

MAX_HOLDOUT_RATIO = 2.0  # times the median hold-out: samples that are believed
# times the usual deviation of a client's figures from its own mean: how far one is believed
OUTLIER_DEVIATIONS = 6.0
# chosen on the decision set of research/docs/stop.md; nothing knows T, M, P or a learning rate
EVALUATION_WINDOW_DOUBLINGS = (0.5, 0.75, 1.0)  # doublings that a stretch of evaluations is long
EVALUATION_SLOPE_SHARE = 0.6  # of its slope that the next doubling brings: gains fall off
EVALUATION_ERROR_MARGIN = 2.0  # errors that are added
CLIENT_WINDOW_DOUBLINGS = (
    1.0  # doublings, or two sweeps if those are more, that a stretch of clients' figures is long
)
CLIENT_SLOPE_SHARE = 0.7  # of its slope that the next doubling brings
CLIENT_ERROR_MARGIN = 1.0  # errors that are added where nothing else is known
CONTRADICTION_ERROR_MARGIN = 0.5  # errors that are taken off before clients contradict evaluations
MAX_LIAR_SHARE = 0.4  # of the clients: what so many say together is bounded (trend.py)
# times the rounds at which the bounded figures say enough: clients who say otherwise are heard no
# longer
PUT_OFF = 4
LEARNING_ERROR_MARGIN = (
    3.0  # errors of the rise over the whole run that show that something was learnt
)
MAX_SLOPE_RATIO = (
    0.4  # of the steepest stretch so far: a slope above this may be a start, not an end
)
# sweeps, of two rounds at least, for a run that has learnt nothing or whose gains have not fallen
# off
PATIENCE_SWEEPS = 10


@dataclass(frozen=True)
class MetricTrend:
    """A rise in units of the metric per doubling of the rounds, with its standard error."""

    slope: float
    error: float
    rounds: int

    def divide_by(self, unit: float) -> "MetricTrend":
        return MetricTrend(self.slope / unit, self.error / unit, self.rounds)


@dataclass(frozen=True)
class GainEstimate:
    """What a look found, in points: hundredths of the metric, or of what it was at first where less
    is better.
    """

    t: int
    gain: float  # predicted of twice the rounds: the upper end of its range
    price: float  # least gain that would be worth them
    trend: MetricTrend  # the stretch that says so, in points per doubling
    by: str  # whose figures those are: "evaluations" or "clients"
    least: float  # at least this, by what clients say; minus infinity where they say nothing
    alive: bool  # whether anything was learnt at all
    # whether this may end the run: one that has learnt nothing, or still gathers way, is given time
    final: bool

    @property
    def should_stop(self) -> bool:
        return max(self.gain, self.least) < self.price and self.final


def estimate_gain(
    found: ProgressReports,
    t: int,
    price: float,
    bent: float | None = MAX_SLOPE_RATIO,
    waits: bool = True,
    liars: float = MAX_LIAR_SHARE,
) -> GainEstimate | None:
    """A look after round t; None while neither clients nor evaluations say enough.

    Where a run evaluates, clients alone do not decide before evaluations can: unless those are so
    rare that there are too few after PATIENT sweeps. `bent`, `waits` and `liars` are here to replay
    earlier rules.

    Clients may lie. They contradict evaluations by bounded figures only. Where they decide alone,
    bounding costs honest runs too much (few clients still gain, and look like liars), so all
    figures count as they are; but once the bounded ones have said enough after t / PUT_OFF rounds
    and say so still, only those count.
    """
    said, bounded = (
        _fit_recent_trend(found.clients, t, CLIENT_WINDOW_DOUBLINGS, found.unit, share)
        for share in (0.0, liars)
    )
    bounds: list[tuple[float, MetricTrend, str]] = []
    for doublings in EVALUATION_WINDOW_DOUBLINGS:
        rise = _fit_recent_trend(found.evaluations, t, doublings, found.unit)
        if rise is not None:
            bounds.append(
                (
                    EVALUATION_SLOPE_SHARE * rise.slope + EVALUATION_ERROR_MARGIN * rise.error,
                    rise,
                    "evaluations",
                )
            )
    late = t >= PATIENCE_SWEEPS * max(found.clients.sweep, 2)
    if not bounds and said is not None and (late or not waits or not len(found.evaluations.t)):
        bounds.append(_weigh_clients(found, t, price, said, liars))
    if not bounds:
        return None
    gain, rise, by = min(bounds, key=lambda bound: bound[0])
    least = (
        -math.inf
        if bounded is None
        else CLIENT_SLOPE_SHARE * bounded.slope - CONTRADICTION_ERROR_MARGIN * bounded.error
    )
    whole = fit_trend(found.clients if len(found.clients.t) else found.evaluations, 0)
    alive = whole is not None and whole.slope > LEARNING_ERROR_MARGIN * whole.error
    used = found.evaluations if by == "evaluations" else found.clients
    fallen = bent is None or rise.slope <= bent * find_steepest_slope(used, t, found.unit)
    final = (alive and fallen) or late
    return GainEstimate(t, gain, price, rise, by, least, alive, final)


def _weigh_clients(
    found: ProgressReports, t: int, price: float, said: MetricTrend, liars: float
) -> tuple[float, MetricTrend, str]:
    """At most what twice the rounds bring where clients decide alone, and the stretch that says
    so.
    """
    bounds = [(CLIENT_SLOPE_SHARE * said.slope + CLIENT_ERROR_MARGIN * said.error, said, "clients")]
    for until in (t // PUT_OFF, t):
        rise = _fit_recent_trend(
            found.clients.truncate_after(until), until, CLIENT_WINDOW_DOUBLINGS, found.unit, liars
        )
        if rise is not None:
            bounds.append(
                (
                    CLIENT_SLOPE_SHARE * rise.slope + CLIENT_ERROR_MARGIN * rise.error,
                    rise,
                    "clients",
                )
            )
    enough = len(bounds) == 3 and bounds[1][0] < price and bounds[2][0] < price
    return bounds[2] if enough else bounds[0]


def find_steepest_slope(found: MetricReports, t: int, unit: float) -> float:
    """The largest slope of a doubling that ended before round t, in points; 0 where there is
    none.
    """
    ends = [int(t * 2.0 ** (-j / 2)) for j in range(1, 20)]
    rises = (
        _fit_recent_trend(found.truncate_after(end), end, 1.0, unit)
        for end in dict.fromkeys(ends)
        if end >= 2
    )
    return max((rise.slope for rise in rises if rise is not None), default=0.0)


def _fit_recent_trend(
    found: MetricReports, t: int, doublings: float, unit: float, liars: float = 0.0
) -> MetricTrend | None:
    """The trend over the last stretch, two sweeps at least, in points."""
    start = min(t * 2.0**-doublings, t - 2 * found.sweep)
    rise = fit_trend(found, start, liars) if start >= 0 else None
    return None if rise is None else rise.divide_by(unit)


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
