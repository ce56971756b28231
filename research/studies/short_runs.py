"""What `frugal` gives away in short runs and small fleets, against the same recipe with float32.

    python research/studies/short_runs.py [CASE ...]

Prints the difference of the final metric in points (hundredths of R2 for the regression), paired
by seed, with Student's 95 % interval, and how many times fewer bytes travelled.
"""

import logging
import sys
from typing import Any

import numpy as np
import torch
from savings_tables import compute_interval
from torch import nn

import flrce
from flrce.data.sources import load_source
from flrce.models.adapters import add_lora_adapters

SEEDS = range(4)
ROUNDS = (5, 10, 20, 60)
DENSE = {"bits_up": 32, "bits_down": 32}


def build_batchnorm_network() -> nn.Module:
    """9,962 floats for the 8 x 8 digits, with BatchNorm's statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def build_adapted_network() -> nn.Module:
    """A perceptron that knows the mirrored digits, with adapters of rank 8: 7,760 trained floats."""
    source = load_source("digits")
    x = torch.from_numpy(source.x).float().flip(-1) * source.scale + source.shift
    y = torch.from_numpy(source.y)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    ).append(nn.Linear(256, 10))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    add_lora_adapters(net, rank=8, targets="*")
    return net


def make_regression_data() -> tuple[np.ndarray, np.ndarray]:
    """A nonlinear function of 20 numbers, with noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 20)).astype(np.float32)
    y = np.sin(x @ rng.normal(size=20)) + x[:, 0] * x[:, 1] + 0.3 * rng.normal(size=1200)
    return x, y.astype(np.float32)


def run_case(case: dict[str, Any], rounds: int, seed: int, bits: dict[str, int]) -> flrce.Result:
    tables = {
        "clients": 20,
        "per_round": 4,
        "data": {"partition": "dirichlet", "alpha": 0.3},
        "train": {"epochs": 2, "batch": 16, "lr": 0.05},
        **case.get("tables", {}),
    }
    experiment = flrce.Experiment(
        rounds=rounds,
        seed=seed,
        recipe={"name": "frugal", "stop": "never", **bits},
        engine={"workers": 1, "eval_every": rounds},
        **tables,
    )
    given = {"data": case["data"]} if "data" in case else {}
    if "network" in case:
        torch.manual_seed(seed)
        given["model"] = case["network"]()
    return flrce.run(experiment, **given)


CASES: dict[str, dict[str, Any]] = {
    "digits, BatchNorm, 4 of 20 clients": {"network": build_batchnorm_network},
    "digits, all of 4 clients": {"tables": {"clients": 4, "per_round": 4}},
    "digits, LoRA of rank 8 on a base that knows mirrored digits, 4 of 20 clients": {
        "network": build_adapted_network,
        # at 0.05 a run in float32 diverged
        "tables": {
            "data": {"partition": "dirichlet", "alpha": 0.3},
            "train": {"epochs": 2, "batch": 16, "lr": 0.02},
        },
    },
    "regression, MLP, 4 of 20 clients": {
        "data": make_regression_data(),
        "tables": {
            "data": {"partition": "iid"},
            "train": {"epochs": 2, "batch": 16, "lr": 0.02},
            "objective": {"name": "regression", "metrics": ["r2"]},
        },
    },
}


def main() -> None:
    logging.disable(logging.WARNING)
    print(
        "| case | rounds | float32 | difference, points | times fewer bytes |\n|---|---|---|---|---|"
    )
    for name, case in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        for rounds in ROUNDS:
            pairs = [
                [run_case(case, rounds, seed, bits).summary for bits in ({}, DENSE)]
                for seed in SEEDS
            ]
            metric = "value" if "value" in pairs[0][0] else "accuracy"
            levels = [100 * dense[metric] for _, dense in pairs]
            mean, half = compute_interval(
                [100 * (frugal[metric] - dense[metric]) for frugal, dense in pairs]
            )
            frugal, dense = (
                sum(pair[i]["bytes_up"] + pair[i]["bytes_down"] for pair in pairs) for i in (0, 1)
            )
            print(
                f"| {name} | {rounds} | {np.mean(levels):.1f} | {mean:+.2f} ± {half:.2f} |"
                f" {dense / frugal:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
