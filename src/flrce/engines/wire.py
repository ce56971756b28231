"""Task and Reply <-> Flower's records.

A peer's bytes are never unpickled, its sizes are checked before anything of that size is made, and a piece is built
only from a name in `recipes.PIECES`: no code is imported because a message says so.
"""

import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flrce.errors import BadInput
from flrce.models.flat import Layout, Slot
from flrce.pieces import Malformed
from flrce.recipes import PIECES
from flrce.types import Payload, Reply, Spent, Task

T = TypeVar("T")

PREFIX = "flrce."  # of our keys in a ConfigRecord, beside the user's
SAMPLES = "num-examples"  # what Flower calls n_k
HEADER = 10_000  # bytes that an .npy header may have
BUFFERS = 4_096  # arrays in one payload
FLOATS = ("float16", "float32", "float64")
DTYPES = {*FLOATS, "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64"}
STATISTICS = ("running_mean", "running_var")  # BatchNorm: on the wire, but not trained
NAME = re.compile(r"[\w.:@+-]{1,64}")
LOCAL = ("compressor", "tensors")  # fields of a Task that are not scalars


def name_of(value: Any) -> str:
    """A client's name for itself, checked."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Malformed(f"client name {str(value)[:40]!r}: use 1 to 64 letters, digits and . : @ + - _")
    return value


def again(work: Callable[[], T]) -> T:
    """Do the work, anew where CPython 3.11 stumbles: two threads that parse literals at once, as numpy does to read an
    array's header, may raise SystemError (python/cpython#106905)."""
    for _ in range(5):
        try:
            return work()
        except SystemError:
            continue
    return work()


def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran's order, dtype, and where the values start."""
    stream = BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    found, fortran, kind = read(stream, max_header_size=HEADER)
    return found, fortran, kind, stream.tell()


