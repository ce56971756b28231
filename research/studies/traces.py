"""Runs without a stop, and what every stop rule could have looked at: the ground on which rules are
replayed.

    python research/studies/traces.py PLAN.json --data CACHE --out DIR [--device cuda] [--seconds 500]

A plan is a list of batches; each names data sets, regimes, recipes (name -> [recipe] table), seeds
and rounds, and becomes DIR/NAME.jsonl.gz, written before the next batch begins. Finished batches
are not run again. With "products" a line also holds the products of all server steps, from which
the movement of any average of models follows. One process keeps a large GPU waiting for its Python:
`--share 0/5` to `--share 4/5` are five that divide the runs among them.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import candidates  # noqa: F401 (names the pieces that were tried)
import torch

from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce_reproduction import plan
from flrce_reproduction.execute import load_dataset, read_dataset_sizes

FIELDS = (
    "accuracy",
    "averaged",
    "conflicts",
    "consensus",
    "headway",
    "exploit",
    "bytes_up",
    "bytes_down",
    "joules",
)


class Steps:
    """The server's steps s_t = w_t - w_(t-1) over trained parameters."""

    def __init__(self, w):
        self.w, self.steps = w.clone(), []

    def __call__(self, w):
        self.steps.append((w - self.w).float())
        self.w = w.clone()

    def products(self):
        """(T, T) of them, row by row up to the diagonal, four digits."""
        S = torch.stack(self.steps).to("cuda" if torch.cuda.is_available() else "cpu")
        G = (S @ S.T).tolist()
        return [[float(f"{x:.4g}") for x in row[: t + 1]] for t, row in enumerate(G)]


def cells(batch):
    for dataset in batch["datasets"]:
        for seed in batch["seeds"]:
            for regime in batch["regimes"]:
                for name, recipe in batch["recipes"].items():
                    yield dataset, regime, name, recipe, seed


def experiment(batch, facts, dataset, regime, recipe, seed, device):
    request = plan.ReproductionRequest(
        ("table3",), (dataset,), (regime,), (seed,), rates=batch.get("rates", {})
    )
    usual = request.build_cell(dataset, regime, "fedavg", seed, facts).experiment.model_dump(
        exclude_none=True
    )
    engine = {
        "eval_every": batch.get("eval_every", 1),
        "device": device,
        "workers": batch.get("workers", "auto"),
    }
    return Experiment.from_tables(
        {**usual, "rounds": batch.get("rounds", 100), "recipe": recipe, "engine": engine}
    )


def trace(key, result):
    dataset, regime, name, recipe, seed = key
    series = {field: [rounded(getattr(h, field)) for h in result.history] for field in FIELDS}
    told = {"dataset": dataset, "regime": regime, "recipe": name, "table": recipe, "seed": seed}
    return {**told, "summary": result.summary, "series": series}


def rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def one_by_one(keys, jobs, sources, products):
    for key, job in zip(keys, jobs, strict=True):
        steps, watch = [], None
        if products:
            watch = lambda done, steps=steps: follow(steps, done)  # noqa: E731
        result = runs.run(job, data=sources(key[0]), watch=watch, allow_divergence=True)
        yield trace(key, result) | ({"products": steps[0].products()} if products else {})


def follow(steps, done):
    """The first step is left out: where it began is not told."""
    if steps:
        steps[0](done.state.w)
    else:
        steps.append(Steps(done.state.w))


def together(keys, jobs, sources, products):
    steps = [[] for _ in jobs]
    watch = (lambda i, done: follow(steps[i], done)) if products else None
    results = runs.run_together([(job, None) for job in jobs], data=sources, watch=watch)
    for key, result, each in zip(keys, results, steps, strict=True):
        yield trace(key, result) | ({"products": each[0].products()} if products else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, loaded = time.monotonic(), {}

    def sources(name):
        if name not in loaded:
            loaded[name] = load_dataset(name, options.data, verify=False)
        return loaded[name]

    part, parts = map(int, options.share.split("/"))
    for batch in json.loads(options.plan.read_text()):
        path = options.out / f"{batch['name']}{f'-{part}' if parts > 1 else ''}.jsonl.gz"
        if path.exists() or time.monotonic() - began + batch.get("expected", 0) > options.seconds:
            continue
        start, keys = time.monotonic(), list(cells(batch))[part::parts]
        jobs = [
            experiment(
                batch, read_dataset_sizes(k[0], options.data), *k[:2], *k[3:], options.device
            )
            for k in keys
        ]
        run = together if options.device == "cuda" else one_by_one
        with gzip.open(path.with_suffix(".part"), "wt") as f:
            for row in run(keys, jobs, sources, batch.get("products", False)):
                f.write(json.dumps(row, separators=(",", ":")) + "\n")
        path.with_suffix(".part").rename(path)
        print(f"{batch['name']}: {len(keys)} runs in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
