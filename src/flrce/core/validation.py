"""What pieces return, looked at before it is used: a user's own piece that errs is named in one
line.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flrce.core import device_transfer
from flrce.core.engine import Engine
from flrce.core.types import RoundRecord, Selection
from flrce.errors import BadInput, describe_exception


def validate_selection(selector: Any, selection: Any, M: int) -> Selection:
    """The selection, if it is one of different rows of the roster."""
    name = type(selector).__name__
    if not isinstance(selection, Selection):
        kind = type(selection).__name__
        raise BadInput(
            f"{name}.select returned a {kind}; return rows as a Selection, such as"
            " Selection((0, 3))"
        )
    try:
        rows = tuple(int(k) for k in selection.k)
    except (TypeError, ValueError):
        raise BadInput(
            f"{name}.select chose {str(selection.k)[:60]}; rows are whole numbers"
        ) from None
    if len(set(rows)) < len(rows):
        raise BadInput(f"{name}.select chose a client twice: {str(rows)[:60]}")
    if any(not 0 <= k < M for k in rows):
        raise BadInput(f"{name}.select chose a row outside 0..{M - 1}: {str(rows)[:60]}")
    return (
        selection
        if rows == selection.k
        else Selection(rows, selection.exploit, selection.keep, selection.why)
    )


def get_stop_reason(stop: Any, history: tuple[RoundRecord, ...]) -> str:
    """Why the rule ends the run, or ""; BadInput where it says neither."""
    said = stop(history)
    if said is None or isinstance(said, str):
        return said or ""
    raise BadInput(
        f'{type(stop).__name__} returned {said!r:.60}; return why the run ends as text, or ""'
    )


def validate_cohort_size(pace: Any, asked: Any) -> int:
    """How many are asked to train, if the pace says a number."""
    if not isinstance(asked, Integral) or asked < 0:
        raise BadInput(
            f"{type(pace).__name__}.cohort_size returned {asked!r:.60};"
            " return how many to ask, 0 or more"
        )
    return int(asked)


def validate_server_step(server: Any, found: Any, target: Tensor, w: Tensor) -> tuple[Tensor, Any]:
    """The next model and what the server step remembers, if it returned both."""
    if not isinstance(found, tuple) or len(found) != 2:
        name = type(server).__name__
        raise BadInput(
            f"{name}.step returned a {type(found).__name__}; return a pair: the next model, and its"
            " memory"
        )
    if found[0] is not target:  # that was looked at
        validate_model(server, found[0], w)
    return found


def validate_final_model(average: Any, model: Any, w: Tensor) -> Tensor:
    """The final model, if it is one."""
    if model is not w:
        _validate_shape(average, model, w)
    found: Tensor = model
    return found


def move_to_host(engine: Engine, w: Tensor) -> Tensor:
    """The next model on the host; an engine that has it on its device keeps it there."""
    found = device_transfer.to_host(w)
    if found is not w:
        engine.remember_device_copy(found, w)
    return found


@contextmanager
def refuse_changes_in_place(piece: Any, *tensors: Tensor) -> Iterator[None]:
    """BadInput where a piece writes into the model or the updates of a round: other pieces read
    them after it.
    """
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in tracked]
    yield
    if [tensor._version for tensor in tracked] != versions:
        raise BadInput(
            f"{type(piece).__name__} changed the model or the updates that it was given; return new"
            " tensors, and write into copies (clone)"
        )


def validate_model(aggregator: Any, target: Any, w: Tensor) -> None:
    """BadInput unless the aggregator returned a model."""
    name = type(aggregator).__name__
    _validate_shape(aggregator, target, w)
    if target.numel() and not all(
        math.isfinite(end) for end in map(float, torch.aminmax(target))
    ):  # one pass
        raise BadInput(f"{name} returned a model that is not finite; check its arithmetic")


@contextmanager
def explain_device_mix(on_device: bool) -> Iterator[None]:
    """BadInput where a piece that declares itself device-agnostic mixes updates on the device with
    tensors of the host.
    """
    try:
        yield
    except RuntimeError as why:  # the words of torch
        if not on_device or "to be on the same device" not in str(why):
            raise
        raise BadInput(
            f"a piece combines updates on the device with tensors on the host:"
            f" {describe_exception(why)}; move the tensors, or set engine.updates = 'host'"
        ) from why


def _validate_shape(piece: Any, model: Any, w: Tensor) -> None:
    if not isinstance(model, Tensor) or model.shape != w.shape:
        shape = tuple(model.shape) if isinstance(model, Tensor) else type(model).__name__
        name = type(piece).__name__
        raise BadInput(
            f"{name} returned {shape}; return the new model, a tensor of shape {tuple(w.shape)}"
        )
