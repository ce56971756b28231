"""Runs cells (data set, regime, recipe, seed) together on one device and keeps what each round looked like.

    PYTHONPATH=src:. python studies/grid.py PLAN.json --data CACHE --out DIR [--seconds 500] [--device cuda]

A plan is a list of batches; a batch names data sets, regimes, recipes (name -> [recipe] table), seeds and rounds. Each
batch is one stack; its records are written before the next begins, and none begins that would end too late.
"""

import argparse
import gzip
import json
import platform
import time
from collections import deque
from pathlib import Path

import torch
from flrce import runs
from flrce.config import Experiment
from flrce.data import cache

#: the paper's batch sizes and learning rates (its Table 2); `lr` in a batch overrides
SETTINGS = {
    "cifar10": {"batch": 128, "lr": 0.1},
    "cifar100": {"batch": 128, "lr": 0.5},
    "femnist": {"batch": 16, "lr": 2e-4},
    "speech": {"batch": 16, "lr": 5e-4},
    "digits": {"batch": 16, "lr": 0.05},
}
FIELDS = ("accuracy", "averaged", "loss", "conflicts", "consensus", "votes", "exploit", "bytes_up", "bytes_down", "joules",
          "joules_wasted", "bytes_wasted", "seconds", "stop")  # fmt: skip
REACH = 12  # past server steps whose products with the present one are kept


def cells(batch):
    for dataset in batch["datasets"]:
        for regime in batch["regimes"]:
            for name, recipe in batch["recipes"].items():
                for seed in batch["seeds"]:
                    yield dataset, regime, name, recipe, seed


def experiment(batch, dataset, regime, recipe, seed):
    partition = {"dirichlet": "by-group" if dataset == "speech" else "dirichlet"}.get(regime, regime)
    train = {"epochs": 5, **SETTINGS[dataset], **batch.get("train", {}).get(dataset, {})}
    return Experiment.of({
        "seed": seed, "rounds": batch.get("rounds", 100), "clients": batch.get("clients", 100),
        "per_round": batch.get("per_round", 10), "data": {"name": dataset, "partition": partition}, "train": train,
        "recipe": recipe, "engine": {"eval_every": batch.get("eval_every", 1)},
        "fleet": {"profile": batch.get("fleet", "jetson-nano")},
    })  # fmt: skip


class Steps:
    """Products of the server's steps, round after round: how far training still goes one way."""

    def __init__(self):
        self.past, self.w, self.products = deque(maxlen=REACH), None, []

    def __call__(self, state, trainable):
        w = state.w[:trainable]
        if self.w is not None:
            step = w - self.w
            self.past.append(step)
            self.products.append([float(f"{float(step @ s):.4g}") for s in reversed(self.past)])
        self.w = w.clone()


def run(batch, data, device):
    keys = list(cells(batch))
    jobs = [(experiment(batch, dataset, regime, recipe, seed), None) for dataset, regime, _, recipe, seed in keys]
    steps = [Steps() for _ in jobs]
    sources = {}

    def find(name):
        if name not in sources:
            from flrce.data.sources import source

            sources[name] = source(name) if name == "digits" else cache.load(data / name, verify=False)
        return sources[name]

    began = time.monotonic()

    def watch(i, done):
        steps[i](done.state, trainable=done.state.w.numel() - 1)
        if i == 0 and done.record.t % 10 == 0:
            print(f"  round {done.record.t}, {time.monotonic() - began:.0f} s", flush=True)

    results = runs.run_together(jobs, data=find, watch=watch, device=device)
    for (dataset, regime, name, recipe, seed), result, each in zip(keys, results, steps, strict=True):
        series = {field: [rounded(getattr(h, field)) for h in result.history] for field in FIELDS}
        yield {
            "dataset": dataset, "regime": regime, "recipe": name, "table": recipe, "seed": seed,
            "summary": result.summary, "series": series, "steps": each.products,
        }  # fmt: skip


def rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    hardware = torch.cuda.get_device_name(0) if options.device == "cuda" else platform.processor()
    torch.set_num_threads(1)  # the runs are the threads
    for number, batch in enumerate(json.loads(options.plan.read_text())):
        if time.monotonic() - began + batch.get("expected", 0) > options.seconds:
            print(f"batch {number} ({batch['name']}) is left for another time", flush=True)
            continue
        start = time.monotonic()
        print(f"batch {number} ({batch['name']}): {len(list(cells(batch)))} cells", flush=True)
        path = options.out / f"{batch['name']}.jsonl.gz"
        with gzip.open(path, "wt") as f:
            for row in run(batch, options.data, options.device):
                f.write(json.dumps(row, separators=(",", ":")) + "\n")
        took = time.monotonic() - start
        print(f"batch {number} ({batch['name']}): {took:.0f} s on {hardware}, torch {torch.__version__}", flush=True)


if __name__ == "__main__":
    main()
