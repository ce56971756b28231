"""What a client sent, inspected before it is used: sizes before contents, and nothing is ever
executed.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.pieces import MalformedPayload
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import limit_payload_bytes
from flrce.core.types import ClientCost, Payload, Reply, Task, Updates
from flrce.errors import format_one_line
from flrce_client import streams

MAX_COORDINATE = 1e9  # of one coordinate: beyond it float32 products of updates overflow
# of any figure that a client reports: sums over clients, samples and rounds stay far from overflow
MAX_REPORTED_VALUE = 1e30
MAX_COST = 1e18  # of bytes, seconds, joules
# a measured cost beyond these is no device's: a full rack drawer, a satellite's radio
WATTS, PER_BYTE = (20_000.0, 0.01)
COST_LIMITS = tuple(
    (f.name, MAX_REPORTED_VALUE if f.name == "flops" else MAX_COST)
    for f in fields(ClientCost)
    if f.name != "other"
)  # and how large each may be
MAX_OTHER_COSTS = 64  # names of further costs
VARIANCE_SUFFIX = "running_var"  # how BatchNorm's variances are named
TaskLayoutFunction = Callable[[Task], tuple[Tensor | None, Sequence[tuple[str, int]]]]


@dataclass(frozen=True, eq=False)
class SentModel:
    """The model that a round's clients were sent."""

    w: Tensor

    @cached_property
    def digest(self) -> str:
        return fingerprint_model(self.w)


@dataclass(frozen=True, eq=False)
class ReplyContext:
    """What the server knows when a round's replies arrive."""

    layout: TaskLayoutFunction  # coordinates that a task trains, names and sizes of their tensors
    d: int  # floats that travel
    trainable: int  # of them are trained
    keep: int | None = None  # no more good replies than that count: the fastest
    w: Tensor | None = None  # (D,) the model now, where updates are; what clients start from
    samples_before: Tensor | None = None  # (M,) each client's samples, 0 where nobody knows
    # client -> the older model that it started from
    bases: Mapping[str, Tensor] = field(default_factory=dict)
    t: int | None = None  # the round
    oldest: int | None = None  # replies that are more rounds old do not count
    table: Tensor | None = None  # as in RoundReplies

    def get_age(self, task: Task) -> int:
        """Rounds since the task was sent."""
        return 0 if self.t is None else self.t - task.t


def fingerprint_model(w: Tensor) -> str:
    """A model in 32 hexadecimal digits."""
    return hashlib.blake2b(w.detach().cpu().contiguous().numpy().data, digest_size=16).hexdigest()


def validate_variances(
    u: Tensor, w: Tensor, held: Tensor | None, layout: Sequence[tuple[str, int]], exact: bool
) -> tuple[str, Tensor | None]:
    """("", u) that leaves no variance of w below 0, where its root would be NaN; or (which it
    would, None).

    What a compressor did not keep `exact` may pass 0 without ill will: it is cut there.
    """
    start = 0
    for name, size in layout:
        span = slice(start, start + size)
        start += size
        if not size or not name.endswith(VARIANCE_SUFFIX):
            continue
        before = tensor_bytes.to_device_of(w[span] if held is None else w[held[span]], u)
        lowest = float((before + u[span]).min())
        if lowest < 0 and exact:
            return f"a variance of {lowest:.3g} in {name[-60:]!r}", None
        if lowest < 0:
            u = u.clone()
            u[span] = torch.maximum(u[span], -before)
    return "", u


def decode_update(
    task: Task, payload: Payload, layout: Sequence[tuple[str, int]]
) -> tuple[str, Tensor | None]:
    """("", the update) or (why its values cannot be used, None); Malformed where there are none to
    speak of.
    """
    size = sum(count for _, count in layout)
    validate_payload_size(payload, size, len(layout))
    u = _decode_payload(task, payload, layout) if payload.decoded is None else payload.decoded
    if type(u) is not Tensor or tuple(u.shape) != (size,) or not u.is_floating_point():
        raise MalformedPayload(
            f"decodes to {str(getattr(u, 'shape', type(u).__name__))[:40]}, not to {size} floats"
        )
    u = u.detach() if u.dtype == torch.float64 else u.detach().float()
    largest = payload.largest if task.compressor.is_dense else None
    if largest is None:  # one pass; a NaN comes out as NaN
        largest = max(map(abs, map(float, torch.aminmax(u)))) if size else 0.0
    if not math.isfinite(largest):
        return f"{int((~torch.isfinite(u)).sum())} of {size} values are not finite", None
    if largest > MAX_COORDINATE:
        return f"a value of {largest:.3g} is beyond {MAX_COORDINATE:g}", None
    return "", u


