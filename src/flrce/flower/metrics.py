"""Metrics that clients report about themselves: found, checked and averaged, over all samples and
by class; and what comes with their replies: samples, losses, batteries. Each is a client's own
word.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.gate import MAX_SAMPLE_RATIO, MAX_SAMPLES_PER_CLIENT
from flrce.core.payloads import is_finite_number
from flrce.core.types import PrimaryMetric, RoundRecord
from flrce.errors import BadInput, format_one_line
from flrce.flower.arrays import list_records
from flrce.flower.messages import explain_failure
from flrce.flower.nodes import ConnectedClient
from flrce.flower.options import FlowerOptions, MetricsAggregation
from flrce.flower.wire import KEY_PREFIX, SAMPLES_KEY
from flrce.training.client import ClientRunner
from flrce.training.metrics import BoundedMetric, MeanMetric, MetricLike

ACCURACY_KEYS = ("accuracy", "eval_acc", "acc", "eval_accuracy", "val_acc", "val_accuracy")
PERCENT_SCALE = 100.0
LOSS_KEYS = ("loss", "eval_loss", "val_loss")
log = logging.getLogger("flwr")
BY_CLASS_REQUEST_KEY = KEY_PREFIX + "by-class"  # in the config of an evaluation
BY_CLASS_RECORD = "by-class"  # the record of the answer, with two lists by class:
# of the primary metric over the samples, and how many those are
SUMS, HELD = (KEY_PREFIX + "sums", KEY_PREFIX + "held")
MAX_CLASSES = 10_000  # classes
ClassTotals = tuple[list[float], list[int]]


def find_accuracy_scale(figures: Sequence[Mapping[str, Any]]) -> float:
    """The largest accuracy that can be: 1, or 100 where more than half of the clients report
    percentages.
    """
    accuracies = [
        f[name]
        for f in figures
        for name in ACCURACY_KEYS
        if is_finite_number(f.get(name), 0.0, PERCENT_SCALE)
    ]
    return PERCENT_SCALE if 2 * sum(value > 1 for value in accuracies) > len(accuracies) else 1.0


def average_metrics(
    figures: Sequence[Mapping[str, Any]], by: str = SAMPLES_KEY, most: float = 1.0
) -> MetricRecord:
    """Every metric that at least half of the clients name, averaged over samples, or by another
    weight.

    Only values within their range count, so a client's NaN is left out and the others' mean stays.
    Lists are averaged by element, over those of the usual length.
    """
    named = Counter(key for f in figures for key in f if key != by)
    means: dict[str, Any] = {}
    for key in (key for key, count in named.items() if 2 * count >= len(figures)):
        pairs = [
            (f[key], float(f[by])) for f in figures if key in f and _is_usable(key, f[key], most)
        ]
        lengths = Counter(len(value) if isinstance(value, list) else -1 for value, _ in pairs)
        usual = max(lengths, key=lambda length: lengths[length], default=0)
        if usual == -1:
            means[key] = _weighted_mean([pair for pair in pairs if not isinstance(pair[0], list)])
        elif pairs:
            same = [pair for pair in pairs if isinstance(pair[0], list) and len(pair[0]) == usual]
            means[key] = [
                _weighted_mean([(value[i], n) for value, n in same]) for i in range(usual)
            ]
    return MetricRecord(means)


def _is_usable(name: str, value: Any, most: float) -> bool:
    """Whether a metric, or every element of a list of them, is a number within its range."""
    return all(
        is_plausible_metric(name, one, most)
        for one in (value if isinstance(value, list) else [value])
    )


def _weighted_mean(pairs: Sequence[tuple[Any, float]]) -> float:
    """Of (value, weight)."""
    return math.fsum(float(value) * n for value, n in pairs) / math.fsum(n for _, n in pairs)


def select_consistent(figures: Sequence[Mapping[str, Any]]) -> list[int]:
    """Positions of those that code of others can sum: every value a number, and names and lengths
    as most have them.
    """
    shapes = {
        i: tuple(
            sorted(
                (name, len(value) if isinstance(value, list) else -1) for name, value in f.items()
            )
        )
        for i, f in enumerate(figures)
        if not any_nan(f)
    }
    counts = Counter(shapes.values())
    usual = min(counts, key=lambda shape: (-counts[shape], shape), default=())
    return [i for i, shape in shapes.items() if shape == usual]


def any_nan(figures: Mapping[str, Any]) -> str:
    """The name of the first metric that is NaN, or that holds one; "" where none does."""
    for name, value in figures.items():
        if any(one != one for one in (value if isinstance(value, list) else [value])):
            return name
    return ""


def find_limits(metric: MetricLike) -> tuple[float, float]:
    """The values that a metric can have."""
    return (
        (float(metric.low), float(metric.high))
        if isinstance(metric, BoundedMetric)
        else (-math.inf, math.inf)
    )


def average_by_metric(
    metrics: Sequence[MetricLike], figures: Sequence[Mapping[str, Any]], by: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Each metric's mean over the clients that report it within its range, and their mean by
    samples.
    """
    alike: dict[str, float] = {}
    by_samples: dict[str, float] = {}
    for metric in metrics:
        low, high = find_limits(metric)
        pairs = [
            (float(f[metric.name]), float(f[by]))
            for f in figures
            if is_finite_number(f.get(metric.name), low, high)
        ]
        if pairs:
            alike[metric.name] = math.fsum(value for value, _ in pairs) / len(pairs)
            total = math.fsum(n for _, n in pairs)
            by_samples[metric.name] = math.fsum(value * n for value, n in pairs) / total
    return alike, by_samples


