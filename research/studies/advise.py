"""Is what `flrce advise` recommends as good as the best of 12 methods x 5 rates in hindsight?

    python research/studies/advise.py prepare --data RAW --out DIR
    python research/studies/advise.py grid   --data DIR --out LINES --tasks develop [--processes 16]
    python research/studies/advise.py advise --data DIR --out LINES --tasks confirm
    python research/studies/advise.py table  --out LINES

plans/advise-2.json has tasks, budgets, seeds and goals. `grid` trains every method at every rate
until the whole budget's joules are spent. `advise` searches on one seed; what it recommends is run
on another one, that of the grid, with the joules that the search left. Every run is one line of a
jsonl file in LINES; a run that is there is not made again. RAW holds heart.npz, tabular.npz,
femnist.npz, chars74k.npz and smartwatch.npz.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from advise_data import load_task_data, prepare_tasks

from flrce.config.experiment import Experiment
from flrce.core.intervals import confidence_interval
from flrce.simulation import runs
from flrce_arena.plan import merge_tables

PLAN = json.loads((Path(__file__).parent / "plans" / "advise-2.json").read_text())
TASKS = {**PLAN["develop"], **PLAN["confirm"]}
PRICED_ROUNDS = 10  # of FedAvg, whose mean cost prices the budget
MAX_LENGTH = 3  # rounds of one run, as a multiple of the budget's
EVAL_EVERY = 5
AVERAGE = {"average": {"piece": "ema", "ease": 4, "level": 0.15}}
GRID = {
    "fedavg": {"name": "fedavg"},
    "fedavg + average": {"name": "fedavg", **AVERAGE},
    "scaffold": {"name": "scaffold"},
    "scaffold + average": {"name": "scaffold", **AVERAGE},
    "fedadam": {"name": "fedadam"},
    "fedyogi": {"name": "fedyogi"},
    "fedavgm": {"name": "fedavgm"},
    "fedprox": {"name": "fedprox"},
    "feddyn": {"name": "feddyn"},
    "fedexp": {"name": "fedexp"},
    "flrce": {"name": "flrce-no-stop", "preset": "default"},
    "frugal": {"name": "frugal", "stop": {"piece": "never"}},
}

load_data = cache(load_task_data)


def build_experiment(task, seed, **tables):
    given = {key: value for key, value in TASKS[task].items() if key != "budget_rounds"}
    base = {
        "seed": seed,
        "rounds": MAX_LENGTH * TASKS[task]["budget_rounds"],
        "train": {"lr": PLAN["own_rate"]},
        "engine": {"device": "cpu", "workers": 1, "eval_every": EVAL_EVERY},
    }
    return Experiment.from_tables(merge_tables(base, given, tables))


@cache
def price_budget(task, seed, folder):
    """Joules that FedAvg spends in the task's number of rounds."""
    few = build_experiment(task, seed, recipe={"name": "fedavg"}, rounds=PRICED_ROUNDS)
    history = runs.run(few, data=load_data(task, folder), allow_divergence=True).history
    return TASKS[task]["budget_rounds"] * sum(h.joules for h in history) / len(history)


def find_metric_within(history, joules):
    """The metric of the last model that was evaluated before the joules were spent."""
    spent, metric = 0.0, None
    for h in history:
        spent += h.joules
        if spent > joules:
            break
        metric = h.final_model_metric if h.final_model_metric is not None else metric
    return metric


def run_grid_cell(folder, cell):
    """[round, metric, joules] at each evaluation, so that shorter budgets can be read from it."""
    task, method, rate, seed = cell
    joules = price_budget(task, seed, folder)
    experiment = build_experiment(
        task,
        seed,
        recipe=GRID[method],
        train={"lr": float(f"{rate * PLAN['own_rate']:.3g}")},
        stop={"joules": joules},
    )
    history = runs.run(experiment, data=load_data(task, folder), allow_divergence=True).history
    spent, curve = 0.0, []
    for h in history:
        spent += h.joules
        if h.final_model_metric is not None:
            curve.append([h.t, round(h.final_model_metric, 5), round(spent, 3)])
    value = find_metric_within(history, joules)
    return {"joules": joules, "value": value, "curve": curve}


def run_advice(folder, cell):
    from flrce_arena.advise import SearchBudget, advise_recipe

    task, _, _, seed = cell
    joules = price_budget(task, seed, folder)
    data = load_data(task, folder)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        advice = advise_recipe(
            build_experiment(task, seed + PLAN["search_seed_offset"]),
            SearchBudget(joules=joules),
            Path(work),
            data=data,
            seeds=1,
        )
    took = time.monotonic() - began
    left = joules - advice.spent["joules"]
    history = runs.run(advice.experiment.with_seed(seed), data=data, allow_divergence=True).history
    return {
        "joules": joules,
        "value": find_metric_within(history, left),
        "advised": advice.label,
        "rounds": advice.experiment.rounds,
        "searched": advice.spent["joules"],
        "tried": [list(vars(each).values()) for each in advice.tried],
        "seconds": round(took, 1),
    }


def list_seeds(task):
    return PLAN["seeds"]["develop" if task in PLAN["develop"] else "confirm"]


def list_task_seeds(tasks, count):
    """The first seed of every task, then the second: an unfinished grid covers every task."""
    return [
        (task, list_seeds(task)[i])
        for i in range(count)
        for task in tasks
        if i < len(list_seeds(task))
    ]