def read_array(array: Array, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """A view of one array's values; dtype and shape must be those given, and the bytes exactly theirs."""
    if array.stype != "numpy.ndarray":
        raise Malformed(f"serialised as {array.stype[:40]!r}, not numpy.ndarray")
    if (
        shape is not None
        and dtype is not None
        and len(array.data) > math.prod(shape) * np.dtype(dtype).itemsize + HEADER
    ):
        raise Malformed(f"{len(array.data)} bytes for {dtype} of shape {shape}")
    try:
        found, fortran, kind, start = again(lambda: _header(array.data))
    except Exception as why:  # whatever numpy's parser raises on hostile bytes
        raise Malformed(f"no .npy header ({type(why).__name__})") from why
    if kind.name not in DTYPES or not kind.isnative or (dtype is not None and kind.name != dtype):
        raise Malformed(f"dtype {str(kind)[:40]}, not {dtype or 'a plain number'}")
    if shape is not None and tuple(found) != tuple(shape):
        raise Malformed(f"shape {str(found)[:60]}, not {tuple(shape)}")
    if min(found, default=0) < 0 or len(array.data) - start != math.prod(found) * kind.itemsize:
        raise Malformed(f"{len(array.data) - start} bytes for {kind} of shape {str(found)[:60]}")
    values = np.frombuffer(array.data, kind, offset=start)
    return values.reshape(found[::-1]).T if fortran else values.reshape(found)


@dataclass(frozen=True, eq=False)
class Template:
    """A user's ArrayRecord as the flat vector w, and back. Integer arrays stay as they are at first."""

    layout: Layout
    dtypes: Mapping[str, str]  # every array, in the record's order
    fixed: Mapping[str, Array]

    @classmethod
    def of(cls, arrays: ArrayRecord, layout: Layout | None = None) -> "Template":
        """Trained floats first, BatchNorm's statistics last, each in the record's order; or as the network's layout."""
        if not arrays:
            raise BadInput("initial_arrays is empty; pass the model, such as ArrayRecord(net.state_dict())")
        try:
            values = {name: read_array(array) for name, array in arrays.items()}
        except Malformed as why:
            raise BadInput(f"initial_arrays cannot be read: {why}; use arrays of plain numbers") from why
        floats = [name for name, value in values.items() if value.dtype.name in FLOATS]
        if not floats:
            raise BadInput("initial_arrays holds no floating-point array, so there is nothing to train")
        dtypes = {name: value.dtype.name for name, value in values.items()}
        fixed = {name: arrays[name] for name in values if name not in floats}
        if layout is not None:
            if {s.name: s.shape for s in layout.slots} != {name: values[name].shape for name in floats}:
                raise BadInput(
                    "initial_arrays and the network have different tensors; use ArrayRecord(net.state_dict())"
                )
            return cls(layout, dtypes, fixed)
        slots, offset, trainable = [], 0, 0
        for name in sorted(floats, key=lambda name: name.endswith(STATISTICS)):
            slots.append(Slot(name, values[name].shape, offset, not name.endswith(STATISTICS)))
            offset += values[name].size
            trainable = offset if slots[-1].trainable else trainable
        return cls(Layout(tuple(slots), trainable, offset), dtypes, fixed)

    def pack(self, arrays: ArrayRecord, minus: Tensor | None = None) -> Tensor:
        """w (size,), or w - `minus`; Malformed unless the record has the template's keys, shapes and dtypes."""
        if set(arrays) != set(self.dtypes):
            odd = sorted(set(arrays) ^ set(self.dtypes))
            raise Malformed(f"arrays differ in {len(odd)} names, such as {odd[0][:60]!r}")
        w = torch.empty(self.layout.size)
        flat = w.numpy()
        for slot in self.layout.slots:
            try:
                flat[slot.span] = read_array(arrays[slot.name], self.dtypes[slot.name], slot.shape).reshape(-1)
            except Malformed as why:
                raise Malformed(f"array {slot.name!r}: {why}") from why
        return w if minus is None else w.sub_(minus)

    def unpack(self, w: Tensor) -> ArrayRecord:
        """The user's record with the values of w."""
        views = self.layout.views(w)
        return ArrayRecord({
            name: self.fixed[name] if name in self.fixed else Array(views[name].numpy().astype(dtype, copy=False))
            for name, dtype in self.dtypes.items()
        })  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the float values as they travel."""
        return sum(slot.size * np.dtype(self.dtypes[slot.name]).itemsize for slot in self.layout.slots)

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        return tuple((slot.name, slot.size) for slot in self.layout.slots)


def record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(x.detach().cpu().contiguous().numpy()) for name, x in tensors.items()})


def tensors(arrays: ArrayRecord, cap: int) -> dict[str, Tensor]:
    """Named tensors of at most `cap` bytes together; the lengths are looked at first."""
    if len(arrays) > BUFFERS or sum(len(array.data) for array in arrays.values()) > cap + len(arrays) * HEADER:
        raise Malformed(f"{len(arrays)} arrays of {sum(len(a.data) for a in arrays.values())} bytes; at most {cap}")
    return {name: torch.from_numpy(read_array(array).copy()) for name, array in arrays.items()}


def weight(arrays: ArrayRecord) -> int:
    """What a record's arrays really weigh: values, headers and names."""
    return sum(len(array.data) + len(name) for name, array in arrays.items())


def write_task(task: Task) -> dict[str, Any]:
    """A task's scalars and its compressor, as entries of a ConfigRecord."""
    entries = {PREFIX + f.name: getattr(task, f.name) for f in fields(task) if f.name not in LOCAL}
    entries = {key: value for key, value in entries.items() if value is not None}
    return entries | write_piece("compressor", task.compressor, PREFIX + "compressor")


def read_task(config: Mapping[str, Any], sent: Mapping[str, Tensor]) -> Task:
    """The task in a ConfigRecord; Malformed says what is wrong with it."""
    values: dict[str, Any] = {}
    for f in fields(Task):
        value = config.get(PREFIX + f.name)
        if f.name in LOCAL or value is None:
            continue
        kinds = typing.get_args(f.type) or (f.type,)
        if type(value) not in (*kinds, *((int,) if float in kinds else ())):
            raise Malformed(f"{PREFIX}{f.name} is a {type(value).__name__}")
        values[f.name] = float(value) if float in kinds else value
    try:
        return Task(**values, compressor=read_piece("compressor", config, PREFIX + "compressor"), tensors=sent)
    except TypeError as why:
        raise Malformed(f"no task: {why}") from why


def write_piece(role: str, piece: Any, key: str) -> dict[str, Any]:
    """A piece as its registered name under `key` and its fields below; wrapped pieces nest."""
    name = next((name for name, make in PIECES[role].items() if make is type(piece)), None)
    if name is None:
        raise BadInput(
            f"{role} {type(piece).__name__} has no name that clients know; "
            f"add it to recipes.PIECES[{role!r}] on both sides"
        )
    entries: dict[str, Any] = {key: name}
    for f in fields(piece):
        value = getattr(piece, f.name)
        if is_dataclass(value):
            entries |= write_piece(role, value, f"{key}.{f.name}")
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
            values[f.name] = read_piece(role, config, f"{key}.{f.name}") if nested else _plain(value)
    try:
        return make(**values)
    except (TypeError, ValueError) as why:
        raise Malformed(f"{role} {name!r}: {why}") from why


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_reply(reply: Reply, seconds: float, joules: float | None, metrics: Mapping[str, Any] = {}) -> RecordDict:
    """A client's answer with its encoded payload; `metrics` are the user's own."""
    assert reply.payload is not None
    figures = {SAMPLES: reply.n, "train_loss": reply.loss, "loss-square": reply.loss_square, "seconds": seconds}
    return RecordDict({
        "payload": record(reply.payload.buffers),
        "metrics": MetricRecord({**metrics, **figures, **({} if joules is None else {"joules": joules})}),
        "reply": ConfigRecord({PREFIX + "client": reply.client, PREFIX + "t": reply.t}),
    })  # fmt: skip


def read_reply(content: RecordDict, task: Task, template: Template, w: Tensor, cap: int) -> Reply:
    """A client's answer, ours or any Flower client's: then its one ArrayRecord is the whole trained model."""
    if len(content) > 8:
        raise Malformed(f"{len(content)} records in one reply")
    metrics, arrays = content.metric_records, content.array_records
    if len(metrics) != 1 or len(arrays) != 1:
        raise Malformed(f"{len(arrays)} ArrayRecords and {len(metrics)} MetricRecords, not one of each")
    figures, values = next(iter(metrics.values())), next(iter(arrays.values()))
    echo = content.config_records.get("reply", ConfigRecord())
    rich, t = PREFIX + "t" in echo, echo.get(PREFIX + "t", task.t)
    if rich and echo.get(PREFIX + "client") != task.client:
        raise Malformed(f"answers for {str(echo.get(PREFIX + 'client'))[:40]!r}")
    buffers = tensors(values, cap) if rich else {"u": template.pack(values, minus=w)}
    payload = Payload(buffers)
    up = payload.nbytes if rich else template.nbytes
    n = figures.get(SAMPLES, 0)
    joules = _figure(figures, "joules")
    spent = Spent(
        bytes_up=up, framing=weight(values) - up + len(figures.deflate()) + len(echo.deflate()),
        compute_seconds=max(_figure(figures, "seconds") or 0.0, 0.0), joules=max(joules or 0.0, 0.0),
        measured=joules is not None,
    )  # fmt: skip
    return Reply(
        task.client, t if type(t) is int else -1, payload,
        n=int(n) if isinstance(n, float) and n.is_integer() else n,  # type: ignore[arg-type]
        loss=_figure(figures, "train_loss", "loss") or 0.0, loss_square=_figure(figures, "loss-square") or 0.0,
        spent=spent,
    )  # fmt: skip


def _figure(figures: Mapping[str, Any], *names: str) -> float | None:
    """The first of these metrics that is a finite number."""
    found = (figures.get(name) for name in names)
    return next((float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)), None)
