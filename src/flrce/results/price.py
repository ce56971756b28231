"""What a run's last stretch says of the next: points, joules and bytes, for `why`, `whatif` and the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.record import format_metric, metric_name
from flrce.stops.wording import Scale, describe_evidence
from flrce.stops.worth import Verdict, Worth, due, judged, metric_scale, predict_gain, seen
from flrce.store.read import Run

CHANCE = 2.0  # errors within which a trend is not called a change


def verdicts(run: Run) -> list[Verdict]:
    """Every look of the run's own rule, or of the usual price where it has none."""
    rule = rule_of(run) or Worth()
    found, history = seen(run.done), list(run.done)
    looks = [i for i, h in enumerate(history) if due(h.t)]
    every = (judged(found.until(history[i].t), history[i].t, rule.price(history[: i + 1])) for i in looks)
    return [verdict for verdict in every if verdict is not None]


def rule_of(run: Run) -> Worth | None:
    return next((rule for rule in run.rules if isinstance(rule, Worth)), None)


def cost(run: Run, t: int) -> tuple[float, float]:
    """Joules and bytes of the rounds up to t: what as many again cost."""
    until = [h for h in run.rounds if h.t <= t]
    return sum(h.joules for h in until), float(sum(h.bytes_up + h.bytes_down for h in until))


@dataclass(frozen=True)
class Price:
    """Estimated cost of a point at a look: as many rounds again, over the upper end of their predicted gain."""

    t: int
    gain: float  # points, the upper end of the prediction
    joules: float | None  # a point; None: no gain is predicted
    bytes: float | None
    most: float  # joules a point, above which the rule's price is not met

    def told(self) -> str:
        return "no predicted gain" if self.joules is None else f"{self.joules:,.3g} J"


def prices(run: Run) -> list[Price]:
    """By look, with the run's own rule or the usual price."""
    found = []
    for verdict in verdicts(run):
        joules, nbytes = cost(run, verdict.t)
        gain = max(verdict.gain, verdict.least)
        point, load = (joules / gain, nbytes / gain) if gain > 0 else (None, None)
        found.append(Price(verdict.t, gain, point, load, joules / verdict.price))
    return found


def thinned(found: Sequence[Price]) -> list[Price]:
    """The last look of every half doubling of rounds."""
    last = {math.floor(2 * math.log2(price.t)): price for price in found}
    return list(last.values())


def sentence(run: Run, verdict: Verdict) -> str:
    """How the metric changed of late, what doubling the rounds is predicted to gain, and what that costs."""
    scale, (joules, nbytes) = metric_scale(run.done), cost(run, verdict.t)
    middle, low, high = predict_gain(verdict)
    gain = f"{scale.format(middle)} ({' to '.join(scale.format(each).removesuffix(' points') for each in (low, high))})"
    price = f"{verdict.price:.3g} points" if scale.in_points else scale.format(verdict.price)
    each = f", {joules / high:.3g} J per point at the upper end" if scale.in_points and high > 0 else ""
    return (
        f"{_change(run, verdict, scale)} Doubling the rounds would cost another {joules:.3g} J and "
        f"{nbytes / 1e6:.3g} MB and is predicted to improve it by {gain}{each}; the price is {price}."
    )


def _change(run: Run, verdict: Verdict, scale: Scale) -> str:
    """What the evaluations of the whole run and the trend of its last stretch show."""
    rise, metric = verdict.trend, metric_name(scale.metric)
    judged = [h for h in run.done if h.handed is not None and h.t <= verdict.t]
    text = ""
    if len(judged) > 1:
        first, last = judged[0], judged[-1]
        values = (format_metric(scale.metric, first.handed), format_metric(scale.metric, last.handed))
        text = f"{metric} of the final model was {values[0]} in round {first.t} and {values[1]} in round {last.t}. "
    size = f"{scale.amount(abs(rise.slope)):.2g} ± {scale.format(rise.error, 2)} per doubling of the rounds"
    if abs(rise.slope) <= CHANCE * rise.error or not rise.slope:
        how = f"did not change measurably ({'-' if rise.slope < 0 else '+'}{size})"
    else:
        how = f"{'improved' if rise.slope > 0 else 'became worse'} by {size}"
    return f"{text}Over {describe_evidence(rise.rounds, verdict.by)} it {how}."


def points(run: Run) -> dict[str, Any]:
    """For the report's chart of what a point costs, and may cost where the run had a price."""
    found, priced, scale = prices(run), rule_of(run) is not None, metric_scale(run.done)
    return {
        "looks": [p.t for p in found],
        "per": "a point" if scale.in_points else f"per {scale.format(1.0)} of {metric_name(scale.metric)}",
        "gain": [_figure(p.gain) for p in found],
        "joules": [_figure(p.joules) for p in found],
        "bytes": [_figure(p.bytes) for p in found],
        "most": [_figure(p.most) if priced else None for p in found],
    }


def _figure(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def course(run: Run) -> dict[str, Any]:
    """For the report's chart: by look, the upper end of the predicted gain, the slope, and the price."""
    found, scale = verdicts(run) if rule_of(run) else [], metric_scale(run.done)
    return {
        "looks": [v.t for v in found],
        "gain": [_figure(scale.amount(v.gain)) for v in found],
        "rise": [_figure(scale.amount(v.trend.slope)) for v in found],
        "price": [_figure(scale.amount(v.price)) for v in found],
        "unit": "points" if scale.in_points else metric_name(scale.metric),
    }
