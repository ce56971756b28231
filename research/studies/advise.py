"""Is what `flrce advise` says as good as the best fixed recipe, its own search paid for?

    python research/studies/advise.py run   --out DIR [--data CACHE] [--tasks fed-heart] [--share 0/4] [--seconds 300]
    python research/studies/advise.py table --out research/studies/lines

plans/advise.json holds tasks, budget and rule. Fixed recipes are the candidates at the task's own
rate, trained until the budget's joules are spent; advice searches on one seed, and what it advises
is run on another one, that of the fixed runs, with the joules that the search has left. Every run
is a line of DIR/advise-SHARE.jsonl; what is there is not run again.
"""

import argparse
import json
import math
import tempfile
import time
from functools import cache
from pathlib import Path

from flrce.config.experiment import Experiment
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce_arena import advise
from flrce_reproduction.execute import load_dataset

PLAN = Path(__file__).parent / "plans" / "advise.json"
ADVICE = "advise"


def experiment(plan, task, seed):
    tables = plan["tasks"][task]
    return Experiment.from_tables(
        tables | {"seed": seed, "engine": {"device": "cpu", "workers": 1, **tables["engine"]}}
    )


def fixed(plan, task, seed):
    """Label -> experiment, of every candidate."""
    base = experiment(plan, task, seed)
    return {c.label: c.experiment for c in advise.build_candidates(base, advise.CANDIDATES, Path())}


def length(plan, task):
    """Rounds of FedAvg that the budget pays for."""
    return plan["fewer"].get(task, plan["rounds"])


def budget(plan, task, seed, data):
    """Joules that FedAvg spends in the plan's number of rounds."""
    base = experiment(plan, task, seed)
    few = Experiment.from_tables(
        base.model_dump(exclude_none=True)
        | {"recipe": {"name": "fedavg"}, "rounds": plan["sample"]}
    )
    history = runs.run(few, data=data, allow_divergence=True).history
    return length(plan, task) * sum(h.joules for h in history) / len(history)


def within(history, joules):
    """The last model judged before the joules were spent, and what was spent by then."""
    total, best = 0.0, None
    for h in history:
        total += h.joules
        if total > joules:
            break
        best = h.final_model_metric if h.final_model_metric is not None else best
    return best


def one(plan, task, label, seed, data):
    joules, most = budget(plan, task, seed, data), min(plan["most"], 3 * length(plan, task))
    if label != ADVICE:
        each = fixed(plan, task, seed)[label]
        stop = {"joules": joules}
        whole = Experiment.from_tables(
            each.model_dump(exclude_none=True) | {"rounds": most, "stop": stop}
        )
        return {
            "joules": joules,
            "value": within(runs.run(whole, data=data, allow_divergence=True).history, joules),
        }
    base = experiment(plan, task, seed + plan["apart"])
    asked = Experiment.from_tables(base.model_dump(exclude_none=True) | {"rounds": most})
    with tempfile.TemporaryDirectory() as work:
        found = advise.advise_recipe(
            asked, advise.SearchBudget(joules=joules), Path(work), data=data, seeds=1
        )
    left = joules - found.spent["joules"]
    history = runs.run(found.experiment.with_seed(seed), data=data, allow_divergence=True).history
    told = {
        "advised": found.label,
        "rounds": found.experiment.rounds,
        "searched": found.spent["joules"],
    }
    return {
        "joules": joules,
        "value": history[-1].final_model_metric,
        "within": within(history, left),
        **told,
    }


def wanted(plan, tasks):
    """(task, label, seed) of all runs, seed by seed."""
    for seed in plan["seeds"]:
        for task in tasks:
            yield task, ADVICE, seed
            yield from ((task, label, seed) for label in fixed(plan, task, seed))


def lines(folder):
    found = []
    for path in sorted(folder.glob("advise*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    find = cache(lambda name: load_dataset(name, options.data, verify=False))
    for key in list(wanted(plan, tasks))[part::parts]:
        if key in done or time.monotonic() - began > options.seconds:
            continue
        task, label, seed = key
        try:
            found = one(plan, *key, find(plan["tasks"][task]["data"]["name"]))
        except BadInput as why:
            print(f"{task}, {label}, seed {seed}: {why}", flush=True)
            continue
        row = {"task": task, "label": label, "seed": seed, **found}
        with open(options.out / f"advise-{part}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{time.monotonic() - began:.0f} s: {task}, {label}, seed {seed}: {row['value']}",
            flush=True,
        )


def table(plan, rows):
    """Advice, now and as it first was, beside every fixed recipe; the best of these in hindsight is
    marked.
    """
    text = []
    for task in plan["tasks"]:
        mine = [r for r in rows if r["task"] == task]
        values = {}
        for r in mine:
            values.setdefault(r["label"], {})[r["seed"]] = r["value"]
        whole = {
            label: found for label, found in values.items() if set(found) == set(plan["seeds"])
        }
        if ADVICE not in whole:
            continue
        recipes = [label for label in whole if not label.startswith(ADVICE)]
        best = max(recipes, key=lambda label: sum(whole[label].values()))
        text += ["", f"### {task}: {len(plan['seeds'])} seeds", ""]
        text += ["| | accuracy, % | minus the best fixed, points |", "|---|---|---|"]
        for label in sorted(whole, key=lambda label: -sum(whole[label].values())):
            found = [whole[label][s] for s in plan["seeds"]]
            minus = [whole[label][s] - whole[best][s] for s in plan["seeds"]]
            name = f"**{label}, search included**" if label.startswith(ADVICE) else label
            text.append(
                f"| {name} | {shown(found)} |"
                f" {'the best fixed' if label == best else shown(minus)} |"
            )
        told = [r for r in mine if r["label"] == ADVICE]
        share = sum(r["searched"] / r["joules"] for r in told) / len(told)
        names = "; ".join(r["advised"] for r in told)
        text += ["", f"Advised: {names}. The search took {100 * share:.0f} % of the joules."]
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
