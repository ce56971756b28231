"""What an evaluation leaves in the record, and what clients made of the model before they trained
on it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.core.engine import Engine
from flrce.core.gate import MAX_SAMPLES_PER_CLIENT
from flrce.core.payloads import is_finite_number
from flrce.core.types import ClientEvaluation, Evaluation, PrimaryMetric, Reply, RoundRecord, State
from flrce.errors import format_one_line

METRIC_DIGITS = 6  # of a client's figure in the record


def evaluate_model(
    record: RoundRecord, engine: Engine, state: State, model: Tensor, last: bool = False
) -> RoundRecord:
    """The record with the judgement of w and, where it differs, of the server average; `last`: due
    or not.

    Where judging a model costs messages, one is judged: the final model.
    """
    once = engine.judges_once
    seen = engine.evaluate(model if once else state.w, record.t, last, state.client_states)
    if seen is None:
        return mark_unevaluated(record, engine)
    averaged = (
        None
        if once or model is state.w
        else engine.evaluate(model, record.t, last, state.client_states)
    )
    return add_evaluation(record, seen, averaged)


def add_evaluation(
    record: RoundRecord, seen: Evaluation, averaged: Evaluation | None
) -> RoundRecord:
    """The record with what was seen of the last model, and of the server average where there is
    one.

    What is not a number is left out: the ledger holds nothing that cannot be read back.
    """
    plain = seen.metric == "accuracy"
    evaluation = replace(
        record.evaluation,
        accuracy=_finite_or_none(seen.value) if plain else None,
        accuracy_weighted=_finite_or_none(seen.weighted) if plain else None,
        loss=_finite_or_none(seen.loss),
        averaged=_finite_or_none(averaged.value) if averaged else None,
        metric=seen.metric,
        lower=seen.lower,
        metrics=_select_metrics(seen.metrics, plain),
        pooled=_select_metrics(seen.pooled, plain),
        metrics_averaged=_select_metrics(averaged.metrics, plain) if averaged else {},
    )
    costs = replace(record.costs, bytes_evaluation=seen.nbytes)
    return replace(record, evaluation=evaluation, costs=costs)


def validate_client_metrics(
    replies: Sequence[Reply], engine: Engine, asked: Collection[str]
) -> list[Reply]:
    """The replies; one whose figure of the model cannot be is refused, as anything else that is
    malformed.

    What clients that were not `asked` for one say is left out.
    """
    scale = engine.primary_metric
    return [
        _validate_client_metric(reply, scale, reply.client in asked)
        if isinstance(reply, Reply)
        else reply
        for reply in replies
    ]


def add_client_evaluations(
    record: RoundRecord, replies: Sequence[Reply], engine: Engine
) -> RoundRecord:
    """The record with what those who counted made of w, in the order of `record.replied`."""
    said: dict[str, ClientEvaluation] = {}
    for reply in replies:
        if isinstance(reply, Reply) and reply.judged:
            said.setdefault(reply.client, reply.judged)  # the first is the one that counted
    found = [said.get(client) for client in record.replied]
    if not any(found):
        return record
    scale = engine.primary_metric
    evaluation = replace(
        record.evaluation,
        holdouts=tuple(
            None if each is None else float(f"{each.value:.{METRIC_DIGITS}g}") for each in found
        ),
        held=tuple(0 if each is None else each.n for each in found),
        metric=scale.metric,
        lower=scale.lower,
    )
    return replace(record, evaluation=evaluation)


def mark_unevaluated(record: RoundRecord, engine: Engine) -> RoundRecord:
    """The record of a round whose model is not judged: what it would have been judged by is known
    all the same.
    """
    scale = engine.primary_metric
    evaluation = replace(record.evaluation, metric=scale.metric, lower=scale.lower)
    return replace(record, evaluation=evaluation)


def _validate_client_metric(reply: Reply, scale: PrimaryMetric, asked: bool) -> Reply:
    judged: Any = reply.judged
    if judged is not None and not asked:
        return replace(reply, judged=None)
    if judged is None or reply.error:
        return reply
    if not isinstance(judged, ClientEvaluation) or not is_finite_number(
        judged.value, scale.low, scale.high
    ):
        what = (
            f"{scale.metric} {format_one_line(getattr(judged, 'value', judged), 20)!r} on its"
            " hold-out"
        )
    elif type(judged.n) is not int or not 1 <= judged.n <= MAX_SAMPLES_PER_CLIENT:
        what = f"a hold-out of {format_one_line(judged.n, 20)} samples"
    else:
        return reply
    return replace(reply, payload=None, judged=None, error=f"malformed: {what}")


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _select_metrics(metrics: Mapping[str, float], plain: bool) -> dict[str, float]:
    """Nothing where accuracy is all there is: it has fields of its own."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {} if plain and set(finite) <= {"accuracy"} else finite
