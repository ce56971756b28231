"""Limits in which a method is another one: bit for bit the same model after three rounds on the
digits.
"""

import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.simulation import runs

QUICK = {"rounds": 3, "clients": 10, "per_round": 4, "engine": {"workers": 1, "eval_every": 100}}


def last(recipe):
    *_, done = runs.rounds(Experiment(**QUICK, recipe=recipe))
    assert done.record.t == 3
    return done.state.w


@pytest.fixture(scope="module")
def fedavg():
    return last({"name": "fedavg"})


@pytest.fixture(scope="module")
def flrce():
    return last({"name": "flrce-no-stop", "preset": "default"})


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "fedcom", "keep": 1.0},
        {"name": "fedcom", "keep": 1.0, "feedback": True},
        {"name": "fedprox", "mu": 0.0, "epochs_from": []},
        {"name": "fedprox", "mu": 0.0, "epochs_from": [5], "preset": "authors"},
        {"name": "dropout", "rate": 1.0},
        {"name": "dropout", "rate": 1.0, "fill": True},
        {
            "name": "heterofl",
            "rates": [1.0],
            "aggregator": "mean",
        },  # but for its own, equal weights
        {"name": "timelyfl", "share": 1.0},
        {"name": "fedavg", "compressor": {"piece": "randomk", "keep": 1.0, "scaled": True}},
        {"name": "fedavg", "compressor": {"piece": "drop-tensors", "rate": 0.0, "coverage": True}},
        {"name": "fedavg", "trainer": {"piece": "freeze", "first": 0}},
    ],
    ids=str,
)
def test_reduces_to_federated_averaging(recipe, fedavg):
    assert torch.equal(last(recipe).view(torch.int32), fedavg.view(torch.int32))


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "flrce-topk", "keep": 1.0, "stop": "never"},
        {"name": "flrce-dropout", "rate": 1.0, "stop": "never"},
        {"name": "flrce-freeze", "first": 0, "stop": "never"},
    ],
    ids=str,
)
def test_combinations_reduce_to_flrce(recipe, flrce):
    assert torch.equal(last(recipe).view(torch.int32), flrce.view(torch.int32))


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "fedcom", "keep": 0.9},
        {"name": "fedprox", "mu": 0.01, "epochs_from": []},
        {"name": "dropout", "rate": 0.9},
        {"name": "timelyfl", "share": 0.25},
        {"name": "fedavg", "trainer": {"piece": "freeze", "first": 1}},
    ],
    ids=str,
)
def test_and_away_from_the_limit_differs(recipe, fedavg):
    assert not torch.equal(last(recipe), fedavg)
