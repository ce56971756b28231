"""A stop with a price instead of a clock: enough once twice the rounds would not bring what they cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flrce.bounds import Positive
from flrce.stops.trend import Reports, Trend, evaluated, heard, trend
from flrce.stops.wording import Prediction, Scale, describe_evidence, describe_prediction
from flrce.types import Record

# chosen on the decision set of docs/beyond.md; nothing knows T, M, P or a learning rate
EVALUATED = (0.5, 0.75, 1.0)  # doublings that a stretch of evaluations is long
SHARE = 0.6  # of its slope that the next doubling brings: gains fall off
SURE = 2.0  # errors that are added
HEARD = 1.0  # doublings, or two sweeps if those are more, that a stretch of clients' figures is long
SAID = 0.7  # of its slope that the next doubling brings
ALONE = 1.0  # errors that are added where nothing else is known
DOUBT = 0.5  # errors that are taken off before clients contradict evaluations
LIARS = 0.4  # of the clients: what so many say together is bounded (trend.py)
PUT_OFF = 4  # times the rounds at which the bounded figures say enough: clients who say otherwise are heard no longer
STEP = 1.05  # a look whenever the rounds have grown by this factor
ALIVE = 3.0  # errors of the rise over the whole run that show that something was learnt
BENT = 0.4  # of the steepest stretch so far: a slope above this may be a start, not an end
PATIENT = 10  # sweeps, of two rounds at least, for a run that has learnt nothing or whose gains have not fallen off
CLEAR = 1.0  # errors of a rise that no message denies
POINTS = Scale()


@dataclass(frozen=True)
class Seen:
    """A record as figures: of clients, of evaluations, and what a point of the metric is."""

    clients: Reports
    evaluations: Reports
    unit: float

    def until(self, t: int) -> "Seen":
        return Seen(self.clients.until(t), self.evaluations.until(t), self.unit)


@dataclass(frozen=True)
class Verdict:
    """What a look found, in points: hundredths of the metric, or of what it was at first where less is better."""

    t: int
    gain: float  # predicted of twice the rounds: the upper end of its range
    price: float  # least gain that would be worth them
    trend: Trend  # the stretch that says so, in points per doubling
    by: str  # whose figures those are: "evaluations" or "clients"
    least: float  # at least this, by what clients say; minus infinity where they say nothing
    alive: bool  # whether anything was learnt at all
    final: bool  # whether this may end the run: one that has learnt nothing, or still gathers way, is given time

    @property
    def enough(self) -> bool:
        return max(self.gain, self.least) < self.price and self.final


@dataclass(frozen=True)
class Worth:
    """Stop once doubling the rounds is predicted to gain less than `points`, or than they cost at a price per point.

    What they would bring is judged by how the metric rose over the last stretch of the run, per doubling of rounds.
    Where the run evaluates the model it hands back, these figures count, and clients that say how good the model was
    that they were sent (`holdouts`) must not contradict; where it does not, clients alone decide, at no traffic. With
    `joules`, `bytes` or `seconds` per point, twice the rounds cost what the run has cost so far. Constants and error
    rates: docs/beyond.md.
    """

    points: Positive = 2.0
    joules: Positive | None = None
    bytes: Positive | None = None
    seconds: Positive | None = None

    def price(self, history: Sequence[Record]) -> float:
        """The least gain, in points, that is worth as many rounds again: at the dearest of the prices that are set."""
        spent = {
            "joules": sum(h.joules for h in history),
            "bytes": float(sum(h.bytes_up + h.bytes_down for h in history)),
            "seconds": sum(h.seconds for h in history),
        }
        prices = [spent[name] / limit for name in spent if (limit := getattr(self, name)) is not None]
        return max(prices) if prices else self.points

    def look(self, history: Sequence[Record]) -> Verdict | None:
        """What the record says after its last round; None while it says too little."""
        return judged(seen(history), history[-1].t, self.price(history)) if history else None

    def __call__(self, history: Sequence[Record]) -> str:
        if not history or history[-1].outcome != "committed" or not due(history[-1].t):
            return ""
        verdict = self.look(history)
        return told(verdict, metric_scale(history)) if verdict is not None and verdict.enough else ""


def seen(history: Sequence[Record]) -> Seen:
    return Seen(heard(history), evaluated(history), point(history))


def judged(
    found: Seen, t: int, price: float, bent: float | None = BENT, waits: bool = True, liars: float = LIARS
) -> Verdict | None:
    """A look after round t; None while neither clients nor evaluations say enough.

    Where a run evaluates, clients alone do not decide before evaluations can: unless those are so rare that there are
    too few after PATIENT sweeps. `bent`, `waits` and `liars` are here to replay earlier rules.

    Clients may lie. They contradict evaluations by bounded figures only. Where they decide alone, bounding costs
    honest runs too much (few clients still gain, and look like liars), so all figures count as they are; but once the
    bounded ones have said enough after t / PUT_OFF rounds and say so still, only those count.
    """
    said, bounded = (_stretch(found.clients, t, HEARD, found.unit, share) for share in (0.0, liars))
    bounds: list[tuple[float, Trend, str]] = []
    for doublings in EVALUATED:
        rise = _stretch(found.evaluations, t, doublings, found.unit)
        if rise is not None:
            bounds.append((SHARE * rise.slope + SURE * rise.error, rise, "evaluations"))
    late = t >= PATIENT * max(found.clients.sweep, 2)
    if not bounds and said is not None and (late or not waits or not len(found.evaluations.t)):
        bounds.append(_weigh_clients(found, t, price, said, liars))
    if not bounds:
        return None
    gain, rise, by = min(bounds, key=lambda bound: bound[0])
    least = -math.inf if bounded is None else SAID * bounded.slope - DOUBT * bounded.error
    whole = trend(found.clients if len(found.clients.t) else found.evaluations, 0)
    alive = whole is not None and whole.slope > ALIVE * whole.error
    used = found.evaluations if by == "evaluations" else found.clients
    fallen = bent is None or rise.slope <= bent * steepest(used, t, found.unit)
    final = (alive and fallen) or late
    return Verdict(t, gain, price, rise, by, least, alive, final)


def _weigh_clients(found: Seen, t: int, price: float, said: Trend, liars: float) -> tuple[float, Trend, str]:
    """At most what twice the rounds bring where clients decide alone, and the stretch that says so."""
    bounds = [(SAID * said.slope + ALONE * said.error, said, "clients")]
    for until in (t // PUT_OFF, t):
        rise = _stretch(found.clients.until(until), until, HEARD, found.unit, liars)
        if rise is not None:
            bounds.append((SAID * rise.slope + ALONE * rise.error, rise, "clients"))
    enough = len(bounds) == 3 and bounds[1][0] < price and bounds[2][0] < price
    return bounds[2] if enough else bounds[0]


def steepest(found: Reports, t: int, unit: float) -> float:
    """The largest slope of a doubling that ended before round t, in points; 0 where there is none."""
    ends = [int(t * 2.0 ** (-j / 2)) for j in range(1, 20)]
    rises = (_stretch(found.until(end), end, 1.0, unit) for end in dict.fromkeys(ends) if end >= 2)
    return max((rise.slope for rise in rises if rise is not None), default=0.0)


def _stretch(found: Reports, t: int, doublings: float, unit: float, liars: float = 0.0) -> Trend | None:
    """The trend over the last stretch, two sweeps at least, in points."""
    start = min(t * 2.0**-doublings, t - 2 * found.sweep)
    rise = trend(found, start, liars) if start >= 0 else None
    return None if rise is None else rise.per(unit)


def due(t: int) -> bool:
    """Whether round t is one of the looks: each, until they grow by STEP."""
    return t == 1 or math.floor(math.log(t) / math.log(STEP)) != math.floor(math.log(t - 1) / math.log(STEP))


def point(history: Sequence[Record]) -> float:
    """A hundredth of the metric; where less is better, of what the first figures were."""
    if not history or not history[-1].lower:
        return 0.01
    for h in history:
        known = [value for value in h.holdouts if value is not None] or ([] if h.handed is None else [h.handed])
        if known:
            return max(abs(sum(known) / len(known)) / 100, 1e-12)
    return 0.01


def told(verdict: Verdict, scale: Scale = POINTS) -> str:
    """The reason in the record."""
    if not verdict.alive and verdict.trend.slope <= CLEAR * verdict.trend.error:
        return f"no improvement over {describe_evidence(verdict.trend.rounds, verdict.by)}"
    return describe_prediction(predict_gain(verdict), verdict.price, scale)


def predict_gain(verdict: Verdict) -> Prediction:
    """What doubling the rounds is predicted to gain, in points: `gain` is the range's upper end."""
    middle = (SHARE if verdict.by == "evaluations" else SAID) * verdict.trend.slope
    return middle, 2 * middle - verdict.gain, verdict.gain


def metric_scale(history: Sequence[Record]) -> Scale:
    """The unit in which to speak of the record's metric."""
    return Scale(history[-1].metric, history[-1].lower, point(history)) if history else POINTS
