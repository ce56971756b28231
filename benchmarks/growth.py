"""How rounds of the simulator grow with M, P, model size, workers and seeds: python
benchmarks/growth.py [--rounds 7]

FLrce on random images of CIFAR-10's shape, 35 training samples a client, batches of 16, one epoch,
fused kernels; evaluation off, so that what grows is selection, training, the relationship map and
the loop. One thing varies at a time around M = 100, P = 10, the paper's CIFAR CNN, one worker, one
seed; for the workers, who share out the training alone, clients train 20 epochs. Medians of warm
rounds, with quartiles, in CPU seconds (steadier on a busy machine) and in wall seconds. Writes
results/growth.{json,md,svg}.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flrce.config.experiment import Experiment
from flrce.data.sources import Source
from flrce.models.flat import make_layout
from flrce.models.nets import build_network
from flrce.simulation.runs import Simulation, build_simulation

SHAPE, EACH = (3, 32, 32), 50
RESULTS = Path(__file__).resolve().parent / "results"
BASE = {"M": 100, "P": 10, "hidden": 0, "workers": 1, "seeds": 1, "epochs": 1}
CURVES = {
    "M": [30, 100, 300, 1000],
    "P": [5, 10, 20, 40, 80],
    "hidden": [16, 64, 256, 1024],
    "workers": [1, 2, 4],
    "seeds": [1, 2, 4],
}
TITLES = {
    "M": "clients M",
    "P": "clients a round P",
    "hidden": "floats in the model d",
    "workers": "workers, 20 epochs",
    "seeds": "seeds, one after another",
}


@lru_cache(maxsize=1)
def images(M: int) -> Source:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (EACH * M, *SHAPE), dtype=np.uint8)
    return Source("random", x, rng.integers(0, 10, len(x)), tuple("0123456789"), scale=1 / 255)


def network(hidden: int) -> nn.Module:
    """The paper's CNN, or a two-layer perceptron of this width."""
    if not hidden:
        return build_network("cnn-cifar", SHAPE, 10, 0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def experiment(point: dict[str, int], seed: int, rounds: int) -> Experiment:
    return Experiment.from_tables(
        {
            "seed": seed,
            "rounds": rounds,
            "clients": point["M"],
            "per_round": point["P"],
            "data": {"partition": "iid", "holdout": 0.3},
            "train": {"batch": 16, "epochs": point["epochs"], "lr": 0.05},
            "recipe": {"name": "flrce", "preset": "default", "psi": float(point["P"] - 1)},
            "engine": {"workers": point["workers"], "device": "cpu", "eval_every": 10_000},
        }
    )


def timed(runs: list[Iterator[object]]) -> Iterator[tuple[float, float]]:
    """CPU and wall seconds of each round of all runs together."""
    while True:
        start = time.process_time(), time.perf_counter()
        if any(next(run, None) is None for run in runs):
            return
        yield time.process_time() - start[0], time.perf_counter() - start[1]


def measure(point: dict[str, int], rounds: int) -> dict[str, object]:
    """One point of a curve; the first round of each run is a warm-up, and the last one is
    judged.
    """
    plans = [experiment(point, seed, rounds + 2) for seed in range(point["seeds"])]
    built: list[Simulation] = [
        build_simulation(plan, images(point["M"]), network(point["hidden"])) for plan in plans
    ]
    found = list(timed([one.iterate_rounds(plan) for one, plan in zip(built, plans, strict=True)]))[
        1:-1
    ]
    for one in built:
        with closing(one.engine):
            pass
    cpu, wall = (statistics.quantiles(values, n=4) for values in zip(*found, strict=True))
    return {
        "d": make_layout(network(point["hidden"])).size,
        "kernel": built[0].engine.workers.name,
        "cpu": cpu,
        "wall": wall,
    }


def write(result: dict[str, list[dict]], rounds: int) -> str:
    head = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {rounds} warm"
        " rounds a point, "
    )
    head += f"load average {os.getloadavg()[0]:.1f} at the end (1 of it is ours)."
    text = ["# Growth of the simulator", "", head, "Milliseconds a round, median (quartiles).", ""]
    for axis, points in result.items():
        text += [
            f"| {TITLES[axis]} | CPU ms | wall ms | rounds a CPU second |",
            "|---|---|---|---|",
        ]
        for p in points:
            cpu, wall = (
                f"{1e3 * v[1]:.1f} ({1e3 * v[0]:.1f}-{1e3 * v[2]:.1f})"
                for v in (p["cpu"], p["wall"])
            )
            text.append(f"| {p['x']:,} | {cpu} | {wall} | {1 / p['cpu'][1]:.1f} |")
        text.append("")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "growth.json").write_text(json.dumps({"about": head, **result}, indent=1))
    (RESULTS / "growth.md").write_text("\n".join(text))
    return "\n".join(text)


def plot(result: dict[str, list[dict]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(result), figsize=(3 * len(result), 2.8), layout="constrained"
    )
    for axes, (axis, points) in zip(np.atleast_1d(panels), result.items(), strict=True):
        axes.loglog(
            [p["x"] for p in points], [1 / p["cpu"][1] for p in points], "o-", label="a CPU second"
        )
        axes.loglog(
            [p["x"] for p in points], [1 / p["wall"][1] for p in points], "s--", label="a second"
        )
        axes.set(xlabel=TITLES[axis])
        axes.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(panels)[0].set_ylabel("rounds")
    np.atleast_1d(panels)[0].legend(frameon=False)
    figure.savefig(RESULTS / "growth.svg")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--rounds", type=int, default=7)
    rounds = ask.parse_args().rounds
    torch.set_num_threads(1)
    result: dict[str, list[dict]] = {}
    for axis, values in CURVES.items():
        for value in values:
            point = measure({**BASE, "epochs": 20 if axis == "workers" else 1, axis: value}, rounds)
            result.setdefault(axis, []).append(
                {"x": point["d"] if axis == "hidden" else value, **point}
            )
    print(write(result, rounds))
    plot(result)


if __name__ == "__main__":
    main()
