"""Thousands of damaged experiments: each is a valid Experiment that survives its own file, or one
line of BadInput.
"""

import random
import typing
from dataclasses import fields

import pytest
import tomli_w
from annotated_types import BaseMetadata
from pydantic.fields import FieldInfo

from experiment_fuzz import BASES, bytes_of, mutated, outcome
from flrce.config.compose import build_piece
from flrce.config.experiment import Experiment
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue import recipes
from flrce.methods.registry import PIECES

PLAIN = (int, float, str)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_tables(seed):
    rng = random.Random(seed)
    valid = sum(
        outcome(lambda: Experiment.from_tables(mutated(rng)), f"seed {seed}, {i}")
        for i in range(400)
    )
    assert 20 < valid < 380  # neither all refused nor all let through


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(seed, tmp_path):
    rng, path = random.Random(100 + seed), tmp_path / "experiment.toml"
    for i in range(250):
        path.write_bytes(bytes_of(rng))
        outcome(lambda: Experiment.load(path), f"seed {seed}, {i}")


@pytest.mark.parametrize("base", BASES, ids=lambda base: str(base.get("recipe", {}).get("name")))
def test_the_bases_are_valid(base, tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps(base))
    assert Experiment.load(path) == Experiment.from_tables(base)


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, all_ in PIECES.items() for name in all_]
)
def test_every_field_of_every_piece_declares_its_bounds(role, name):
    """A plain int, float or str would let anything through."""
    make = PIECES[role][name]
    hints = typing.get_type_hints(make, include_extras=True)
    for f in fields(make):  # type: ignore[arg-type]
        for kind in kinds(hints[f.name]):
            assert kind not in PLAIN, (
                f"{make.__name__}.{f.name} is a plain {kind.__name__}; see flrce/bounds.py"
            )


def kinds(hint):
    """The leaves of an annotation; an Annotated one with bounds is a leaf."""
    if any(isinstance(m, BaseMetadata | FieldInfo) for m in getattr(hint, "__metadata__", ())):
        return [hint]
    parts = [p for p in typing.get_args(hint) if isinstance(p, type) or typing.get_origin(p)]
    return [leaf for part in parts for leaf in kinds(part)] if parts else [hint]


BAD = [
    ("average", {"piece": "ema", "decay": "x"}, "decay = 'x': should be a valid number"),
    ("average", {"piece": "ema", "decay": 1.0}, "decay = 1.0: should be less than 1"),
    ("average", {"piece": "tail", "last": -1}, "last = -1: should be greater than or equal to 1"),
    (
        "stop",
        {"piece": "patience", "rounds": 0},
        "rounds = 0: should be greater than or equal to 1",
    ),
    ("stop", {"piece": "conflicts"}, "psi is missing"),
    ("trainer", {"piece": "sgd", "batch": 0}, "batch is no setting of it"),
    ("link", {"piece": "sgd", "lr": float("inf")}, "lr = inf: should be"),
    ("link", {"piece": "momentum", "beta": 1.5}, "beta = 1.5: should be"),
    ("selector", {"piece": "utility", "overcommit": float("nan")}, "overcommit = nan: should be"),
    (
        "selector",
        {"piece": "relationship", "anchor": "modle"},
        "anchor = 'modle': should be 'origin' or 'model'",
    ),
    ("aggregator", {"piece": "mean", "rate": float("nan")}, "rate = nan: should be"),
    (
        "aggregator",
        {"piece": "mean", "by": "sampels"},
        "by = 'sampels': should be 'samples' or 'equal'",
    ),
    ("aggregator", {"piece": "clipped", "norm": "mean"}, "norm = 'mean': should be"),
    ("aggregator", {"piece": "mean", "rate": True}, "rate = True: should be a valid number"),
    (
        "compressor",
        {"piece": "error-feedback", "inner": {"piece": "topk", "keep": 2}},
        "keep = 2: should be",
    ),
    (
        "compressor",
        {"piece": "topk", "keep": 10**5000},
        "keep = an integer of 16610 bits: should be",
    ),
    ("submodel", {"piece": "random-units", "rates": [0.5, 7.0]}, "rates"),
    ("submodel", {"piece": "full", "rate": 1}, "rate is no setting of it; it has none"),
]


@pytest.mark.parametrize(("role", "wanted", "line"), BAD)
def test_bad_fields_of_pieces(role, wanted, line):
    with pytest.raises(BadInput) as refused:
        build_piece(role, wanted)
    assert line in str(refused.value)
    assert str(refused.value).startswith(f"recipe.{role} = ")


def test_pieces_made_in_python_are_checked_too():
    from dataclasses import replace

    with pytest.raises(
        BadInput, match="aggregator WeightedMean: rate = nan: should be a finite number"
    ):
        replace(recipes.fedavg(), aggregator=WeightedMean(rate=float("nan")))
    with pytest.raises(BadInput, match="update SGD: lr = -1"):
        recipes.fedavg(lr=-1)
    with pytest.raises(
        BadInput, match="work LocalWork: epochs = 0: should be greater than or equal to 1"
    ):
        recipes.fedavg(epochs=0)
    with pytest.raises(BadInput, match="work LocalWork: batch = 1000000000: should be"):
        recipes.fedavg(batch=10**9)
