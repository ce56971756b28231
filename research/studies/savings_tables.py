"""The tables of `savings.py`: what each row costs until it is as good as FedAvg."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
from scipy import stats

COST_COLUMNS = (
    ("bytes", "averaged"),
    ("bytes", "last"),
    ("joules", "averaged"),
    ("joules", "last"),
)
BYTE_FIELDS = ("bytes_up", "bytes_down", "bytes_framing")  # framing: seeds, hashes, figures
HEADINGS = (
    "task",
    "row",
    "seeds",
    "points after the same rounds",
    "bytes to FedAvg + average",
    "bytes to plain FedAvg",
    "joules to FedAvg + average",
    "joules to plain FedAvg",
    "not reached",
)


def read_lines(folder: Path):
    """(task, row, seed) -> metrics and costs by round, of all runs in a folder."""
    lines = {}
    for path in sorted(folder.glob("savings-*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            for line in map(json.loads, file):
                lines[tuple(line["key"])] = line
    return lines


def compute_levels(line, model):
    """(T,) the mean of the evaluations of the last sweep; nan before a whole sweep."""
    values = np.array([np.nan if value is None else value for value in line[model]])
    levels = np.full(len(values), np.nan)
    for t in range(line["sweep"], len(values) + 1):
        window = values[t - line["sweep"] : t]
        levels[t - 1] = np.nanmean(window) if np.isfinite(window).any() else np.nan
    return levels


def sum_costs(line, t):
    """Bytes and joules of the first t rounds."""
    return {
        "bytes": sum(sum(line.get(name, ())[:t]) for name in BYTE_FIELDS),
        "joules": sum(line["joules"][:t]),
    }


def find_round(line, model, target):
    """The first round whose level has the target; None if there is none."""
    hits = np.flatnonzero(compute_levels(line, model) >= target)
    return int(hits[0]) + 1 if len(hits) else None


def compute_interval(values):
    """(mean, half of the 95 % interval by Student's t)."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return float(values.mean()) if len(values) else np.nan, np.nan
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def format_ratio(logs):
    """How many times fewer: geometric mean and 95 % interval."""
    if not len(logs):
        return "-"
    mean, half = compute_interval(logs)
    if len(logs) < 3:  # an interval of two values says nothing
        return f"{np.exp(mean):.1f}"
    return f"{np.exp(mean):.1f} [{np.exp(mean - half):.1f}, {np.exp(mean + half):.1f}]"


def list_log_ratios(plan, lines, task, row, model, cost):
    """(log ratios of the base's cost over the row's, seeds in which the row misses the target).

    The target is the base's level after `plan["reference"]` rounds, the mean over seeds. Both sides
    pay until their own level has it.
    """
    seeds = list_seeds(plan, lines, task, row)
    reference = plan["reference"]
    bases = {seed: lines[task, plan["base"], seed] for seed in seeds}
    target = np.mean([compute_levels(bases[s], model)[reference - 1] for s in seeds])
    logs, missed = [], 0
    for seed in seeds:
        line = lines[task, row, seed]
        ours = find_round(line, "averaged" if row != plan["base"] else model, target)
        base = find_round(bases[seed], model, target)
        if ours is None:
            missed += 1
            continue
        spent = sum_costs(bases[seed], base or len(bases[seed]["last"]))[cost]
        logs.append(np.log(spent / sum_costs(line, ours)[cost]))
    return logs, missed


def list_seeds(plan, lines, task, row):
    """Seeds of which the row and the base have a run."""
    return [
        seed
        for seed in plan["seeds"]
        if (task, row, seed) in lines and (task, plan["base"], seed) in lines
    ]


def list_differences(plan, lines, task, row):
    """Points of the averaged model over the base's, seed by seed, after the reference rounds."""
    at = plan["reference"] - 1
    return [
        100
        * (
            compute_levels(lines[task, row, seed], "averaged")[at]
            - compute_levels(lines[task, plan["base"], seed], "averaged")[at]
        )
        for seed in list_seeds(plan, lines, task, row)
    ]


def build_rows(plan, lines):
    """The table's cells, task by task, and the geometric mean over tasks at the end."""
    for task in plan["tasks"]:
        for row in plan["rows"]:
            seeds = list_seeds(plan, lines, task, row)
            if not seeds:
                continue
            mean, half = compute_interval(list_differences(plan, lines, task, row))
            ratios = [
                list_log_ratios(plan, lines, task, row, model, cost) for cost, model in COST_COLUMNS
            ]
            cells, missed = [format_ratio(logs) for logs, _ in ratios], [n for _, n in ratios]
            lost = f"{missed[0]} / {missed[1]}"
            yield [task, row, len(seeds), f"{mean:+.2f} ± {half:.2f}", *cells, lost]
    means = compute_task_means(plan, lines)
    for row in [*plan["rows"], *plan.get("best of", {})]:
        logs = [
            [means[task, row, *column] for task in plan["tasks"] if (task, row, *column) in means]
            for column in COST_COLUMNS
        ]
        if any(logs):
            tasks = "/".join(str(len(values)) for values in logs)
            yield ["all tasks", row, f"{tasks} tasks", "", *map(format_ratio, logs), ""]


def compute_task_means(plan, lines):
    """(task, row, cost, model) -> mean log ratio, where most seeds reach the target."""
    means = {}
    for task in plan["tasks"]:
        for row in plan["rows"]:
            seeds = list_seeds(plan, lines, task, row)
            for cost, model in COST_COLUMNS if seeds else ():
                logs, failures = list_log_ratios(plan, lines, task, row, model, cost)
                if failures <= len(seeds) / 2:
                    means[task, row, cost, model] = np.mean(logs)
    return means | choose_best_rows(plan, means)


def choose_best_rows(plan, means):
    """In each task the figures of the row with the fewest bytes to FedAvg + average, of those that
    the plan counts as one.
    """
    chosen = {}
    for name, members in plan.get("best of", {}).items():
        for task in plan["tasks"]:
            reached = [row for row in members if (task, row, *COST_COLUMNS[0]) in means]
            best = max(reached, key=lambda row: means[task, row, *COST_COLUMNS[0]], default=None)
            for column in COST_COLUMNS:
                if (task, best, *column) in means:
                    chosen[task, name, *column] = means[task, best, *column]
    return chosen


def format_tables(plan, lines, path=None):
    """A Markdown table, and the same as csv."""
    rows = [[str(cell) for cell in row] for row in build_rows(plan, lines)]
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADINGS, *rows])
    text = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in text)
