"""Bytes and joules until a model is as good as FedAvg's: `frugal`, its parts and its rivals.

    python research/studies/savings.py run --plan research/studies/plans/savings.json \
        --data CACHE --out DIR [--tasks femnist,cifar10] [--rows "fedavg;frugal"] [--device cuda]
        [--share 0/4]
    python research/studies/savings.py table --plan PLAN --out DIR [--csv FILE]

The plan holds tasks, rows, seeds and the rule. A run that is in DIR is not made again. CACHE holds
prepared data sets (`flrce data prepare`).
"""

import argparse
import gzip
import json
import time
from pathlib import Path

from savings_tables import format_tables, read_lines

from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce_reproduction.execute import load_dataset

PLAN_KEYS = (
    "rows",
    "train by row",
    "model by row",
)  # of a task: for the study, not for the experiment


def build_experiment(plan, task, row, seed, device):
    """The experiment of one cell of the plan."""
    own = {key: value for key, value in plan["tasks"][task].items() if key not in PLAN_KEYS}
    common = plan["all"]
    recipe = {**plan["rows"][row]}
    if recipe.pop("averaged", True):
        recipe["average"] = plan["average"]
    tables = {
        **common,
        **own,
        "seed": seed,
        "recipe": recipe,
        "data": {**common["data"], **own["data"]},
        "engine": {**common["engine"], "device": device},
    }
    if tables["data"]["partition"] in ("natural", "given"):
        tables["data"].pop("alpha", None)
    for table in ("train", "model"):
        by_row = plan["tasks"][task].get(f"{table} by row", {}).get(row, {})
        if merged := {**own.get(table, {}), **by_row}:
            tables[table] = merged
    return Experiment.from_tables(tables)


def list_cells(plan, task, wanted=""):
    """(task, row, seed), seed by seed, so that a run that is cut leaves whole seeds."""
    rows = plan["tasks"][task].get("rows") or list(plan["rows"])
    chosen = [row for row in rows if not wanted or row in wanted.split(";")]
    return [(task, row, seed) for seed in plan["seeds"] for row in chosen]


def run_cells(options, plan):
    """Run what is missing and append one line for each run."""
    part, parts = map(int, options.share.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    done = set(read_lines(options.out))
    until = time.monotonic() + options.seconds
    for task in options.tasks.split(",") if options.tasks else plan["tasks"]:
        cells = [
            cell for cell in list_cells(plan, task, options.rows)[part::parts] if cell not in done
        ]
        if not cells or time.monotonic() > until:
            continue
        name = plan["tasks"][task]["data"]["name"]
        source = load_dataset(name, options.data, verify=False)
        for start in range(0, len(cells), options.together):
            if time.monotonic() > until:
                break
            batch = cells[start : start + options.together]
            append_lines(
                options.out / f"savings-{part}.jsonl.gz", run_batch(batch, plan, source, options)
            )
            print(
                f"{batch[0]}: {len(batch)} runs, {until - time.monotonic():.0f} s left", flush=True
            )


def run_batch(cells, plan, source, options):
    """One line for each cell; on a GPU the cells train together."""
    experiments = [build_experiment(plan, *cell, options.device) for cell in cells]
    histories = [[] for _ in cells]
    runs.run_in_process(
        [(experiment, None) for experiment in experiments],
        data=lambda _: source,
        watch=lambda i, done: histories[i].append(done.record),
        device=options.device,
        beside=int(options.share.split("/")[1]),
    )
    return [
        describe_run(cell, experiment, history)
        for cell, experiment, history in zip(cells, experiments, histories, strict=True)
    ]


def describe_run(cell, experiment, history):
    """Metrics and costs by round."""
    return {
        "key": cell,
        "sweep": -(-experiment.clients // experiment.per_round),
        "averaged": round_values(record.final_model_metric for record in history),
        "last": round_values(record.last_model_metric for record in history),
        "joules": round_values(record.joules for record in history),
        "bytes_up": [record.bytes_up for record in history],
        "bytes_down": [record.bytes_down for record in history],
        "bytes_framing": [record.bytes_framing for record in history],
        # reports of clients on the model they were sent: a stop rule can be replayed on them
        "replied": [list(record.replied) for record in history],
        "held": [list(record.held) for record in history],
        "holdouts": [round_values(record.holdouts) for record in history],
    }


def round_values(values):
    return [None if value is None else float(f"{value:.6g}") for value in values]


def append_lines(path, lines):
    with gzip.open(path, "at") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks")
    parser.add_argument("--rows", default="", help="of the plan, separated by semicolons")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=1, help="runs that share one computation")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    parser.add_argument("--csv", type=Path, help="write the table there too")
    options = parser.parse_args()
    plan = json.loads(options.plan.read_text())
    if options.command == "run":
        run_cells(options, plan)
    else:
        print(format_tables(plan, read_lines(options.out), options.csv))


if __name__ == "__main__":
    main()
