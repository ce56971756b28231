"""flrce reach runs/all --target 0.8"""

import json
from dataclasses import asdict
from pathlib import Path

from flrce.cli.terminal import print_table
from flrce.errors import BadInput
from flrce.report import tables
from flrce.report import target_costs as results
from flrce.report.tasks import require_one_task
from flrce.storage import metric_format as words
from flrce.storage import read

COST_DIGITS = {"rounds": 0}  # of the others 2
COST_HEADINGS = {
    "rounds": "rounds",
    "seconds": "time",
    "joules": "energy",
    "bytes": "traffic",
    "grams": "CO2",
}


def show_target_costs(runs: list[Path], target: float, as_json: bool) -> None:
    """What it took each recipe to reach a target of the headline metric."""
    found = read.read_runs(runs)
    with read.explain_damaged_runs(found):
        require_one_task(found, "ask for the target of one of them")
        parts = tables.group_runs(found)
        metric = tables.get_primary_metric(parts)
        if metric in words.SHARES and not 0 < target <= 1:
            raise BadInput(f"--target {target:g}: {metric} is a share from 0 to 1, such as 0.8")
        rows = results.compare_target_costs(parts, target)
        if as_json:
            told = [asdict(row) | {"metric": metric, "target": target} for row in rows]
            print(json.dumps(told, indent=1))
            return
        units = {**tables.choose_units(parts), "rounds": (1.0, "")}
        shown = [
            name
            for name in COST_HEADINGS
            if name != "grams" or any(row.costs[name].mean for row in rows)
        ]
        heads = [
            "recipe",
            "reached",
            *(f"{COST_HEADINGS[name]} {units[name][1]}".strip() for name in shown),
        ]
        lines = []
        for row in rows:
            costs = [
                row.costs[name].divide_by(units[name][0]).format_interval(COST_DIGITS.get(name, 2))
                for name in shown
            ]
            lines.append([row.label, f"{row.reached} of {row.runs}", *costs])
        print_table(
            f"to {words.format_metric_value(metric, target)} {metric}, handed back", heads, lines
        )
