"""The one door between clients and everything else: a reply passes whole, or is that client's failure with a reason."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flrce.pieces import Malformed
from flrce.types import Reply, Task, Updates

MOST_SAMPLES = 10_000_000  # a client that claims more lies, or should be several clients
Holdings = Callable[[Task], tuple[Tensor | None, Sequence[tuple[str, int]]]]


def gate(
    tasks: Sequence[Task], replies: Sequence[Reply], holdings: Holdings, d: int, trainable: int, keep: int | None = None
) -> tuple[Updates, dict[str, str]]:
    """The updates that passed, ordered by row, and why each other client did not count."""
    asked = {task.client: task for task in tasks}
    rejected = {task.client: "no reply" for task in tasks}
    passed: dict[str, tuple[Reply, Tensor]] = {}
    seen: set[str] = set()
    for reply in replies:
        if reply.client not in asked or reply.client in seen:
            continue  # nobody asked, or the first reply counts
        seen.add(reply.client)
        why, u = check(asked[reply.client], reply, holdings)
        if u is None:
            rejected[reply.client] = why
        else:
            passed[reply.client] = (reply, u)
            del rejected[reply.client]
    for client in _slow(passed, keep):
        del passed[client]
        rejected[client] = "slower than the replies that were waited for"
    ordered = sorted(passed, key=lambda client: asked[client].k)
    return _stack([asked[c] for c in ordered], [passed[c] for c in ordered], holdings, d, trainable), rejected


def check(task: Task, reply: Reply, holdings: Holdings) -> tuple[str, Tensor | None]:
    """("", the decoded update), or (why not, None)."""
    if reply.error or reply.payload is None:
        return reply.error or "empty reply", None
    if reply.t != task.t:
        return f"late: reply to round {reply.t} in round {task.t}", None
    if type(reply.n) is not int or not 1 <= reply.n <= MOST_SAMPLES:
        return f"num_examples {str(reply.n)[:20]!r} is not an integer from 1 to {MOST_SAMPLES}", None
    if not reply.spent.seconds <= task.deadline:
        return f"late: {reply.spent.seconds:.1f} s past the deadline of {task.deadline:.1f} s", None
    try:
        u = task.compressor.decode(reply.payload, holdings(task)[1])
    except Malformed as why:
        return f"malformed: {why}", None
    if not torch.isfinite(u).all():
        return f"{int((~torch.isfinite(u)).sum())} of {u.numel()} values are not finite", None
    return "", u


def _slow(passed: dict[str, tuple[Reply, Tensor]], keep: int | None) -> list[str]:
    """Clients beyond the `keep` fastest; ties by name."""
    return sorted(passed, key=lambda client: (passed[client][0].spent.seconds, client))[keep:] if keep else []


def _stack(
    tasks: Sequence[Task], passed: Sequence[tuple[Reply, Tensor]], holdings: Holdings, d: int, trainable: int
) -> Updates:
    U = torch.zeros(len(passed), d)
    covered = torch.zeros(len(passed), d, dtype=torch.bool)
    for row, (task, (_, u)) in enumerate(zip(tasks, passed, strict=True)):
        where = holdings(task)[0]
        U[row, where if where is not None else slice(None)] = u
        covered[row, where if where is not None else slice(None)] = True
    replies = [reply for reply, _ in passed]
    return Updates(
        k=torch.tensor([task.k for task in tasks], dtype=torch.long),
        U=U,
        n=torch.tensor([reply.n for reply in replies], dtype=torch.float64),
        trainable=trainable,
        covered=None if bool(covered.all()) else covered,
        loss=torch.tensor([reply.loss for reply in replies], dtype=torch.float64),
        loss_square=torch.tensor([reply.loss_square for reply in replies], dtype=torch.float64),
        seconds=torch.tensor([reply.spent.seconds for reply in replies], dtype=torch.float64),
        spent=tuple(reply.spent for reply in replies),
    )
