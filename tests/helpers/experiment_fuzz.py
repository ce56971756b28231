"""Experiments and ways to damage them, seeded; used by the suite and by `make fuzz`."""

import copy
import datetime
import random
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

from flrce.config.experiment import Experiment
from flrce.errors import BadInput

BASES: list[dict[str, Any]] = [
    {},
    {
        "seed": 3,
        "rounds": 5,
        "clients": 20,
        "per_round": 4,
        "recipe": {"name": "flrce", "preset": "default", "psi": "40%"},
    },
    {
        "data": {
            "name": "digits",
            "partition": "quantity",
            "alpha": 0.5,
            "holdout": 0.2,
            "minimum": 4,
        },
        "recipe": {"name": "fedprox", "mu": 0.1, "epochs_from": [1, 2], "stragglers": 0.5},
    },
    {
        "train": {"batch": 8, "epochs": 2, "lr": 0.05},
        "engine": {"workers": 2, "kernel": "torch", "eval_every": 3},
        "recipe": {
            "name": "fedavg",
            "selector": {"piece": "utility", "epsilon": 0.5, "overcommit": 1.5, "pace": 3},
            "average": {"piece": "ema", "decay": 0.8},
            "stop": {"piece": "patience", "rounds": 4},
        },
    },
    {
        "fleet": {"profile": {"jetson-nano": 0.5, "phone": 2.0}},
        "stop": {"joules": 1e4, "rounds": 50},
        "recipe": {
            "name": "fedavg",
            "compressor": {"piece": "error-feedback", "inner": {"piece": "topk", "keep": 0.2}},
            "aggregator": {"piece": "clipped", "norm": 2.0, "by": "equal"},
            "minimum": 2,
        },
    },
    {
        "recipe": {
            "name": "flrce",
            "preset": "paper",
            "selector": {"piece": "relationship", "decay": 0.9, "window": 5},
            "submodel": {"piece": "random-units", "rates": [1.0, 0.5], "seconds": 3.0},
        }
    },
    {
        "recipe": {
            "name": "fedavg",
            "trainer": {"piece": "deadline", "share": 0.4, "clip": False},
            "compressor": {"piece": "quantize", "bits": 4},
            "average": {"piece": "tail", "last": 3},
        }
    },
]
ODD: list[Any] = [
    0,
    1,
    -1,
    2**63,
    2**64,
    -(2**63),
    10**5000,
    0.0,
    -0.0,
    0.5,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "²",
    ":",
    "a:b",
    "os:path",
    "math:",
    ":b",
    "..:x",
    "json:JSONDecoder",
    "\x1b[2J",
    "a\nb",
    "\u202e",
    "é" * 500,
    "x" * 5000,
    "1e9",
    "auto",
    "flrce",
    "fedavg",
    "digits",
    "../../etc/passwd",
    "profile.toml",
    "\x00",
    [],
    [1],
    [[]],
    [0.5, "x"],
    {},
    {"piece": "ema"},
    {"piece": 3},
    {"": 1},
    True,
    False,
    datetime.date(2020, 1, 1),
    {"piece": "error-feedback", "inner": {"piece": "error-feedback"}},
    17,
    1000,
    10**9,
    10**12,
    "/dev/null.toml",
]
KEYS = [
    "",
    "x",
    "seed",
    "name",
    "piece",
    "recipe",
    "data.name",
    "é",
    "a b",
    "_",
    "__class__",
    "model_config",
    "self",
    "P",
    "epochs",
]


def mutated(rng: random.Random) -> dict[str, Any]:
    """A base with one to three things done to it."""
    tables = copy.deepcopy(rng.choice(BASES))
    for _ in range(rng.randint(1, 3)):
        spot = rng.choice(list(_tables(tables)))
        key = (
            rng.choice(list(spot))
            if spot and rng.random() < 0.8
            else rng.choice([*KEYS, *Experiment.model_fields])
        )
        action = rng.random()
        if action < 0.3 and type(spot.get(key)) in (int, float) and abs(spot[key]) < 1e9:
            spot[key] = type(spot[key])(spot[key] * rng.choice([0.5, 2, 3, 10, -1]))
        elif action < 0.7:
            spot[key] = copy.deepcopy(rng.choice(ODD))
        elif action < 0.8:
            spot.pop(key, None)
        elif action < 0.9:
            spot[rng.choice(KEYS)] = spot.pop(key, 1)
        else:
            spot[key] = {rng.choice(KEYS): copy.deepcopy(spot.get(key, 1))}
    return tables


def bytes_of(rng: random.Random) -> bytes:
    """A base as a file, with bytes flipped, dropped, doubled, or strange lines added."""
    data = bytearray(tomli_w.dumps(rng.choice(BASES)).encode() or b"seed = 0\n")
    for _ in range(rng.randint(1, 6)):
        at, action = rng.randrange(len(data) + 1), rng.random()
        if action < 0.4 and at < len(data):
            data[at] = rng.randrange(256)
        elif action < 0.6:
            del data[at : at + rng.randrange(20)]
        elif action < 0.8:
            data[at:at] = data[at : at + rng.randrange(40)]
        else:
            data[at:at] = rng.choice(
                [
                    b"[" * 3000,
                    b"9" * 5000,
                    b"\n[[recipe]]\n",
                    b"a=" + b"{a=" * 400,
                    b"\xff",
                    b"\x00",
                    b'"""',
                    b"-",
                ]
            )
    return bytes(data)


def outcome(make: Callable[[], Experiment], where: str) -> bool:
    """Whether it is valid; anything but a sound Experiment or one line raises."""
    try:
        made = make()
    except BadInput as why:
        text = str(why)
        assert text, where
        assert text.isprintable(), (where, text)
        assert len(text) <= 2000, where
        return False
    again = Experiment.from_tables(tomllib.loads(made.to_toml()))
    assert again == made, where
    assert again.build_recipe() == made.build_recipe(), where
    return True


def _tables(table: dict[str, Any]) -> Any:
    yield table
    for value in table.values():
        if isinstance(value, dict):
            yield from _tables(value)
