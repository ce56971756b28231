"""Two of five clients of an experiment on Flower that say anything: introductions, tasks' replies,
evaluations, losses.

The server must end the run with a sound model and books that can be read, with costs modelled or
measured.
"""

import logging
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from flower_fuzz import KEYS, VALUES, spoil_arrays, spoil_metrics
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from flrce.config.experiment import Experiment
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import engine, server
from flrce.flower.grid import LocalGrid
from flrce.storage import read

CLIENTS = 5
HELLO = ("flrce.client", "flrce.n", "flrce.simulation.build", "flrce.compresses")
WORDS: list[Any] = [
    *VALUES,
    "",
    "0",
    "1",
    "4",
    "9",
    "-1",
    "node-1000",
    "node-1001",
    "node-9",
    "client-3",
    "x" * 5000,
    "a\nb",
    "\x1b[2J",
    "../../etc/passwd",
    "é" * 30,
    b"",
    b"\xff" * 9,
    True,
    False,
    ["0", "1"],
    [b"a"],
    [True],
]
RECIPES = (
    "flrce",
    "fedavg",
    "oort",
    "power-of-choice",
    "fedprox",
    "scaffold",
    "dropout",
    "fedbuff",
    "flrce-topk",
)


def spoil_config(record: Any, keys: tuple[str, ...], rng: random.Random) -> ConfigRecord:
    """A ConfigRecord with some entries missing, of another type, or added."""
    told = dict(record)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice((*keys, *told, *KEYS))
        told[key] = rng.choice(WORDS)
        if rng.random() < 0.3:
            del told[key]
    return ConfigRecord({} if rng.random() < 0.05 else told)


def spoil_reply(content: RecordDict, rng: random.Random) -> None:
    """A reply of a client that knows our tasks."""
    name = rng.choice(list(content))
    record = content[name]
    if rng.random() < 0.1:
        del content[name]
    elif isinstance(record, MetricRecord):
        spoil_metrics(record, rng)
    elif isinstance(record, ConfigRecord):
        content[name] = spoil_config(
            record, ("flrce.client", "flrce.t", "flrce.base", "flrce.held"), rng
        )
    elif rng.random() < 0.5 and len(record):
        key = rng.choice(list(record))
        with np.errstate(all="ignore"):
            record[key] = Array(record[key].numpy() * rng.choice([np.nan, np.inf, 1e30, -3.0, 0.0]))
    else:
        spoil_arrays(record, rng)


def hostile_app(app: Any, seed: float, rate: float) -> Any:
    """The experiment's app; what partitions 0 and 1 answer is spoilt, or they raise."""

    def answer(message: Message, context: Any) -> Message:
        reply = app(message, context)
        partition, kind = context.node_config["partition-id"], message.metadata.message_type
        rng = random.Random(f"{seed} {partition} {kind} {message.metadata.group_id}")
        if partition > 1 or rng.random() > rate:
            return reply
        if rng.random() < 0.1:
            raise RuntimeError("broken")
        if "hello" in reply.content:
            reply.content["hello"] = spoil_config(reply.content["hello"], HELLO, rng)
        else:
            spoil_reply(reply.content, rng)
        return reply

    return answer


def case(folder: Path, rng: random.Random) -> str:
    """How the run went: "ended", or the line that ended it."""
    shutil.rmtree(folder, ignore_errors=True)
    experiment = Experiment.from_tables(
        {
            "rounds": 2,
            "clients": CLIENTS,
            "per_round": rng.choice([3, 5]),
            "seed": rng.randrange(2**31),
            "recipe": {"name": rng.choice(RECIPES)},
            "train": {"epochs": 1},
            "engine": {"name": "flower", "kernel": "torch"},
        }
    )
    app = hostile_app(
        server.build_experiment_client(experiment), rng.random(), rng.choice([0.5, 1.0])
    )
    settings = {
        "modelled": rng.random() < 0.7,
        "by_class": rng.random() < 0.5,
        "min_available_nodes": CLIENTS,
    }
    patience, engine.NODE_WAIT_SECONDS = engine.NODE_WAIT_SECONDS, 0.2
    logging.disable(logging.CRITICAL)
    try:
        result = server.serve(
            LocalGrid(app, CLIENTS), experiment, folder, wait_for_nodes=5.0, **settings
        )
    except (BadInput, UnfinishedRun) as why:
        line = str(why)
        assert line.isprintable(), line
        return line
    finally:
        logging.disable(logging.NOTSET)
        engine.NODE_WAIT_SECONDS = patience
    for array in result.arrays.values():
        assert np.isfinite(array.numpy()).all()
    assert read.read_single_run(folder).rounds
    return "ended"
