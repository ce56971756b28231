"""flrce reach runs/all --target 0.8"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flrce.cli.terminal import print_table
from flrce.core.cost_table import list_spent_costs
from flrce.core.metric_format import SHARES, format_metric_value
from flrce.errors import BadInput
from flrce.report import tables
from flrce.report import target_costs as results
from flrce.report.tasks import require_one_task
from flrce.storage import read


def show_target_costs(runs: Sequence[Path], target: float, as_json: bool) -> None:
    """What it took each recipe to reach a target of the headline metric."""
    recorded = read.read_runs(runs)
    with read.explain_damaged_runs(recorded):
        require_one_task(recorded, "ask for the target of one of them")
        parts = tables.group_runs(recorded)
        metric = tables.get_primary_metric(parts)
        if metric in SHARES and not 0 < target <= 1:
            raise BadInput(f"--target {target:g}: {metric} is a share from 0 to 1, such as 0.8")
        rows = results.compare_target_costs(parts, target)
        if as_json:
            rows_with_target = [asdict(row) | {"metric": metric, "target": target} for row in rows]
            print(json.dumps(rows_with_target, indent=1))
            return
        units = tables.choose_units(parts)
        shown = list_spent_costs(lambda cost: max(row.costs[cost.name].mean or 0 for row in rows))
        heads = [f"{cost.label} {units[cost.name][1]}".strip() for cost in shown]
        lines = []
        for row in rows:
            scaled = [(row.costs[cost.name].divide_by(units[cost.name][0]), cost) for cost in shown]
            cells = [interval.format_interval(cost.digits) for interval, cost in scaled]
            lines.append([row.label, f"{row.reached} of {row.runs}", *cells])
        print_table(
            f"to {format_metric_value(metric, target)} {metric} of the final model",
            ["recipe", "reached", *heads],
            lines,
        )
