"""What a user should know about a run beyond its figures: a training that diverged, a model that
learnt nothing, a rule that could not act, an average that lags. Pure functions of the record and of
the label counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flrce.core.pieces import Recipe
from flrce.core.record import metric_name
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.methods.aggregation.related_mean import MIN_CLIENTS_PER_KIN, RelatedMean
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.storage.metric_format import SHARES, format_metric_value

# what the gate says of replies that have diverged
DIVERGENCE_PHRASES = ("not finite", "malformed: loss", "is beyond")
DIVERGED_LOSS_RATIO = 1e3  # times its first value: a loss that is lost
MAX_CHANCE_RATIO = 1.15  # times what guessing gets
MAJORITY_TOLERANCE = 0.005  # of what a constant prediction gets, where the metric is a share
MIN_RISE_OVER_BASELINE = 0.01  # likewise of its score, of other metrics
LEARNING_REMEDY = (
    "train for longer, change train.lr or the model, or scale the features (data.standardise)"
)
MAX_AVERAGE_LAG = 0.01  # by which the final model may be worse than the last one
MAX_RELATIVE_LAG = 0.02  # likewise of the last one's, where the metric is no share


def list_run_notes(
    history: Sequence[RoundRecord],
    partition: Mapping[str, Any],
    stop: StopRule,
    T: int,
    eval_every: int = 1,
    sweep: float | None = None,
) -> tuple[str, ...]:
    """Every note about a run, the gravest first."""
    late = explain_unreachable_rule(stop, T, eval_every, sweep)
    found = [
        explain_divergence(history),
        explain_unknown_metric(history, partition, eval_every),
        explain_no_learning(history, partition),
        explain_lagging_average(history),
        late,
    ]
    return tuple(note for note in found if note)


def explain_divergence(history: Sequence[RoundRecord]) -> str:
    """The first round in which losses or updates went to infinity, and what to do; "" where none
    did.
    """
    for h in history:
        if what := refused_updates(h) or lost_loss(h, history):
            return _suggest_remedy(what, h)
    return ""


def ended_diverged(history: Sequence[RoundRecord]) -> str:
    """The same where it decided the end: the last evaluation is lost, or rounds were given up for
    diverged updates.
    """
    if not history:
        return ""
    if history[-1].outcome == "abandoned" and history[-1].stop:
        return _suggest_remedy(refused_updates(history[-1]), history[-1])
    judged = next(
        (
            h
            for h in reversed(history)
            if h.last_model_metric is not None or h.costs.bytes_evaluation
        ),
        None,
    )
    return "" if judged is None else _suggest_remedy(lost_loss(judged, history), judged)


def refused_updates(h: RoundRecord) -> str:
    """Whether half of a round's updates or more had diverged."""
    lost = sum(any(word in reason for word in DIVERGENCE_PHRASES) for reason in h.rejected.values())
    many = lost and 2 * lost >= len(h.chosen)
    return f"the training of {lost} of {len(h.chosen)} clients diverged" if many else ""


def lost_loss(h: RoundRecord, history: Sequence[RoundRecord]) -> str:
    """Whether a round's evaluation found a loss that is infinite, or far beyond that of the first
    evaluation.
    """
    first = next(
        (other.evaluation.loss for other in history if other.evaluation.loss is not None), 1.0
    )
    if h.evaluation.loss is None:
        return (
            "the loss went to infinity"
            if h.last_model_metric is not None or h.costs.bytes_evaluation
            else ""
        )
    return (
        f"the loss went to {h.evaluation.loss:.1e}"
        if h.evaluation.loss > DIVERGED_LOSS_RATIO * max(first, 1.0)
        else ""
    )


def _suggest_remedy(what: str, h: RoundRecord) -> str:
    remedy = "lower train.lr, or scale the features (data.standardise) or the values to be learnt"
    return f"{what} in round {h.t}: {remedy}" if what else ""


def explain_unknown_metric(
    history: Sequence[RoundRecord], partition: Mapping[str, Any], eval_every: int
) -> str:
    """Whether samples were held back and judged, and the metric is not known of any client's."""
    judged = [h for h in history if h.outcome == "committed" and h.t % eval_every == 0]
    if (
        not judged
        or any(h.last_model_metric is not None for h in history)
        or not sum(partition.get("held") or ())
    ):
        return ""
    return (
        f"{judged[0].evaluation.metric} is not known of any client's hold-out, so nothing is"
        " judged: is it defined there (one class has no AUC)? Hold more back (data.holdout), or"
        " name another metric first"
    )


def explain_no_learning(history: Sequence[RoundRecord], partition: Mapping[str, Any]) -> str:
    """Whether the last evaluation is no better than a constant prediction, or than guessing."""
    seen = next((h for h in reversed(history) if h.last_model_metric is not None), None)
    if seen is None:
        return ""
    return (
        beats_no_constant(seen, partition.get("baseline") or {})
        or negative_r2(seen)
        or by_chance(seen, partition)
    )


