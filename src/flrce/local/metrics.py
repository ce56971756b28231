"""Metrics: what a model is judged by, on one client's samples or on all of them pooled.

A metric says in two steps what it measures: `of(out, y)` gives a few numbers for each sample, `value(numbers)` makes
one figure of any set of samples. An engine keeps the numbers and asks for the figure per client and for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
IGNORED = -100  # a target that does not count, as in torch


@runtime_checkable
class Judges(Protocol):
    """A metric; `better` says which way it points."""

    @property
    def name(self) -> str: ...
    @property
    def better(self) -> Literal["higher", "lower"]: ...

    def of(self, out: Any, y: Tensor) -> Tensor: ...  # (n,) or (n, ...): numbers of each sample
    def value(self, numbers: Numbers) -> float: ...


@runtime_checkable
class Bounded(Protocol):
    """A metric that says what values it can have; of others, any."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


@runtime_checkable
class Averages(Protocol):
    """A metric that says whether it is the mean of one number a sample: then millions of clients cost nothing."""

    @property
    def mean(self) -> bool: ...


def mean_value(numbers: Numbers) -> float:
    return float(numbers.mean())


@dataclass(frozen=True)
class Metric:
    """A metric made of two functions; where `value` is not given, it is the mean of the numbers."""

    name: str
    of: Callable[[Any, Tensor], Tensor]
    value: Callable[[Numbers], float] = mean_value
    better: Literal["higher", "lower"] = "higher"
    low: float = -math.inf
    high: float = math.inf
    mean: bool = False  # whether the figure is the mean of one number a sample
    kinds: tuple[str, ...] = ()  # of targets that it is about; none: any


def is_poolable(judge: Judges) -> bool:
    """Whether the figure over all samples is the mean of the clients' figures by their numbers of samples."""
    return (isinstance(judge, Averages) and judge.mean) or (isinstance(judge, Metric) and judge.value is mean_value)


def accuracy_of(out: Tensor, y: Tensor) -> Tensor:
    return out.argmax(-1) == y


def top5_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.topk(min(5, out.shape[-1]), -1).indices == y[..., None]).any(-1)


def pairs_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): predicted and true class."""
    return torch.stack([out.argmax(-1), y], -1)


def macro_f1(pairs: Numbers) -> float:
    """The mean over the classes that occur, truly or as predicted, of 2 tp / (2 tp + fp + fn)."""
    pairs = pairs.reshape(-1, 2)  # a sample may have several tokens
    predicted, true = pairs[pairs[:, 1] != IGNORED].T
    scores = []
    for c in np.union1d(predicted, true):
        hits = float(((predicted == c) & (true == c)).sum())
        scores.append(2 * hits / float((predicted == c).sum() + (true == c).sum()))
    return sum(scores) / len(scores) if scores else math.nan


def probabilities_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, C + 1): the classes' probabilities, and the true class."""
    return torch.cat([out.float().softmax(-1), y[:, None].float()], -1)


def auc(rows: Numbers) -> float:
    """Area under the ROC curve; of several classes, the mean of each against the rest. NaN where one is alone."""
    probabilities, true = rows[:, :-1], rows[:, -1]
    classes = [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    areas = [area for c in classes if math.isfinite(area := _area(probabilities[:, c], true == c))]
    return sum(areas) / len(areas) if areas else math.nan


def _area(score: Numbers, positive: NDArray[np.bool_]) -> float:
    """P(a positive's score is above a negative's), ties counted half: the Mann-Whitney statistic."""
    many, few = int(positive.sum()), int((~positive).sum())
    if not many or not few:
        return math.nan
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]  # mean rank of equal scores
    return float((rank[positive].sum() - many * (many + 1) / 2) / (many * few))


def absolute_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.reshape(len(y), -1) - y.reshape(len(y), -1)).abs().mean(-1)


def square_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.reshape(len(y), -1) - y.reshape(len(y), -1)).square().mean(-1)


def values_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2, K): predicted and true values."""
    return torch.stack([out.reshape(len(y), -1), y.reshape(len(y), -1)], 1)


def r2(rows: Numbers) -> float:
    """1 - the error's share of the variance, the mean over outputs; NaN where the truth does not vary."""
    error = np.square(rows[:, 0] - rows[:, 1]).sum(0)
    spread = np.square(rows[:, 1] - rows[:, 1].mean(0)).sum(0)
    return float(np.mean(1 - error[spread > 0] / spread[spread > 0])) if (spread > 0).any() else math.nan


def tokens_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): tokens guessed right, tokens that count."""
    return _counted(accuracy_of(out, y), y)


def top5_tokens_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): tokens among the first five guesses, tokens that count."""
    return _counted(top5_of(out, y), y)


def _counted(right: Tensor, y: Tensor) -> Tensor:
    real = y != IGNORED
    return torch.stack([(right & real).reshape(len(y), -1).sum(-1), real.reshape(len(y), -1).sum(-1)], -1)


def surprise_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2): nats over the tokens that count, and how many they are."""
    real = y != IGNORED
    nats = torch.nn.functional.cross_entropy(
        out.reshape(-1, out.shape[-1]).float(), y.reshape(-1), reduction="none", ignore_index=IGNORED
    )
    return torch.stack([nats.reshape(len(y), -1).sum(-1), real.reshape(len(y), -1).sum(-1).float()], -1)


def share(rows: Numbers) -> float:
    """The sum of the first number over that of the second."""
    return float(rows[:, 0].sum() / max(rows[:, 1].sum(), 1.0))


def perplexity(rows: Numbers) -> float:
    return math.exp(min(share(rows), 700.0))


def labels_of(out: Tensor, y: Tensor) -> Tensor:
    """(n, 2, K): labels predicted, labels true."""
    return torch.stack([(out > 0).float(), y.float()], 1)


def labels_f1(rows: Numbers) -> float:
    """The mean over labels that occur of 2 tp / (2 tp + fp + fn)."""
    hits, both = (rows[:, 0] * rows[:, 1]).sum(0), rows.sum((0, 1))
    return float(np.mean(2 * hits[both > 0] / both[both > 0])) if (both > 0).any() else 0.0


def all_right_of(out: Tensor, y: Tensor) -> Tensor:
    return ((out > 0) == (y > 0)).reshape(len(y), -1).all(-1)


CLASSES, VALUES, LABELS = ("classes", "tokens"), ("values",), ("labels",)
#: by the names that experiment files use
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy_of, low=0, high=1, mean=True, kinds=CLASSES),
        Metric("top-5", top5_of, low=0, high=1, mean=True, kinds=CLASSES),
        Metric("macro-f1", pairs_of, macro_f1, low=0, high=1, kinds=CLASSES),
        Metric("auc", probabilities_of, auc, low=0, high=1, kinds=CLASSES),
        Metric("mae", absolute_of, better="lower", low=0, mean=True, kinds=VALUES),
        Metric("mse", square_of, better="lower", low=0, mean=True, kinds=VALUES),
        Metric("r2", values_of, r2, high=1, kinds=VALUES),
        Metric("perplexity", surprise_of, perplexity, better="lower", low=1, kinds=CLASSES),
        Metric("label-f1", labels_of, labels_f1, low=0, high=1, kinds=LABELS),
        Metric("subset-accuracy", all_right_of, low=0, high=1, mean=True, kinds=LABELS),
    )
}
#: those that count tokens instead of samples where a sample has many
BY_TOKEN = {
    "accuracy": Metric("accuracy", tokens_of, share, low=0, high=1),
    "top-5": Metric("top-5", top5_tokens_of, share, low=0, high=1),
}
