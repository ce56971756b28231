"""A recipe is built and validated once per run, whatever engine runs it."""

import copy
import gc

import pytest

import flrce
from flrce import Experiment
from flrce.config import experiment as module

SMALL = {"clients": 4, "per_round": 2, "rounds": 2, "recipe": {"name": "fedavg"}}


@pytest.fixture
def builds(monkeypatch):
    """How often a recipe was composed from its table."""
    seen = []
    compose = module.compose_recipe
    monkeypatch.setattr(
        module, "compose_recipe", lambda *given: seen.append(given) or compose(*given)
    )
    return seen


@pytest.mark.parametrize("engine", ["simulator", "flower"])
def test_a_run_builds_its_recipe_once(engine, builds):
    if engine == "flower":
        pytest.importorskip("flwr", reason="needs flrce[flower]")
    flrce.run(Experiment(**SMALL, engine={"name": engine, "workers": 1, "kernel": "torch"}))
    assert len(builds) == 1


def test_copies_have_recipes_of_their_own(builds):
    first = Experiment(**SMALL)
    second = first.with_seed(1)
    assert first.build_recipe() is first.build_recipe()
    assert second.build_recipe() is not first.build_recipe()
    assert second.build_recipe() == first.build_recipe()
    assert first == copy.deepcopy(first)
    assert len(builds) == 2


def test_recipes_go_with_their_experiments():
    gc.collect()
    before = len(module._recipes)
    experiment = Experiment(**SMALL)
    assert len(module._recipes) == before + 1
    del experiment
    gc.collect()
    assert len(module._recipes) == before
