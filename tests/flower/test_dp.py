"""DP-FedAvg over Flower's messages: the same draws, noise and epsilon, empty rounds included."""

import pytest
import torch

pytest.importorskip("flwr", reason="the extra `flower` is not installed")
pytest.importorskip("opacus", reason="the extra `privacy` is not installed")

import flrce
from flrce import Experiment

TABLES = {
    "rounds": 6,
    "clients": 6,
    "per_round": 1,
    "seed": 1,
    "model": {"name": "logistic"},
    "train": {"epochs": 1, "lr": 0.05},
    "recipe": {"name": "dp-fedavg", "noise": 0.5},
}


def test_private_rounds_are_the_same_on_flower(tmp_path):
    here = flrce.run(Experiment(engine={"workers": 1}, **TABLES))
    there = flrce.run(Experiment(engine={"name": "flower"}, **TABLES), tmp_path)
    assert any(not record.chosen for record in here.history), "the comparison needs an empty round"
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert (ours.chosen, ours.outcome) == (theirs.chosen, "committed")
        assert ours.figures == pytest.approx(theirs.figures)
    for name, tensor in here.model.items():
        torch.testing.assert_close(tensor, there.model[name], rtol=0, atol=1e-6)
