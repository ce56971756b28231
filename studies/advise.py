"""Is what `flrce advise` says as good as the best fixed recipe, its own search paid for? On data it was not tuned on.

    python studies/advise.py run   --out DIR [--data CACHE] [--tasks smartwatch] [--share 0/4] [--seconds 300]
    python studies/advise.py table --out studies/lines

plans/advise.json holds tasks, budget and rule. Fixed recipes are advise's own candidates, each with each of three
rates, trained until the budget's joules are spent; advice searches on one seed, and what it advises is run on another
one, that of the fixed runs, with the joules that the search has left. Every run is a line of DIR/advise-SHARE.jsonl;
one that is there is not run again.
"""

import argparse
import json
import math
import tempfile
import time
from functools import cache
from pathlib import Path

from flrce import runs
from flrce.arena import advise
from flrce.config import Experiment
from flrce.results.paper.execute import load

PLAN = Path(__file__).parent / "plans" / "advise.json"
ADVICE = "advise"


def experiment(plan, task, seed):
    tables = plan["tasks"][task]
    return Experiment.of(tables | {"seed": seed, "engine": {"device": "cpu", "workers": 1, **tables["engine"]}})


def fixed(plan, task, seed):
    """Label -> experiment, of every candidate with every rate."""
    base = experiment(plan, task, seed)
    with tempfile.TemporaryDirectory() as work:
        return {c.label: c.experiment for c in advise.field_of(base, advise.CANDIDATES, Path(work))}


def budget(plan, task, seed, data):
    """Joules that FedAvg spends in the plan's number of rounds."""
    base = experiment(plan, task, seed)
    few = Experiment.of(base.model_dump(exclude_none=True) | {"recipe": {"name": "fedavg"}, "rounds": plan["sample"]})
    history = runs.run(few, data=data).history
    return plan["rounds"] * sum(h.joules for h in history) / len(history)


def within(history, joules):
    """The last model judged before the joules were spent, and what was spent by then."""
    total, best = 0.0, None
    for h in history:
        total += h.joules
        if total > joules:
            break
        best = h.handed if h.handed is not None else best
    return best


def one(plan, task, label, seed, data):
    joules = budget(plan, task, seed, data)
    if label != ADVICE:
        each = fixed(plan, task, seed)[label]
        stop = {"joules": joules}
        whole = Experiment.of(each.model_dump(exclude_none=True) | {"rounds": plan["most"], "stop": stop})
        return {"joules": joules, "value": within(runs.run(whole, data=data).history, joules)}
    base = experiment(plan, task, seed + plan["apart"])
    asked = Experiment.of(base.model_dump(exclude_none=True) | {"rounds": plan["most"]})
    with tempfile.TemporaryDirectory() as work:
        found = advise.advise(asked, advise.Budget(joules=joules), Path(work), data=data, seeds=1)
    left = joules - found.spent["joules"]
    history = runs.run(found.experiment.with_seed(seed), data=data).history
    told = {"advised": found.label, "rounds": found.experiment.rounds, "searched": found.spent["joules"]}
    return {"joules": joules, "value": history[-1].handed, "within": within(history, left), **told}


def wanted(plan, tasks):
    """(task, label, seed) of all runs: advice and fixed recipes at the tasks' own rates first, then other rates."""
    every = [(task, label, seed) for seed in plan["seeds"] for task in tasks for label in fixed(plan, task, seed)]
    first = [(task, ADVICE, seed) for seed in plan["seeds"] for task in tasks]
    first += [key for key in every if key[1].endswith(own(plan, key[0]))]
    first.sort(key=lambda key: (key[2], tasks.index(key[0])))  # what there is of an unfinished study has whole seeds
    return [*first, *(key for key in every if key not in first)]


def own(plan, task):
    """The end of labels with the task's own rate."""
    return f", lr {plan['tasks'][task]['train']['lr']:g}"


def lines(folder):
    found = []
    for path in sorted(folder.glob("advise*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["run", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--plan", type=Path, default=PLAN)
    options = parser.parse_args()
    plan = json.loads(options.plan.read_text())
    tasks = options.tasks.split(",") if options.tasks else list(plan["tasks"])
    if options.phase == "table":
        print(table(plan, lines(options.out)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    began, (part, parts) = time.monotonic(), map(int, options.share.split("/"))
    done = {(r["task"], r["label"], r["seed"]) for r in lines(options.out)}
    find = cache(lambda name: load(name, options.data, verify=False))
    for key in wanted(plan, tasks)[part::parts]:
        if key in done or time.monotonic() - began > options.seconds:
            continue
        task, label, seed = key
        row = {"task": task, "label": label, "seed": seed, **one(plan, *key, find(plan["tasks"][task]["data"]["name"]))}
        with open(options.out / f"advise-{part}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - began:.0f} s: {task}, {label}, seed {seed}: {row['value']}", flush=True)


def table(plan, rows):
    """Advice beside the best fixed recipes in hindsight: with the task's own rate, and with any of three."""
    text = []
    for task in plan["tasks"]:
        mine = [r for r in rows if r["task"] == task]
        values = {
            label: {r["seed"]: r["value"] for r in mine if r["label"] == label} for label in {r["label"] for r in mine}
        }
        advice = values.pop(ADVICE, {})
        whole = {label: found for label, found in values.items() if set(found) >= set(advice) and advice}
        if not whole:
            continue
        text += ["", f"### {task}: {len(advice)} seeds, {len(whole)} fixed recipes", ""]
        text += ["| | accuracy, % | advice minus this, points |", "|---|---|---|"]
        for heading, among in (
            ("best of the fixed recipes, the task's own rate", [x for x in whole if x.endswith(own(plan, task))]),
            ("best of the fixed recipes, any of three rates", list(whole)),
        ):
            best = max(among, key=lambda label: sum(whole[label][s] for s in advice))
            minus = [advice[s] - whole[best][s] for s in sorted(advice)]
            text.append(f"| {heading}: {best} | {shown([whole[best][s] for s in advice])} | {shown(minus)} |")
        text.append(f"| advice, search included | {shown(list(advice.values()))} | |")
        told = [r for r in mine if r["label"] == ADVICE]
        share = sum(r["searched"] / r["joules"] for r in told) / len(told)
        text += [
            "",
            f"Advised: {'; '.join(r['advised'] for r in told)}. The search took {100 * share:.0f} % of the joules.",
        ]
    return "\n".join(text)


def shown(values):
    from scipy.stats import t as student

    mean, n = sum(values) / len(values), len(values)
    if n < 2:
        return f"{100 * mean:.1f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return f"{100 * mean:.1f} ± {100 * student.ppf(0.975, n - 1) * spread / math.sqrt(n):.1f}"


if __name__ == "__main__":
    main()
