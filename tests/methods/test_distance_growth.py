"""The stop on the growth of the way from the initial model."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flrce import Experiment
from flrce.core.types import RoundEvent, RoundRecord, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.budget import AnyOf, CostBudget
from flrce.methods.stopping.distance_growth import DistanceGrowth
from flrce.simulation import runs


def test_the_way_is_measured_from_the_first_model():
    """w_0 = (3, 0), then (3, 4): 4 away, then (6, 4): 5 away; what does not train does not
    count.
    """
    rule = DistanceGrowth()
    memory = rule.initial_state(1, 2, 3)
    models = [torch.tensor(w) for w in ([3.0, 0.0, 9.0], [3.0, 4.0, 1.0], [6.0, 4.0, 5.0])]
    nobody = Updates(torch.zeros(0), torch.zeros(0, 3), torch.zeros(0), trainable=2)
    ways = []
    for t, (w, w_next) in enumerate(pairwise(models), 1):
        memory = rule.observe(memory, RoundEvent(t, w, w_next, nobody, M=1))
        ways.append(rule.distance_from_start(memory))
    assert ways == [4.0, 5.0]


def test_it_stops_where_the_way_hardly_grows():
    """Ways 1, 2, 4, 4.04: log 2 a round over two rounds, then log(4.04 / 2) / 2 = .35, and .005
    over the last one.
    """
    history = [RoundRecord(t, way=way) for t, way in enumerate((1.0, 2.0, 4.0, 4.04), 1)]
    assert not DistanceGrowth(0.3, rounds=2)(history)
    assert DistanceGrowth(0.36, rounds=2)(history)
    assert (
        DistanceGrowth(0.01, rounds=1)(history)
        == "the way from the initial model grew by 0.01 a round < 0.01 over 1 rounds"
    )
    assert math.log(4.04 / 4) < 0.01
    assert not DistanceGrowth(0.01, rounds=1)(history[:3])
    assert not DistanceGrowth(9.0, rounds=4)(history)  # too few are known
    assert not DistanceGrowth(9.0, rounds=1)([*history, RoundRecord(5, "abandoned")])
    assert not DistanceGrowth(9.0, rounds=1)(
        [RoundRecord(1, way=0.0), RoundRecord(2, way=1.0)]
    )  # it stood still before


@pytest.mark.parametrize(
    "recipe", [{"name": "fedavg"}, {"name": "flrce", "preset": "private"}], ids=lambda r: r["name"]
)
def test_a_run_ends_and_resumes_with_it(tmp_path, recipe):
    """It reads models alone, so that sums are enough; a budget beside it does not take its memory
    away.
    """
    recipe = {**recipe, "stop": {"piece": "growth", "rate": 0.9, "rounds": 2}}
    settings = {
        "rounds": 6,
        "clients": 8,
        "per_round": 4,
        "data": {"name": "digits"},
        "engine": {"workers": 1},
        "recipe": recipe,
        "stop": {"joules": 1e9},
    }
    whole = runs.run(Experiment(**settings))
    assert whole.history[-1].t == 3
    assert whole.summary["stopped"].startswith("the way from the initial model grew")
    ways = [h.way for h in whole.history]
    assert ways == sorted(ways)
    assert ways[0] > 0
    runs.run(Experiment(**{**settings, "rounds": 1}), tmp_path)
    again = runs.run(Experiment(**settings), tmp_path, resume=True)
    assert [h.way for h in again.history] == ways


def test_bad_values_are_refused_in_one_line():
    with pytest.raises(BadInput, match="rate"):
        Experiment(recipe={"name": "fedavg", "stop": {"piece": "growth", "rate": 0.0}}).composed()


def test_memory_is_that_of_the_rule_that_remembers():
    recipe = replace(recipes.fedavg(2), stop=AnyOf((CostBudget(joules=1.0), DistanceGrowth())))
    assert recipe.initial_state(3, 2, 2)["stop"].model.shape == (2,)
    deep = replace(
        recipe, stop=AnyOf((recipe.stop, CostBudget(rounds=9)))
    )  # as a strategy of Flower adds its own
    assert deep.initial_state(3, 2, 2)["stop"].model.shape == (2,)
    assert "stop" not in replace(recipe, stop=AnyOf((CostBudget(joules=1.0),))).initial_state(
        3, 2, 2
    )
