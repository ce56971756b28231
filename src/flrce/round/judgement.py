"""What an evaluation leaves in the record."""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from flrce.pieces import Engine
from flrce.types import Evaluation, Record, State


def judge(record: Record, engine: Engine, state: State, model: Tensor, last: bool = False) -> Record:
    """The record with the judgement of w and, where it differs, of the server average; `last`: due or not.

    Where judging a model costs messages, one is judged: the one that would be handed back.
    """
    once = engine.judges_once
    seen = engine.evaluate(model if once else state.w, record.t, last, state.carry)
    if seen is None:
        return record
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _kept(metrics: Mapping[str, float], plain: bool) -> dict[str, float]:
    """Nothing where accuracy is all there is: it has fields of its own."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {} if plain and set(finite) <= {"accuracy"} else finite
