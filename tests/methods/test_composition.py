"""Pieces made of pieces: several trainers in one recipe, and states inside states."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_loop import Made, drive, vec

import flrce
from flrce import Aggregator, Experiment, LocalTrainer, StopRule
from flrce.core.pieces import NeverStop, NoCompression
from flrce.core.state_values import grow_tables
from flrce.errors import BadInput
from flrce.methods import own_pieces
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue import recipes
from flrce.methods.client.combined import CombinedTraining
from flrce.methods.client.scaffold import ScaffoldTraining
from flrce.methods.client.workload import PlainTraining, ProximalTraining
from flrce.methods.compression.sparsify import TopK
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.selection.uniform import UniformSelector
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.training.optimizers import ProximalTerm
from training import assert_resumes

SHORT = {"rounds": 4, "clients": 8, "per_round": 3, "train": {"epochs": 1, "lr": 0.05}}


@dataclass(frozen=True)
class Turns:
    seen: torch.Tensor = field(metadata={"rows": True, "fill": -1.0})  # (M,)


@dataclass(frozen=True)
class Counting(LocalTrainer):
    """Counts each client's replies; sends a tensor along."""

    name: str = "count"

    def initial_state(self, M, d, D):
        return Turns(torch.zeros(M))

    def assign(self, tasks, memory, view):
        return [
            replace(task, tensors={**task.tensors, self.name: memory.seen[task.k : task.k + 1]})
            for task in tasks
        ]

    def observe(self, memory, event):
        seen = memory.seen.clone()
        seen[event.updates.k] += 1
        return Turns(seen)

    def report_figures(self, memory, event):
        return {self.name: memory.seen.sum()}


