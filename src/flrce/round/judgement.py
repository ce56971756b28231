"""What an evaluation leaves in the record, and what clients made of the model before they trained on it."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.engine import Engine, Measures
from flrce.errors import brief
from flrce.round.gate import MOST_SAMPLES
from flrce.round.payloads import number
from flrce.types import Evaluation, Judged, Record, Reply, State, Yardstick

DIGITS = 6  # of a client's figure in the record


def judge(record: Record, engine: Engine, state: State, model: Tensor, last: bool = False) -> Record:
    """The record with the judgement of w and, where it differs, of the server average; `last`: due or not.

    Where judging a model costs messages, one is judged: the one that would be handed back.
    """
    once = engine.judges_once
    seen = engine.evaluate(model if once else state.w, record.t, last, state.carry)
    if seen is None:
        return unjudged(record, engine)
    averaged = None if once or model is state.w else engine.evaluate(model, record.t, last, state.carry)
    return judged(record, seen, averaged)


def judged(record: Record, seen: Evaluation, averaged: Evaluation | None) -> Record:
    """The record with what was seen of the last model, and of the server average where there is one.

    What is not a number is left out: the ledger holds nothing that cannot be read back.
    """
    plain = seen.metric == "accuracy"
    return replace(
        record,
        accuracy=_finite(seen.value) if plain else None,
        accuracy_weighted=_finite(seen.weighted) if plain else None,
        loss=_finite(seen.loss),
        averaged=_finite(averaged.value) if averaged else None,
        metric=seen.metric,
        lower=seen.lower,
        metrics=_kept(seen.metrics, plain),
        pooled=_kept(seen.pooled, plain),
        metrics_averaged=_kept(averaged.metrics, plain) if averaged else {},
        bytes_evaluation=seen.nbytes,
    )


def vetted(replies: Sequence[Reply], engine: Engine, asked: Collection[str]) -> list[Reply]:
    """The replies; one whose figure of the model cannot be is refused, as anything else that is malformed.

    What clients that were not `asked` for one say is left out.
    """
    scale = _yardstick(engine)
    return [_vetted(reply, scale, reply.client in asked) if isinstance(reply, Reply) else reply for reply in replies]


def heard(record: Record, replies: Sequence[Reply], engine: Engine) -> Record:
    """The record with what those who counted made of w, in the order of `record.replied`."""
    said: dict[str, Judged] = {}
    for reply in replies:
        if isinstance(reply, Reply) and reply.judged:
            said.setdefault(reply.client, reply.judged)  # the first is the one that counted
    found = [said.get(client) for client in record.replied]
    if not any(found):
        return record
    scale = _yardstick(engine)
    return replace(
        record,
        holdouts=tuple(None if each is None else float(f"{each.value:.{DIGITS}g}") for each in found),
        held=tuple(0 if each is None else each.n for each in found),
        metric=scale.metric,
        lower=scale.lower,
    )


def unjudged(record: Record, engine: Engine) -> Record:
    """The record of a round whose model is not judged: what it would have been judged by is known all the same."""
    scale = _yardstick(engine)
    return replace(record, metric=scale.metric, lower=scale.lower)


def _yardstick(engine: Engine) -> Yardstick:
    return engine.yardstick if isinstance(engine, Measures) else Yardstick()


def _vetted(reply: Reply, scale: Yardstick, asked: bool) -> Reply:
    judged: Any = reply.judged
    if judged is not None and not asked:
        return replace(reply, judged=None)
    if judged is None or reply.error:
        return reply
    if not isinstance(judged, Judged) or not number(judged.value, scale.low, scale.high):
        what = f"{scale.metric} {brief(getattr(judged, 'value', judged), 20)!r} on its hold-out"
    elif type(judged.n) is not int or not 1 <= judged.n <= MOST_SAMPLES:
        what = f"a hold-out of {brief(judged.n, 20)} samples"
    else:
        return reply
    return replace(reply, payload=None, judged=None, error=f"malformed: {what}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _kept(metrics: Mapping[str, float], plain: bool) -> dict[str, float]:
    """Nothing where accuracy is all there is: it has fields of its own."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {} if plain and set(finite) <= {"accuracy"} else finite
