"""What a model is for: the loss of each sample, and the metrics it is judged by. The first metric
is the primary metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from flrce.errors import BadInput, suggest_name
from flrce.training.metrics import IGNORED_TARGET, METRICS, TOKEN_METRICS, Metric, MetricLike

ProportionBelowOne = Annotated[float, Field(ge=0, lt=1)]
OpenProportion = Annotated[float, Field(gt=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


@runtime_checkable
class Objective(Protocol):
    """`losses(out, y)`: (n,) the loss of each sample; `evaluation_metrics`: its metrics; `kind`:
    the targets it wants (data).
    """

    @property
    def evaluation_metrics(self) -> tuple[MetricLike, ...]: ...

    def losses(self, out: Any, y: Tensor) -> Tensor: ...


class MetricObjective:
    """Judged by its `metrics`, each a name or a metric; the first is the primary one."""

    metrics: tuple[Any, ...]
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", tuple(self.metrics))
        if not self.metrics:
            raise BadInput(
                "objective.metrics is empty; name at least one, the first is the primary metric"
            )
        validate_metrics(resolve_metrics(self.metrics))
        for judge in resolve_metrics(self.metrics):
            if isinstance(judge, Metric) and judge.kinds and self.kind not in (*judge.kinds, ""):
                fit = [name for name, metric in METRICS.items() if self.kind in metric.kinds]
                raise BadInput(
                    f"objective.metrics: {judge.name!r} is about {' or '.join(judge.kinds)},"
                    f" {type(self).__name__} about {self.kind}; use {', '.join(fit)}, or one of"
                    " your own"
                )

    @property
    def evaluation_metrics(self) -> tuple[MetricLike, ...]:
        return resolve_metrics(self.metrics)


@dataclass(frozen=True)
class Classification(MetricObjective):
    """Cross-entropy over classes; `weights` makes some classes count more, `smoothing` softens the
    labels.
    """

    smoothing: ProportionBelowOne = 0.0
    weights: tuple[float, ...] = ()
    metrics: tuple[Any, ...] = ("accuracy",)
    kind: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        # experiment files have lists
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        if any(not weight > 0 for weight in self.weights):
            raise BadInput(
                f"objective.weights = {list(self.weights)!r}: every class needs a weight above 0"
            )
        super().__post_init__()

    @property
    def is_plain_cross_entropy(self) -> bool:
        """Whether this is the cross-entropy that fused kernels train."""
        return not self.smoothing and not self.weights

    @property
    def supports_fused_evaluation(self) -> bool:
        """Whether fused kernels can judge by it, too: they tell a sample's loss, and whether it is
        right.
        """
        return self.is_plain_cross_entropy and self.metrics == ("accuracy",)

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        weights = _class_weights(self.weights, out.device) if self.weights else None
        if weights is not None and len(weights) != out.shape[-1]:
            raise BadInput(
                f"objective.weights has {len(weights)} values for {out.shape[-1]} classes; give one"
                " for each"
            )
        return F.cross_entropy(out, y, weights, reduction="none", label_smoothing=self.smoothing)


@dataclass(frozen=True)
class Regression(MetricObjective):
    """Values: squared error, Huber's loss (`delta`: where it turns linear), or the pinball loss of
    a `quantile`.
    """

    loss: Literal["mse", "huber", "quantile"] = "mse"
    delta: PositiveFloat = 1.0
    quantile: OpenProportion = 0.5
    metrics: tuple[Any, ...] = ("mae", "mse", "r2")
    kind: ClassVar[str] = "values"

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        out, y = out.reshape(len(y), -1), y.reshape(len(y), -1).to(out.dtype)
        if out.shape != y.shape:
            raise BadInput(
                f"the network gives {out.shape[1]} values a sample, the data has {y.shape[1]}"
            )
        if self.loss == "mse":
            return (out - y).square().mean(1)
        if self.loss == "huber":
            return F.huber_loss(out, y, reduction="none", delta=self.delta).mean(1)
        below = y - out
        return torch.maximum(self.quantile * below, (self.quantile - 1) * below).mean(1)


@dataclass(frozen=True)
class NextToken(MetricObjective):
    """Cross-entropy per token: out (n, L, V) with y (n, L), -100 where none counts; or (n, V) with
    y (n,).
    """

    metrics: tuple[Any, ...] = ("accuracy", "perplexity")
    kind: ClassVar[str] = "tokens"

    @property
    def evaluation_metrics(self) -> tuple[MetricLike, ...]:
        """Accuracy and top-5 are per token here."""
        return tuple(
            TOKEN_METRICS.get(j.name, j) if j is METRICS.get(j.name) else j
            for j in super().evaluation_metrics
        )

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        nats = F.cross_entropy(
            out.reshape(-1, out.shape[-1]),
            y.reshape(-1),
            reduction="none",
            ignore_index=IGNORED_TARGET,
        )
        real = (y != IGNORED_TARGET).reshape(len(y), -1).sum(1).clamp(min=1)
        return nats.reshape(len(y), -1).sum(1) / real


@dataclass(frozen=True)
class MultiLabel(MetricObjective):
    """Any number of labels a sample: binary cross-entropy for each; y (n, K) of 0 and 1."""

    metrics: tuple[Any, ...] = ("label-f1", "subset-accuracy")
    kind: ClassVar[str] = "labels"

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype), reduction="none").mean(1)


#: by the names that experiment files use
OBJECTIVES: dict[str, type[Any]] = {
    "classification": Classification,
    "regression": Regression,
    "next-token": NextToken,
    "multi-label": MultiLabel,
}
OBJECTIVES_BY_KIND: dict[str, type[Any]] = {make.kind: make for make in OBJECTIVES.values()}


def validate_metrics(judges: Sequence[MetricLike]) -> None:
    """BadInput where metrics cannot be told apart, or do not say which way they point."""
    names = [judge.name for judge in judges]
    for judge in judges:
        if judge.better not in ("higher", "lower"):
            raise BadInput(
                f"objective.metrics: {judge.name!r} has better = {judge.better!r}; say 'higher' or"
                " 'lower'"
            )
        if judge.name == "loss" or names.count(judge.name) > 1:
            why = "is what the loss itself is called" if judge.name == "loss" else "is there twice"
            raise BadInput(
                f"objective.metrics: {judge.name!r} {why}; give each metric a name of its own"
            )


def validate_per_sample(values: Any, target: Tensor, owner: Any, what: str) -> Tensor:
    """What an objective or a metric gives, if it is of each sample."""
    if isinstance(values, Tensor) and values.shape[:1] == target.shape[:1]:
        return values
    given = f"a {type(values).__name__}"
    if isinstance(values, Tensor):
        given = f"a tensor of {tuple(values.shape)}"
    raise BadInput(
        f"{type(owner).__name__} {what} gave {given}, not one value for each sample; leave the mean"
        " out (reduction='none')"
    )


@lru_cache(maxsize=16)
def _class_weights(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Weights of classes on a device, put there once: a recorded step may not copy from the host.

    They may be asked for first while a model is judged, and are trained with later: so they are no
    inference tensor.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)


def resolve_metrics(metrics: tuple[Any, ...]) -> tuple[MetricLike, ...]:
    """Metrics by name or as they are; BadInput for anything else."""
    found = []
    for metric in metrics:
        if isinstance(metric, str) and metric not in METRICS:
            raise BadInput(f"objective.metrics: {metric!r}: {suggest_name(metric, METRICS)}")
        found.append(METRICS[metric] if isinstance(metric, str) else metric)
        if not isinstance(found[-1], MetricLike):
            raise BadInput(
                f"objective.metrics: {metric!r} is no metric; it needs name, better, of(out, y) and"
                " value(...)"
            )
    return tuple(found)
