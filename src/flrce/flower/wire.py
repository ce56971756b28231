"""Task and Reply <-> Flower's records.

A piece is built only from a name in `registry.PIECES`, or of a class that this process registered
itself (methods/own_pieces.py): a message never causes an import of code.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from flrce.core.bounds import find_problem
from flrce.core.payloads import is_finite_number
from flrce.core.pieces import MalformedPayload
from flrce.core.tensor_bytes import count_upload_bytes
from flrce.core.types import ClientCost, ClientEvaluation, LocalWork, Payload, Portion, Reply, Task
from flrce.errors import BadInput
from flrce.flower.arrays import (
    ArrayTemplate,
    count_record_bytes,
    list_records,
    read_tensors,
    to_array_record,
)
from flrce.methods.own_pieces import find_inner_role, find_own_class, find_own_name
from flrce.methods.registry import PIECES
from flrce.training.update_chain import ProximalTerm, UpdateChain
from flrce_client.wire import COMPRESSOR_KEY, KEY_PREFIX, SAMPLES_KEY

__all__ = [
    "KEY_PREFIX",
    "SAMPLES_KEY",
    "read_piece",
    "read_reply",
    "read_task",
    "write_piece",
    "write_plain_config",
    "write_reply",
    "write_task",
]

# fields of a Task that are not scalars
NON_SCALAR_FIELDS = ("compressor", "tensors", "work", "part", "update", "augment", "download")
MAX_PIECES_PER_TASK = 32  # links or transforms in one task
MAX_RECORDS_PER_REPLY = 8


def write_task(task: Task) -> dict[str, Any]:
    """A task's numbers, its compressor, the links of its update and its transforms, as entries of a
    ConfigRecord.
    """
    entries: dict[str, Any] = {}
    for owner in (task, task.work, task.part):
        entries |= {
            KEY_PREFIX + f.name: getattr(owner, f.name)
            for f in fields(owner)
            if f.name not in NON_SCALAR_FIELDS
        }
    entries = {key: value for key, value in entries.items() if value is not None}
    if not task.judge:
        del entries[KEY_PREFIX + "judge"]
    update = task.update or UpdateChain()
    entries |= _write_pieces("link", update.links, KEY_PREFIX + "update") | {
        KEY_PREFIX + "lr": update.lr
    }
    entries |= _write_pieces("augment", task.augment, KEY_PREFIX + "augment")
    return entries | write_piece("compressor", task.compressor, COMPRESSOR_KEY)


def write_plain_config(task: Task) -> dict[str, Any]:
    """What clients that know Flower's strategies and not our tasks look for: FedProx's pull."""
    links = task.update.links if task.update else ()
    pull = next((link.mu for link in links if isinstance(link, ProximalTerm)), 0.0)
    return {"proximal-mu": pull} if pull else {}


def read_task(config: Mapping[str, Any], sent: Mapping[str, Tensor]) -> Task:
    """The task in a ConfigRecord; Malformed says what is wrong with it."""
    try:
        return Task(
            **_read_fields(Task, config),
            work=LocalWork(**_read_fields(LocalWork, config)),
            part=Portion(**_read_fields(Portion, config)),
            update=UpdateChain(_read_pieces("link", config, KEY_PREFIX + "update")),
            augment=_read_pieces("augment", config, KEY_PREFIX + "augment"),
            compressor=read_piece("compressor", config, COMPRESSOR_KEY),
            tensors=sent,
        )
    except (TypeError, BadInput) as why:
        raise MalformedPayload(f"no task: {why}") from why


def _read_fields(kind: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and names of one part of a task, each of its type."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)  # without the bounds beside them
    for f in fields(kind):
        value = config.get(KEY_PREFIX + f.name)
        if f.name in NON_SCALAR_FIELDS or value is None:
            continue
        kinds = typing.get_args(hints[f.name]) or (hints[f.name],)
        if type(value) not in (*kinds, *((int,) if float in kinds else ())):
            raise MalformedPayload(f"{KEY_PREFIX}{f.name} is a {type(value).__name__}")
        values[f.name] = float(value) if float in kinds else value
    return values


def _write_pieces(role: str, pieces: Sequence[Any], key: str) -> dict[str, Any]:
    """Pieces in order, under key.0, key.1, ..."""
    entries: dict[str, Any] = {}
    for i, piece in enumerate(pieces):
        entries |= write_piece(role, piece, f"{key}.{i}")
    return entries


def _read_pieces(role: str, config: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    pieces: list[Any] = []
    while f"{key}.{len(pieces)}" in config and len(pieces) < MAX_PIECES_PER_TASK:
        pieces.append(read_piece(role, config, f"{key}.{len(pieces)}"))
    return tuple(pieces)


def write_piece(role: str, piece: Any, key: str) -> dict[str, Any]:
    """A piece as its registered name under `key` and its fields below; wrapped pieces nest."""
    name = next((name for name, make in PIECES[role].items() if make is type(piece)), None)
    name = name or find_own_name(role, type(piece))
    if name is None:
        raise BadInput(
            f"{role} {type(piece).__name__} has no name that clients know; name it in their"
            f" experiment file, or add it to registry.PIECES[{role!r}] on both sides"
        )
    entries: dict[str, Any] = {key: name}
    for f in fields(piece):
        value = getattr(piece, f.name)
        if is_dataclass(value):
            inner_role = find_inner_role(role, type(piece), f) or role
            entries |= write_piece(inner_role, value, f"{key}.{f.name}")
        elif value is not None:
            entries[f"{key}.{f.name}"] = list(value) if isinstance(value, tuple) else value
    return entries


def read_piece(role: str, config: Mapping[str, Any], key: str) -> Any:
    """The piece that `write_piece` wrote; only registered names are built."""
    name = config.get(key)
    make: Callable[..., Any] | None = PIECES[role].get(name) if isinstance(name, str) else None
    make = make or find_own_class(role, name)
    if make is None:
        raise MalformedPayload(
            f"{role} {str(name)[:40]!r} is not one of {', '.join(sorted(PIECES[role]))}"
        )
    values = {}
    for f in fields(make) if is_dataclass(make) else ():
        value = config.get(f"{key}.{f.name}")
        if value is not None:
            inner_role = find_inner_role(role, make, f) if isinstance(value, str) else ""
            inner = f"{key}.{f.name}"
            values[f.name] = (
                read_piece(inner_role, config, inner) if inner_role else _list_to_tuple(value)
            )
    try:
        piece = make(**values)
        problem = find_problem(piece)
    except (TypeError, ValueError) as why:
        raise MalformedPayload(f"{role} {name!r}: {why}") from why
    if problem:
        raise MalformedPayload(f"{role} {name!r}: {problem}")
    return piece


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_reply(
    reply: Reply, seconds: float, joules: float | None, metrics: Mapping[str, Any] = {}
) -> RecordDict:
    """A client's answer with its encoded payload; `metrics` are the user's own."""
    assert reply.payload is not None
    echo: dict[str, Any] = {KEY_PREFIX + "base": reply.base} if reply.base else {}
    if reply.steps is not None:
        echo |= {KEY_PREFIX + "steps": reply.steps}
    if reply.judged:
        echo |= {
            KEY_PREFIX + "held": float(reply.judged.value),
            KEY_PREFIX + "held-n": reply.judged.n,
        }
    figures = {
        SAMPLES_KEY: reply.n,
        "train_loss": reply.loss,
        "loss-square": reply.loss_square,
        "seconds": seconds,
    }
    answer = RecordDict(
        {
            "payload": to_array_record(reply.payload.buffers),
            "metrics": MetricRecord(
                {**metrics, **figures, **({} if joules is None else {"joules": joules})}
            ),
            "reply": ConfigRecord(
                {KEY_PREFIX + "client": reply.client, KEY_PREFIX + "t": reply.t, **echo}
            ),
        }
    )
    if reply.extras:
        answer["extras"] = to_array_record(reply.extras)
    return answer


def read_reply(
    content: RecordDict,
    task: Task,
    template: ArrayTemplate,
    w: Tensor,
    cap: int,
    weight_key: str = SAMPLES_KEY,
    into: Tensor | None = None,
) -> Reply:
    """A client's answer, ours or any Flower client's: then its one ArrayRecord is the whole trained
    model.

    A dense update is written `into` a row of the round's table where it has one.
    """
    metrics, values, extras = _split_reply(content)
    echo = list_records(content, ConfigRecord).get("reply", ConfigRecord())
    t = echo.get(KEY_PREFIX + "t", task.t)
    if _is_own_reply(echo, task):
        payload = Payload(read_tensors(values, cap, {} if into is None else {"u": into}))
        sent_beside = read_tensors(extras, cap)
        up = count_upload_bytes(payload.buffers, sent_beside)
    else:
        payload, sent_beside = template.pack_update(values, w, into), {}
        up = template.count_float_bytes(values)
    if weight_key not in metrics:
        raise MalformedPayload(
            f"no metric {weight_key!r}, which says how many samples it trained on"
        )
    n = metrics[weight_key]
    arrays = count_record_bytes(values) + count_record_bytes(extras)
    framing = arrays - up + len(metrics.deflate()) + len(echo.deflate())
    # what is of a wrong type here is the gate's to judge
    return Reply(
        task.client,
        t if type(t) is int else -1,
        payload,
        n=int(n) if isinstance(n, float) and n.is_integer() else n,  # type: ignore[arg-type]
        loss=_find_number(metrics, "train_loss", "loss") or 0.0,
        loss_square=_find_number(metrics, "loss-square") or 0.0,
        extras=sent_beside,
        steps=echo.get(KEY_PREFIX + "steps"),  # type: ignore[arg-type]
        spent=_read_cost(metrics, up, framing),
        base=echo.get(KEY_PREFIX + "base", ""),  # type: ignore[arg-type]
        judged=_read_evaluation(echo),
    )


def _is_own_reply(echo: Mapping[str, Any], task: Task) -> bool:
    """Whether a reply says which task it answers; Malformed where that is another's, or where it
    is a whole model though the task asked for less.
    """
    own = KEY_PREFIX + "t" in echo
    if own and echo.get(KEY_PREFIX + "client") != task.client:
        raise MalformedPayload(f"answers for {str(echo.get(KEY_PREFIX + 'client'))[:40]!r}")
    if not own and not task.compressor.is_dense:
        raise MalformedPayload(
            "the whole model from a client that says it compresses; add the mod to it: compressing"
        )
    return own


def _read_evaluation(echo: Mapping[str, Any]) -> ClientEvaluation | None:
    """The metric of the model on the client's hold-out, if the reply has one."""
    if KEY_PREFIX + "held" not in echo:
        return None
    return ClientEvaluation(echo[KEY_PREFIX + "held"], echo.get(KEY_PREFIX + "held-n", 0))


