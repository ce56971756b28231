"""Task and Reply <-> Flower's records.

A piece is built only from a name in `names.PIECES`: no code is imported because a message says so.
"""

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from flrce.errors import BadInput, brief
from flrce.flower.arrays import Template, record, tensors, weight
from flrce.local.updates import Chain, Prox
from flrce.names import PIECES
from flrce.payload_bytes import count_bytes
from flrce.pieces import Dense, Malformed
from flrce.round.payloads import number
from flrce.types import Judged, Payload, Portion, Reply, Spent, Task, Work

PREFIX = "flrce."  # of our keys in a ConfigRecord, beside the user's
SAMPLES = "num-examples"  # what Flower calls n_k
NAME = re.compile(r"[\w.:@+-]{1,64}")
LOCAL = ("compressor", "tensors", "work", "part", "update", "augment")  # fields of a Task that are not scalars
MOST = 32  # links or transforms in one task


def name_of(value: Any) -> str:
    """A client's name for itself, checked."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Malformed(f"client name {brief(value, 40)!r}: use 1 to 64 letters, digits and . : @ + - _")
    return value


def write_task(task: Task) -> dict[str, Any]:
    """A task's numbers, its compressor, the links of its update and its transforms, as entries of a ConfigRecord."""
    entries: dict[str, Any] = {}
    for owner in (task, task.work, task.part):
        entries |= {PREFIX + f.name: getattr(owner, f.name) for f in fields(owner) if f.name not in LOCAL}
    entries = {key: value for key, value in entries.items() if value is not None}
    if not task.judge:
        del entries[PREFIX + "judge"]
    update = task.update or Chain()
    entries |= _write_all("link", update.links, PREFIX + "update") | {PREFIX + "lr": update.lr}
    entries |= _write_all("augment", task.augment, PREFIX + "augment")
    return entries | write_piece("compressor", task.compressor, PREFIX + "compressor")


def for_plain(task: Task) -> dict[str, Any]:
    """What clients that know Flower's strategies and not our tasks look for: FedProx's pull."""
    links = task.update.links if task.update else ()
    pull = next((link.mu for link in links if isinstance(link, Prox)), 0.0)
    return {"proximal-mu": pull} if pull else {}


def read_task(config: Mapping[str, Any], sent: Mapping[str, Tensor]) -> Task:
    """The task in a ConfigRecord; Malformed says what is wrong with it."""
    try:
        return Task(
            **_read_fields(Task, config),
            work=Work(**_read_fields(Work, config)),
            part=Portion(**_read_fields(Portion, config)),
            update=Chain(_read_all("link", config, PREFIX + "update")),
            augment=_read_all("augment", config, PREFIX + "augment"),
            compressor=read_piece("compressor", config, PREFIX + "compressor"),
            tensors=sent,
        )
    except (TypeError, BadInput) as why:
        raise Malformed(f"no task: {why}") from why


