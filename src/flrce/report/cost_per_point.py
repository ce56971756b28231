"""What a run's last stretch says of the next: points, joules and bytes, for `why`, `whatif` and the
report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.record import format_metric, metric_name
from flrce.methods.stopping.marginal_gain import (
    GainEstimate,
    MarginalGain,
    collect_reports,
    estimate_gain,
    is_check_due,
    metric_scale,
    predict_gain,
)
from flrce.methods.stopping.wording import MetricScale, describe_evidence
from flrce.storage.read import RecordedRun

CHANGE_THRESHOLD_ERRORS = 2.0  # errors within which a trend is not called a change


def estimate_gains(run: RecordedRun) -> list[GainEstimate]:
    """Every look of the run's own rule, or of the usual price where it has none."""
    rule = find_gain_rule(run) or MarginalGain()
    found, history = collect_reports(run.committed_rounds), list(run.committed_rounds)
    looks = [i for i, h in enumerate(history) if is_check_due(h.t)]
    every = (
        estimate_gain(
            found.truncate_after(history[i].t),
            history[i].t,
            rule.compute_required_gain(history[: i + 1]),
        )
        for i in looks
    )
    return [verdict for verdict in every if verdict is not None]


def find_gain_rule(run: RecordedRun) -> MarginalGain | None:
    return next((rule for rule in run.stop_rules if isinstance(rule, MarginalGain)), None)


def sum_cost_until(run: RecordedRun, t: int) -> tuple[float, float]:
    """Joules and bytes of the rounds up to t: what as many again cost."""
    until = [h for h in run.rounds if h.t <= t]
    return COSTS["joules"].of_run(until), float(COSTS["bytes"].of_run(until))


@dataclass(frozen=True)
class PointPrice:
    """Estimated cost of a point at a look: as many rounds again, over the upper end of their
    predicted gain.
    """

    t: int
    gain: float  # points, the upper end of the prediction
    joules: float | None  # a point; None: no gain is predicted
    bytes: float | None
    most: float  # joules a point, above which the rule's price is not met

    def describe(self) -> str:
        return "no predicted gain" if self.joules is None else f"{self.joules:,.3g} J"


def compute_point_prices(run: RecordedRun) -> list[PointPrice]:
    """By look, with the run's own rule or the usual price."""
    found = []
    for verdict in estimate_gains(run):
        joules, nbytes = sum_cost_until(run, verdict.t)
        gain = max(verdict.gain, verdict.least)
        point, load = (joules / gain, nbytes / gain) if gain > 0 else (None, None)
        found.append(PointPrice(verdict.t, gain, point, load, joules / verdict.price))
    return found


def thin_prices(found: Sequence[PointPrice]) -> list[PointPrice]:
    """The last look of every half doubling of rounds."""
    last = {math.floor(2 * math.log2(price.t)): price for price in found}
    return list(last.values())


def describe_gain(run: RecordedRun, verdict: GainEstimate) -> str:
    """How the metric changed of late, what doubling the rounds is predicted to gain, and what that
    costs.
    """
    scale, (joules, nbytes) = metric_scale(run.committed_rounds), sum_cost_until(run, verdict.t)
    middle, low, high = predict_gain(verdict)
    ends = " to ".join(scale.format_amount(end).removesuffix(" points") for end in (low, high))
    gain = f"{scale.format_amount(middle)} ({ends})"
    price = f"{verdict.price:.3g} points" if scale.in_points else scale.format_amount(verdict.price)
    each = (
        f", {joules / high:.3g} J per point at the upper end"
        if scale.in_points and high > 0
        else ""
    )
    return (
        f"{_describe_metric_change(run, verdict, scale)} Doubling the rounds would cost another"
        f" {joules:.3g} J and {nbytes / 1e6:.3g} MB and is predicted to improve it by {gain}{each};"
        f" the price is {price}."
    )


def _describe_metric_change(run: RecordedRun, verdict: GainEstimate, scale: MetricScale) -> str:
    """What the evaluations of the whole run and the trend of its last stretch show."""
    rise, metric = verdict.trend, metric_name(scale.metric)
    judged = [
        h for h in run.committed_rounds if h.final_model_metric is not None and h.t <= verdict.t
    ]
    text = ""
    if len(judged) > 1:
        first, last = judged[0], judged[-1]
        values = (
            format_metric(scale.metric, first.final_model_metric),
            format_metric(scale.metric, last.final_model_metric),
        )
        text = (
            f"{metric} of the final model was {values[0]} in round {first.t} and {values[1]} in"
            f" round {last.t}. "
        )
    size = (
        f"{scale.to_unit(abs(rise.slope)):.2g} ± {scale.format_amount(rise.error, 2)} per doubling"
        " of the rounds"
    )
    if abs(rise.slope) <= CHANGE_THRESHOLD_ERRORS * rise.error or not rise.slope:
        how = f"did not change measurably ({'-' if rise.slope < 0 else '+'}{size})"
    else:
        how = f"{'improved' if rise.slope > 0 else 'became worse'} by {size}"
    return f"{text}Over {describe_evidence(rise.rounds, verdict.by)} it {how}."


def build_price_chart(run: RecordedRun) -> dict[str, Any]:
    """For the report's chart of what a point costs, and may cost where the run had a price."""
    found, priced, scale = (
        compute_point_prices(run),
        find_gain_rule(run) is not None,
        metric_scale(run.committed_rounds),
    )
    return {
        "looks": [p.t for p in found],
        "per": "a point"
        if scale.in_points
        else f"per {scale.format_amount(1.0)} of {metric_name(scale.metric)}",
        "gain": [_round_digits(p.gain) for p in found],
        "joules": [_round_digits(p.joules) for p in found],
        "bytes": [_round_digits(p.bytes) for p in found],
        "most": [_round_digits(p.most) if priced else None for p in found],
    }


def _round_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def build_gain_chart(run: RecordedRun) -> dict[str, Any]:
    """For the report's chart: by look, the upper end of the predicted gain, the slope, and the
    price.
    """
    found, scale = (
        estimate_gains(run) if find_gain_rule(run) else [],
        metric_scale(run.committed_rounds),
    )
    return {
        "looks": [v.t for v in found],
        "gain": [_round_digits(scale.to_unit(v.gain)) for v in found],
        "rise": [_round_digits(scale.to_unit(v.trend.slope)) for v in found],
        "price": [_round_digits(scale.to_unit(v.price)) for v in found],
        "unit": "points" if scale.in_points else metric_name(scale.metric),
    }
