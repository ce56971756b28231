"""What a user should know about a run beyond its figures: a training that diverged, a model that learnt nothing, a rule
that could not act, an average that lags. Pure functions of the record and of the label counts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flrce.aggregators.related import FEW, RelatedMean
from flrce.pieces import Recipe, StopRule
from flrce.record import metric_name
from flrce.selectors.turns import InTurn
from flrce.stops.budget import AnyOf, Patience
from flrce.stops.conflict import Conflicts
from flrce.stops.growth import Growth
from flrce.stops.standstill import Standstill
from flrce.stops.trend import FEWEST
from flrce.stops.worth import PATIENT, Worth
from flrce.store.headline import SHARES, shown
from flrce.types import Record

ABSURD = ("not finite", "malformed: loss", "is beyond")  # what the gate says of replies that have diverged
GROWN = 1e3  # times its first value: a loss that is lost
CHANCE = 1.15  # times what guessing gets
NEAR = 0.005  # of what a constant prediction gets, where the metric is a share
SLIGHT = 0.01  # likewise of its score, of other metrics
TRY = "train for longer, change train.lr or the model, or scale the features (data.standardise)"
LAG = 0.01  # by which the model handed back may be worse than the last one
RELATIVE = 0.02  # likewise of the last one's, where the metric is no share


def notes(
    history: Sequence[Record], partition: Mapping[str, Any], stop: StopRule, T: int, eval_every: int = 1,
    sweep: float | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Every note about a run, the gravest first."""
    late = unreachable(stop, T, eval_every, sweep)
    found = [diverged(history), unknown(history, partition, eval_every), learnt_nothing(history, partition),
             lagging(history), late]  # fmt: skip
    return tuple(note for note in found if note)


def diverged(history: Sequence[Record]) -> str:
    """The first round in which losses or updates went to infinity, and what to do; "" where none did."""
    for h in history:
        if what := refused_updates(h) or lost_loss(h, history):
            return _remedy(what, h)
    return ""


def ended_diverged(history: Sequence[Record]) -> str:
    """The same where it decided the end: the last evaluation is lost, or rounds were given up for diverged updates."""
    if not history:
        return ""
    if history[-1].outcome == "abandoned" and history[-1].stop:
        return _remedy(refused_updates(history[-1]), history[-1])
    judged = next((h for h in reversed(history) if h.headline is not None or h.bytes_evaluation), None)
    return "" if judged is None else _remedy(lost_loss(judged, history), judged)


def refused_updates(h: Record) -> str:
    """Whether half of a round's updates or more had diverged."""
    lost = sum(any(word in reason for word in ABSURD) for reason in h.rejected.values())
    many = lost and 2 * lost >= len(h.chosen)
    return f"the training of {lost} of {len(h.chosen)} clients diverged" if many else ""


def lost_loss(h: Record, history: Sequence[Record]) -> str:
    """Whether a round's evaluation found a loss that is infinite, or far beyond that of the first evaluation."""
    first = next((other.loss for other in history if other.loss is not None), 1.0)
    if h.loss is None:
        return "the loss went to infinity" if h.headline is not None or h.bytes_evaluation else ""
    return f"the loss went to {h.loss:.1e}" if h.loss > GROWN * max(first, 1.0) else ""


def _remedy(what: str, h: Record) -> str:
    remedy = "lower train.lr, or scale the features (data.standardise) or the values to be learnt"
    return f"{what} in round {h.t}: {remedy}" if what else ""


def unknown(history: Sequence[Record], partition: Mapping[str, Any], eval_every: int) -> str:
    """Whether samples were held back and judged, and the metric is not known of any client's."""
    judged = [h for h in history if h.outcome == "committed" and h.t % eval_every == 0]
    if not judged or any(h.headline is not None for h in history) or not sum(partition.get("held") or ()):
        return ""
    return (
        f"{judged[0].metric} is not known of any client's hold-out, so nothing is judged: is it defined there (one "
        "class has no AUC)? Hold more back (data.holdout), or name another metric first"
    )


def learnt_nothing(history: Sequence[Record], partition: Mapping[str, Any]) -> str:
    """Whether the last evaluation is no better than a constant prediction, or than guessing."""
    seen = next((h for h in reversed(history) if h.headline is not None), None)
    if seen is None:
        return ""
    return beats_no_constant(seen, partition.get("baseline") or {}) or negative_r2(seen) or by_chance(seen, partition)


def beats_no_constant(seen: Record, baseline: Mapping[str, Any]) -> str:
    """Whether the final model is at or below the score of the most frequent class, or of the mean value."""
    constant, value = (baseline.get("metrics") or {}).get(seen.metric), seen.handed
    if constant is None or value is None:
        return ""
    margin = NEAR if seen.metric in (*SHARES, "r2") else SLIGHT * abs(constant)
    if (constant - value if seen.lower else value - constant) > margin:
        return ""
    return (
        f"{metric_name(seen.metric)} {shown(seen.metric, value)} is no better than a constant prediction: always "
        f"predicting {baseline.get('predicts', 'the same')} gives {shown(seen.metric, constant)}. The model may have "
        f"learnt nothing: {TRY}"
    )