def aggregate_metrics(
    figures: Sequence[Mapping[str, Any]], by: str, how: MetricsAggregation | None, most: float = 1.0
) -> MetricRecord | None:
    """One round's metrics from those of its clients; None where there are none, or where `how`
    cannot.

    `how`, the user's own, is given what it can sum: no NaN, and the same names from everybody.
    """
    usable = [f for f in figures if is_finite_number(f.get(by)) and f[by] > 0]
    if not usable:
        return None
    if how is None:
        return average_metrics(usable, by, most)
    try:
        return how(
            [
                RecordDict({"metrics": MetricRecord(dict(usable[i]))})
                for i in select_consistent(usable)
            ],
            by,
        )
    except Exception as why:  # the user's own function
        log.warning(
            "%s could not sum the clients' metrics: %s: %s",
            getattr(how, "__name__", how),
            type(why).__name__,
            why,
        )
        return None


def read_valid_metrics(reply: Message, most: float = 1.0, by: str = "") -> Mapping[str, Any]:
    """The metrics of an answer; of one that failed, that has one out of its range, or that has no
    `by`, none.
    """
    if reply.has_error():
        log.info("node %d: %s", reply.metadata.src_node_id, explain_failure(reply))
        return {}
    figures = get_reply_metrics(reply)
    if figures.get(SAMPLES_KEY) == 0:  # a client that holds nothing back has nothing to say
        return {}
    problem = explain_implausible_metric(figures, most)
    if not problem and by and not (is_finite_number(figures.get(by)) and figures[by] > 0):
        problem = (
            f"metric {by!r} is {format_one_line(figures[by], 20)}"
            if by in figures
            else f"no metric {by!r}"
        )
    if problem:
        log.warning("node %d: %s; its metrics do not count", reply.metadata.src_node_id, problem)
    elif name := any_nan(figures):
        log.warning(
            "node %d: metric %r is not a number; it does not count",
            reply.metadata.src_node_id,
            format_one_line(name, 40),
        )
    return {} if problem else figures


def get_reply_metrics(reply: Message) -> Mapping[str, Any]:
    """What an answer reports."""
    records = {} if reply.has_error() else list_records(reply.content, MetricRecord)
    return next(iter(records.values()), {})


def find_metric(
    figures: Mapping[str, Any], names: Sequence[str], most: float = 1.0
) -> float | None:
    """The first of these metrics that is a number within its range."""
    for name in names:
        value: Any = figures.get(name)
        if is_plausible_metric(name, value, most):
            return float(value)
    return None


