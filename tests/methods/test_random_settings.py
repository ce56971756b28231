"""Settings drawn at random from the catalogue: each run is finite and its books add up, or one line
refuses it.
"""

import json
import math
import random

import numpy as np
import pytest
from torch import nn

from flrce import Experiment, run
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes

rng = np.random.default_rng(0)
X = rng.normal(size=(80, 6)).astype(np.float32)
GROUP = np.arange(80) % 6
DATA = [
    Source("classes", X, (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1), tuple("abc"), GROUP),
    Source("values", X, X[:, :2] + 1, (), GROUP, kind="values"),
    Source("labels", X, (X[:, :3] > 0).astype(np.float32), tuple("pqr"), GROUP, kind="labels"),
]
MORE = {
    "selector": ["in-turn", "utility", "clustered", "divfl", "power-of-choice"],
    "compressor": [
        "topk",
        "randomk",
        "quantize",
        {"piece": "error-feedback", "inner": "topk"},
        "drop-tensors",
    ],
    "aggregator": [
        "median",
        "clipped",
        "geometric-median",
        "related",
        "centred-clip",
        "fleet-clip",
    ],
    "server": ["momentum", "adam", "yogi", "exp"],
    "pace": ["fastest", {"piece": "buffered", "size": 1}, {"piece": "deadline", "seconds": 50.0}],
    "average": ["ema", "swa", {"piece": "tail", "last": 2}, "growing-tail"],
}
TRAIN = [
    {},
    {"momentum": 0.9},
    {"optimizer": "adam", "schedule": "cosine"},
    {"clip": 1.0},
    {"steps": 2},
]


def drawn(seed):
    draw = random.Random(seed)
    recipe = {"name": draw.choice(sorted(recipes.CATALOGUE))}
    recipe |= {role: draw.choice(some) for role, some in MORE.items() if draw.random() < 0.15}
    tables = {
        "seed": draw.randrange(2**63),
        "rounds": 3,
        "clients": 6,
        "per_round": draw.choice([1, 2, 3, 6]),
        "recipe": recipe,
        "engine": {"workers": 1, "eval_every": draw.choice([1, 2])},
        "train": {"epochs": 1, "lr": 0.02, "batch": draw.choice([2, 8, 64]), **draw.choice(TRAIN)},
        "data": {
            "partition": draw.choice(["iid", "quantity", "natural"]),
            "holdout": draw.choice([0.0, 0.3]),
        },
    }
    return tables, draw.choice(DATA)


@pytest.mark.parametrize("seed", range(24))
def test_a_run_or_a_line(seed, tmp_path):
    tables, data = drawn(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, data.outputs))
    trained = []
    try:
        done = run(
            Experiment(**tables), tmp_path / "run", data=data, model=net, watch=trained.append
        )
    except BadInput:
        assert not trained, "refused after clients had trained"
        return
    rounds, clients = (
        [json.loads(line) for line in (tmp_path / "run" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("rounds", "clients")
    )
    for figure in ("bytes_up", "bytes_down", "joules"):
        assert sum(each[figure] for each in rounds) == pytest.approx(
            sum(each[figure] for each in clients)
        )
    for value in done.summary.values():
        assert not isinstance(value, float) or math.isfinite(value)
