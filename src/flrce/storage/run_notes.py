"""Notes about a run: training that diverged, a model that learnt nothing, a stop rule that could
not act, an average that lags. Pure functions of the record and of the label counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flrce.core.metric_format import SHARES, format_metric_name, format_metric_value
from flrce.core.pieces import Recipe
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.methods.aggregation.related_mean import MIN_CLIENTS_PER_KIN, RelatedMean
from flrce.methods.selection.turns import RoundRobinSelector

# phrases of the gate about replies that have diverged
DIVERGENCE_PHRASES = ("not finite", "malformed: loss", "is beyond")
DIVERGED_LOSS_RATIO = 1e3  # in multiples of its first value
MAX_CHANCE_RATIO = 1.15  # in multiples of chance
MAJORITY_TOLERANCE = 0.005  # above a constant prediction, if the metric is a share
MIN_RISE_OVER_BASELINE = 0.01  # relative, for other metrics
LEARNING_REMEDY = (
    "train for longer, change train.lr or the model, or scale the features (data.standardise)"
)
MAX_AVERAGE_LAG = 0.01  # of the final model behind the last one
MAX_RELATIVE_LAG = 0.02  # relative, if the metric is not a share


def list_run_notes(
    history: Sequence[RoundRecord],
    partition: Mapping[str, Any],
    stop: StopRule,
    T: int,
    eval_every: int = 1,
    sweep: float | None = None,
) -> tuple[str, ...]:
    """Every note about a run, the most serious first."""
    notes = [
        explain_divergence(history),
        explain_unknown_metric(history, partition, eval_every),
        explain_no_learning(history, partition),
        explain_lagging_average(history),
        explain_unreachable_rule(stop, T, eval_every, sweep),
    ]
    return tuple(note for note in notes if note)


def explain_divergence(history: Sequence[RoundRecord]) -> str:
    """The first round in which losses or updates diverged, and what to do; "" if none did."""
    for h in history:
        if sign := describe_diverged_updates(h) or describe_diverged_loss(h, history):
            return _suggest_remedy(sign, h)
    return ""


def ended_diverged(history: Sequence[RoundRecord]) -> str:
    """The same if it decided the end of the run: the last evaluation or abandoned rounds."""
    if not history:
        return ""
    if history[-1].outcome == "abandoned" and history[-1].stop:
        return _suggest_remedy(describe_diverged_updates(history[-1]), history[-1])
    for h in reversed(history):
        if _was_evaluated(h):
            return _suggest_remedy(describe_diverged_loss(h, history), h)
    return ""


def _was_evaluated(h: RoundRecord) -> bool:
    return h.last_model_metric is not None or bool(h.costs.bytes_evaluation)


def describe_diverged_updates(h: RoundRecord) -> str:
    """Says so if at least half of a round's updates diverged."""
    diverged = sum(
        any(word in reason for word in DIVERGENCE_PHRASES) for reason in h.rejected.values()
    )
    if not diverged or 2 * diverged < len(h.chosen):
        return ""
    return f"the training of {diverged} of {len(h.chosen)} clients diverged"


def describe_diverged_loss(h: RoundRecord, history: Sequence[RoundRecord]) -> str:
    """Says so if a round's loss is infinite or much larger than the first one."""
    losses = (other.evaluation.loss for other in history)
    first, loss = next((x for x in losses if x is not None), 1.0), h.evaluation.loss
    if loss is None:
        return "the loss went to infinity" if _was_evaluated(h) else ""
    return f"the loss went to {loss:.1e}" if loss > DIVERGED_LOSS_RATIO * max(first, 1.0) else ""


def _suggest_remedy(what: str, h: RoundRecord) -> str:
    remedy = "lower train.lr, or scale features and values (data.standardise = true)"
    return f"{what} in round {h.t}: {remedy}" if what else ""


def explain_unknown_metric(
    history: Sequence[RoundRecord], partition: Mapping[str, Any], eval_every: int
) -> str:
    """Says so if hold-outs were evaluated, but the metric is defined on none of them."""
    evaluated = [h for h in history if h.outcome == "committed" and h.t % eval_every == 0]
    if (
        not evaluated
        or any(h.last_model_metric is not None for h in history)
        or not sum(partition.get("held") or ())
    ):
        return ""
    return (
        f"{evaluated[0].evaluation.metric} is not defined on any client's hold-out (AUC needs two"
        " classes); raise data.holdout, or name another metric first"
    )


