"""What it took to reach a target: every cost up to the first round that was good enough."""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.core.cost_table import COSTS
from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.report.tables import RunGroup

CostToTarget = dict[str, float]  # cost -> spent, abandoned rounds and waiting included


def find_cost_to_target(history: Sequence[RoundRecord], target: float) -> CostToTarget | None:
    """The costs up to the first round as good as the target; None if there is none."""
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
    table = []
    for part in parts:
        spent = [find_cost_to_target(run.rounds, target) for run in part.runs]
        reached = [costs for costs in spent if costs is not None]
        means = {name: confidence_interval([float(c[name]) for c in reached]) for name in COSTS}
        table.append(TargetCostRow(part.label, len(part.runs), len(reached), means))
    return table
