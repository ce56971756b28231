"""A stop with a price instead of a clock: enough once doubling the rounds is predicted to gain less
than it costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen

from flrce.core.bounds import NonNegativeInt, PositiveFloat
from flrce.core.cost_table import COSTS
from flrce.core.roles import StopCourse, StopRule
from flrce.core.types import RoundRecord
from flrce.methods.stopping.gains import (
    MeasuredGain,
    compare_blocks,
    compute_block_rounds,
    compute_uniform_width,
    measure_evaluation_gain,
    measure_report_gain,
    measure_total_evaluation_gain,
)
from flrce.methods.stopping.memory import (
    RememberedGain,
    blend_gains,
    describe_recorded_tasks,
    look_up_earlier_gain,
)
from flrce.methods.stopping.trend import (
    LOG_METRICS,
    MetricReports,
    collect_client_reports,
    collect_evaluations,
    compute_sweep,
)
from flrce.methods.stopping.wording import (
    MetricScale,
    describe_change,
    describe_no_learning,
    describe_prediction,
)

# chosen on the decision set of research/docs/stop.md; nothing knows T, M, P or a learning rate
NEXT_DOUBLING_SHARE = 0.6  # of the last doubling's gain that the next one brings: gains fall off
ERROR_MARGIN = 0.5  # errors that are added to a prediction
MAX_GAIN_RATIO = 0.3  # of the largest doubling so far: a gain above this may be a start, not an end
LEARNING_ERROR_MARGIN = 3.0  # errors of the whole gain that show that something was learnt
LEARNING_ALPHA = 0.1  # chance that any look of a run takes noise in the reports for learning
PATIENCE_SWEEPS = 10  # for a run that has learnt nothing, or whose gains have not fallen off
PATIENCE_BLOCKS = 4  # and at least so many blocks
# times the rounds at which the trimmed mean of the clients says enough: then it decides alone
MAX_DELAY_FACTOR = 1.4
CHECK_GROWTH_FACTOR = 1.05  # a look whenever the rounds have grown by this factor
# the range of a prediction: set by hand, not calibrated
RANGE_GAIN_SHARE = 0.5
RANGE_POINTS = 0.4
RANGE_WIDTHS = 1.2
MAX_COHORT = 10_000  # reports among which a second client is looked for
POINTS = MetricScale()
Evidence = Literal["reports", "evaluations", "both"]
RecordedGain = Annotated[float, Ge(-1e9), Le(1e9)]  # points


@dataclass(frozen=True)
class ProgressReports:
    """A record as values of the metric: of clients, of evaluations, and what a point is."""

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
    measured: MeasuredGain  # of the last doubling of the rounds
    bound: float  # the prediction with its margin of error: what is compared with the price
    price: float  # least gain that would be worth twice the rounds
    by: str  # whose values those are: "reports" or "evaluations"
    alive: bool  # whether anything was learnt at all
    # whether this may end the run: one that has learnt nothing, or still gathers way, is given time
    final: bool
    earlier: RememberedGain | None = None  # what earlier runs of the task gained from here on

    @property
    def should_stop(self) -> bool:
        return self.bound < self.price and self.final

    @property
    def predicted_gain(self) -> float:
        """What doubling the rounds is predicted to gain."""
        own = NEXT_DOUBLING_SHARE * self.measured.gain
        return own if self.earlier is None else blend_gains(own, self._width, self.earlier)

    @property
    def _width(self) -> float:
        """What the own prediction is off by."""
        gain, error = self.measured.gain, self.measured.error
        return math.hypot(error, RANGE_GAIN_SHARE * gain, RANGE_POINTS)

    @property
    def predicted_range(self) -> tuple[float, float]:
        """A rough range of the true gain."""
        reach = RANGE_WIDTHS * self._width
        return self.predicted_gain - reach, self.predicted_gain + reach


@dataclass(frozen=True)
class MarginalGain(StopRule):
    """Stop once doubling the rounds is predicted to gain less than `points`, or than they cost at a
    price per point.

    The prediction is three fifths of what the last doubling of the rounds gained. `evidence` says
    what that is measured on: clients' reports on the model they were sent (`holdouts`; free of
    traffic), evaluations of the final model on all hold-outs (billed), or both, which must agree.
    A record without the one is judged by the other. With `joules`, `bytes` or `seconds` per point,
    twice the rounds cost what the run has cost so far. Constants and error rates:
    research/docs/stop.md.
    """

    points: PositiveFloat = 2.0
    joules: PositiveFloat | None = None
    bytes: PositiveFloat | None = None
    seconds: PositiveFloat | None = None
    evidence: Evidence = "reports"
    # folders of earlier runs of the task, "runs/*": read once, at the start
    like: Annotated[str, MaxLen(4096)] = ""
    # what those runs gained (memory.py), their number, how many this rule would have ended too
    # early, and a hash of it all; filled in at the start and stored with the run
    earlier: tuple[RecordedGain, ...] = ()
    earlier_runs: NonNegativeInt = 0
    earlier_too_early: NonNegativeInt = 0
    earlier_hash: Annotated[str, MaxLen(64)] = ""

    @property
    def required_fields(self) -> tuple[str, ...]:
        names = ("joules", "bytes", "seconds")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def reads_evaluations(self) -> bool:
        return self.evidence != "reports"

    @property
    def reads_reports(self) -> bool:
        return self.evidence != "evaluations"

    def compute_required_gain(self, history: Sequence[RoundRecord]) -> float:
        """The least gain, in points, that is worth as many rounds again: at the dearest of the
        prices that are set.
        """
        spent = {
            "joules": sum(h.costs.joules for h in history),
            "bytes": float(sum(h.costs.bytes_up + h.costs.bytes_down for h in history)),
            "seconds": sum(h.costs.seconds for h in history),
        }
        prices = [
            spent[name] / limit for name in spent if (limit := getattr(self, name)) is not None
        ]
        return max(prices) if prices else self.points

    def assess_history(self, history: Sequence[RoundRecord]) -> GainEstimate | None:
        """What the record says after its last round; None while it says too little."""
        if not history:
            return None
        price = self.compute_required_gain(history)
        return self.estimate(collect_reports(history), history[-1].t, price)

    def estimate(self, found: ProgressReports, t: int, price: float) -> GainEstimate | None:
        """A look after round t, by the record and by what earlier runs gained."""
        own = estimate_gain(found, t, price, self.evidence)
        remembered = look_up_earlier_gain(self.earlier, t) if self.earlier else None
        return own if own is None or remembered is None else add_memory(own, remembered)

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        if not history or history[-1].outcome != "committed" or not is_check_due(history[-1].t):
            return ""
        estimate = self.assess_history(history)
        if estimate is None or not estimate.should_stop:
            return ""
        return format_stop_reason(estimate, metric_scale(history)) + self._describe_memory()

    def _describe_memory(self) -> str:
        if not self.earlier_runs:
            return ""
        return (
            f" (of {self.earlier_runs} earlier runs of the task {self.earlier_too_early} would have"
            " been stopped too early)"
        )

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        block = compute_block_rounds(sweep or 1.0)
        least = max(2 * block, 2 * eval_every if sweep is None else 0)
        return next(t for t in range(least, 10**9) if is_check_due(t))

    def list_looks(self, history: Sequence[RoundRecord]) -> list[GainEstimate]:
        """What the rule found in every round in which it looked."""
        done = [h for h in history if h.outcome == "committed"]
        reports = collect_reports(done)
        looks = (
            self.estimate(
                reports.truncate_after(h.t), h.t, self.compute_required_gain(done[: i + 1])
            )
            for i, h in enumerate(done)
            if is_check_due(h.t)
        )
        return [look for look in looks if look is not None]

    def trace(self, history: Sequence[RoundRecord]) -> StopCourse | None:
        looks, scale = self.list_looks(history), metric_scale(history)
        return StopCourse(
            "gain",
            "price",
            "predicted gain from doubling the rounds",
            "points" if scale.in_points else scale.name,
            tuple(look.t for look in looks),
            tuple(scale.to_unit(look.bound) for look in looks),
            tuple(scale.to_unit(look.price) for look in looks),
        )

    def explain(self, history: Sequence[RoundRecord]) -> str:
        done = [h for h in history if h.outcome == "committed"]
        estimate = self.assess_history(done)
        if estimate is None:
            return ""
        memory = self._describe_memory() or f" ({describe_recorded_tasks(compute_sweep(done))})"
        return f"{explain_gain(done, estimate, metric_scale(done))}{memory}."


def collect_reports(history: Sequence[RoundRecord]) -> ProgressReports:
    log_scale = bool(history) and history[-1].evaluation.metric in LOG_METRICS
    return ProgressReports(
        collect_client_reports(history, log_scale),
        collect_evaluations(history, log_scale),
        0.01 if log_scale else metric_point_size(history),
    )


def estimate_gain(
    found: ProgressReports, t: int, price: float, evidence: Evidence = "reports"
) -> GainEstimate | None:
    """A look after round t; None while the evidence says too little.

    With both kinds of evidence the one that predicts more decides.
    """
    available = [
        name
        for name, reports in (("reports", found.clients), ("evaluations", found.evaluations))
        if len(reports.t)
    ]
    used = [name for name in available if evidence in (name, "both")] or available
    estimates = [_estimate_from(name, found, t, price) for name in used]
    if not estimates or None in estimates:
        return None
    return max((estimate for estimate in estimates if estimate is not None), key=_rank_estimate)


def add_memory(own: GainEstimate, earlier: RememberedGain) -> GainEstimate:
    """The look with what earlier runs of the task gained from this round on.

    Two runs or more know whether gains have fallen off, so the rule does not wait for that.
    """
    seen = replace(own, earlier=earlier)
    bound = seen.predicted_gain + ERROR_MARGIN * own.measured.error
    return replace(seen, bound=bound, final=own.final or (own.alive and earlier.runs > 1))


def _rank_estimate(estimate: GainEstimate) -> tuple[bool, float]:
    return not estimate.should_stop, estimate.bound


def _estimate_from(by: str, found: ProgressReports, t: int, price: float) -> GainEstimate | None:
    """A look by one kind of evidence. Reports that reach the server as one mean of all clients
    (sums only) are compared as evaluations are.
    """
    if by == "reports" and len(set(found.clients.k[:MAX_COHORT].tolist())) > 1:
        return _estimate_from_pairs(found, t, price)
    reports = found.clients if by == "reports" else found.evaluations
    return _estimate_from_levels(reports, by, t, price, found.unit)


def _estimate_from_levels(
    reports: MetricReports, by: str, t: int, price: float, unit: float
) -> GainEstimate | None:
    """By the levels of one series: evaluations of the final model, or means of all clients."""
    block = compute_block_rounds(reports.sweep)
    measured = measure_evaluation_gain(reports, t, block, unit)
    total = measure_total_evaluation_gain(reports, t, block, unit)
    if measured is None or total is None:
        return None
    gains = (
        measure_evaluation_gain(reports, end, block, unit) for end in _list_earlier_ends(t, block)
    )
    alive = total.gain > LEARNING_ERROR_MARGIN * total.error
    steepest = max((gain.gain for gain in gains if gain is not None), default=0.0)
    fallen = measured.gain <= MAX_GAIN_RATIO * steepest
    final = (alive and fallen) or _is_patience_over(t, reports.sweep)
    measured = measured.divide_by(unit)
    bound = _add_margin(measured, ERROR_MARGIN)
    return GainEstimate(t, measured, bound, price, by, alive, final)


def _estimate_from_pairs(found: ProgressReports, t: int, price: float) -> GainEstimate | None:
    """By clients that are each compared with themselves.

    The mean over clients decides, within bounds that a minority cannot move far: not before the
    trimmed mean predicts less than the price too, and not after MAX_DELAY_FACTOR times the rounds
    at which the trimmed mean alone said enough. Late in an honest run few clients still gain, and
    look like liars; so the trimmed mean is early, and is waited for.
    """
    mean = _compare_clients(found, t, price, trimmed=False)
    trimmed = _compare_clients(found, t, price, trimmed=True)
    if mean is None or trimmed is None:
        return None
    if trimmed.should_stop and not mean.should_stop:
        before = _compare_clients(found, _find_earlier_look(t), price, trimmed=True)
        return trimmed if before is not None and before.should_stop else mean
    return trimmed if mean.should_stop and trimmed.bound >= price else mean


def _compare_clients(
    found: ProgressReports, t: int, price: float, trimmed: bool
) -> GainEstimate | None:
    """The gain of the last doubling by all clients, or by those that are left in the middle."""
    reports, block = found.clients, compute_block_rounds(found.clients.sweep)
    measured = measure_report_gain(reports, t, block, trimmed)
    total = compare_blocks(reports, t, block, block, trimmed)
    if measured is None or total is None:
        return None
    ends = _list_earlier_ends(t, block)
    gains = (measure_report_gain(reports, end, block, trimmed) for end in ends)
    steepest = max((gain.gain for gain in gains if gain is not None), default=0.0)
    width = compute_uniform_width(t, block, total.count - 1, LEARNING_ALPHA)
    alive = total.gain > width * total.error
    final = (alive and measured.gain <= MAX_GAIN_RATIO * steepest) or _is_patience_over(
        t, reports.sweep
    )
    measured = measured.divide_by(found.unit)
    bound = _add_margin(measured, ERROR_MARGIN)
    return GainEstimate(t, measured, bound, price, "reports", alive, final)


def _find_earlier_look(t: int) -> int:
    """The last look up to round t / MAX_DELAY_FACTOR."""
    return next(end for end in range(int(t / MAX_DELAY_FACTOR), 0, -1) if is_check_due(end))


def _add_margin(measured: MeasuredGain, errors: float) -> float:
    return NEXT_DOUBLING_SHARE * measured.gain + errors * measured.error


def _list_earlier_ends(t: int, block: int) -> list[int]:
    """Ends of earlier doublings, half a doubling apart."""
    ends = (round(t * 2.0 ** (-j / 2)) for j in range(1, 40))
    return [end for end in ends if end >= 2 * block]


def _is_patience_over(t: int, sweep: float) -> bool:
    return t >= max(PATIENCE_SWEEPS * sweep, PATIENCE_BLOCKS * compute_block_rounds(sweep))


def is_check_due(t: int) -> bool:
    """Whether round t is one of the looks: each, until they grow by CHECK_GROWTH_FACTOR."""
    return t == 1 or math.floor(math.log(t) / math.log(CHECK_GROWTH_FACTOR)) != math.floor(
        math.log(t - 1) / math.log(CHECK_GROWTH_FACTOR)
    )


def metric_point_size(history: Sequence[RoundRecord]) -> float:
    """A hundredth of the metric; where less is better, of the median of the first values."""
    if not history or not history[-1].evaluation.lower:
        return 0.01
    for h in history:
        values = [value for value in h.evaluation.holdouts if value is not None] or (
            [] if h.final_model_metric is None else [h.final_model_metric]
        )
        if values:
            return max(abs(median(values)) / 100, 1e-12)
    return 0.01


def format_stop_reason(estimate: GainEstimate, scale: MetricScale = POINTS) -> str:
    """The reason in the record."""
    gain = estimate.measured
    if not estimate.alive and gain.gain <= gain.error:
        return describe_no_learning(estimate.t, estimate.by)
    prediction = (estimate.predicted_gain, *estimate.predicted_range)
    return describe_prediction(prediction, estimate.price, scale)


def metric_scale(history: Sequence[RoundRecord]) -> MetricScale:
    """The unit in which to speak of the record's metric."""
    return (
        MetricScale(
            history[-1].evaluation.metric, history[-1].evaluation.lower, metric_point_size(history)
        )
        if history
        else POINTS
    )


def explain_gain(done: Sequence[RoundRecord], estimate: GainEstimate, scale: MetricScale) -> str:
    """How the metric changed of late, what doubling the rounds is predicted to gain, and what that
    costs.
    """
    joules = float(COSTS["joules"].of_run(done))
    megabytes = float(COSTS["bytes"].of_run(done)) / 1e6
    prediction = (estimate.predicted_gain, *estimate.predicted_range)
    sentence = describe_prediction(prediction, estimate.price, scale)
    return (
        f"{describe_change(done, estimate.measured, estimate.by, scale)} Doubling the rounds would"
        f" cost another {joules:.3g} J and {megabytes:.3g} MB;"
        f" {sentence[0].lower()}{sentence[1:]}"
    )
