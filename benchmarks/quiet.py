"""Is `preset = "hardened"` ever far below plain FedAvg? Loud and quiet attacks, by a plan and its
rule.

    python benchmarks/quiet.py --data digits --raw research/results/attacks/quiet.jsonl
    python benchmarks/quiet.py --raw research/results/attacks/quiet.jsonl --table

The plan is research/studies/plans/quiet.json; research/studies/plans/README.md says what was decided before its runs.
They are as robustness.py's, but none is stopped early. "hardened before" was run with the sources
of commit 9269ab4.
"""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks import TROUBLES, Attacked, attackers
from robustness import ROOT, Run, handed, opened, pool_of, read, settings, write

from flrce.config.experiment import Experiment
from flrce.simulation import runs

PLAN: dict[str, Any] = json.loads(
    (ROOT / "research" / "studies" / "plans" / "quiet.json").read_text()
)


def run_attack(run: Run) -> dict[str, Any]:
    """One run under attack, and the accuracy of the model it hands back."""
    data, recipe, attack, share, seed = run
    experiment = settings(data, PLAN["candidates"][recipe], seed)
    if attack in TROUBLES:
        tables = experiment.model_dump(exclude_none=True)
        tables["data"]["trouble"] = [{**TROUBLES[attack], "share": share}]
        experiment = Experiment.from_tables(tables)
    built = runs.build_simulation(experiment, pool_of(data))
    bad = set() if attack in TROUBLES else attackers(built.federation.clients, share, seed)
    with closing(built.engine):
        engine = Attacked(built.engine, bad, attack, seed) if bad else built.engine
        history = [done.record for done in replace(built, engine=engine).iterate_rounds(experiment)]
    host = f"{platform.machine()}, torch {torch.__version__}"
    return {"run": run, "accuracy": handed(history), "rounds": history[-1].t, "host": host}


def list_runs(data: Sequence[str], recipes: Sequence[str]) -> list[Run]:
    """Seed after seed, so that whoever is cut short has whole tables of fewer seeds."""
    cells = [
        ("none", 0.0),
        *((a, s) for a in (*PLAN["loud"], *PLAN["quiet"]) for s in PLAN["shares"]),
    ]
    return [
        (d, recipe, *cell, seed)
        for d in data
        for seed in PLAN["seeds"][d]
        for cell in cells
        for recipe in recipes
    ]


def format_tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """Mean accuracy over seeds by data set, share and attack; a star where the rule is broken."""
    accuracy = {tuple(line["run"]): 100 * line["accuracy"] for line in lines}
    reference, below = PLAN["rule"]["reference"], PLAN["rule"]["below"]
    pages = []
    for data, seeds in PLAN["seeds"].items():
        heads = [
            f"{recipe}, {share:.0%}" for share in PLAN["shares"] for recipe in PLAN["candidates"]
        ]
        pages += [
            f"| {data}, seeds {', '.join(map(str, seeds))} | {' | '.join(heads)} |",
            "|---|" + "---|" * len(heads),
        ]
        for attack in ("none", *PLAN["loud"], *PLAN["quiet"]):
            cells = []
            for share in PLAN["shares"]:
                at = 0.0 if attack == "none" else share
                means = {
                    r: np.mean([accuracy[data, r, attack, at, s] for s in seeds])
                    for r in PLAN["candidates"]
                }
                cells += [
                    f"{m:.1f}{'*' if m < means[reference] - below else ''}" for m in means.values()
                ]
            pages.append(f"| {attack} | {' | '.join(cells)} |")
        pages.append("")
    return "\n".join(pages)


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--data", nargs="+", choices=tuple(PLAN["seeds"]), default=list(PLAN["seeds"]))
    ask.add_argument(
        "--recipes", nargs="+", choices=tuple(PLAN["candidates"]), default=list(PLAN["candidates"])
    )
    ask.add_argument(
        "--raw",
        type=Path,
        required=True,
        help="One JSON line per run; those in it are not repeated.",
    )
    ask.add_argument("--table", action="store_true", help="Run nothing; write the page's section.")
    ask.add_argument("--out", type=Path, default=ROOT / "research" / "docs" / "robustness.md")
    given = ask.parse_args()
    if given.table:
        return write(given.out, "quiet", format_tables(read(given.raw)))
    torch.set_num_threads(1)
    have = {tuple(line["run"]) for line in read(given.raw)}
    for run in list_runs(given.data, given.recipes):
        if run not in have:
            with opened(given.raw, "at") as f:
                f.write(json.dumps(run_attack(run)) + "\n")


if __name__ == "__main__":
    main()
