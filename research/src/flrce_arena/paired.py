"""Every method against the reference, seed by seed: a seed has the same clients and hold-outs for
all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce_arena.leaderboard import compute_reference_budgets
from flrce_arena.records import CellRecord


@dataclass(frozen=True)
class PairedComparison:
    """A method's gains on each task, so that more is better."""

    method: str
    gains: Mapping[str, ConfidenceInterval]
    better: tuple[str, ...]  # tasks where the whole interval is above 0
    worse: tuple[str, ...]


def compare_with_reference(
    found: Sequence[CellRecord], axis: str, share: float, reference: str
) -> list[PairedComparison]:
    """At a share of the reference's budget; on tasks where both have a model by then, on every seed
    that both have.
    """
    budgets = compute_reference_budgets(found, axis, reference)
    limits = {task: share * spent for task, spent in budgets.items()}
    values: dict[tuple[str, str], dict[int, float | None]] = {}
    for p in found:
        if p.task in limits:
            value = p.get_value_within(axis, limits[p.task])
            signed = value if value is None or not p.lower else -value
            values.setdefault((p.task, p.method), {})[p.seed] = signed
    lines = []
    for method in dict.fromkeys(p.method for p in found if p.method != reference):
        gains = {}
        for task in limits:
            mine, theirs = values.get((task, method), {}), values[task, reference]
            pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            if differences and len(differences) == len(pairs):
                gains[task] = confidence_interval(differences)
        better, worse = (_list_significant_tasks(gains, sign) for sign in (1.0, -1.0))
        lines.append(PairedComparison(method, gains, better, worse))
    return lines


def _list_significant_tasks(
    gains: Mapping[str, ConfidenceInterval], sign: float
) -> tuple[str, ...]:
    """Tasks whose interval is wholly on one side of 0."""
    return tuple(
        task
        for task, x in gains.items()
        if x.mean is not None and x.half is not None and sign * x.mean > x.half
    )