def is_plausible_metric(name: str, value: Any, most: float = 1.0) -> bool:
    """Whether a metric is a finite number that can be: accuracies from 0 to `most`, whole samples,
    others bounded.
    """
    if name in ACCURACY_KEYS:
        return is_finite_number(value, 0.0, most)
    return (
        is_finite_number(value, 1, MAX_SAMPLES_PER_CLIENT)
        if name == SAMPLES_KEY
        else is_finite_number(value)
    )


def explain_implausible_metric(figures: Mapping[str, Any], most: float = 1.0) -> str:
    """What is wrong with the first metric out of its range, or ""; NaN only says that a client does
    not know.
    """
    for name, value in figures.items():
        for one in value if isinstance(value, list) else [value]:
            if one == one and not is_plausible_metric(name, one, most):
                return (
                    f"metric {format_one_line(name, 40)!r} is {format_one_line(one, 20)}, out of"
                    " its range"
                )
    return ""


class ClientReports:
    """By client, what each said last; of metrics those of the round under way, or of the last
    one.
    """

    def __init__(self, options: FlowerOptions) -> None:
        self.options = options
        self.samples: dict[str, int] = {}
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.batteries: dict[str, float] = {}  # levels from 0 to 1
        self.losses: dict[str, float] = {}  # on what each trained on
        # the round's training metrics, where somebody else made one of them
        self.summed: MetricRecord | None = None

    def restore_sample_counts(self, samples: Mapping[str, int]) -> None:
        """What clients said to an earlier server: a run that goes on chooses by the same
        figures.
        """
        self.samples = {**samples, **self.samples}

    def record_metrics(self, client: ConnectedClient, metrics: Mapping[str, Any]) -> None:
        """The metrics of a reply; of these the loss and the battery's level are remembered for
        longer.
        """
        self.metrics[client.name] = metrics
        loss = find_metric(metrics, ("train_loss", *LOSS_KEYS))
        if loss is not None:
            self.losses[client.name] = loss
        level = metrics.get("battery")
        if is_finite_number(level, 0, 1):
            self.batteries[client.name] = float(level)  # type: ignore[arg-type]

    def accept_sample_count(self, client: ConnectedClient, n: int) -> int:
        """The samples that a client is believed to have, now that it claims n; 0 where that is no
        number of them.
        """
        if type(n) is not int or not 0 < n <= MAX_SAMPLES_PER_CLIENT:
            return 0
        before = client.n or self.samples.get(client.name, 0)
        self.samples[client.name] = min(n, MAX_SAMPLE_RATIO * before) if before else n
        return self.samples[client.name]

    def get_client_metrics(self, client: str) -> dict[str, object]:
        """The metrics of a client's reply but for its weight, which is the gate's to judge."""
        if client not in self.metrics:
            return {}
        return {
            name: value
            for name, value in self.metrics[client].items()
            if name != self.options.weight_key
        }

    def battery_levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) batteries as last reported, the others' mean where one did not say; None:
        nobody did.
        """
        levels = torch.tensor(
            [self.batteries.get(client, math.nan) for client in clients], dtype=torch.float64
        )
        return None if bool(levels.isnan().all()) else levels.nan_to_num(float(levels.nanmean()))

    def aggregate_training_metrics(self, record: RoundRecord) -> MetricRecord | None:
        """The training metrics of a round as one, from the replies that counted."""
        if self.summed is not None:
            return self.summed
        useful = [self.metrics[client] for client in record.replied if client in self.metrics]
        return aggregate_metrics(
            useful, self.options.weight_key, self.options.train_sum, find_accuracy_scale(useful)
        )


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
    totals: list[ClassTotals] = []
    for reply, n in zip(replies, samples, strict=True):
        record = reply.content.config_records.get(BY_CLASS_RECORD)
        if record is None:
            continue
        why = explain_invalid_totals(record, n, scale)
        if why:
            log.warning(
                "node %d: %s; its figures by class do not count", reply.metadata.src_node_id, why
            )
        else:
            totals.append((record[SUMS], record[HELD]))  # type: ignore[arg-type]
    if not totals:
        return None
    sums = [
        float(sum(column)) for column in zip_longest(*(each for each, _ in totals), fillvalue=0.0)
    ]
    return sums, [sum(column) for column in zip_longest(*(held for _, held in totals), fillvalue=0)]


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
