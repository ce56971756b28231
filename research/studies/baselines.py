"""The field's baselines beside FLrce: settings searched by one rule with one budget for all, then
five other seeds.

    python research/studies/baselines.py search  --out DIR [--tasks fed-heart] [--data CACHE] [--device cuda]
    [--share 0/4]
    python research/studies/baselines.py confirm --out DIR ...       the settings that the search's lines in DIR speak for
    python research/studies/baselines.py table   --out DIR           research/docs/baselines.md's tables, from the lines alone

plans/baselines.json holds tasks, methods, settings and the rule. Every run is a line of
DIR/PHASE-TASK[-SHARE].jsonl; one that is there is not run again, so that several processes may
share the work and a killed one goes on. On a GPU, runs that stack are trained together; `--stacked`
takes only those, `--alone` the others.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np

from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce_reproduction.execute import load_dataset

PLAN = Path(__file__).parent / "plans" / "baselines.json"
FIGURES = ("value", "metric", "rounds", "bytes_up", "bytes_down", "joules", "stopped")
ALONE = ("moon",)  # what a stack leaves to torch, one client after another


def settings(plan, task, method):
    """The four settings of a method on a task: rates of clients, or two of them by two of its own
    knob.
    """
    found, table = plan["methods"][method], plan["tasks"][task]
    rates, two = (table.get(key, plan[key]) for key in ("rates", "two_rates"))
    if "knob" not in found:
        return [(lr, {}) for lr in rates]
    name, values = found["knob"]
    return [(lr, {name: value}) for value in values for lr in two]


def experiment(plan, task, method, setting, seed, device):
    lr, knobs = setting
    tables, found = plan["tasks"][task]["tables"], plan["methods"][method]
    engine = {"device": device, "workers": 1, "eval_every": tables["rounds"] // 5}
    given = {
        "seed": seed,
        "recipe": found["recipe"] | knobs,
        "train": tables["train"] | {"lr": lr},
        "engine": engine,
    }
    return Experiment.from_tables(tables | given)


def methods(plan, task):
    return [
        method for method in plan["methods"] if method not in plan["tasks"][task].get("without", {})
    ]


def large(source, least):
    """The data without groups of fewer samples."""
    if least <= 1:
        return source
    count = np.bincount(source.group)
    keep = np.flatnonzero(count[source.group] >= least)
    _, group = np.unique(source.group[keep], return_inverse=True)
    return replace(source, x=source.x[keep], y=source.y[keep], group=group)


def lines(folder, phase):
    """All finished runs of a phase."""
    found = []
    for path in sorted(folder.glob(f"{phase}-*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def best(plan, task, method, searched):
    """The setting that the rule takes; None while its search is not done."""
    task = plan["tasks"][task].get("settings_of", task)
    tried = settings(plan, task, method)
    values = {
        json.dumps(row["setting"]): row["value"]
        for row in searched
        if (row["task"], row["method"]) == (task, method)
    }
    known = [values.get(json.dumps(setting)) for setting in json.loads(json.dumps(tried))]
    if None in known:
        return None
    return tried[max(range(len(tried)), key=lambda i: (known[i], -i))]


def wanted(plan, phase, tasks, folder):
    """(task, method, setting, seed) of all runs of a phase."""
    searched = lines(folder, "search")
    for task in tasks:
        for method in methods(plan, task):
            if phase == "search" and "settings_of" not in plan["tasks"][task]:
                tried = settings(plan, task, method)
            else:
                setting = best(plan, task, method, searched) if phase == "confirm" else None
                tried = [] if setting is None else [setting]
            for setting in tried:
                for seed in plan[phase]:
                    yield task, method, setting, seed


def row(key, result):
    task, method, setting, seed = key
    last = result.history[-1]
    figures = {name: result.summary[name] for name in FIGURES}
    if not math.isfinite(figures["value"] or math.nan):  # a run that diverged is the worst there is
        figures["value"] = 0.0
    told = {
        "task": task,
        "method": method,
        "setting": setting,
        "seed": seed,
        "last": result.summary["value_last"],
    }
    curve = [
        [h.t, round(h.final_model_metric, 5)]
        for h in result.history
        if h.final_model_metric is not None
    ]
    return told | figures | {"pooled": dict(last.pooled), "curve": curve}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=["search", "confirm", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--methods", default="")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    parser.add_argument("--rounds", type=int, help="fewer rounds, to try the script")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--stack", type=int, default=12, help="how many runs a GPU trains together")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    plan = json.loads(PLAN.read_text())
    tasks = options.tasks.split(",") if options.tasks else list(plan["tasks"])
    if options.phase == "table":
        print(search_table(plan, tasks, lines(options.out, "search")))
        print(table(plan, tasks, lines(options.out, "confirm")))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    began, (part, parts) = time.monotonic(), map(int, options.share.split("/"))
    done = {
        json.dumps([r["task"], r["method"], r["setting"], r["seed"]])
        for r in lines(options.out, options.phase)
    }
    keys = [
        key
        for key in wanted(plan, options.phase, tasks, options.out)
        if json.dumps(key) not in done
    ]
    keys.sort(key=lambda key: key[3])  # a run that is cut off leaves whole seeds
    if options.methods:
        keys = [key for key in keys if key[1] in options.methods.split(";")]
    if options.stacked or options.alone:
        keys = [key for key in keys if (key[1] in ALONE) == options.alone]
    least = {
        table["tables"]["data"]["name"]: table.get("least", 1) for table in plan["tasks"].values()
    }
    find = cache(lambda name: large(load_dataset(name, options.data, verify=False), least[name]))

    def job(key):
        found = experiment(plan, *key, options.device)
        return found.model_copy(update={"rounds": options.rounds}) if options.rounds else found

    def keep(key, result):
        name = f"{options.phase}-{key[0]}{f'-{part}' if parts > 1 else ''}{'-alone' if options.alone else ''}.jsonl"
        with open(options.out / name, "a") as file:
            file.write(json.dumps(row(key, result)) + "\n")

    for task in tasks:
        mine = [key for key in keys if key[0] == task][part::parts]
        together = [
            key
            for key in mine
            if options.stacked or (options.device == "cuda" and key[1] not in ALONE)
        ]
        for first in range(0, len(together), options.stack):
            some = together[first : first + options.stack]
            if time.monotonic() - began < options.seconds:
                jobs = [(job(key), None) for key in some]
                found = runs.run_in_process(
                    jobs, data=find, device=options.device, beside=max(1, parts // 2)
                )
                for key, result in zip(some, found, strict=True):
                    keep(key, result)
        for key in mine:
            if key not in together and time.monotonic() - began < options.seconds:
                keep(key, runs.run(job(key), data=find(job(key).data.name), allow_divergence=True))
        print(f"{task}: {len(mine)} runs, {time.monotonic() - began:.0f} s", flush=True)


def search_table(plan, tasks, rows):
    """What every setting reached on the search's one seed; the one that the rule takes is
    marked.
    """
    text = []
    for task in tasks:
        mine = [r for r in rows if r["task"] == task]
        if not mine:
            continue
        text += [
            "",
            f"### {task}: search, seed 0, {mine[0]['metric']} in %",
            "",
            "| method | four settings | taken |",
        ]
        text += ["|---|---|---|"]
        for method in methods(plan, task):
            tried = [r for r in mine if r["method"] == method]
            taken = best(plan, task, method, rows)
            told = [f"{shown(r['setting'])}: {100 * r['value']:.1f}" for r in tried]
            text.append(
                f"| {method} | {'; '.join(told) or 'not run'} | {shown(taken) if taken else ''} |"
            )
    return "\n".join(text)


def shown(setting):
    lr, knobs = setting
    return ", ".join([f"lr {lr:g}", *(f"{key} {value:g}" for key, value in knobs.items())])


def table(plan, tasks, rows):
    """One table a task: mean and 95 % interval over seeds, and the difference to FedAvg, paired by
    seed.
    """
    from scipy.stats import t as student

    def interval(values):
        if len(values) < 2:
            return f"{100 * mean(values):.1f}"
        centre = mean(values)
        spread = (sum((v - centre) ** 2 for v in values) / (len(values) - 1)) ** 0.5
        return (
            f"{100 * centre:.1f} ±"
            f" {100 * student.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5:.1f}"
        )

    text = []
    for task in tasks:
        mine = [r for r in rows if r["task"] == task]
        if not mine:
            continue
        values = {
            m: {r["seed"]: r["value"] for r in mine if r["method"] == m} for m in plan["methods"]
        }
        text += [
            "",
            f"### {task}",
            "",
            "| method | setting | " + mine[0]["metric"] + ", % | minus FedAvg | seeds |",
            "|---|---|---|---|---|",
        ]
        for method, found in values.items():
            if not found:
                why = plan["tasks"][task].get("without", {}).get(method, "not run")
                text.append(f"| {method} | | {why} | | |")
                continue
            one = next(r for r in mine if r["method"] == method)
            told = shown(one["setting"])
            paired = [
                found[s] - values["fedavg"][s] for s in sorted(found) if s in values["fedavg"]
            ]
            minus = "" if method == "fedavg" or not paired else interval(paired)
            text.append(
                f"| {method} | {told} | {interval(list(found.values()))} | {minus} | {len(found)} |"
            )
    return "\n".join(text)


if __name__ == "__main__":
    main()