def test_two_trainers_of_which_one_does_nothing_are_the_other():
    alone = {"name": "scaffold"}
    both = {"name": "scaffold", "trainer": ["alike", "scaffold", "alike"]}
    first, second = (
        flrce.run(Experiment(recipe=recipe, **SHORT)).model for recipe in (alone, both)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_links_and_tasks_of_all_trainers_apply(tmp_path):
    recipe = {"name": "scaffold", "trainer": ["scaffold", {"piece": "proximal", "mu": 0.5}]}
    exp = Experiment(recipe=recipe, engine={"workers": 1}, **SHORT)
    built = exp.build_recipe()
    assert built.trainer == CombinedTraining((ScaffoldTraining(), ProximalTraining(0.5)))
    links = [type(link) for link in built.chain.links]
    assert ProximalTerm in links
    assert len(links) == 1 + len(recipes.scaffold().chain.links)
    assert_resumes(exp, tmp_path, after=2)


def test_states_lie_in_a_tuple_and_grow_with_the_roster():
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b"])
    trainer = CombinedTraining((PlainTraining(), Counting(), Counting("again")))
    recipe = replace(recipes.fedavg(P=4), trainer=trainer)
    drive(recipe, engine, 2)
    engine.ids = ["a", "b", "c", "d"]
    memory = recipe.initial_state(2, 2, 2)
    grown = grow_tables(memory, 4)["trainer"]
    assert grown[0] is None
    assert grown[1].seen.tolist() == [0.0, 0.0, -1.0, -1.0]
    done = drive(recipe, engine, 2)[-1]
    assert done.record.figures == {"count": 8.0, "again": 8.0}


@pytest.mark.parametrize(
    ("trainers", "says"),
    [
        ((Counting(), Counting()), "both send a tensor 'count'"),
        ((), "trainers is empty"),
        ((WeightedMean(),), "must subclass LocalTrainer"),
    ],
)
def test_trainers_that_do_not_go_together_are_refused(trainers, says):
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b"])
    with pytest.raises(BadInput, match=says):
        drive(replace(recipes.fedavg(P=2), trainer=CombinedTraining(trainers)), engine, 1)


@dataclass(frozen=True)
class Remembering(Aggregator):
    def initial_state(self, M, d, D):
        return Turns(torch.zeros(M))

    def __call__(self, w, updates, memory):
        return w + updates.U.mean(0)

    def observe(self, memory, event):
        seen = memory.seen.clone()
        seen[event.updates.k] += event.t
        return Turns(seen)


@dataclass(frozen=True)
class OuterState:
    rounds: int
    inner: Any


@dataclass(frozen=True)
class Forgetful(Aggregator):
    """Halves the step of another aggregator, and keeps no state of it."""

    inner: Aggregator = field(default=Remembering(), metadata={"piece": True})

    def __call__(self, w, updates, memory):
        return (w + self.inner(w, updates, memory)) / 2


@dataclass(frozen=True)
class Wrapper(Aggregator):
    """The same with a state in which the inner one's lies."""

    inner: Aggregator = field(default=Remembering(), metadata={"piece": True})

    def initial_state(self, M, d, D):
        return OuterState(0, self.inner.initial_state(M, d, D))

    def __call__(self, w, updates, memory):
        return (w + self.inner(w, updates, memory.inner)) / 2

    def observe(self, memory, event):
        return OuterState(memory.rounds + 1, self.inner.observe(memory.inner, event))


def test_a_wrapper_that_would_lose_its_inner_state_is_refused():
    with pytest.raises(BadInput, match="Forgetful wraps Remembering, which remembers") as why:
        replace(recipes.fedavg(P=2), aggregator=Forgetful())
    assert "\n" not in str(why.value)
    assert replace(recipes.fedavg(P=2), aggregator=Forgetful(WeightedMean()))


def test_a_state_inside_a_state_resumes_and_grows(tmp_path):
    recipe = replace(recipes.fedavg(P=3), aggregator=Wrapper())
    exp = Experiment(recipe=recipe, rounds=4, clients=6, engine={"workers": 1})
    assert_resumes(exp, tmp_path, after=2)
    memory = {"aggregator": OuterState(3, Turns(torch.ones(2)))}
    grown = grow_tables(memory, 3)["aggregator"]
    assert grown == OuterState(3, grown.inner)
    assert grown.inner.seen.tolist() == [1.0, 1.0, -1.0]


@dataclass(frozen=True)
class CountingStop(flrce.StopRule):
    """Counts rounds, and reports the count by its name."""

    name: str = "count"

    def initial_state(self, M, d, D):
        return Turns(torch.zeros(M))

    def __call__(self, history):
        return ""

    def observe(self, state, event):
        return Turns(state.seen + 1)

    def report_figures(self, state, event):
        return {self.name: float(state.seen[0])}


def test_stop_rules_that_remember_each_keep_their_state(tmp_path):
    rules = (CountingStop("one"), CostBudget(joules=1e9), CountingStop("two"), Patience(9))
    recipe = replace(recipes.fedavg(P=2), stop=AnyOf(rules))
    exp = Experiment(recipe=recipe, rounds=3, clients=6, engine={"workers": 1})
    assert flrce.run(exp, tmp_path / "run").history[-1].figures == {"one": 3.0, "two": 3.0}
    again = Experiment.load(tmp_path / "run" / "experiment.toml").build_recipe()
    assert again.stop == recipe.stop
    listed = {"name": "fedavg", "stop": ["never", {"piece": "patience", "rounds": 4}]}
    assert Experiment(recipe=listed).build_recipe().stop == AnyOf((NeverStop(), Patience(4)))


@dataclass(frozen=True)
class Wrapping(flrce.Selector):
    """Holds another selector; only the annotation says so."""

    inner: flrce.Selector = field(default=RoundRobinSelector())
    others: tuple[flrce.Selector, ...] = ()

    def select(self, state, view, rng):
        return self.inner.select(state, view, rng)


def test_the_annotation_of_a_field_says_which_piece_it_holds(tmp_path):
    tables = {"piece": f"{__name__}:Wrapping", "inner": "uniform", "others": ["uniform"]}
    exp = Experiment(recipe={"name": "fedavg", "selector": tables})
    made = exp.build_recipe().selector
    assert made == Wrapping(UniformSelector(), (UniformSelector(),))
    recipe = replace(recipes.fedavg(P=2), selector=made)
    assert Experiment(recipe=recipe).build_recipe() == recipe


@dataclass(frozen=True)
class Halving(flrce.Compressor):
    inner: flrce.Compressor = field(default=NoCompression())

    def encode(self, u, layout, rng, client_state):
        return self.inner.encode(u / 2, layout, rng, client_state)

    def decode(self, payload, layout, rng):
        return 2 * self.inner.decode(payload, layout, rng)


def test_messages_name_a_piece_inside_one_of_ones_own(monkeypatch):
    wire = pytest.importorskip("flrce.flower.wire", reason="needs flrce[flower]")
    monkeypatch.setattr(own_pieces, "OWN_PIECES", {"compressor": {}})
    own_pieces.register_recipe_pieces(replace(recipes.fedavg(P=2), compressor=Halving()))
    message = wire.write_piece("compressor", Halving(TopK(0.5)), "code")
    assert wire.read_piece("compressor", message, "code") == Halving(TopK(0.5))


@dataclass(frozen=True)
class FirstModelRule(StopRule):
    """Keeps the first model that it sees."""

    def initial_state(self, M, d, D):
        return torch.zeros(D)

    def observe(self, state, event):
        return event.w if not state.any() else state

    def __call__(self, history):
        return ""


def test_the_state_of_joined_stop_rules_is_that_of_the_rule_that_remembers():
    recipe = replace(recipes.fedavg(2), stop=AnyOf((CostBudget(joules=1.0), FirstModelRule())))
    assert recipe.initial_state(3, 2, 2)["stop"].shape == (2,)
    deep = replace(
        recipe, stop=AnyOf((recipe.stop, CostBudget(rounds=9)))
    )  # as Flower adds its own
    assert deep.initial_state(3, 2, 2)["stop"].shape == (2,)
    assert "stop" not in replace(recipe, stop=AnyOf((CostBudget(joules=1.0),))).initial_state(
        3, 2, 2
    )
