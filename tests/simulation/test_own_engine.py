"""flrce.run over an engine of the user's."""

import pytest
import torch

import flrce
from flrce.errors import BadInput
from training import cut_and_resumed

SMALL = flrce.Experiment(
    rounds=3,
    clients=6,
    per_round=2,
    recipe={"name": "fedavg"},
    train={"epochs": 1},
    engine={"workers": 1},
)


class Counting(flrce.Engine):
    """The simulator, and a count of what it was asked to train."""

    def __init__(self, simulator):
        self.inner, self.trained = simulator, []
        self.trainable, self.shapes = simulator.trainable, simulator.shapes

    def clients(self, t):
        return self.inner.clients(t)

    def count_samples(self, client):
        return self.inner.count_samples(client)

    def estimate(self, task):
        return self.inner.estimate(task)

    def estimate_inquiry(self, client, down):
        return self.inner.estimate_inquiry(client, down)

    def losses(self, models, clients):
        return self.inner.losses(models, clients)

    def get_task_layout(self, task):
        return self.inner.get_task_layout(task)

    def get_held_part(self, task):
        return self.inner.get_held_part(task)

    def train(self, pending, carry, keep=None):
        self.trained += [one.task.client for one in pending]
        return self.inner.train(pending, carry, keep)

    def evaluate(self, w, t, last, carry):
        return self.inner.evaluate(w, t, last, carry)


def test_an_engine_around_the_simulator_trains_the_same_model():
    made = []

    def wrap(simulator):
        made.append(Counting(simulator))
        return made[0]

    plain, own = flrce.run(SMALL), flrce.run(SMALL, engine=wrap)
    assert made[0].trained == [client for h in own.history for client in h.chosen]
    assert all(torch.equal(own.model[name], x) for name, x in plain.model.items())
    assert own.summary["joules"] == plain.summary["joules"]


def test_it_resumes_to_the_same_bits(tmp_path):
    given = {"engine": Counting}
    flrce.run(SMALL, tmp_path / "straight", **given)
    cut_and_resumed(SMALL, tmp_path / "cut", tmp_path / "straight", **given)


def test_what_is_no_engine_is_an_error():
    with pytest.raises(BadInput, match="engine gave a int"):
        flrce.run(SMALL, engine=lambda simulator: 3)
    flower = SMALL.with_tables({"engine": {"name": "flower"}})
    with pytest.raises(BadInput, match="exclude each other"):
        flrce.run(flower, engine=Counting)