def _decode_payload(task: Task, payload: Payload, layout: Sequence[tuple[str, int]]) -> Tensor:
    buffers = _TrackedBuffers(payload.buffers)
    # to make a generator takes longer than to decode
    rng = None if task.compressor.is_dense else make_encoding_stream(task)
    u: Tensor = task.compressor.decode(Payload(buffers), layout, rng)
    if buffers.unread:
        raise MalformedPayload(f"unexpected buffer {format_one_line(min(buffers.unread), 40)!r}")
    return u


def validate_extras(task: Task, extras: Any, d: int) -> None:
    """Malformed unless what a client sends beside its update is what the links of its task send."""
    expected = task.update.list_extra_sizes(d) if task.update is not None else {}
    if not isinstance(extras, Mapping) or set(extras) != set(expected):
        names = (
            ", ".join(sorted(map(str, extras)))[:80]
            if isinstance(extras, Mapping)
            else type(extras).__name__
        )
        raise MalformedPayload(
            f"sends {names or 'nothing'} beside its update, not {', '.join(expected) or 'nothing'},"
            " which is what its links declare (list_extra_sizes)"
        )
    for name, size in expected.items():
        value = extras[name]
        if (
            type(value) is not Tensor
            or tuple(value.shape) != (size,)
            or not value.is_floating_point()
        ):
            raise MalformedPayload(
                f"{name!r} is {str(getattr(value, 'shape', type(value).__name__))[:40]}, not {size}"
                " floats"
            )
        if size and not float(value.abs().max()) <= MAX_COORDINATE:
            raise MalformedPayload(
                f"{name!r} holds values that are not finite, or beyond {MAX_COORDINATE:g}"
            )


def validate_payload_size(payload: Payload, size: int, tensors: int) -> None:
    """Malformed unless the payload is plain tensors, no more and no heavier than a task of `size`
    floats can need.
    """
    if not isinstance(payload, Payload) or not isinstance(payload.buffers, Mapping):
        raise MalformedPayload(f"a {type(payload).__name__[:40]} is no payload")
    buffers, limit = payload.buffers, limit_payload_bytes(size, tensors)
    if len(buffers) > 4 * tensors + 16:
        raise MalformedPayload(f"{len(buffers)} buffers for {tensors} tensors")
    for name, buffer in buffers.items():
        if type(name) is not str or type(buffer) is not Tensor:
            raise MalformedPayload(
                f"buffer {format_one_line(name, 40)!r} is a {type(buffer).__name__[:40]}, not a"
                " tensor"
            )
        if buffer.layout != torch.strided or buffer.is_meta or buffer.is_quantized:
            raise MalformedPayload(
                f"buffer {format_one_line(name, 40)!r} is no plain tensor in memory"
            )
    if payload.nbytes > limit:
        raise MalformedPayload(
            f"{payload.nbytes} bytes, more than the {limit} that {size} floats can need"
        )


