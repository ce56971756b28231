"""Figures by class. A client sends them only where it is asked to: they tell its label counts."""

import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.payloads import is_finite_number
from flrce.core.types import PrimaryMetric
from flrce.errors import BadInput, format_one_line
from flrce.flower.wire import KEY_PREFIX
from flrce.training.client import ClientRunner
from flrce.training.metrics import MeanMetric

BY_CLASS_REQUEST_KEY = KEY_PREFIX + "by-class"  # in the config of an evaluation
BY_CLASS_RECORD = "by-class"  # the record of the answer, with two lists by class:
# of the primary metric over the samples, and how many those are
SUMS, HELD = (KEY_PREFIX + "sums", KEY_PREFIX + "held")
MAX_CLASSES = 10_000  # classes
log = logging.getLogger("flwr")
ClassTotals = tuple[list[float], list[int]]


def parse_class_names(by_class: Any) -> tuple[str, ...]:
    """The classes' names, where the setting gives them."""
    if isinstance(by_class, bool):
        return ()
    if isinstance(by_class, str) or not isinstance(by_class, Sequence) or not by_class:
        raise BadInput(
            f"by_class = {by_class!r}: use True, False, or the classes' names in the order of their"
            " labels"
        )
    return tuple(map(str, by_class))


def count_by_class(
    runner: ClientRunner, numbers: Mapping[str, NDArray[np.float64]], y: Tensor
) -> ConfigRecord | None:
    """A client's answer, from the primary metric's number of each sample; None where labels are no
    classes.
    """
    head = runner.objective.evaluation_metrics[0]
    classes = (
        getattr(runner.objective, "kind", "") == "classes"
        and y.ndim == 1
        and not y.is_floating_point()
    )
    if not classes or not (isinstance(head, MeanMetric) and head.mean):
        return None
    labels, values = y.numpy(), numbers[head.name]
    counts = labels >= 0  # a target that does not count is below
    return ConfigRecord(
        {
            SUMS: np.bincount(labels[counts], values[counts]).tolist(),
            HELD: np.bincount(labels[counts]).tolist(),
        }
    )


def sum_class_totals(
    replies: Sequence[Message], samples: Sequence[Any], scale: PrimaryMetric
) -> ClassTotals | None:
    """Sums and samples of each class over the clients that told them; None where nobody did.

    `samples` are those that each says to have judged with. What cannot be is left out, with a
    warning.
    """
    found: list[ClassTotals] = []
    for reply, n in zip(replies, samples, strict=True):
        told = reply.content.config_records.get(BY_CLASS_RECORD)
        if told is None:
            continue
        why = explain_invalid_totals(told, n, scale)
        if why:
            log.warning(
                "node %d: %s; its figures by class do not count", reply.metadata.src_node_id, why
            )
        else:
            found.append((told[SUMS], told[HELD]))  # type: ignore[arg-type]
    if not found:
        return None
    sums = [
        float(sum(column)) for column in zip_longest(*(each for each, _ in found), fillvalue=0.0)
    ]
    return sums, [sum(column) for column in zip_longest(*(held for _, held in found), fillvalue=0)]


def explain_invalid_totals(told: Mapping[str, Any], n: Any, scale: PrimaryMetric) -> str:
    """Why these figures cannot be, or ""."""
    sums, held = told.get(SUMS), told.get(HELD)
    if (
        not isinstance(sums, list)
        or not isinstance(held, list)
        or not len(sums) == len(held) <= MAX_CLASSES
    ):
        return f"figures by class are two lists of one length, of at most {MAX_CLASSES} classes"
    if any(type(count) is not int or count < 0 for count in held) or sum(held) > n:
        return f"more samples in its classes than the {n} that it judged with, or fewer than 0"
    for value, count in zip(sums, held, strict=True):
        low, high = (count * scale.low, count * scale.high) if count else (0.0, 0.0)
        if not (is_finite_number(value) and low <= value <= high):
            return f"a sum of {format_one_line(value, 20)} over {count} samples of a class"
    return ""


def compute_class_metrics(told: ClassTotals) -> dict[str, Any]:
    """As in final.json: the metric for each class, None where nobody holds samples of it, and how
    many there are.
    """
    sums, held = told
    return {
        "classes": [s / count if count else None for s, count in zip(sums, held, strict=True)],
        "held": held,
    }
