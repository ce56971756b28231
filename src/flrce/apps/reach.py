"""flrce reach runs/all --target 0.8"""

import json
from dataclasses import asdict
from pathlib import Path

from flrce.apps.show import table
from flrce.errors import BadInput
from flrce.results import reach as results
from flrce.results import tables
from flrce.results.tasks import require_one_task
from flrce.store import headline as words
from flrce.store import read

DIGITS = {"rounds": 0}  # of the others 2
HEADS = {"rounds": "rounds", "seconds": "time", "joules": "energy", "bytes": "traffic", "grams": "CO2"}


def reach(runs: list[Path], target: float, as_json: bool) -> None:
    """What it took each recipe to reach a target of the headline metric."""
    found = read.find(runs)
    with read.careful(found):
        require_one_task(found, "ask for the target of one of them")
        parts = tables.groups(found)
        metric = tables.metric(parts)
        if metric in words.SHARES and not 0 < target <= 1:
            raise BadInput(f"--target {target:g}: {metric} is a share from 0 to 1, such as 0.8")
        rows = results.rows(parts, target)
        if as_json:
            told = [asdict(row) | {"metric": metric, "target": target} for row in rows]
            print(json.dumps(told, indent=1))
            return
        units = {**tables.units(parts), "rounds": (1.0, "")}
        shown = [name for name in HEADS if name != "grams" or any(row.costs[name].mean for row in rows)]
        heads = ["recipe", "reached", *(f"{HEADS[name]} {units[name][1]}".strip() for name in shown)]
        lines = []
        for row in rows:
            costs = [row.costs[name].per(units[name][0]).text(DIGITS.get(name, 2)) for name in shown]
            lines.append([row.label, f"{row.reached} of {row.runs}", *costs])
        table(f"to {words.shown(metric, target)} {metric}, handed back", heads, lines)
