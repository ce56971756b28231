"""What a user's piece may get wrong: links that would be lost, methods with their old names, an
inner piece whose state would be forgotten, results that cannot be used. Each is named in one line.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flrce.core.roles import Piece
from flrce.core.types import RoundRecord, Selection
from flrce.errors import BadInput, describe_exception


def list_inner_pieces(piece: Any) -> Iterator[Piece]:
    """The pieces that are fields of a piece, alone or in a tuple or list."""
    for f in fields(piece) if is_dataclass(piece) else ():
        value = getattr(piece, f.name, None)
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Piece):
                yield part


def explain_forgotten_state(piece: Any) -> str:
    """Why a wrapper would lose what its inner piece remembers; "" if it would not."""
    name = type(piece).__name__
    for inner in list_inner_pieces(piece):
        if inner.has_state and not piece.has_state:
            return (
                f"{name} wraps {type(inner).__name__}, which remembers rounds, and {name} has no"
                " state; define initial_state and observe that hold the inner piece's, or use it"
                " alone"
            )
    return ""


def has_links(piece: Any) -> bool:
    """Whether a piece, or one that it is made of, has links for clients' updates."""
    links = getattr(piece, "links", ())  # a name that only trainers declare
    if isinstance(links, list | tuple) and any(_is_link(link) for link in links):
        return True
    inner = [getattr(piece, f.name, None) for f in fields(piece)] if is_dataclass(piece) else []
    parts = [
        part for value in inner for part in (value if isinstance(value, list | tuple) else (value,))
    ]
    return any(has_links(part) for part in parts if is_dataclass(part))


def _is_link(link: Any) -> bool:
    return any(callable(getattr(link, method, None)) for method in ("step", "probe", "loss_term"))


# optional methods that had other names before 0.2; ignored without this check, as a piece may leave
# them out
RENAMED_METHODS = {
    "init": "initial_state",
    "objection": "check_recipe",
    "told": "with_deadline",
    "room": "cohort_size",
    "begin": "begin_round",
    "end": "end_round",
    "sends": "list_extra_sizes",
    "term": "loss_term",
}


def explain_renamed_method(piece: Any) -> str:
    """Which method of a user's piece must be renamed, and how; "" if none."""
    kind = piece if isinstance(piece, type) else type(piece)
    if kind.__module__.partition(".")[0] == "flrce":
        return ""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "flrce"]
    for old, new in RENAMED_METHODS.items():
        if callable(getattr(kind, old, None)) and not any(new in vars(base) for base in own):
            return f"{kind.__name__}.{old} is called {new} since version 0.2; rename it"
    return ""


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
    reason = stop(history)
    if reason is None or isinstance(reason, str):
        return reason or ""
    raise BadInput(
        f'{type(stop).__name__} returned {reason!r:.60}; return why the run ends as text, or ""'
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
    checked: Tensor = model
    return checked


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
