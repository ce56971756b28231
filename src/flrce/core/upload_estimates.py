"""How many bytes a reply will have, before its task is run: budgets and selectors ask for this.

A compressor that has `estimate_bytes(layout, rng)` knows. Of any other, a budget goes by what the
last committed round sent, and before the first one by what the compressor makes of an update of
random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from flrce.core.engine import Engine
from flrce.core.payload_bytes import count_value_bytes
from flrce.core.payloads import make_encoding_stream
from flrce.core.types import RoundRecord, State, Task
from flrce.errors import BadInput
from flrce.rng import make_stream

TensorLayout = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class ExpectedSize:
    """In a task's compressor's place: replies weigh this share of dense ones."""

    share: float
    is_dense: ClassVar[bool] = False
    instruction_bytes: ClassVar[int] = 0

    def estimate_bytes(self, layout: TensorLayout, rng: Any) -> int:
        return round(self.share * _dense_bytes(layout))


def estimate_upload_bytes(
    task: Task, layout: TensorLayout, trainable: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of a task's reply: its update as its compressor sends it, dense where that is unknown,
    and its extras.
    """
    known = estimate_payload_bytes(task, layout)
    return (_dense_bytes(layout, dtype) if known is None else known) + _extras_bytes(
        task, trainable
    )


def estimate_payload_bytes(task: Task, layout: TensorLayout) -> int | None:
    """Bytes of the encoded update as its compressor knows them; None: it does not."""
    compressor = task.compressor
    if compressor is None or compressor.is_dense:
        return None
    size: Any = compressor.estimate_bytes(layout, make_encoding_stream(task))
    if size is not None and (type(size) is bool or not isinstance(size, Integral) or int(size) < 0):
        name = type(compressor).__name__
        raise BadInput(
            f"{name}.estimate_bytes returned {size!r:.60}; return a whole number of bytes, or None"
        )
    return None if size is None else int(size)


def expect_uploads(engine: Engine, state: State, tasks: Sequence[Task]) -> list[Task]:
    """Tasks whose upload an engine can estimate: compressors that do not know their bytes stand for
    what they sent.
    """
    unknown = [task for task in tasks if not _is_known(engine, task)]
    if not unknown:
        return list(tasks)
    share = _learned_share(state, unknown[0], engine.trainable)
    if share is None:
        share = _probed_share(unknown[0], engine.get_task_layout(unknown[0])[1])
    if share is None:
        return list(tasks)
    stand_in, replaced = ExpectedSize(share), {id(task) for task in unknown}
    return [replace(task, compressor=stand_in) if id(task) in replaced else task for task in tasks]


def _is_known(engine: Engine, task: Task) -> bool:
    if task.compressor is None or task.compressor.is_dense:
        return True
    return estimate_payload_bytes(task, engine.get_task_layout(task)[1]) is not None


def _learned_share(state: State, task: Task, trainable: int) -> float | None:
    """Bytes of the last committed round's replies against those of dense ones; None before there is
    one.
    """
    last: RoundRecord | None = next(
        (h for h in reversed(state.history) if h.outcome == "committed" and h.replied), None
    )
    if last is None:
        return None
    payloads = last.costs.bytes_up / len(last.replied) - _extras_bytes(task, trainable)
    return max(payloads, 0.0) / max(count_value_bytes(len(state.w)), 1)


def _probed_share(task: Task, layout: TensorLayout) -> float | None:
    """The same of an update of random numbers; None where the compressor cannot encode one."""
    size = sum(count for _, count in layout)
    u: Tensor = torch.from_numpy(
        make_stream(task.seed, "probe", task.t).standard_normal(size)
    ).float()
    try:
        payload, _ = task.compressor.encode(u, layout, make_encoding_stream(task), {})
        return float(payload.nbytes) / max(_dense_bytes(layout), 1)
    except (
        Exception
    ):  # a user's compressor that needs more than a first update: its upload counts as dense
        return None


def _dense_bytes(layout: TensorLayout, dtype: torch.dtype = torch.float32) -> int:
    return count_value_bytes(sum(size for _, size in layout), dtype)


def _extras_bytes(task: Task, trainable: int) -> int:
    """What the links of a task send beside its update, as float32."""
    sizes: dict[str, int] = (
        task.update.list_extra_sizes(trainable) if task.update is not None else {}
    )
    return count_value_bytes(sum(sizes.values()))
