"""Paces on a fleet that lives: what a target costs in seconds, joules and grams when phones sleep
and differ tenfold.

    PYTHONPATH=src python research/studies/fleets.py [--plan P] run --carbon FILE --out DIR [--share 0/16]
    [--seconds 170] PYTHONPATH=src python research/studies/fleets.py [--plan P] tables DIR

The plans, `fleets.json` and `fleets-carbon.json` in `research/studies/plans` (`--plan`), were committed
before the first of their runs was looked at: arms, seeds, target and what would confirm or refute
each claim. Digits, 100 clients; devices are as slow as if the network were some thousand times as
large, so that a task takes minutes, and nights matter.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
from scipy.stats import t as student

PLANS = Path(__file__).parent / "plans"
PROFILE = """idle_watts = {{ value = 0.4, source = "study" }}
active_watts = {{ value = {watts}, source = "study" }}
flops = {{ value = 1e15, source = "study: all of a batch's time is in batch_seconds" }}
batch_seconds = {{ value = {batch}, source = "study" }}
up_bits = {{ value = {up}, source = "study" }}
down_bits = {{ value = {down}, source = "study" }}
up_joules = {{ value = 2.27e-4, source = "phone, a hundred times" }}
down_joules = {{ value = 1.1e-4, source = "phone, a hundred times" }}
"""


def experiment(plan, arm, seed, carbon, folder):
    """One run of an arm."""
    from flrce.config.experiment import Experiment

    folder.mkdir(parents=True, exist_ok=True)
    mix = {}
    for name, device in plan["devices"].items():
        path = folder / f"{name}.toml"
        if not path.exists():
            path.write_text(PROFILE.format(**device["profile"]))
        mix[str(path)] = device["share"]
    tables = json.loads(json.dumps(plan["common"]))
    settings = plan["arms"][arm]
    tables["fleet"] |= {"profile": mix, "carbon": str(carbon), **settings.get("fleet", {})}
    if "starts" in plan:
        tables["fleet"]["start"] = plan["starts"][seed % len(plan["starts"])]
    tables |= {key: settings[key] for key in ("rounds", "per_round") if key in settings}
    engine = {"workers": 1, "device": "cpu"}
    return Experiment(**{**tables, "recipe": settings["recipe"], "seed": seed, "engine": engine})


def one(plan, arm, seed, carbon, folder):
    """Rounds until the target, and what they took."""
    from flrce.report.target_costs import find_cost_to_target
    from flrce.simulation import runs

    history, began = [], time.monotonic()
    for done in runs.rounds(experiment(plan, arm, seed, carbon, folder)):
        history.append(done.record)
        if (
            done.record.final_model_metric is not None
            and done.record.final_model_metric >= plan["target"]
        ):
            break
    got = find_cost_to_target(history, plan["target"])
    last = history[-1]
    return {
        "arm": arm,
        "seed": seed,
        "reached": None if got is None else vars(got),
        "best": max(h.final_model_metric or 0 for h in history),
        "rounds": sum(h.outcome == "committed" for h in history),
        "seconds": last.began + last.seconds,
        "joules": sum(h.joules for h in history),
        "joules_wasted": sum(h.joules_wasted for h in history),
        "grams": sum(h.grams for h in history),
        "stop": last.stop,
        "left": sum(why.startswith("left") for h in history for why in h.rejected.values()),
        "took": round(time.monotonic() - began, 2),
    }


def run(options):
    plan = json.loads((PLANS / f"{options.plan}.json").read_text())
    part, parts = map(int, options.share.split("/"))
    jobs = [(arm, seed) for seed in range(plan["seeds"]) for arm in plan["arms"]]
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"fleets-{part}.jsonl"
    there = path.read_text().splitlines() if path.exists() else []
    done = {(row["arm"], row["seed"]) for row in map(json.loads, there)}
    with path.open("a") as file:
        for arm, seed in [job for job in jobs[part::parts] if job not in done]:
            if time.monotonic() - began > options.seconds:
                print(f"no time for {arm} seed {seed}", flush=True)
                continue
            row = one(plan, arm, seed, options.carbon, options.out / f"profiles-{part}")
            file.write(json.dumps(row) + "\n")
            file.flush()


def ratios(a, b, cost):
    """Geometric mean of a's cost over b's, seed by seed, with its 95 % interval; only seeds in
    which both reached.
    """
    both = sorted(set(a) & set(b))
    logs = np.array([math.log(a[s]["reached"][cost] / b[s]["reached"][cost]) for s in both])
    if len(logs) < 2:
        return None
    half = student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    return [len(logs), *(float(np.exp(logs.mean() + k * half)) for k in (0, -1, 1))]


def tables(options):
    """The tables of the page, and the verdicts by the plan's rule."""
    plan = json.loads((PLANS / f"{options.plan}.json").read_text())
    rows = [
        json.loads(line)
        for path in sorted(options.folder.glob("**/*.jsonl"))
        for line in path.open()
    ]
    arms = {
        arm: {r["seed"]: r for r in rows if r["arm"] == arm and r["reached"]}
        for arm in plan["arms"]
    }
    lines = [
        (
            f"Digits, 100 clients, {plan['seeds']} seeds, target {100 * plan['target']:g} %."
            f" Ratios: cost to the target over that of the baseline, {plan['baseline']} unless the"
            " plan says otherwise, seed by seed, geometric mean and 95 % interval."
        ),
        "",
        "| arm | reached | hours | kJ | g CO2 | wasted % | time | energy | CO2 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, settings in plan["arms"].items():
        mine, base = arms[arm], arms[settings.get("against", plan["baseline"])]
        ran = [r for r in rows if r["arm"] == arm]
        cells = [f"{len(mine)} of {len(ran)}"]
        for cost, unit, digits in (("seconds", 3600, 1), ("joules", 1e3, 1), ("grams", 1, 2)):
            values = [r["reached"][cost] / unit for r in mine.values()]
            cells.append(f"{np.mean(values):.{digits}f}" if values else "--")
        wasted, all_ = sum(r["joules_wasted"] for r in ran), sum(r["joules"] for r in ran)
        cells.append(f"{100 * wasted / all_:.0f}" if all_ else "--")
        for cost in ("seconds", "joules", "grams"):
            found = ratios(mine, base, cost) if mine is not base else None
            cells.append(
                "{1:.2f} ({2:.2f} to {3:.2f})".format(*found)
                if found
                else "1"
                if mine is base
                else "--"
            )
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", *verdicts(plan, arms)]
    text = "\n".join(lines) + "\n"
    (options.folder / "fleets.md").write_text(text)
    sys.stdout.write(text)


def verdicts(plan, arms):
    """Each claim, a ratio of costs at most `below`: holds where the whole interval is, refuted
    where none of it.
    """
    for claim in plan["claims"]:
        found = ratios(arms[claim["arm"]], arms[claim["of"]], claim["cost"])
        if found is None:
            yield f"- {claim['says']}: not decided, too few seeds reached the target."
            continue
        _, mean, low, high = found
        word = (
            "holds"
            if high <= claim["below"]
            else "refuted"
            if low > claim["below"]
            else "undecided"
        )
        yield (
            f"- {claim['says']}: {word} ({mean:.2f}, {low:.2f} to {high:.2f}; at most"
            f" {claim['below']:.3g} claimed)."
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="fleets", help="fleets, or fleets-carbon")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--carbon", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument(
        "--share", default="0/1", help="I/N: every N-th job, from the I-th, as one of N processes"
    )
    running.add_argument("--seconds", type=float, default=1e9)
    told = commands.add_parser("tables")
    told.add_argument("folder", type=Path)
    options = parser.parse_args()
    {"run": run, "tables": tables}[options.command](options)


if __name__ == "__main__":
    main()
