"""Work that a client decides: a link ends training early, and what was done is booked."""

from dataclasses import dataclass, replace

import pytest
import torch
from test_loop import Made, drive, vec

import flrce
from flrce import Experiment, Link
from flrce.core.payloads import is_plausible_step_count
from flrce.core.types import LocalWork, Task
from flrce.methods.catalogue import recipes
from flrce.storage.read import read_run
from flrce.training.update_chain import SGD, UpdateChain
from training import assert_resumes


@dataclass(frozen=True)
class StopAfter(Link):
    """Ends a client's training after some steps, and counts them."""

    steps: int = 3

    def begin_round(self, w, local, carry):
        return {"done": torch.zeros(1)}

    def step(self, g, w, state):
        return g, {"done": state["done"] + 1}

    def ends_training(self, state):
        return bool(state["done"] >= self.steps)


def experiment(update, rounds=2, **train):
    train = {"epochs": 2, "batch": 16, **train}
    recipe = replace(recipes.fedavg(P=3, update=update, epochs=2, batch=16))
    if "steps" in train:
        recipe = replace(recipe, work=LocalWork(2, 16, train["steps"]))
    return Experiment(recipe=recipe, rounds=rounds, clients=6, engine={"workers": 1})


def test_an_early_exit_is_a_task_of_fewer_steps(tmp_path):
    """The same model, joules and ledger lines as a task that is told to stop there."""
    early = experiment(UpdateChain((StopAfter(3), SGD(0.05))))
    told = experiment(UpdateChain((StopAfter(99), SGD(0.05))), steps=3)
    first, second = flrce.run(early, tmp_path / "early"), flrce.run(told, tmp_path / "told")
    assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)
    lines = [read_run(tmp_path / name).costs for name in ("early", "told")]
    assert lines[0] == lines[1]
    assert {line["batches"] for line in lines[0]} == {3}
    assert first.summary["joules"] == second.summary["joules"]


def test_it_costs_less_than_what_was_planned_and_resumes(tmp_path):
    early = experiment(UpdateChain((StopAfter(2), SGD(0.05))), rounds=4)
    whole = experiment(UpdateChain((StopAfter(10**6), SGD(0.05))), rounds=4)
    assert flrce.run(early).summary["joules"] < flrce.run(whole).summary["joules"]
    assert_resumes(early, tmp_path, after=2)


@pytest.mark.parametrize(
    ("steps", "fits"),
    [(None, True), (1, True), (8, True), (9, False), (0, False), (2.0, False), ("2", False)],
)
def test_the_gate_takes_no_more_steps_than_were_planned(steps, fits):
    task = Task("a", 0, 1, 0, LocalWork(epochs=2, batch=16))
    assert is_plausible_step_count(task, 50, steps) == fits  # 2 epochs of 4 batches


def test_a_reply_that_claims_more_does_not_count():
    class Boasting(Made):
        def reply(self, task, w):
            steps = 10**6 if task.client == "a" else 1
            return replace(super().reply(task, w), steps=steps)

    engine = Boasting(lambda client, t, w: vec(1.0, 0.0), ["a", "b"])
    record = drive(recipes.fedavg(P=2), engine, 1)[0].record
    assert record.replied == ("b",)
    assert "steps, more than its task has" in record.rejected["a"]