def beats_no_constant(seen: RoundRecord, baseline: Mapping[str, Any]) -> str:
    """Whether the final model is at or below the score of the most frequent class, or of the mean
    value.
    """
    metric, value = seen.evaluation.metric, seen.final_model_metric
    constant = (baseline.get("metrics") or {}).get(metric)
    if constant is None or value is None:
        return ""
    margin = (
        MAJORITY_TOLERANCE if metric in (*SHARES, "r2") else MIN_RISE_OVER_BASELINE * abs(constant)
    )
    if (constant - value if seen.evaluation.lower else value - constant) > margin:
        return ""
    return (
        f"{metric_name(metric)} {format_metric_value(metric, value)} is no better than a"
        f" constant prediction: always predicting {baseline.get('predicts', 'the same')} gives"
        f" {format_metric_value(metric, constant)}. The model may have learnt nothing:"
        f" {LEARNING_REMEDY}"
    )


def negative_r2(seen: RoundRecord) -> str:
    """Whether a model of values is worse than their mean."""
    found = (
        {"r2": seen.final_model_metric}
        if seen.evaluation.metric == "r2"
        else {**seen.evaluation.metrics, **seen.evaluation.pooled}
    )
    value = found.get("r2")
    if value is None or value >= 0:
        return ""
    return (
        f"R² {value:.3g} is below 0: predicting the mean value would be better."
        f" {LEARNING_REMEDY[0].upper()}{LEARNING_REMEDY[1:]}"
    )


def by_chance(seen: RoundRecord, partition: Mapping[str, Any]) -> str:
    """The same as `beats_no_constant` by the training labels alone, where no baseline was recorded;
    and chance.
    """
    labels, classes = (
        partition.get("labels") or (),
        [str(name) for name in partition.get("classes", ())],
    )
    if (
        seen.evaluation.accuracy_weighted is None
        or not labels
        or len(classes) < 2
        or not any(map(sum, labels))
    ):
        return ""
    accuracy = float(seen.evaluation.accuracy_weighted)
    counts = [sum(column) for column in zip(*labels, strict=True)]
    share, name = max(zip((count / sum(counts) for count in counts), classes, strict=True))
    if (
        share > MAX_CHANCE_RATIO / len(classes)
        and accuracy <= share + MAJORITY_TOLERANCE
        and "baseline" not in partition
    ):
        return (
            f"{100 * accuracy:.1f} % of all samples right is no better than always predicting class"
            f" {name!r} ({100 * share:.1f} %). The model may have learnt nothing: {LEARNING_REMEDY}"
        )
    if accuracy <= MAX_CHANCE_RATIO / len(classes):
        return (
            f"{100 * accuracy:.1f} % of all samples right is chance for {len(classes)} classes:"
            f" {LEARNING_REMEDY}"
        )
    return ""


def explain_lagging_average(history: Sequence[RoundRecord]) -> str:
    """Whether the averaged final model is worse than the last one, by the headline
    metric.
    """
    seen = [h for h in history if h.last_model_metric is not None]
    if not seen or seen[-1].evaluation.averaged is None:
        return ""
    metric, last, averaged = (
        seen[-1].evaluation.metric,
        float(seen[-1].last_model_metric or 0.0),
        float(seen[-1].evaluation.averaged or 0.0),
    )
    worse = averaged - last if seen[-1].evaluation.lower else last - averaged
    if worse <= (MAX_AVERAGE_LAG if metric in SHARES else MAX_RELATIVE_LAG * abs(last)):
        return ""
    what = "" if metric == "accuracy" else f" ({metric})"
    return (
        f"the averaged final model scored {format_metric_value(metric, averaged)},"
        f" the last one {format_metric_value(metric, last)}"
        f"{what} (last.safetensors): train for longer, or return the last one with"
        ' recipe.average = "last"'
    )


def compute_sweep_rounds(recipe: Recipe, M: int) -> float | None:
    """Rounds in which nobody is heard twice: a sweep where clients take turns; None where they are
    not asked at all.
    """
    if not recipe.holdouts:
        return None
    return M / recipe.P if isinstance(recipe.selector, RoundRobinSelector) else 1.0


def explain_unreachable_rule(
    stop: Any, T: int, eval_every: int = 1, sweep: float | None = None
) -> str:
    """Rules that cannot act within T rounds."""
    for rule in stop.list_rules():
        at = rule.earliest_round(eval_every, sweep)
        if at > T:
            return (
                f"the stop rule ({type(rule).__name__}) acts from round {at} on, so it cannot end a"
                f" run of {T} rounds"
            )
    return ""


def explain_small_fleet(recipe: Recipe, M: int) -> str:
    """Whether a fleet is too small for its aggregator to tell who has no kin."""
    least = (
        MIN_CLIENTS_PER_KIN * recipe.aggregator.kin
        if isinstance(recipe.aggregator, RelatedMean)
        else 0
    )
    if least < M:
        return ""
    return (
        f"the aggregator (related) compares clients once it has heard from more than {least}, and"
        f" there are {M}: it leaves out copies and zeros, but wrong labels and noise count in full;"
        " lower its kin"
    )
