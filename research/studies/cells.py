"""Trains the reproduction's cells on one GPU and keeps their records: what `flrce reproduce` then
makes its tables of.

    PYTHONPATH=src python research/studies/cells.py cifar10,cifar100 --data CACHE --out DIR --seconds 500
    [--lr femnist=0.02]

The same cells as `flrce reproduce all --datasets ... --device cuda`, on a machine that has torch
but not everything that tables and figures need. A data set is left out if there is no time for it;
methods are tried for two rounds first.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

from flrce_reproduction import execute, plan, records
from flrce_reproduction.execute import load_dataset, read_dataset_sizes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("datasets")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument(
        "--each", type=float, default=250, help="seconds a data set is expected to take"
    )
    parser.add_argument("--lr", default="")
    parser.add_argument("--targets", default="table3,fig-motivation")
    parser.add_argument("--sure", action="store_true", help="do not try the methods first")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--share", default="0/1", help="I/N: every N-th seed, from the I-th, as one of N processes"
    )
    options = parser.parse_args()
    part, parts = map(int, options.share.split("/"))
    rates = {
        name: float(value)
        for name, _, value in (pair.partition("=") for pair in options.lr.split(",") if pair)
    }
    began, names = time.monotonic(), options.datasets.split(",")
    request = plan.ReproductionRequest(
        tuple(options.targets.split(",")),
        tuple(names),
        plan.REGIMES,
        tuple(range(options.seeds))[part::parts],
        rates=rates,
    )
    facts = {name: read_dataset_sizes(name, options.data) for name in names}
    sources = cache(lambda name: load_dataset(name, options.data, verify=False))
    taken = {}
    for name in names:
        if time.monotonic() - began + options.each > options.seconds:
            print(f"{name} is left for another time", flush=True)
            continue
        cells = [cell for cell in plan.plan_cells(request, facts) if cell.dataset == name]
        if not options.sure:
            cells = working(cells, options.out, sources, options.device)
        start = time.monotonic()
        stacks = sorted(
            {(-cell.experiment.rounds, cell.regime) for cell in cells}
        )  # the long ones first
        for T, regime in stacks:
            group = [
                cell for cell in cells if (-cell.experiment.rounds, cell.regime) == (T, regime)
            ]
            if time.monotonic() - began < options.seconds:
                execute.execute_on_gpu(
                    group, options.out, sources, report(group, start), options.device
                )
                keep(group, options.out, facts)
        taken[name] = {"cells": len(cells), "seconds": round(time.monotonic() - start, 1)}
        print(name, taken[name], flush=True)
    (options.out / "records" / "time.json").write_text(json.dumps(taken, indent=1))


def working(cells, out, sources, device):
    """Cells of the methods that survive two rounds."""
    fine, start = [], time.monotonic()
    for method in dict.fromkeys(cell.method for cell in cells):
        one = next(cell for cell in cells if cell.method == method)
        short = replace(
            one,
            experiment=one.experiment.model_copy(update={"rounds": 2}),
            place=f"try/{one.place}",
        )
        try:
            execute.execute_on_gpu([short], out / "try", sources, lambda cell, done: None, device)
            fine.append(method)
        except Exception:
            traceback.print_exc(limit=6, file=sys.stdout)
            print(f"{method} is left out", flush=True)
    print(f"tried {', '.join(fine)} in {time.monotonic() - start:.0f} s", flush=True)
    return [cell for cell in cells if cell.method in fine]


def report(group, start):
    def watch(cell, done):
        if cell is group[0] and done.record.t % 10 == 0:
            print(
                f"  round {done.record.t} of {len(group)} cells, {time.monotonic() - start:.0f} s",
                flush=True,
            )

    return watch


def keep(cells, out, facts):
    runs = {cell.name: run for cell in cells if (run := records.read_cell_run(cell, out))}
    records.write_records((records.read_records(out / "records") | runs).values(), out / "records")
    records.write_dataset_sizes(facts, out / "records")


if __name__ == "__main__":
    main()
