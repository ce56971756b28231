"""Network, objective, metrics and transforms on a few samples, before anything is trained: what
fails, fails here.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flrce.errors import BadInput, describe_exception, format_one_line
from flrce.models.drawing import get_rng_states, preserve_rng_states
from flrce.models.inputs import find_scores, iter_output_tensors
from flrce.training.given_objectives import GivenObjective
from flrce.training.objectives import (
    MetricObjective,
    Objective,
    validate_metrics,
    validate_per_sample,
)

log = logging.getLogger("flrce")


def unwrap_network_output(net: nn.Module, x: Tensor, objective: Objective) -> nn.Module:
    """The network, or where its scores lie alone in a dict, are called logits or come first in a
    tuple, a copy that gives them as they are.

    Objectives of one's own get what the network gives.
    """
    if not isinstance(objective, MetricObjective):
        return net
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        out = copy.deepcopy(net).eval()(x.clone())  # code may change its samples in place
    if isinstance(out, Tensor):
        return net
    count = len(list(iter_output_tensors(out)))
    named = isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor)
    first = isinstance(out, tuple | list) and bool(out) and _has_row_per_sample(out[0], x)
    if not (named or first or count == 1):
        return net
    if first and not named and count > 1:
        log.warning("%s gives %d outputs; the first is its scores", type(net).__name__, count)
    net = copy.deepcopy(net)
    net.register_forward_hook(_take_scores)
    return net


def _has_row_per_sample(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == x.shape[:1]


def _name_objective(objective: Objective) -> str:
    return objective.name if isinstance(objective, GivenObjective) else type(objective).__name__


def _take_scores(net: nn.Module, given: Any, out: Any) -> Tensor:
    return find_scores(out)


def validate_on_samples(
    net: nn.Module, x: Tensor, y: Tensor, objective: Objective, augment: Sequence[Any] = ()
) -> None:
    """BadInput where these samples (n, ...), as the network sees them, do not go with one of the
    others.
    """
    validate_metrics(objective.evaluation_metrics)
    rng = torch.Generator().manual_seed(0)
    for transform in augment:
        x = _apply_transform(transform, x, rng)
    name, judging = type(net).__name__, copy.deepcopy(net).eval()
    with torch.no_grad(), preserve_rng_states(x.device):
        before = get_rng_states(x.device)
        out = judging(x.clone())
        if before != get_rng_states(x.device):
            log.warning(
                "%s draws at random while it judges (dropout without training=self.training?): its"
                " metrics are of one draw",
                name,
            )
        else:
            _check_sample_independence(judging, x, out, name)
    loss = f"the loss of {_name_objective(objective)}"
    losses = _call_on_outputs(objective.losses, loss, out, y, name)
    validate_per_sample(losses, y, objective, "losses")
    for metric in objective.evaluation_metrics:
        values = _call_on_outputs(metric.of, f"the metric {metric.name!r}", out, y, name)
        validate_per_sample(values, y, metric, f"{metric.name}.of")


def _apply_transform(transform: Any, x: Tensor, rng: torch.Generator) -> Tensor:
    name, shape = type(transform).__name__, tuple(x.shape[1:])
    try:
        made: Tensor = transform(x, rng)
        fits = made.shape == x.shape and made.dtype == x.dtype
    except Exception as why:  # whatever a transform of the user's may raise
        raise BadInput(
            f"train.augment: {name} cannot take samples of shape {shape}:"
            f" {describe_exception(why)}; drop it"
        ) from why
    if not fits:
        what = "token ids" if x.dtype == torch.int64 else f"{x.dtype} samples of shape {shape}"
        raise BadInput(
            f"train.augment: {name} makes {made.dtype} {tuple(made.shape[1:])} of {what}; drop it"
        )
    return made


def _check_sample_independence(net: nn.Module, x: Tensor, out: Any, name: str) -> None:
    """Says where a network judges a sample by those beside it, and BadInput where it can judge none
    alone.
    """
    try:
        one, both = (next(iter_output_tensors(o)) for o in (net(x[:1].clone()), out))
    except Exception as why:  # torch and the network's own code raise many kinds
        raise BadInput(
            f"{name} cannot judge a sample by itself: {format_one_line(why, 160)}; let its"
            " BatchNorm keep running statistics"
        ) from why
    if not one.ndim or len(both) != len(x):
        return
    if not torch.allclose(one[0], both[0], 1e-2, 1e-4, equal_nan=True):
        log.warning(
            "%s judges a sample by those beside it (BatchNorm without running statistics?): its"
            " metrics hang on which samples are judged together",
            name,
        )


def _call_on_outputs(call: Any, what: str, out: Any, y: Tensor, net: str) -> Any:
    try:
        return call(out, y)
    except BadInput:
        raise
    except Exception as why:  # torch and a user's own code raise many kinds
        kind = "" if isinstance(out, Tensor) else f"a {type(out).__name__} of "
        given = kind + ", ".join(str(tuple(each.shape)) for each in iter_output_tensors(out))
        raise BadInput(
            f"{what} cannot be taken of {net}, which gives {given} for targets {tuple(y.shape)}:"
            f" {describe_exception(why, 120)}; adapt the network, or set another objective"
        ) from why