def _read_fields(kind: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and names of one part of a task, each of its type."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)  # without the bounds beside them
    for f in fields(kind):
        value = config.get(PREFIX + f.name)
        if f.name in LOCAL or value is None:
            continue
        kinds = typing.get_args(hints[f.name]) or (hints[f.name],)
        if type(value) not in (*kinds, *((int,) if float in kinds else ())):
            raise Malformed(f"{PREFIX}{f.name} is a {type(value).__name__}")
        values[f.name] = float(value) if float in kinds else value
    return values


def _write_all(role: str, pieces: Sequence[Any], key: str) -> dict[str, Any]:
    """Pieces in order, under key.0, key.1, ..."""
    entries: dict[str, Any] = {}
    for i, piece in enumerate(pieces):
        entries |= write_piece(role, piece, f"{key}.{i}")
    return entries


def _read_all(role: str, config: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    found: list[Any] = []
    while f"{key}.{len(found)}" in config and len(found) < MOST:
        found.append(read_piece(role, config, f"{key}.{len(found)}"))
    return tuple(found)


def write_piece(role: str, piece: Any, key: str) -> dict[str, Any]:
    """A piece as its registered name under `key` and its fields below; wrapped pieces nest."""
    name = next((name for name, make in PIECES[role].items() if make is type(piece)), None)
    if name is None:
        raise BadInput(
            f"{role} {type(piece).__name__} has no name that clients know; "
            f"add it to names.PIECES[{role!r}] on both sides"
        )
    entries: dict[str, Any] = {key: name}
    for f in fields(piece):
        value = getattr(piece, f.name)
        if is_dataclass(value):
            entries |= write_piece(_inner(role, f), value, f"{key}.{f.name}")
        elif value is not None:
            entries[f"{key}.{f.name}"] = list(value) if isinstance(value, tuple) else value
    return entries


def read_piece(role: str, config: Mapping[str, Any], key: str) -> Any:
    """The piece that `write_piece` wrote; only registered names are built."""
    name = config.get(key)
    make: Callable[..., Any] | None = PIECES[role].get(name) if isinstance(name, str) else None
    if make is None:
        raise Malformed(f"{role} {str(name)[:40]!r} is not one of {', '.join(sorted(PIECES[role]))}")
    values = {}
    for f in fields(make) if is_dataclass(make) else ():
        value = config.get(f"{key}.{f.name}")
        if value is not None:
            nested = f.metadata.get("piece") and isinstance(value, str)
            inner = f"{key}.{f.name}"
            values[f.name] = read_piece(_inner(role, f), config, inner) if nested else _plain(value)
    try:
        return make(**values)
    except (TypeError, ValueError) as why:
        raise Malformed(f"{role} {name!r}: {why}") from why


def _inner(role: str, f: Any) -> str:
    """The role of a piece within a piece: metadata may name another one than its own."""
    named = f.metadata.get("piece")
    return named if isinstance(named, str) else role


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_reply(reply: Reply, seconds: float, joules: float | None, metrics: Mapping[str, Any] = {}) -> RecordDict:
    """A client's answer with its encoded payload; `metrics` are the user's own."""
    assert reply.payload is not None
    told: dict[str, Any] = {PREFIX + "base": reply.base} if reply.base else {}
    if reply.judged:
        told |= {PREFIX + "held": float(reply.judged.value), PREFIX + "held-n": reply.judged.n}
    figures = {SAMPLES: reply.n, "train_loss": reply.loss, "loss-square": reply.loss_square, "seconds": seconds}
    answer = RecordDict({
        "payload": record(reply.payload.buffers),
        "metrics": MetricRecord({**metrics, **figures, **({} if joules is None else {"joules": joules})}),
        "reply": ConfigRecord({PREFIX + "client": reply.client, PREFIX + "t": reply.t, **told}),
    })  # fmt: skip
    if reply.extras:
        answer["extras"] = record(reply.extras)
    return answer


def read_reply(
    content: RecordDict, task: Task, template: Template, w: Tensor, cap: int, weight_key: str = SAMPLES,
    into: Tensor | None = None,
) -> Reply:  # fmt: skip
    """A client's answer, ours or any Flower client's: then its one ArrayRecord is the whole trained model.

    A dense update is written `into` a row of the round's table where it has one.
    """
    if len(content) > 8:
        raise Malformed(f"{len(content)} records in one reply")
    metrics, arrays = content.metric_records, dict(content.array_records)
    extras = arrays.pop("extras", ArrayRecord())
    if len(metrics) != 1 or len(arrays) != 1:
        raise Malformed(f"{len(arrays)} ArrayRecords and {len(metrics)} MetricRecords, not one of each")
    figures, values = next(iter(metrics.values())), next(iter(arrays.values()))
    echo = content.config_records.get("reply", ConfigRecord())
    rich, t = PREFIX + "t" in echo, echo.get(PREFIX + "t", task.t)
    if rich and echo.get(PREFIX + "client") != task.client:
        raise Malformed(f"answers for {str(echo.get(PREFIX + 'client'))[:40]!r}")
    if not rich and type(task.compressor) is not Dense:
        raise Malformed("the whole model from a client that says it compresses; add the mod to it: compressing")
    place = {} if into is None else {"u": into}
    buffers = tensors(values, cap, place) if rich else {"u": template.pack(values, minus=w, into=into)}
    payload = Payload(buffers)
    more = tensors(extras, cap) if rich else {}
    up = payload.nbytes + count_bytes(more) if rich else template.carried(values)
    if weight_key not in figures:
        raise Malformed(f"no metric {weight_key!r}, which says how many samples it trained on")
    n = figures[weight_key]
    joules = _figure(figures, "joules")
    spent = Spent(
        bytes_up=up, framing=weight(values) + weight(extras) - up + len(figures.deflate()) + len(echo.deflate()),
        compute_seconds=max(_figure(figures, "seconds") or 0.0, 0.0), joules=max(joules or 0.0, 0.0),
        measured=joules is not None,
    )  # fmt: skip
    return Reply(
        task.client, t if type(t) is int else -1, payload,
        n=int(n) if isinstance(n, float) and n.is_integer() else n,  # type: ignore[arg-type]
        loss=_figure(figures, "train_loss", "loss") or 0.0, loss_square=_figure(figures, "loss-square") or 0.0,
        extras=more, spent=spent, base=echo.get(PREFIX + "base", ""),  # type: ignore[arg-type]  # the gate's to judge
        judged=Judged(echo[PREFIX + "held"], echo.get(PREFIX + "held-n", 0)) if PREFIX + "held" in echo else None,  # type: ignore[arg-type]
    )  # fmt: skip


def _figure(figures: Mapping[str, Any], *names: str) -> float | None:
    """The first of these metrics that is a number in bounds."""
    found = (figures.get(name) for name in names)
    return next((float(v) for v in found if number(v)), None)  # type: ignore[arg-type]