def _split_reply(content: RecordDict) -> tuple[MetricRecord, ArrayRecord, ArrayRecord]:
    """(metrics, the payload's arrays, those sent beside it) of a reply."""
    if len(content) > MAX_RECORDS_PER_REPLY:
        raise MalformedPayload(f"{len(content)} records in one reply")
    metrics, arrays = list_records(content, MetricRecord), list_records(content, ArrayRecord)
    extras = arrays.pop("extras", ArrayRecord())
    if len(metrics) != 1 or len(arrays) != 1:
        raise MalformedPayload(
            f"{len(arrays)} ArrayRecords and {len(metrics)} MetricRecords, not one of each"
        )
    return next(iter(metrics.values())), next(iter(arrays.values())), extras


def _read_cost(metrics: Mapping[str, Any], up: int, framing: int) -> ClientCost:
    """What a client says that its reply cost; joules only where it measured them."""
    joules = _find_number(metrics, "joules")
    return ClientCost(
        bytes_up=up,
        framing=framing,
        compute_seconds=max(_find_number(metrics, "seconds") or 0.0, 0.0),
        joules=max(joules or 0.0, 0.0),
        measured=joules is not None,
    )


def _find_number(figures: Mapping[str, Any], *names: str) -> float | None:
    """The first of these metrics that is a number in bounds."""
    values = (figures.get(name) for name in names)
    return next((float(v) for v in values if is_finite_number(v)), None)  # type: ignore[arg-type]
