"""Metrics: what a model is judged by, on one client's samples or on all of them pooled.

A metric says in two steps what it measures: `of(out, y)` gives a few numbers for each sample,
`value(numbers)` makes one figure of any set of samples. An engine keeps the numbers and asks for
the figure per client and for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MetricNumbers = NDArray[np.float64]
IGNORED_TARGET = -100  # a target that does not count, as in torch


@runtime_checkable
class MetricLike(Protocol):
    """A metric; `better` says which way it points."""

    @property
    def name(self) -> str: ...
    @property
    def better(self) -> Literal["higher", "lower"]: ...

    def of(self, out: Any, y: Tensor) -> Tensor: ...  # (n,) or (n, ...): numbers of each sample
    def value(self, numbers: MetricNumbers) -> float: ...


@runtime_checkable
class BoundedMetric(Protocol):
    """A metric that says what values it can have; of others, any."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@runtime_checkable
class MeanMetric(Protocol):
    """A metric that says whether it is the mean of one number a sample: then millions of clients
    cost nothing.
    """

    @property
    def mean(self) -> bool: ...


def mean_value(numbers: MetricNumbers) -> float:
    return float(numbers.mean())


@dataclass(frozen=True)
class Metric:
    """A metric made of two functions; where `value` is not given, it is the mean of the numbers."""

    name: str
    of: Callable[[Any, Tensor], Tensor]
    value: Callable[[MetricNumbers], float] = mean_value
    better: Literal["higher", "lower"] = "higher"
    low: float = -math.inf
    high: float = math.inf
    mean: bool = False  # whether the figure is the mean of one number a sample
    kinds: tuple[str, ...] = ()  # of targets that it is about; none: any


def is_poolable(judge: MetricLike) -> bool:
    """Whether the figure over all samples is the mean of the clients' figures by their numbers of
    samples.
    """
    return (isinstance(judge, MeanMetric) and judge.mean) or (
        isinstance(judge, Metric) and judge.value is mean_value
    )


def correct_predictions(out: Tensor, y: Tensor) -> Tensor:
    return out.argmax(-1) == y


def top5_hits(out: Tensor, y: Tensor) -> Tensor:
    return (out.topk(min(5, out.shape[-1]), -1).indices == y[..., None]).any(-1)


def class_pairs(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): predicted and true class."""
    return torch.stack([out.argmax(-1), y], -1)


def macro_f1(pairs: MetricNumbers) -> float:
    """The mean over the classes that occur, truly or as predicted, of 2 tp / (2 tp + fp + fn)."""
    pairs = pairs.reshape(-1, 2)  # a sample may have several tokens
    predicted, true = pairs[pairs[:, 1] != IGNORED_TARGET].T
    scores = []
    for c in np.union1d(predicted, true):
        hits = float(((predicted == c) & (true == c)).sum())
        scores.append(2 * hits / float((predicted == c).sum() + (true == c).sum()))
    return sum(scores) / len(scores) if scores else math.nan


def class_probabilities(out: Tensor, y: Tensor) -> Tensor:
    """(n, C + 1): the classes' probabilities, and the true class."""
    return torch.cat([out.float().softmax(-1), y[:, None].float()], -1)


def roc_auc(rows: MetricNumbers) -> float:
    """Area under the ROC curve; of several classes, the mean of each against the rest. NaN where
    one is alone.
    """
    probabilities, true = rows[:, :-1], rows[:, -1]
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [
        area for c in classes if math.isfinite(area := _roc_area(probabilities[:, c], true == c))
    ]
    return sum(areas) / len(areas) if areas else math.nan


def _roc_area(score: MetricNumbers, positive: NDArray[np.bool_]) -> float:
    """P(a positive's score is above a negative's), ties counted half: the Mann-Whitney
    statistic.
    """
    many, few = int(positive.sum()), int((~positive).sum())
    if not many or not few:
        return math.nan
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]  # mean rank of equal scores
    return float((rank[positive].sum() - many * (many + 1) / 2) / (many * few))


def absolute_errors(out: Tensor, y: Tensor) -> Tensor:
    return (out.reshape(len(y), -1) - y.reshape(len(y), -1)).abs().mean(-1)


