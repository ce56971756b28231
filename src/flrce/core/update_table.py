"""Replies that passed the gate, as one row each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flrce.core import device_transfer
from flrce.core.buffers import allocate_tensor
from flrce.core.payloads import make_encoding_stream
from flrce.core.roles import Compressor
from flrce.core.types import Reply, Task, Updates


def stack_updates(
    tasks: Sequence[Task],
    passed: list[tuple[Reply, Tensor]],
    holdings: Any,
    d: int,
    trainable: int,
    dtype: torch.dtype,
    table: Tensor | None = None,
    beside: Tensor | None = None,
) -> Updates:
    """One row each, in the order of the tasks; `passed` is emptied, so that P large models are not
    held twice.

    Updates that lie in the `table` stay there, or move up where others before them did not pass.
    Else the rows are `beside` the model that replies lie next to, where that is on a device.
    """
    fits = (
        table is not None
        and table.dtype == dtype
        and len(table) >= len(passed)
        and table.shape[1] == d
    )
    # of new memory, a row is taken as it is written, and its reply let go of
    if table is not None and fits:
        U = table[: len(passed)]
    elif beside is not None and not device_transfer.is_on_host(beside):
        U = beside.new_empty(len(passed), d)
    else:
        U = allocate_tensor(len(passed), d, dtype=dtype)
    covered: Tensor | None = None
    replies = [reply for reply, _ in passed]
    count = len(replies)
    for row, task in enumerate(tasks):
        held, names = holdings(task)
        where = held if held is not None else slice(None)
        u = passed.pop(0)[1]
        if held is not None:
            U[row] = 0
        if held is not None or u.data_ptr() != U[row].data_ptr():
            U[row, where] = device_transfer.to_device_of(u, U)
        del u  # it may be large
        mask = _compute_coverage(task, names)
        if held is not None or mask is not None:
            if covered is None:
                covered = torch.ones(count, d, dtype=torch.bool)
            covered[row] = held is None
            covered[row, where] = True if mask is None else mask
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
