"""A stop with a price instead of a clock: enough once twice the rounds would not bring what they
cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flrce.core.bounds import PositiveFloat
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.methods.stopping.trend import (
    MetricReports,
    MetricTrend,
    collect_client_reports,
    collect_evaluations,
    fit_trend,
)
from flrce.methods.stopping.wording import (
    MetricScale,
    Prediction,
    describe_evidence,
    describe_prediction,
)

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
CHECK_GROWTH_FACTOR = 1.05  # a look whenever the rounds have grown by this factor
LEARNING_ERROR_MARGIN = (
    3.0  # errors of the rise over the whole run that show that something was learnt
)
MAX_SLOPE_RATIO = (
    0.4  # of the steepest stretch so far: a slope above this may be a start, not an end
)
# sweeps, of two rounds at least, for a run that has learnt nothing or whose gains have not fallen
# off
PATIENCE_SWEEPS = 10
CLEAR = 1.0  # errors of a rise that no message denies
POINTS = MetricScale()


@dataclass(frozen=True)
class ProgressReports:
    """A record as figures: of clients, of evaluations, and what a point of the metric is."""

    clients: MetricReports
    evaluations: MetricReports
    unit: float

    def truncate_after(self, t: int) -> "ProgressReports":
        return ProgressReports(
            self.clients.truncate_after(t), self.evaluations.truncate_after(t), self.unit
        )


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


@dataclass(frozen=True)
class MarginalGain(StopRule):
    """Stop once doubling the rounds is predicted to gain less than `points`, or than they cost at a
    price per point.

    What they would bring is judged by how the metric rose over the last stretch of the run, per
    doubling of rounds. Where the run evaluates the model it hands back, these figures count, and
    clients that say how good the model was that they were sent (`holdouts`) must not contradict;
    where it does not, clients alone decide, at no traffic. With `joules`, `bytes` or `seconds` per
    point, twice the rounds cost what the run has cost so far. Constants and error rates:
    research/docs/stop.md.
    """

    points: PositiveFloat = 2.0
    joules: PositiveFloat | None = None
    bytes: PositiveFloat | None = None
    seconds: PositiveFloat | None = None

    @property
    def required_fields(self) -> tuple[str, ...]:
        names = ("joules", "bytes", "seconds")
        return tuple(name for name in names if getattr(self, name) is not None)

    def compute_required_gain(self, history: Sequence[RoundRecord]) -> float:
        """The least gain, in points, that is worth as many rounds again: at the dearest of the
        prices that are set.
        """
        spent = {
            "joules": sum(h.joules for h in history),
            "bytes": float(sum(h.bytes_up + h.bytes_down for h in history)),
            "seconds": sum(h.seconds for h in history),
        }
        prices = [
            spent[name] / limit for name in spent if (limit := getattr(self, name)) is not None
        ]
        return max(prices) if prices else self.points

    def assess_history(self, history: Sequence[RoundRecord]) -> GainEstimate | None:
        """What the record says after its last round; None while it says too little."""
        return (
            estimate_gain(
                collect_reports(history), history[-1].t, self.compute_required_gain(history)
            )
            if history
            else None
        )

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        if not history or history[-1].outcome != "committed" or not is_check_due(history[-1].t):
            return ""
        verdict = self.assess_history(history)
        return (
            format_stop_reason(verdict, metric_scale(history))
            if verdict is not None and verdict.should_stop
            else ""
        )


def collect_reports(history: Sequence[RoundRecord]) -> ProgressReports:
    return ProgressReports(
        collect_client_reports(history), collect_evaluations(history), metric_point_size(history)
    )


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


def is_check_due(t: int) -> bool:
    """Whether round t is one of the looks: each, until they grow by STEP."""
    return t == 1 or math.floor(math.log(t) / math.log(CHECK_GROWTH_FACTOR)) != math.floor(
        math.log(t - 1) / math.log(CHECK_GROWTH_FACTOR)
    )


def metric_point_size(history: Sequence[RoundRecord]) -> float:
    """A hundredth of the metric; where less is better, of what the first figures were."""
    if not history or not history[-1].lower:
        return 0.01
    for h in history:
        known = [value for value in h.holdouts if value is not None] or (
            [] if h.final_model_metric is None else [h.final_model_metric]
        )
        if known:
            return max(abs(sum(known) / len(known)) / 100, 1e-12)
    return 0.01


def format_stop_reason(verdict: GainEstimate, scale: MetricScale = POINTS) -> str:
    """The reason in the record."""
    if not verdict.alive and verdict.trend.slope <= CLEAR * verdict.trend.error:
        return f"no improvement over {describe_evidence(verdict.trend.rounds, verdict.by)}"
    return describe_prediction(predict_gain(verdict), verdict.price, scale)


def predict_gain(verdict: GainEstimate) -> Prediction:
    """What doubling the rounds is predicted to gain, in points: `gain` is the range's upper end."""
    middle = (
        EVALUATION_SLOPE_SHARE if verdict.by == "evaluations" else CLIENT_SLOPE_SHARE
    ) * verdict.trend.slope
    return middle, 2 * middle - verdict.gain, verdict.gain


def metric_scale(history: Sequence[RoundRecord]) -> MetricScale:
    """The unit in which to speak of the record's metric."""
    return (
        MetricScale(history[-1].metric, history[-1].lower, metric_point_size(history))
        if history
        else POINTS
    )
