"""Two of six Flower clients that send anything: metrics, arrays, records; the run goes on, and its
books are read.
"""

import logging
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_helpers import plain_app, start
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import FLrce, Guarded, RecipeStrategy
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue import recipes
from flrce.storage import read

VALUES: list[Any] = [
    0, 1, -1, 2**63 - 1, -(2**63), 10**18, 1e308, -1e308, math.nan, math.inf, 5e-324, -0.0, 0.5, [], [1.0], [1e308] * 3,
    [math.nan], list(range(5000)), [2**63 - 1] * 2,
]  # fmt: skip
KEYS = (
    "train_loss",
    "num-examples",
    "eval_acc",
    "eval_loss",
    "accuracy",
    "loss",
    "",
    "x" * 3000,
    "\x1b[2J",
    "../../a",
    "a\nb",
    "seconds",
    "joules",
    "bytes_up",
    "conflicts",
    "stopped",
    "flrce.joules",
    "flrce.holdout",
    "server-round",
)
DTYPES = ("f4", "f8", "f2", "i1", "i8", "u8", "?", "c8", "U3", "S4", ">f4")
SHAPES = ((4, 3), (3, 4), (12,), (), (0,), (4, 3, 1), (1, 4, 3), (400, 300))
PRESETS = ("default", "hardened", "paper", "wary", "private")


def spoil_metrics(record: Any, rng: random.Random) -> Any:
    for _ in range(rng.randint(1, 4)):
        key = rng.choice((*KEYS, *record))
        record[key] = rng.choice(VALUES)
        if rng.random() < 0.1:
            del record[key]
    return record


def spoil_arrays(record: Any, rng: random.Random) -> None:
    with np.errstate(all="ignore"):
        value = np.full(
            rng.choice(SHAPES), rng.choice([0, 1, 1e38, np.nan, np.inf, 3.4e38])
        ).astype("f8")
        odd = Array(
            np.zeros(value.shape, "U3") if rng.random() < 0.1 else value.astype(rng.choice(DTYPES))
        )
    name, action = rng.choice(list(record)), rng.random()
    if action < 0.6:
        record[name] = odd
    elif action < 0.8:
        del record[name]
    else:
        record[rng.choice(KEYS)] = odd


def spoil(content: RecordDict, rng: random.Random) -> None:
    which = rng.random()
    if which < 0.55:
        spoil_metrics(content["metrics"], rng)
    elif which < 0.85:
        spoil_arrays(content["arrays"], rng)
    elif which < 0.93:
        content[rng.choice(["more", "flrce", "config"])] = ConfigRecord(
            {"a": "x" * 100, "b": b"\xff" * 9, "c": [1, 2]}
        )
    else:
        content[rng.choice(["m2", "flrce.metrics"])] = MetricRecord({"a": 1e308})


def strategy_of(folder: Path, rng: random.Random) -> Any:
    shared: dict[str, Any] = {"state": folder, "seed": rng.randrange(2**31), "wait_for_nodes": 5.0}
    kind = rng.random()
    if kind < 0.5:
        return FLrce(per_round=5, preset=rng.choice(PRESETS), **shared)
    if kind < 0.8:
        name = rng.choice(["fedavg", "oort", "fedprox", "median", "fedadam", "krum"])
        return RecipeStrategy(recipes.CATALOGUE[name](P=5), **shared)
    return Guarded(FedAvg(fraction_train=1.0), **shared)


def case(folder: Path, rng: random.Random) -> str:
    """How the run went: "ended", or the line that ended it."""
    shutil.rmtree(folder, ignore_errors=True)
    seed = rng.random()

    def train(content: RecordDict, partition: int, t: int) -> None:
        if partition < 2:
            spoil(content, random.Random(f"{seed} {partition} {t}"))

    def judge(metrics: dict[str, Any]) -> dict[str, Any]:
        n = metrics["num-examples"]
        return spoil_metrics(dict(metrics), random.Random(f"{seed} {n}")) if n < 12 else metrics

    logging.disable(logging.CRITICAL)
    try:
        grid = LocalGrid(plain_app(train, misjudge=judge), 6)
        result = strategy_of(folder, rng).start(grid, start(), 3)
    except (BadInput, UnfinishedRun) as why:
        line = str(why)
        assert line.isprintable(), line
        return line
    finally:
        logging.disable(logging.NOTSET)
    for array in result.arrays.values():
        assert array.numpy().dtype.kind != "f" or np.isfinite(array.numpy()).all()
    if (folder / "rounds.jsonl").exists():
        assert read.read_single_run(folder).rounds
    return "ended"
