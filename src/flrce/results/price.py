"""What a run's last stretch says of the next: points, joules and bytes, for `why`, `whatif` and the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.stops.worth import Verdict, Worth, due, judged, seen
from flrce.store.read import Run


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
    """What a point would cost at a look, at least: as many rounds again, over the most that they would bring."""

    t: int
    gain: float  # points, at most
    joules: float | None  # a point; None: nothing that can be told from chance
    bytes: float | None
    most: float  # joules a point, above which the rule's price is not met

    def told(self) -> str:
        return "no gain that can be told from chance" if self.joules is None else f"{self.joules:,.3g} J"


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
    """What the last stretch brought, what twice the rounds would, and what a point of that costs."""
    rise, (joules, nbytes) = verdict.trend, cost(run, verdict.t)
    whose = "evaluations" if verdict.by == "evaluations" else "what clients found on their hold-outs"
    text = (
        f"By {whose} of the last {rise.rounds} rounds that had any, the model rose by {rise.slope:+.1f} +- "
        f"{rise.error:.1f} points per doubling of the rounds. Twice the rounds would cost another {joules:.3g} J and "
        f"{nbytes / 1e6:.3g} MB"
    )
    if not verdict.alive:
        return f"{text}. No rise over the whole run can be told from chance."
    if verdict.gain <= 0:
        return f"{text} and bring nothing that can be told from chance; {verdict.price:.3g} points were asked for."
    each = joules / verdict.gain
    return (
        f"{text} and bring at most {verdict.gain:.1f} points, {each:.3g} J a point; {verdict.price:.3g} were asked for."
    )


def points(run: Run) -> dict[str, Any]:
    """For the report's chart of what a point costs, and may cost where the run had a price."""
    found, priced = prices(run), rule_of(run) is not None
    return {
        "looks": [p.t for p in found],
        "gain": [_figure(p.gain) for p in found],
        "joules": [_figure(p.joules) for p in found],
        "bytes": [_figure(p.bytes) for p in found],
        "most": [_figure(p.most) if priced else None for p in found],
    }


def _figure(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def course(run: Run) -> dict[str, Any]:
    """For the report's chart: by look, the most that twice the rounds would bring, the slope, and the price."""
    found = verdicts(run) if rule_of(run) else []
    return {
        "looks": [v.t for v in found],
        "gain": [round(v.gain, 3) for v in found],
        "rise": [round(v.trend.slope, 3) for v in found],
        "price": [round(v.price, 3) for v in found],
    }