def list_grid_cells(tasks, seeds, methods, rates):
    for task, seed in list_task_seeds(tasks, seeds):
        for method in methods:
            yield from ((task, method, rate, seed) for rate in rates)


def list_advice_cells(tasks, seeds):
    return [(task, "advise", 1.0, seed) for task, seed in list_task_seeds(tasks, seeds)]


def read_lines(folder):
    """(task, method, rate, seed) -> its line."""
    lines = {}
    for path in sorted(folder.glob("advise-2-*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            lines[line["task"], line["method"], line["rate"], line["seed"]] = line
    return lines


def run_cells(cells, run_one, out, processes):
    """Every cell that has no line yet; one process each, a line as soon as it ends."""
    out.parent.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if cell not in read_lines(out.parent)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool, open(out, "a") as file:
        pending = {pool.submit(run_one, cell): cell for cell in missing}
        for count, done in enumerate(as_completed(pending), 1):
            line = dict(zip(("task", "method", "rate", "seed"), pending[done], strict=True))
            file.write(json.dumps(line | done.result()) + "\n")
            file.flush()
            if count % 50 == 0:
                print(f"{count} of {len(missing)}", flush=True)


def read_percent(lines, key):
    """A run's metric in %; 0 where it never had a model."""
    return 100 * (lines[key]["value"] or 0.0)


def find_whole_seeds(lines, task):
    """Seeds with a run of every method at every rate."""
    return [
        seed
        for seed in list_seeds(task)
        if all((task, m, r, seed) in lines for m in GRID for r in PLAN["rates"])
    ]


def format_mean(values):
    return confidence_interval(values).format_interval(1) if values else "--"


def format_difference(values, others):
    return format_mean([a - b for a, b in zip(values, others, strict=True)])


def print_table(lines, tasks):
    """Advice beside the best of the grid, FedAvg at the task's own rate, and each method's best."""
    print(
        "| task | seeds of the grid | advice, these seeds | best of the grid | minus the best |"
        " advice, all seeds | minus FedAvg, own rate | searched, at most |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for task in tasks:
        whole = find_whole_seeds(lines, task)
        runs_made = {seed: read_percent(lines, (task, "advise", 1.0, seed)) for seed in whole}
        values = {
            (m, r): [read_percent(lines, (task, m, r, seed)) for seed in whole]
            for m in GRID
            for r in PLAN["rates"]
        }
        best = max(values, key=lambda key: sum(values[key]))
        named = f"{best[0]}, {best[1]:g} x: {format_mean(values[best])}" if whole else "--"
        own = [s for s in list_seeds(task) if (task, "fedavg", 1.0, s) in lines]
        advised = [read_percent(lines, (task, "advise", 1.0, s)) for s in own]
        fedavg = [read_percent(lines, (task, "fedavg", 1.0, s)) for s in own]
        mine = [line for key, line in lines.items() if key[:2] == (task, "advise")]
        searched = max(line["searched"] / line["joules"] for line in mine)
        print(
            f"| {task} | {', '.join(map(str, whole)) or 'none'} |"
            f" {format_mean(list(runs_made.values()))} | {named} |"
            f" {format_difference(list(runs_made.values()), values[best]) if whole else '--'} |"
            f" {format_mean(advised)} | {format_difference(advised, fedavg)} |"
            f" {100 * searched:.0f} % |"
        )
    print("\n| task | " + " | ".join(GRID) + " |\n|---|" + "---|" * len(GRID))
    for task in tasks:
        whole, row = find_whole_seeds(lines, task), []
        for method in GRID:
            tried = {
                rate: sum(read_percent(lines, (task, method, rate, s)) for s in whole) / len(whole)
                for rate in PLAN["rates"]
                if whole
            }
            rate = max(tried, key=tried.get, default=None)
            row.append("--" if rate is None else f"{tried[rate]:.1f} ({rate:g} x)")
        print(f"| {task} | " + " | ".join(row) + " |")
    print("\n| task | seed | advised | rounds |\n|---|---|---|---|")
    for task in tasks:
        for line in (line for key, line in lines.items() if key[:2] == (task, "advise")):
            print(f"| {task} | {line['seed']} | {line['advised']} | {line['rounds']} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=["prepare", "grid", "advise", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--tasks", default="confirm", help="develop, confirm, or names with commas")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, help="only so many of the plan's seeds")
    parser.add_argument("--methods", nargs="+", default=list(GRID), help="of the grid; all")
    parser.add_argument("--rates", nargs="+", type=float, default=PLAN["rates"], help="of the grid")
    options = parser.parse_args()
    parts = (PLAN.get(part, [part]) for part in options.tasks.split(","))
    tasks = [task for part in parts for task in part]
    if options.phase == "prepare":
        prepare_tasks(Path(options.data), options.out)
        return
    if options.phase == "table":
        print_table(read_lines(options.out), tasks)
        return
    cells, run_one = (
        (list_grid_cells(tasks, options.seeds, options.methods, options.rates), run_grid_cell)
        if options.phase == "grid"
        else (list_advice_cells(tasks, options.seeds), run_advice)
    )
    name = options.tasks.replace(",", "-")
    out = options.out / f"advise-2-{options.phase}-{name}.jsonl"
    run_cells(list(cells), partial(run_one, options.data), out, options.processes)


if __name__ == "__main__":
    main()
