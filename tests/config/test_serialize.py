"""A recipe made in Python becomes tables that make it again: it runs, is kept, and resumes."""

import tomllib
from dataclasses import dataclass, replace

import pytest

from flrce import ServerStep
from flrce.config.experiment import Experiment
from flrce.config.serialize import serialize_recipe
from flrce.core.pieces import Recipe
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.server.optimizers import ServerYogi
from flrce.simulation import runs
from flrce.training.augment import RandomFlip
from flrce.training.schedules import CosineDecay
from flrce.training.update_chain import SGD, Momentum, PersistentLink, UpdateChain
from training import assert_resumes


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_recipe_can_be_written_down(name):
    recipe = CATALOGUE[name](P=7)
    tables = serialize_recipe(recipe)
    assert Experiment(**tables).build_recipe() == recipe
    assert tables["recipe"]["name"] == recipe.name


@pytest.mark.parametrize(
    "preset", [*recipes.STOP_PRESETS, *recipes.RELATIONSHIP_PRESETS, "private"]
)
def test_every_preset_of_flrce_can_be_written_down(preset):
    recipe = recipes.flrce(preset=preset, P=7)
    assert Experiment(**serialize_recipe(recipe)).build_recipe() == recipe


@dataclass(frozen=True)
class Slow(ServerStep):
    """A server step of one's own."""

    factor: float = 0.5

    def step(self, w, target, updates, memory):
        return w + self.factor * (target - w), memory


def mine(**changes):
    chain = UpdateChain((PersistentLink(Momentum(0.5)), SGD(0.05, CosineDecay())))
    return replace(
        recipes.fedavg(P=3, epochs=1, batch=16, update=chain, augment=[RandomFlip()]),
        name="mine",
        **changes,
    )


def test_one_of_one_s_own_runs_and_resumes(tmp_path):
    exp = Experiment(
        recipe=mine(server=Slow(0.8)),
        rounds=4,
        clients=6,
        engine={"workers": 1},
        model={"kept": "head"},
    )
    assert exp.per_round == 3
    found = assert_resumes(exp, tmp_path)
    kept = tomllib.loads((tmp_path / "straight" / "experiment.toml").read_text())
    assert kept["recipe"]["server"] == {"piece": "test_serialize:Slow", "factor": 0.8}
    assert kept["recipe"]["name"] == "mine"
    again = runs.run(Experiment.load(tmp_path / "straight" / "experiment.toml"))
    assert again.summary["accuracy"] == found.summary["accuracy"]


def test_a_recipe_stands_for_the_usual_experiment():
    def quit_at_once(done):
        raise KeyboardInterrupt

    assert Experiment(recipe=mine(server=ServerYogi(0.02))).build_recipe() == mine(
        server=ServerYogi(0.02)
    )
    with pytest.raises(KeyboardInterrupt):
        runs.run(recipes.fedavg(P=2, epochs=1), watch=quit_at_once)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"recipe": mine(), "per_round": 4}, "its own per_round"),
        ({"recipe": mine(), "train": {"lr": 0.1}}, "its own train"),
        ({"recipe": recipes.fedper(), "model": {"kept": "norms"}}, r"its own model\.personal"),
        ({"recipe": recipes.fedper(), "model": {"personal": "norms"}}, r"its own model\.personal"),
        ({"recipe": {"name": "mine", "base": "fedavgg"}}, r"recipe\.base = 'fedavgg'"),
        ({"recipe": {"name": "", "base": "fedavg"}}, "give it a name"),
    ],
)
def test_what_cannot_be_is_refused(tables, why):
    with pytest.raises(BadInput, match=why):
        Experiment(**tables)


def test_a_class_that_nobody_can_import_is_refused():
    @dataclass(frozen=True)
    class Inner(ServerStep):
        def step(self, w, target, updates, memory):
            return target, memory

    with pytest.raises(BadInput, match=r"cannot be written down.*Inner"):
        Experiment(recipe=mine(server=Inner()))


def test_a_recipe_without_an_update_goes_by_plain_sgd():
    base = recipes.fedavg(P=4)
    bare = Recipe(4, base.selector, base.trainer, base.aggregator)
    assert Experiment(recipe=bare).build_recipe().update == UpdateChain()
