"""Metrics that clients report about themselves: found, checked and averaged."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

from flrce.errors import brief
from flrce.flower.nodes import why
from flrce.flower.options import Summing
from flrce.flower.wire import SAMPLES
from flrce.round.gate import MOST_SAMPLES
from flrce.round.payloads import number

ACCURACY = ("accuracy", "eval_acc", "acc", "eval_accuracy", "val_acc", "val_accuracy")
LOSSES = ("loss", "eval_loss", "val_loss")
log = logging.getLogger("flwr")


def weighted(figures: Sequence[Mapping[str, Any]], by: str = SAMPLES) -> MetricRecord:
    """Every metric that all report within its range, averaged over samples, or by another weight; lists by element."""
    n = [float(f[by]) for f in figures]
    total = math.fsum(n)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(float(value) * weight for value, weight in zip(values, n, strict=True)) / total

    found: dict[str, Any] = {}
    for key in (key for key in figures[0] if key != by):
        values: list[Any] = [f.get(key) for f in figures]
        if all(within(key, value) for value in values):
            found[key] = mean(values)
        elif all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
            found[key] = [mean(column) for column in zip(*values, strict=True)]
    return MetricRecord(found)


def summed(figures: Sequence[Mapping[str, Any]], by: str, how: Summing | None) -> MetricRecord | None:
    """One round's metrics from those of its clients; None where there are none, or where `how` cannot."""
    known = [f for f in figures if number(f.get(by)) and f[by] > 0]
    if not known or (how is None and len(known) < len(figures)):
        return None
    if how is None:
        return weighted(known, by)
    try:
        return how([RecordDict({"metrics": MetricRecord(dict(f))}) for f in known], by)
    except Exception as why:  # the user's own function
        log.warning(
            "%s could not sum the clients' metrics: %s: %s", getattr(how, "__name__", how), type(why).__name__, why
        )
        return None


def reported(reply: Message) -> Mapping[str, Any]:
    """The metrics of an answer; of one that failed, or that has one out of its range, none."""
    if reply.has_error():
        log.info("node %d: %s", reply.metadata.src_node_id, why(reply))
        return {}
    figures: Mapping[str, Any] = next(iter(reply.content.metric_records.values()), {})
    problem = strange(figures)
    if problem:
        log.warning("node %d: %s; its metrics do not count", reply.metadata.src_node_id, problem)
    return {} if problem else figures


def first(figures: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The first of these metrics that is a number within its range."""
    found = ((name, figures.get(name)) for name in names)
    return next((float(value) for name, value in found if within(name, value)), None)  # type: ignore[arg-type]


def within(name: str, value: Any) -> bool:
    """Whether a metric is a finite number that can be: accuracies from 0 to 1, whole samples, others bounded."""
    if name in ACCURACY:
        return number(value, 0.0, 1.0)
    return number(value, 1, MOST_SAMPLES) if name == SAMPLES else number(value)


def strange(figures: Mapping[str, Any]) -> str:
    """What is wrong with the first metric out of its range, or ""; NaN only says that a client does not know."""
    for name, value in figures.items():
        for one in value if isinstance(value, list) else [value]:
            if one == one and not within(name, one):
                return f"metric {brief(name, 40)!r} is {brief(one, 20)}, out of its range"
    return ""
