"""Metrics that clients report about themselves: found, checked and averaged."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict

from flrce.errors import brief
from flrce.flower.options import Summing
from flrce.flower.post import why
from flrce.flower.wire import SAMPLES
from flrce.local.metrics import Judges, Metric
from flrce.round.gate import MOST_SAMPLES
from flrce.round.payloads import number

ACCURACY = ("accuracy", "eval_acc", "acc", "eval_accuracy", "val_acc", "val_accuracy")
PERCENT = 100.0
LOSSES = ("loss", "eval_loss", "val_loss")
log = logging.getLogger("flwr")


def scale(figures: Sequence[Mapping[str, Any]]) -> float:
    """The largest accuracy that can be: 1, or 100 where more than half of the clients report percentages."""
    found = [f[name] for f in figures for name in ACCURACY if number(f.get(name), 0.0, PERCENT)]
    return PERCENT if 2 * sum(value > 1 for value in found) > len(found) else 1.0


def weighted(figures: Sequence[Mapping[str, Any]], by: str = SAMPLES, most: float = 1.0) -> MetricRecord:
    """Every metric that all report within its range, averaged over samples, or by another weight; lists by element."""
    n = [float(f[by]) for f in figures]
    total = math.fsum(n)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(float(value) * weight for value, weight in zip(values, n, strict=True)) / total

    found: dict[str, Any] = {}
    for key in (key for key in figures[0] if key != by):
        values: list[Any] = [f.get(key) for f in figures]
        if all(within(key, value, most) for value in values):
            found[key] = mean(values)
        elif all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
            found[key] = [mean(column) for column in zip(*values, strict=True)]
    return MetricRecord(found)


def by_metric(
    judges: Sequence[Judges], figures: Sequence[Mapping[str, Any]], by: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Each metric's mean over the clients that report it within its range, and their mean by samples."""
    alike: dict[str, float] = {}
    by_samples: dict[str, float] = {}
    for judge in judges:
        low, high = (judge.low, judge.high) if isinstance(judge, Metric) else (-math.inf, math.inf)
        known = [(float(f[judge.name]), float(f[by])) for f in figures if number(f.get(judge.name), low, high)]
        if known:
            alike[judge.name] = math.fsum(value for value, _ in known) / len(known)
            total = math.fsum(n for _, n in known)
            by_samples[judge.name] = math.fsum(value * n for value, n in known) / total
    return alike, by_samples


def summed(
    figures: Sequence[Mapping[str, Any]], by: str, how: Summing | None, most: float = 1.0
) -> MetricRecord | None:
    """One round's metrics from those of its clients; None where there are none, or where `how` cannot."""
    known = [f for f in figures if number(f.get(by)) and f[by] > 0]
    if not known or (how is None and len(known) < len(figures)):
        return None
    if how is None:
        return weighted(known, by, most)
    try:
        return how([RecordDict({"metrics": MetricRecord(dict(f))}) for f in known], by)
    except Exception as why:  # the user's own function
        log.warning(
            "%s could not sum the clients' metrics: %s: %s", getattr(how, "__name__", how), type(why).__name__, why
        )
        return None


def reported(reply: Message, most: float = 1.0) -> Mapping[str, Any]:
    """The metrics of an answer; of one that failed, or that has one out of its range, none."""
    if reply.has_error():
        log.info("node %d: %s", reply.metadata.src_node_id, why(reply))
        return {}
    figures = metrics_of(reply)
    if figures.get(SAMPLES) == 0:  # a client that holds nothing back has nothing to say
        return {}
    problem = strange(figures, most)
    if problem:
        log.warning("node %d: %s; its metrics do not count", reply.metadata.src_node_id, problem)
    return {} if problem else figures


def metrics_of(reply: Message) -> Mapping[str, Any]:
    """What an answer reports."""
    return {} if reply.has_error() else next(iter(reply.content.metric_records.values()), {})


def first(figures: Mapping[str, Any], names: Sequence[str], most: float = 1.0) -> float | None:
    """The first of these metrics that is a number within its range."""
    found = ((name, figures.get(name)) for name in names)
    return next((float(value) for name, value in found if within(name, value, most)), None)  # type: ignore[arg-type]


def within(name: str, value: Any, most: float = 1.0) -> bool:
    """Whether a metric is a finite number that can be: accuracies from 0 to `most`, whole samples, others bounded."""
    if name in ACCURACY:
        return number(value, 0.0, most)
    return number(value, 1, MOST_SAMPLES) if name == SAMPLES else number(value)


def strange(figures: Mapping[str, Any], most: float = 1.0) -> str:
    """What is wrong with the first metric out of its range, or ""; NaN only says that a client does not know."""
    for name, value in figures.items():
        for one in value if isinstance(value, list) else [value]:
            if one == one and not within(name, one, most):
                return f"metric {brief(name, 40)!r} is {brief(one, 20)}, out of its range"
    return ""