def squared_errors(out: Tensor, y: Tensor) -> Tensor:
    return (out.reshape(len(y), -1) - y.reshape(len(y), -1)).square().mean(-1)


def value_pairs(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2, K): predicted and true values."""
    return torch.stack([out.reshape(len(y), -1), y.reshape(len(y), -1)], 1)


def r2_score(rows: MetricNumbers) -> float:
    """1 - the error's share of the variance, the mean over outputs; NaN where the truth does not
    vary.
    """
    error = np.square(rows[:, 0] - rows[:, 1]).sum(0)
    spread = np.square(rows[:, 1] - rows[:, 1].mean(0)).sum(0)
    return (
        float(np.mean(1 - error[spread > 0] / spread[spread > 0]))
        if (spread > 0).any()
        else math.nan
    )


def count_correct_tokens(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): tokens guessed right, tokens that count."""
    return _count_tokens(correct_predictions(out, y), y)


def count_top5_tokens(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): tokens among the first five guesses, tokens that count."""
    return _count_tokens(top5_hits(out, y), y)


def _count_tokens(right: Tensor, y: Tensor) -> Tensor:
    real = y != IGNORED_TARGET
    return torch.stack(
        [(right & real).reshape(len(y), -1).sum(-1), real.reshape(len(y), -1).sum(-1)], -1
    )


def token_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): nats over the tokens that count, and how many they are."""
    real = y != IGNORED_TARGET
    nats = torch.nn.functional.cross_entropy(
        out.reshape(-1, out.shape[-1]).float(),
        y.reshape(-1),
        reduction="none",
        ignore_index=IGNORED_TARGET,
    )
    return torch.stack(
        [nats.reshape(len(y), -1).sum(-1), real.reshape(len(y), -1).sum(-1).float()], -1
    )


def ratio_of_sums(rows: MetricNumbers) -> float:
    """The sum of the first number over that of the second."""
    return float(rows[:, 0].sum() / max(rows[:, 1].sum(), 1.0))


def perplexity(rows: MetricNumbers) -> float:
    return math.exp(min(ratio_of_sums(rows), 700.0))


def label_pairs(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2, K): labels predicted, labels true."""
    return torch.stack([(out > 0).float(), y.float()], 1)


def label_f1(rows: MetricNumbers) -> float:
    """The mean over labels that occur of 2 tp / (2 tp + fp + fn)."""
    hits, both = (rows[:, 0] * rows[:, 1]).sum(0), rows.sum((0, 1))
    return float(np.mean(2 * hits[both > 0] / both[both > 0])) if (both > 0).any() else 0.0


def exact_matches(out: Tensor, y: Tensor) -> Tensor:
    return ((out > 0) == (y > 0)).reshape(len(y), -1).all(-1)


CLASSES, VALUES, LABELS = ("classes", "tokens"), ("values",), ("labels",)
#: by the names that experiment files use
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", correct_predictions, low=0, high=1, mean=True, kinds=CLASSES),
        Metric("top-5", top5_hits, low=0, high=1, mean=True, kinds=CLASSES),
        Metric("macro-f1", class_pairs, macro_f1, low=0, high=1, kinds=CLASSES),
        Metric("auc", class_probabilities, roc_auc, low=0, high=1, kinds=CLASSES),
        Metric("mae", absolute_errors, better="lower", low=0, mean=True, kinds=VALUES),
        Metric("mse", squared_errors, better="lower", low=0, mean=True, kinds=VALUES),
        Metric("r2", value_pairs, r2_score, high=1, kinds=VALUES),
        Metric("perplexity", token_cross_entropy, perplexity, better="lower", low=1, kinds=CLASSES),
        Metric("label-f1", label_pairs, label_f1, low=0, high=1, kinds=LABELS),
        Metric("subset-accuracy", exact_matches, low=0, high=1, mean=True, kinds=LABELS),
    )
}
#: those that count tokens instead of samples where a sample has many
TOKEN_METRICS = {
    "accuracy": Metric("accuracy", count_correct_tokens, ratio_of_sums, low=0, high=1),
    "top-5": Metric("top-5", count_top5_tokens, ratio_of_sums, low=0, high=1),
}
