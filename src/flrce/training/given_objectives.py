"""Losses and metrics that come as Python objects: functions of (outputs, targets), torch loss
modules, metrics that accumulate as those of torchmetrics do.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flrce.errors import BadInput
from flrce.training.metrics import Metric, MetricLike, MetricNumbers
from flrce.training.objectives import (
    OBJECTIVES_BY_KIND,
    Classification,
    MetricObjective,
    MultiLabel,
    Objective,
    Regression,
    resolve_metrics,
)

LossFunction = Callable[[Any, Tensor], Tensor]
Direction = Literal["higher", "lower"]
MAX_AXES = 4  # of outputs and of targets, whose shapes stand before a sample's numbers
HEADER = 2 * (1 + MAX_AXES) + 1  # numbers before a sample's outputs and targets
LOWER_WORDS = ("loss", "error", "mae", "mse", "rmse", "distance", "perplexity", "brier", "entropy")
ACCEPTED = (
    "give an objective with losses(out, y) and evaluation_metrics, a function of (outputs,"
    " targets), or a torch loss"
)
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class GivenObjective:
    """A loss of the user's own, with or without a reduction, and the metrics beside it.

    A loss that is reduced already counts as it is in training. The loss of one sample, which
    evaluation and masked batches of a GPU need, is the loss of a batch of that sample.
    """

    loss: LossFunction
    evaluation_metrics: tuple[MetricLike, ...]
    name: str = "loss"

    def losses(self, out: Any, y: Tensor) -> Tensor:
        """(n,): the loss of each sample."""
        out = align_values(out, y)
        value = self.loss(out, y)
        if not isinstance(value, Tensor):
            raise BadInput(f"objective {self.name} gave a {type(value).__name__}; return a tensor")
        if value.ndim and value.shape[0] == len(y):
            return value.reshape(len(y), -1).mean(1)
        if value.numel() != 1:
            raise BadInput(
                f"objective {self.name} gave a tensor of {tuple(value.shape)} for {len(y)} samples;"
                " return one value, or one per sample"
            )
        if value.requires_grad and not value.is_cuda:
            return value.reshape(()).expand(len(y))
        return torch.stack([self._measure_sample(out, y, i) for i in range(len(y))])

    def _measure_sample(self, out: Any, y: Tensor, i: int) -> Tensor:
        one = tree_map(lambda t: t[i : i + 1] if isinstance(t, Tensor) else t, out)
        return self.loss(one, y[i : i + 1]).reshape(())


@dataclass(frozen=True)
class GivenMetric:
    """A metric of the user's own: a function of all outputs and targets.

    `of` keeps both for each sample, after a header with their shapes; `value` hands them to the
    function, for one client's samples or for all.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any]
    better: Direction = "higher"

    def of(self, out: Any, y: Tensor) -> Tensor:
        """(n, HEADER + outputs + targets) in float64."""
        if not isinstance(out, Tensor):
            raise BadInput(
                f"the metric {self.name!r} is a function, and the network gives a"
                f" {type(out).__name__}; give an object with of(out, y) and value(numbers)"
            )
        shapes = [_pad_shape(out), _pad_shape(y), [float(y.is_floating_point())]]
        header = torch.tensor([n for part in shapes for n in part], device=out.device).double()
        rows = [header.expand(len(y), -1), out.reshape(len(y), -1), y.reshape(len(y), -1)]
        return torch.cat([part.double() for part in rows], 1)

    def value(self, numbers: MetricNumbers) -> float:
        """The function of these samples; the mean where it gives one number per sample."""
        header, rows = numbers[0, :HEADER], numbers[:, HEADER:]
        shapes = [_read_shape(header[i * (1 + MAX_AXES) :]) for i in (0, 1)]
        width = math.prod(shapes[0])
        out = torch.from_numpy(rows[:, :width].astype(np.float32)).reshape(-1, *shapes[0])
        y = torch.from_numpy(np.ascontiguousarray(rows[:, width:])).reshape(-1, *shapes[1])
        y = y.float() if header[-1] else y.long()
        found = self.function(align_values(out, y), y)
        return float(torch.as_tensor(found, dtype=torch.float64).mean())


def align_values(out: Any, y: Tensor) -> Any:
    """Outputs (n, 1) in the shape of the values (n,) that they are about: torch would otherwise
    compare each with all.
    """
    if not isinstance(out, Tensor) or not y.is_floating_point() or out.numel() != y.numel():
        return out
    return out.reshape(y.shape)


def _pad_shape(x: Tensor) -> list[float]:
    """Number of axes of one sample, and their sizes."""
    shape = list(x.shape[1:])
    if len(shape) > MAX_AXES:
        raise BadInput(f"metrics take at most {MAX_AXES + 1} axes, got shape {tuple(x.shape)}")
    return [float(n) for n in (len(shape), *shape, *[0] * (MAX_AXES - len(shape)))]


