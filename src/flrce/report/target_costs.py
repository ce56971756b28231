"""What it took to reach a target: every cost up to the first round that was good enough."""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.core.cost_table import COSTS
from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.report.tables import RunGroup

CostToTarget = dict[str, float]  # cost -> spent, abandoned rounds and waiting included


def find_cost_to_target(history: Sequence[RoundRecord], target: float) -> CostToTarget | None:
    """What was spent by the end of the first round whose final model was as good as the target;
    None: none was.
    """
    for i, record in enumerate(history):
        value = record.final_model_metric
        if value is not None and (value <= target if record.lower else value >= target):
            return {name: cost.accumulate(history[: i + 1])[-1] for name, cost in COSTS.items()}
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
            spent
            for run in part.runs
            if (spent := find_cost_to_target(run.rounds, target)) is not None
        ]
        costs = {
            name: confidence_interval([float(spent[name]) for spent in each]) for name in COSTS
        }
        found.append(TargetCostRow(part.label, len(part.runs), len(each), costs))
    return found
