"""A round's books: every byte and joule of every client, useful or wasted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flrce.core.energy_basis import MODELLED_FIELD, add_amounts
from flrce.core.gate import MAX_SAMPLES_PER_CLIENT, match_replies
from flrce.core.payloads import is_finite_number, is_plausible_cost
from flrce.core.record import RoundCosts
from flrce.core.types import ClientCost, ClientRecord, Reply, RoundRecord, Task

FREE_OF_WASTE = ("useful", "asked", "evaluated")  # outcomes whose costs were not in vain
LEFT_PREFIX = "left"  # how the reason of a client begins that went while it worked


def book_costs(
    t: int,
    tasks: Sequence[Task],
    replies: Sequence[Reply],
    rejected: Mapping[str, str],
    asked: Sequence[tuple[str, ClientCost]] = (),
    lasted: float | None = None,
    keep: int | None = None,
    price: Callable[[Sequence[ClientRecord]], Sequence[ClientRecord]] = list,
) -> tuple[tuple[ClientRecord, ...], RoundCosts]:
    """Each client's line, and the round's totals.

    A download is charged when it is sent, even to a client that then fails. Late, duplicate and
    unasked replies get lines of their own, all waste: what travelled was paid for. The round lasts
    as long as the slowest reply that counts, or up to the deadline where one was missed, or until
    it is known that a client left whose reply would have counted among the first `keep`; whoever is
    done sooner idles until then, and its line says so: the lines add up to the round. Where it is
    known how long it `lasted`, nobody waits. Clients that were `asked` for their loss have lines
    too; that comes before training.
    """
    first, strays = match_replies(tasks, replies)
    lines = [
        _make_client_record(
            t,
            first.get(task.client, Reply(task.client, t)),
            rejected.get(task.client, "useful"),
            t - task.t,
        )
        for task in tasks
    ]
    late = any(line.outcome.startswith("late") for line in lines)
    lines += [_make_client_record(t, reply, why) for reply, why in strays]
    seconds = _compute_training_seconds(lines, tasks if late else (), keep)
    if lasted is None:
        lines = [replace(line, spent=_add_idle_energy(line.spent, seconds)) for line in lines]
    else:  # clients come and go by themselves, and nobody waits for the round's end
        seconds = lasted
    lines += [ClientRecord(t, client, "asked", 0, 0.0, spent) for client, spent in asked]
    lines = list(price(lines))
    spent = [line.spent for line in lines]
    return tuple(lines), RoundCosts(
        **sum_line_costs(lines),
        seconds=seconds + max((s.seconds for _, s in asked), default=0.0),
        measured=bool(spent) and all(s.measured for s in spent),
        other=sum_other_costs(spent),
    )


def _compute_training_seconds(
    lines: Sequence[ClientRecord], late_tasks: Sequence[Task], keep: int | None
) -> float:
    """How long a round waits: for replies that count, for clients that left whose reply would have
    counted, and for deadlines that were missed.
    """
    waits = [line.spent.seconds for line in lines if line.outcome == "useful"]
    if keep is None or len(waits) < keep:
        waits += [line.spent.seconds for line in lines if line.outcome.startswith(LEFT_PREFIX)]
    waits += [task.deadline for task in late_tasks if task.deadline < float("inf")]
    return max(waits, default=0.0)


def sum_line_costs(lines: Sequence[ClientRecord]) -> dict[str, Any]:
    """What clients' lines add up to, by the field of a round's costs."""
    spent = [line.spent for line in lines]
    wasted = [line.spent for line in lines if line.outcome not in FREE_OF_WASTE]
    return {
        "bytes_up": sum(s.bytes_up for s in spent),
        "bytes_down": sum(s.bytes_down for s in spent),
        "bytes_framing": sum(s.framing for s in spent),
        "bytes_wasted": sum(s.bytes_up + s.bytes_down for s in wasted),
        "joules": sum(s.joules for s in spent),
        "joules_wasted": sum(s.joules for s in wasted),
        "joules_low": sum(s.joules / (1 + s.error) for s in spent),
        "joules_high": sum(s.joules * (1 + s.error) for s in spent),
        "grams": sum(s.grams for s in spent),
        "grams_wasted": sum(s.grams for s in wasted),
    }


def bill_evaluation(
    record: RoundRecord,
    evaluated: Sequence[tuple[str, ClientCost]],
    price: Callable[[Sequence[ClientRecord]], Sequence[ClientRecord]] = list,
) -> tuple[RoundRecord, tuple[ClientRecord, ...]]:
    """The record with what clients spent to evaluate the final model after the round, and their
    lines.
    """
    lines = price([ClientRecord(record.t, k, "evaluated", 0, 0.0, s) for k, s in evaluated])
    spent = [line.spent for line in lines]
    before = record.costs
    more = {name: getattr(before, name) + x for name, x in sum_line_costs(lines).items()}
    other = {name: before.other.get(name, 0.0) + x for name, x in sum_other_costs(spent).items()}
    seconds = before.seconds + max((s.seconds for s in spent), default=0.0)
    costs = replace(before, **more, seconds=seconds, other={**before.other, **other})
    return replace(record, costs=costs), tuple(lines)


def sum_other_costs(spent: Sequence[ClientCost]) -> dict[str, float]:
    """What clients booked beside bytes, joules and grams, by name."""
    names = dict.fromkeys(name for cost in spent for name in cost.other)
    return {name: sum(cost.other.get(name, 0.0) for cost in spent) for name in names}


def _make_client_record(t: int, reply: Reply, outcome: str, age: int = 0) -> ClientRecord:
    """A client's line; what it claims without sense is booked as nothing."""
    loss = reply.loss if is_finite_number(reply.loss) else 0.0
    spent = reply.spent if is_plausible_cost(reply.spent) else ClientCost()
    n = reply.n if type(reply.n) is int and 0 <= reply.n <= MAX_SAMPLES_PER_CLIENT else 0
    return ClientRecord(t, reply.client, outcome, n, loss, spent, age)


def _add_idle_energy(spent: ClientCost, seconds: float) -> ClientCost:
    """With what the client drew until the round's end."""
    waiting = spent.idle_watts * max(seconds - spent.seconds, 0.0)
    basis = "joules_assumed_waiting" if spent.idle_assumed else MODELLED_FIELD
    other = add_amounts(spent.other, {basis: waiting}) if waiting else spent.other
    return replace(spent, joules=spent.joules + waiting, other=other)
