"""Every method against the reference, seed by seed: a seed has the same clients and hold-outs for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flrce.arena.board import budgets
from flrce.arena.records import Played
from flrce.intervals import Interval, interval


@dataclass(frozen=True)
class Paired:
    """A method's gains on each task, so that more is better."""

    method: str
    gains: Mapping[str, Interval]
    better: tuple[str, ...]  # tasks where the whole interval is above 0
    worse: tuple[str, ...]


def paired(found: Sequence[Played], axis: str, share: float, reference: str) -> list[Paired]:
    """At a share of the reference's budget; on tasks where both have a model by then, on every seed that both have."""
    limits = {task: share * spent for task, spent in budgets(found, axis, reference).items()}
    values: dict[tuple[str, str], dict[int, float | None]] = {}
    for p in found:
        if p.task in limits:
            value = p.within(axis, limits[p.task])
            sign = -1.0 if p.lower else 1.0
            values.setdefault((p.task, p.method), {})[p.seed] = None if value is None else sign * value
    lines = []
    for method in dict.fromkeys(p.method for p in found if p.method != reference):
        gains = {}
        for task in limits:
            mine, theirs = values.get((task, method), {}), values[task, reference]
            pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            if differences and len(differences) == len(pairs):
                gains[task] = interval(differences)
        lines.append(Paired(method, gains, _sure(gains, 1.0), _sure(gains, -1.0)))
    return lines


def _sure(gains: Mapping[str, Interval], sign: float) -> tuple[str, ...]:
    """Tasks whose interval is wholly on one side of 0."""
    return tuple(
        task for task, x in gains.items() if x.mean is not None and x.half is not None and sign * x.mean > x.half
    )
