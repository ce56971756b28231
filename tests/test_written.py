"""A recipe made in Python becomes tables that make it again: it runs, is kept, and resumes."""

import tomllib
from dataclasses import dataclass, replace

import pytest

from flrce import recipes, runs
from flrce.config import Experiment
from flrce.errors import BadInput
from flrce.local.augment import Flip
from flrce.local.schedules import Cosine
from flrce.local.updates import SGD, Carried, Chain, Momentum
from flrce.pieces import Recipe
from flrce.recipes import CATALOGUE
from flrce.servers.steps import Yogi
from flrce.stops.budget import AnyOf, Budget
from flrce.written import tables_of
from training import assert_resumes


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_recipe_can_be_written_down(name):
    recipe = CATALOGUE[name](P=7)
    tables = tables_of(recipe)
    assert Experiment(**tables).build_recipe() == recipe
    assert tables["recipe"]["name"] == recipe.name


@pytest.mark.parametrize("preset", [*recipes.STOPS, *recipes.SELECTIONS, "private"])
def test_every_preset_of_flrce_can_be_written_down(preset):
    recipe = recipes.flrce(preset=preset, P=7)
    assert Experiment(**tables_of(recipe)).build_recipe() == recipe


@dataclass(frozen=True)
class Slow:
    """A server step of one's own."""

    factor: float = 0.5

    def step(self, w, target, updates, memory):
        return w + self.factor * (target - w), memory


def mine(**changes):
    chain = Chain((Carried(Momentum(0.5)), SGD(0.05, Cosine())))
    return replace(recipes.fedavg(P=3, epochs=1, batch=16, update=chain, augment=[Flip()]), name="mine", **changes)


def test_one_of_one_s_own_runs_and_resumes(tmp_path):
    exp = Experiment(recipe=mine(server=Slow(0.8)), rounds=4, clients=6, engine={"workers": 1}, model={"kept": "head"})
    assert exp.per_round == 3
    found = assert_resumes(exp, tmp_path)
    kept = tomllib.loads((tmp_path / "straight" / "experiment.toml").read_text())
    assert kept["recipe"]["server"] == {"piece": "test_written:Slow", "factor": 0.8}
    assert kept["recipe"]["name"] == "mine"
    again = runs.run(Experiment.load(tmp_path / "straight" / "experiment.toml"))
    assert again.summary["accuracy"] == found.summary["accuracy"]


def test_a_recipe_stands_for_the_usual_experiment():
    def quit_at_once(done):
        raise KeyboardInterrupt

    assert Experiment(recipe=mine(server=Yogi(0.02))).build_recipe() == mine(server=Yogi(0.02))
    with pytest.raises(KeyboardInterrupt):
        runs.run(recipes.fedavg(P=2, epochs=1), watch=quit_at_once)


@pytest.mark.parametrize(("tables", "why"), [
    ({"recipe": mine(), "per_round": 4}, "its own per_round"),
    ({"recipe": mine(), "train": {"lr": 0.1}}, "its own train"),
    ({"recipe": recipes.fedper(), "model": {"kept": "norms"}}, r"its own model\.kept"),
    ({"recipe": mine(stop=AnyOf((Budget(rounds=3),)))}, "cannot be written down"),
    ({"recipe": {"name": "mine", "base": "fedavgg"}}, r"recipe\.base = 'fedavgg'"),
    ({"recipe": {"name": "", "base": "fedavg"}}, "give it a name"),
])  # fmt: skip
def test_what_cannot_be_is_refused(tables, why):
    with pytest.raises(BadInput, match=why):
        Experiment(**tables)


def test_a_class_that_nobody_can_import_is_refused():
    @dataclass(frozen=True)
    class Inner:
        def step(self, w, target, updates, memory):
            return target, memory

    with pytest.raises(BadInput, match=r"cannot be written down.*Inner"):
        Experiment(recipe=mine(server=Inner()))


def test_a_recipe_without_an_update_goes_by_plain_sgd():
    base = recipes.fedavg(P=4)
    bare = Recipe(4, base.selector, base.trainer, base.aggregator)
    assert Experiment(recipe=bare).build_recipe().update == Chain()
