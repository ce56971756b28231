"""Metrics that clients report about themselves: found, checked and averaged."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Message, MetricRecord

from flrce.flower.nodes import why
from flrce.flower.wire import SAMPLES

ACCURACY = ("accuracy", "eval_acc", "acc", "eval_accuracy", "val_acc", "val_accuracy")
LOSSES = ("loss", "eval_loss", "val_loss")
log = logging.getLogger("flwr")


def weighted(figures: Sequence[Mapping[str, Any]]) -> MetricRecord:
    """Every metric that all report as a finite number, averaged over samples."""
    n = [float(f[SAMPLES]) for f in figures]
    shared = [key for key in figures[0] if key != SAMPLES and all(first(f, (key,)) is not None for f in figures)]
    return MetricRecord({
        key: math.fsum(float(f[key]) * weight for f, weight in zip(figures, n, strict=True)) / math.fsum(n)
        for key in shared
    })  # fmt: skip


def reported(reply: Message) -> Mapping[str, Any]:
    """The metrics of an answer; of one that failed, none."""
    if reply.has_error():
        log.info("node %d: %s", reply.metadata.src_node_id, why(reply))
        return {}
    return next(iter(reply.content.metric_records.values()), {})


def first(figures: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The first of these metrics that is a finite number."""
    found = (figures.get(name) for name in names)
    return next((float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)), None)
