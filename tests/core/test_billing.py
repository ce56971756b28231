"""What is billed: evaluations that a stop rule reads, besides what training costs."""

import json
from dataclasses import replace

import pytest

from flrce.config.experiment import Experiment
from flrce.core.pieces import NeverStop
from flrce.flower.guarded import EveryRound
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.simulation import runs


@pytest.mark.parametrize(
    ("rule", "reads"),
    [
        (NeverStop(), False),
        (CostBudget(rounds=3), False),
        (UpdateConflicts(2.0), False),
        (NoHeadway(), False),
        (Patience(), True),
        (AnyOf((NeverStop(), CostBudget(rounds=3))), False),
        (AnyOf((NeverStop(), AnyOf((Patience(), NeverStop())))), True),
        (EveryRound(UpdateConflicts(2.0)), False),
        (EveryRound(Patience()), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_says_whether_it_reads_evaluations(rule, reads):
    assert rule.reads_evaluations is reads


@pytest.mark.parametrize(
    ("stop", "holdouts", "pays"),
    [
        (MarginalGain(), True, False),  # reports cost no traffic
        (MarginalGain(), False, True),  # without them it reads evaluations
        (MarginalGain(evidence="both"), True, True),
        (AnyOf((NeverStop(), MarginalGain())), False, True),
        (NeverStop(), False, False),
    ],
)
def test_a_recipe_pays_for_what_its_rule_reads(stop, holdouts, pays):
    assert replace(recipes.fedavg(), stop=stop, holdouts=holdouts).pays_for_evaluations is pays


SHAPE = {
    "rounds": 4,
    "clients": 6,
    "per_round": 2,
    "seed": 3,
    "engine": {"workers": 1, "eval_every": 2},
    "train": {"epochs": 1, "batch": 16},
}


def run_with(rule, folder, **changes):
    recipe = {"name": "fedavg", "stop": rule}
    return runs.run(Experiment.from_tables({**SHAPE, "recipe": recipe, **changes}), folder)


def test_evaluations_that_a_rule_reads_are_billed(tmp_path):
    """In rounds 2 and 4 every client downloads the model, and says its metric in 8 bytes."""
    free, read = run_with("never", tmp_path / "free"), run_with("patience", tmp_path / "read")
    lines = [json.loads(line) for line in (tmp_path / "read" / "clients.jsonl").open()]
    evaluated = [line for line in lines if line["outcome"] == "evaluated"]
    assert [line["t"] for line in evaluated] == [2] * 6 + [4] * 6
    size = evaluated[0]["bytes_down"]
    assert size == 4 * sum(len(value.flatten()) for value in read.model.values())
    for a, b in zip(free.history, read.history, strict=True):
        count = 6 if b.t % 2 == 0 else 0
        assert b.bytes_down == a.bytes_down + count * size
        assert b.bytes_framing == a.bytes_framing + 8 * count
        assert (b.bytes_up, b.bytes_wasted, b.accuracy) == (a.bytes_up, a.bytes_wasted, a.accuracy)
        joules = sum(line["joules"] for line in evaluated if line["t"] == b.t)
        assert b.joules == pytest.approx(a.joules + joules)
        assert (b.seconds > a.seconds) == bool(count)
    assert read.summary["joules"] == pytest.approx(sum(line["joules"] for line in lines))


def test_a_budget_knows_of_evaluations(tmp_path):
    """A budget of what two rounds cost ends before a third, with the evaluation counted."""
    read = run_with("patience", tmp_path / "whole")
    spent = sum(record.bytes_up + record.bytes_down for record in read.history[:2])
    cut = run_with("patience", tmp_path / "cut", stop={"bytes": float(spent)})
    assert [record.outcome for record in cut.history] == ["committed"] * 2
    short = run_with("patience", tmp_path / "short", stop={"bytes": float(spent - 1)})
    assert [record.outcome for record in short.history] == ["committed", "not started"]


@pytest.mark.parametrize("rounds", [3, 30])
def test_a_budget_of_three_rounds_of_the_default_runs_three(rounds, tmp_path):
    """Estimates know the codes of both directions, the first contacts included."""
    tables = {**SHAPE, "rounds": rounds, "recipe": {"name": "frugal", "stop": "never"}}
    three = {**tables, "stop": {"rounds": 3}}
    whole = runs.run(Experiment.from_tables(three), tmp_path / "whole")
    spent = sum(record.bytes_up + record.bytes_down for record in whole.history)
    assert whole.summary["rounds"] == 3
    exact = Experiment.from_tables({**tables, "stop": {"bytes": float(spent)}})
    assert runs.run(exact, tmp_path / "exact").summary["rounds"] == 3
    less = Experiment.from_tables({**tables, "stop": {"bytes": float(spent - 1)}})
    assert runs.run(less, tmp_path / "less").summary["rounds"] == 2
