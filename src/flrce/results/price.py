"""What a run's last stretch says of the next: points, joules and bytes, for `why`, `whatif` and the report."""

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
        return f"{text}. The model is no better than before training."
    if verdict.gain <= 0:
        return f"{text} and bring nothing that can be told from chance; {verdict.price:.3g} points were asked for."
    each = joules / verdict.gain
    return (
        f"{text} and bring at most {verdict.gain:.1f} points, {each:.3g} J a point; {verdict.price:.3g} were asked for."
    )


def course(run: Run) -> dict[str, Any]:
    """For the report's chart: by look, the most that twice the rounds would bring, the slope, and the price."""
    found = verdicts(run) if rule_of(run) else []
    return {
        "looks": [v.t for v in found],
        "gain": [round(v.gain, 3) for v in found],
        "rise": [round(v.trend.slope, 3) for v in found],
        "price": [round(v.price, 3) for v in found],
    }
