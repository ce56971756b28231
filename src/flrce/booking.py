"""A round's books: every byte and joule of every client, useful or wasted."""

from collections.abc import Mapping, Sequence
from typing import Any

from flrce.types import ClientRecord, Reply, Spent, Task


def book(
    t: int, tasks: Sequence[Task], replies: Sequence[Reply], rejected: Mapping[str, str], asked: Sequence[Spent] = ()
) -> tuple[tuple[ClientRecord, ...], dict[str, Any]]:
    """Each client's line, and the round's totals as fields of a Record.

    A download is charged when it is sent, even to a client that then fails. The round lasts as long as the slowest
    reply that counts, or up to the deadline where one was missed; whoever is done sooner idles until then.
    """
    answers: dict[str, Reply] = {}
    for reply in replies:
        answers.setdefault(reply.client, reply)
    lines = []
    for task in tasks:
        reply = answers.get(task.client, Reply(task.client, t))
        lines.append(
            ClientRecord(t, task.client, rejected.get(task.client, "useful"), _int(reply.n), reply.loss, reply.spent)
        )
    useful = [line.spent for line in lines if line.outcome == "useful"]
    wasted = [line.spent for line in lines if line.outcome != "useful"]
    seconds = max((spent.seconds for spent in useful), default=0.0)
    if any(line.outcome.startswith("late") for line in lines):
        seconds = max([seconds, *(task.deadline for task in tasks if task.deadline < float("inf"))])
    spent = [*useful, *wasted, *asked]
    return tuple(lines), {
        "bytes_up": sum(s.bytes_up for s in spent),
        "bytes_down": sum(s.bytes_down for s in spent),
        "bytes_framing": sum(s.framing for s in spent),
        "bytes_wasted": sum(s.bytes_up + s.bytes_down for s in wasted),
        "joules": sum(_joules(s, seconds) for s in spent),
        "joules_wasted": sum(_joules(s, seconds) for s in wasted),
        "seconds": seconds,
        "measured": bool(spent) and all(s.measured for s in spent),
    }


def _joules(spent: Spent, seconds: float) -> float:
    return spent.joules + spent.idle_watts * max(seconds - spent.seconds, 0.0)


def _int(n: Any) -> int:
    return n if type(n) is int else 0