def negative_r2(seen: Record) -> str:
    """Whether a model of values is worse than their mean."""
    found = {"r2": seen.handed} if seen.metric == "r2" else {**seen.metrics, **seen.pooled}
    value = found.get("r2")
    if value is None or value >= 0:
        return ""
    return f"R² {value:.3g} is below 0: predicting the mean value would be better. {TRY[0].upper()}{TRY[1:]}"


def by_chance(seen: Record, partition: Mapping[str, Any]) -> str:
    """The same as `beats_no_constant` by the training labels alone, where no baseline was recorded; and chance."""
    labels, classes = partition.get("labels") or (), [str(name) for name in partition.get("classes", ())]
    if seen.accuracy_weighted is None or not labels or len(classes) < 2 or not any(map(sum, labels)):
        return ""
    accuracy = float(seen.accuracy_weighted)
    counts = [sum(column) for column in zip(*labels, strict=True)]
    share, name = max(zip((count / sum(counts) for count in counts), classes, strict=True))
    if share > CHANCE / len(classes) and accuracy <= share + NEAR and "baseline" not in partition:
        return (
            f"{100 * accuracy:.1f} % of all samples right is no better than always predicting class {name!r} "
            f"({100 * share:.1f} %). The model may have learnt nothing: {TRY}"
        )
    if accuracy <= CHANCE / len(classes):
        return f"{100 * accuracy:.1f} % of all samples right is chance for {len(classes)} classes: {TRY}"
    return ""


def lagging(history: Sequence[Record]) -> str:
    """Whether the averaged model that is handed back is worse than the last one, by the headline metric."""
    seen = [h for h in history if h.headline is not None]
    if not seen or seen[-1].averaged is None:
        return ""
    metric, last, averaged = seen[-1].metric, float(seen[-1].headline or 0.0), float(seen[-1].averaged or 0.0)
    worse = averaged - last if seen[-1].lower else last - averaged
    if worse <= (LAG if metric in SHARES else RELATIVE * abs(last)):
        return ""
    what = "" if metric == "accuracy" else f" ({metric})"
    return (
        f"the averaged model that is handed back scored {shown(metric, averaged)}, the last one {shown(metric, last)}"
        f'{what} (last.safetensors): train for longer, or hand the last one back with recipe.average = "last"'
    )


def sweep_of(recipe: Recipe, M: int) -> float | None:
    """Rounds in which nobody is heard twice: a sweep where clients take turns; None where they are not asked at all."""
    if not recipe.holdouts:
        return None
    return M / recipe.P if isinstance(recipe.selector, InTurn) else 1.0


def earliest(rule: Any, eval_every: int = 1, sweep: float | None = None) -> int:
    """The first round in which a rule of ours can say stop; `sweep` as above."""
    if isinstance(rule, Worth):
        judged = (2 * FEWEST - 1) * eval_every  # so many evaluations in the last half of the rounds
        if sweep is None:
            return judged
        alone = max(FEWEST, math.floor(sweep)) + 1  # clients' figures, not from the first round on; one speaks twice
        late = math.ceil(PATIENT * max(sweep, 2))  # from then on clients decide, where evaluations are rare
        return alone if alone < eval_every else min(max(judged, alone), late)
    if isinstance(rule, Standstill):
        return max(rule.after + 1, rule.n + 2)  # headway is known from the third round on
    if isinstance(rule, Conflicts):
        return max(rule.after + 1, rule.r)
    if isinstance(rule, Growth):
        return rule.rounds + 1
    return (rule.rounds + 1) * eval_every if isinstance(rule, Patience) else 1


def unreachable(stop: Any, T: int, eval_every: int = 1, sweep: float | None = None) -> str:
    """Rules that cannot act within T rounds."""
    for rule in rules(stop):
        at = earliest(rule, eval_every, sweep)
        if at > T:
            return (
                f"the stop rule ({type(rule).__name__}) acts from round {at} on, so it cannot end a run of {T} rounds"
            )
    return ""


def unjudged(recipe: Recipe, M: int) -> str:
    """Whether a fleet is too small for its aggregator to tell who has no kin."""
    least = FEW * recipe.aggregator.kin if isinstance(recipe.aggregator, RelatedMean) else 0
    if least < M:
        return ""
    return (
        f"the aggregator (related) compares clients once it has heard from more than {least}, and there are {M}: it "
        "leaves out copies and zeros, but wrong labels and noise count in full; lower its kin"
    )


def rules(stop: Any) -> Iterator[Any]:
    """A stop rule, or those that it is any of."""
    if isinstance(stop, AnyOf):
        for inner in stop.rules:
            yield from rules(inner)
    else:
        yield stop