def is_plausible_step_count(task: Task, n: int, steps: Any) -> bool:
    """Whether a client with n samples can have trained on so many batches; None: on all."""
    if steps is None:
        return True
    planned = task.work.steps or task.work.epochs * -(-n // task.work.batch)
    return type(steps) is int and 1 <= steps <= planned


def is_plausible_cost(spent: Any) -> bool:
    """Whether what a client says it spent can be booked: numbers in bounds, and no more joules than
    its time allows.
    """
    if not isinstance(spent, ClientCost):
        return False
    if not all(is_finite_number(getattr(spent, name), 0, limit) for name, limit in COST_LIMITS):
        return False
    if not _are_plausible_amounts(spent.other):
        return False
    limit = WATTS * spent.seconds + PER_BYTE * (spent.bytes_up + spent.bytes_down)
    return not spent.measured or spent.joules <= limit


def _are_plausible_amounts(other: Any) -> bool:
    return (
        isinstance(other, Mapping)
        and len(other) <= MAX_OTHER_COSTS
        and all(type(name) is str for name in other)
        and all(is_finite_number(amount, 0, MAX_COST) for amount in other.values())
    )


def is_finite_number(
    value: Any, least: float = -MAX_REPORTED_VALUE, most: float = MAX_REPORTED_VALUE
) -> bool:
    """Whether this is a finite number within bounds; a giant integer is none."""
    return isinstance(value, int | float) and least <= value <= most  # NaN compares with nothing


def make_encoding_stream(task: Task) -> Generator:
    """The randomness that the client encoded with."""
    return streams.make_encoding_stream(task.seed, task.t, task.client)


class _TrackedBuffers(Mapping[str, Tensor]):
    """Buffers that know which of them were looked at."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers, self.unread = buffers, set(buffers)

    def __getitem__(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self.buffers[name]

    def __iter__(self) -> Iterator[str]:
        for name in self.buffers:
            self.unread.discard(name)
            yield name

    def __len__(self) -> int:
        return len(self.buffers)


def stack_updates(
    tasks: Sequence[Task], passed: list[tuple[Reply, Tensor]], context: ReplyContext
) -> Updates:
    """One row each, in the order of the tasks; `passed` is emptied, so that P large models are not
    held twice.

    Updates that lie in the context's table stay there, or move up where others before them did not
    pass. Else the rows are where the model is.
    """
    replies = [reply for reply, _ in passed]
    U, covered = _allocate_rows(len(passed), context), None
    for row, task in enumerate(tasks):
        held, names = context.layout(task)
        where = held if held is not None else slice(None)
        u = passed.pop(0)[1]
        if held is not None:
            U[row] = 0
        if held is not None or u.data_ptr() != U[row].data_ptr():
            U[row, where] = tensor_bytes.to_device_of(u, U)
        del u  # it may be large
        mask = _compute_coverage(task, names)
        if held is not None or mask is not None:
            covered = torch.ones(U.shape, dtype=torch.bool) if covered is None else covered
            covered[row] = held is None
            covered[row, where] = True if mask is None else mask
    return _build_updates(tasks, replies, U, covered, context.trainable)


def _allocate_rows(count: int, context: ReplyContext) -> Tensor:
    """(count, d) rows: in the table where it fits, else beside the model on its device, else new;
    of new memory, a row is taken as it is written, and its reply let go of.
    """
    table, w, d = context.table, context.w, context.d
    dtype = torch.float32 if w is None else w.dtype
    if table is not None and table.dtype == dtype and len(table) >= count and table.shape[1] == d:
        return table[:count]
    if w is not None and not tensor_bytes.is_on_host(w):
        return w.new_empty(count, d)
    return tensor_bytes.allocate_tensor(count, d, dtype=dtype)


def _build_updates(
    tasks: Sequence[Task],
    replies: Sequence[Reply],
    U: Tensor,
    covered: Tensor | None,
    trainable: int,
) -> Updates:
    return Updates(
        k=torch.tensor([task.k for task in tasks], dtype=torch.long),
        U=U,
        n=torch.tensor([reply.n for reply in replies], dtype=torch.float64),
        trainable=trainable,
        covered=None if covered is None or bool(covered.all()) else covered,
        loss=torch.tensor([reply.loss for reply in replies], dtype=torch.float64),
        loss_square=torch.tensor([reply.loss_square for reply in replies], dtype=torch.float64),
        seconds=torch.tensor([reply.spent.seconds for reply in replies], dtype=torch.float64),
        spent=tuple(reply.spent for reply in replies),
        extras={
            name: torch.stack([reply.extras[name] for reply in replies])
            for name in _list_common_extras(replies)
        },
    )


def _compute_coverage(task: Task, names: Sequence[tuple[str, int]]) -> Tensor | None:
    """Which of a task's coordinates count in the mean; None: all."""
    compressor: Compressor | None = task.compressor
    if compressor is None or compressor.is_dense:
        return None
    return compressor.coverage_mask(names, make_encoding_stream(task))


def _list_common_extras(replies: Sequence[Reply]) -> list[str]:
    """Extras that every reply has: links of one recipe send the same ones."""
    return sorted(set.intersection(*(set(reply.extras) for reply in replies))) if replies else []