def _read_shape(header: MetricNumbers) -> tuple[int, ...]:
    return tuple(int(n) for n in header[1 : 1 + int(header[0])])


def name_object(value: Any) -> str:
    """The name of a function, or the class of an object."""
    return str(getattr(value, "__name__", type(value).__name__)).strip("<>")


def make_objective(value: Any, metrics: Any, default: Any, kind: str) -> Objective:
    """An objective from what was passed as `objective=` and `metrics=`; `default` is the one that
    the experiment or the kind of targets names.
    """
    judges = () if metrics is None else resolve_metrics(make_metrics(metrics))
    if value is None:
        return replace_metrics(default, judges)
    if isinstance(value, type):
        raise BadInput(f"objective is the class {value.__name__}; pass an instance of it")
    if isinstance(value, Objective):
        return replace_metrics(value, judges) if judges else value
    if not callable(value):
        raise BadInput(f"objective is a {type(value).__name__}; {ACCEPTED}")
    known = _translate_torch_loss(value, kind)
    if known is not None:
        return replace_metrics(known, judges) if judges else known
    usual = OBJECTIVES_BY_KIND[kind]().evaluation_metrics if kind in OBJECTIVES_BY_KIND else ()
    return GivenObjective(_without_reduction(value), judges or usual, name_object(value))


def _translate_torch_loss(loss: Any, kind: str) -> Any:
    """The objective of ours that is the same as a loss of torch, which the fast kernels know, or
    None.
    """
    if type(loss) is nn.CrossEntropyLoss and kind == "classes":
        weights = () if loss.weight is None else tuple(loss.weight.tolist())
        return Classification(loss.label_smoothing, weights)
    if type(loss) is nn.MSELoss and kind == "values":
        return Regression()
    if type(loss) is nn.HuberLoss and kind == "values":
        return Regression("huber", loss.delta)
    if type(loss) is nn.BCEWithLogitsLoss and kind == "labels":
        plain = loss.weight is None and loss.pos_weight is None
        return MultiLabel() if plain else None
    return None


def _without_reduction(loss: Any) -> LossFunction:
    """A loss module of torch with reduction="none"; anything else as it is."""
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        loss = copy.deepcopy(loss)
        loss.reduction = "none"
    return loss  # type: ignore[no-any-return]


def replace_metrics(objective: Any, judges: tuple[MetricLike, ...]) -> Objective:
    if not judges:
        return objective  # type: ignore[no-any-return]
    if isinstance(objective, MetricObjective):
        changed: Any = replace(objective, metrics=judges)  # type: ignore[type-var]
        return changed  # type: ignore[no-any-return]
    return GivenObjective(objective.losses, judges, name_object(objective))


def make_metrics(wanted: Any) -> tuple[Any, ...]:
    """Metrics from a name, a metric, a function, an object with update and compute, a list of them,
    or a dict by name.
    """
    if isinstance(wanted, Mapping) or hasattr(wanted, "items"):  # torchmetrics' collections
        return tuple(_make_metric(value, str(name)) for name, value in wanted.items())
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        wanted = (wanted,)
    return tuple(_make_metric(value, "") for value in wanted)


def _make_metric(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, Metric | MetricLike) and not isinstance(value, type):
        return replace(value, name=name) if name and isinstance(value, Metric) else value
    called = name or name_object(value)
    if all(hasattr(value, key) for key in ("update", "compute", "reset")):
        lower = getattr(value, "higher_is_better", True) is False
        better: Direction = "lower" if lower else "higher"
        return GivenMetric(called, _AccumulatedMetric(value), better)
    if callable(value) and not isinstance(value, type):
        return GivenMetric(called, value, _guess_direction(value, called))
    raise BadInput(
        f"metrics: {called} is a {type(value).__name__}; give a name, a function of (outputs,"
        " targets), or an object with update, compute and reset"
    )


def _guess_direction(value: Any, name: str) -> Direction:
    """Which way a function points: by its attribute `better`, or by its name, which is said."""
    told = getattr(value, "better", None)
    if told in ("higher", "lower"):
        return told  # type: ignore[no-any-return]
    better: Direction = "lower" if any(w in name.lower() for w in LOWER_WORDS) else "higher"
    log.warning("metrics: %s counts as better where %s; set its attribute better", name, better)
    return better


@dataclass(frozen=True)
class _AccumulatedMetric:
    """An object with update(outputs, targets) and compute(), as those of torchmetrics."""

    metric: Any

    def __call__(self, out: Tensor, y: Tensor) -> Any:
        one = copy.deepcopy(self.metric)
        one.reset()
        one.update(out, y)
        return one.compute()
