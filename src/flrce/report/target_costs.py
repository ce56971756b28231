"""What it took to reach a target: rounds, seconds, joules, bytes and grams by the first round that
was good enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.report.tables import RunGroup

COST_NAMES = ("rounds", "seconds", "joules", "bytes", "grams")


@dataclass(frozen=True)
class CostToTarget:
    """Spent by the end of the round that reached the target, abandoned rounds and waiting
    included.
    """

    rounds: int
    seconds: float
    joules: float
    bytes: int
    grams: float


def find_cost_to_target(history: Sequence[RoundRecord], target: float) -> CostToTarget | None:
    """By when the model that would be handed back was as good as the target; None: it never was."""
    joules, nbytes, grams, rounds = 0.0, 0, 0.0, 0
    for record in history:
        joules, nbytes = joules + record.joules, nbytes + record.bytes_up + record.bytes_down
        grams, rounds = grams + record.grams, rounds + (record.outcome == "committed")
        value = record.final_model_metric
        if value is not None and (value <= target if record.lower else value >= target):
            return CostToTarget(rounds, record.began + record.seconds, joules, nbytes, grams)
    return None


@dataclass(frozen=True)
class TargetCostRow:
    """A recipe's runs: how many reached the target, and what that took those that did."""

    label: str
    runs: int
    reached: int
    costs: dict[str, ConfidenceInterval]


def compare_target_costs(parts: Sequence[RunGroup], target: float) -> list[TargetCostRow]:
    """Every group's costs up to the target, with 95 % intervals over its seeds."""
    found = []
    for part in parts:
        each = [
            got for run in part.runs if (got := find_cost_to_target(run.rounds, target)) is not None
        ]
        costs = {
            name: confidence_interval([float(getattr(got, name)) for got in each])
            for name in COST_NAMES
        }
        found.append(TargetCostRow(part.label, len(part.runs), len(each), costs))
    return found