def explain_no_learning(history: Sequence[RoundRecord], partition: Mapping[str, Any]) -> str:
    """Says so if the last evaluation is no better than a constant prediction or chance."""
    evaluated = next((h for h in reversed(history) if h.last_model_metric is not None), None)
    if evaluated is None:
        return ""
    return (
        _compare_with_constant(evaluated, partition.get("baseline") or {})
        or _describe_negative_r2(evaluated)
        or _compare_with_chance(evaluated, partition)
    )


def _compare_with_constant(h: RoundRecord, baseline: Mapping[str, Any]) -> str:
    """Says so if the final model is no better than the most frequent class or the mean value."""
    metric, value = h.evaluation.metric, h.final_model_metric
    constant = (baseline.get("metrics") or {}).get(metric)
    if constant is None or value is None:
        return ""
    margin = (
        MAJORITY_TOLERANCE if metric in (*SHARES, "r2") else MIN_RISE_OVER_BASELINE * abs(constant)
    )
    if (constant - value if h.evaluation.lower else value - constant) > margin:
        return ""
    return (
        f"{format_metric_name(metric)} {format_metric_value(metric, value)} is no better than a"
        f" constant prediction: always predicting {baseline.get('predicts', 'the same')} gives"
        f" {format_metric_value(metric, constant)}. The model may have learnt nothing:"
        f" {LEARNING_REMEDY}"
    )


def _describe_negative_r2(h: RoundRecord) -> str:
    """Says so if a regression is worse than the mean value."""
    if h.evaluation.metric == "r2":
        metrics = {"r2": h.final_model_metric}
    else:
        metrics = {**h.evaluation.metrics, **h.evaluation.pooled}
    value = metrics.get("r2")
    if value is None or value >= 0:
        return ""
    return (
        f"R² {value:.3g} is below 0: predicting the mean value would be better."
        f" {LEARNING_REMEDY[0].upper()}{LEARNING_REMEDY[1:]}"
    )


def _compare_with_chance(h: RoundRecord, partition: Mapping[str, Any]) -> str:
    """A note if accuracy is at chance, or at the share of the most frequent label."""
    labels = partition.get("labels") or ()
    classes = [str(name) for name in partition.get("classes", ())]
    accuracy = h.evaluation.accuracy_weighted
    if accuracy is None or len(classes) < 2 or not any(map(sum, labels)):
        return ""
    counts = [sum(column) for column in zip(*labels, strict=True)]
    share, name = max(zip((count / sum(counts) for count in counts), classes, strict=True))
    skewed = share > MAX_CHANCE_RATIO / len(classes) and "baseline" not in partition
    if skewed and accuracy <= share + MAJORITY_TOLERANCE:
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
    """Says so if the averaged final model is worse than the last one."""
    evaluated = [h for h in history if h.last_model_metric is not None]
    if not evaluated or evaluated[-1].evaluation.averaged is None:
        return ""
    final, metric = evaluated[-1], evaluated[-1].evaluation.metric
    last = float(final.last_model_metric or 0.0)
    averaged = float(final.evaluation.averaged or 0.0)
    worse = averaged - last if final.evaluation.lower else last - averaged
    if worse <= (MAX_AVERAGE_LAG if metric in SHARES else MAX_RELATIVE_LAG * abs(last)):
        return ""
    metric_note = "" if metric == "accuracy" else f" ({metric})"
    return (
        f"the averaged final model scored {format_metric_value(metric, averaged)},"
        f" the last one {format_metric_value(metric, last)}"
        f"{metric_note} (last.safetensors): train for longer, or return the last one with"
        ' recipe.average = "last"'
    )


def compute_sweep_rounds(recipe: Recipe, M: int) -> float | None:
    """Rounds until a client reports twice (a sweep if they take turns); None without reports."""
    if not recipe.holdouts:
        return None
    return M / recipe.P if isinstance(recipe.selector, RoundRobinSelector) else 1.0


def explain_unreachable_rule(
    stop: Any, T: int, eval_every: int = 1, sweep: float | None = None
) -> str:
    """Says so if a stop rule cannot act within T rounds."""
    for rule in stop.list_rules():
        first = rule.earliest_round(eval_every, sweep)
        if first > T:
            return (
                f"the stop rule {type(rule).__name__} needs {first} rounds, so it cannot end a run"
                f" of {T}"
            )
    return ""


def explain_small_fleet(recipe: Recipe, M: int) -> str:
    """Says so if there are too few clients for the aggregator to compare them."""
    min_clients = 0
    if isinstance(recipe.aggregator, RelatedMean):
        min_clients = MIN_CLIENTS_PER_KIN * recipe.aggregator.kin
    if min_clients < M:
        return ""
    return (
        f"the aggregator (related) compares clients only if there are more than {min_clients}, and"
        f" there are {M}: it rejects copies and zeros, but not wrong labels or noise; lower its kin"
    )
