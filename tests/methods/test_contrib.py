"""Methods of examples/contrib: FedJoule's knapsack and AutoFL's tables by hand, against plain loops,
and within whole runs.
"""

import itertools
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from autofl import QLearning, autofl, get_metric_percent
from eafl import eafl
from fedclean import fedclean
from fedjoule import (
    BUDGET_STEPS,
    EnergyBudgetSelector,
    EnergyBudgetState,
    alignment_scores,
    fedjoule,
    select_quickest_cohort,
    solve_knapsack,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.roles import RoundView
from flrce.core.state_values import grow_state_tables
from flrce.core.types import ClientCost, LocalWork, RoundEvent, RoundRecord, Task, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.simulation import runs

FLEET = {"profile": {"phone": 0.5, "raspberry-pi-5": 0.5}}


def vec(*values):
    return torch.tensor(values, dtype=torch.float64)


def updates(k, U, joules=None):
    spent = tuple(ClientCost(joules=each) for each in (joules or [0.0] * len(k)))
    return Updates(
        torch.tensor(k),
        torch.tensor(U),
        torch.ones(len(k), dtype=torch.float64),
        len(U[0]),
        spent=spent,
    )


def view(t, P, pool, costs=None, history=(), T=10):
    def draft(k):
        return Task(str(k), k, t, 0, LocalWork(epochs=5), rounds=T)

    def estimate(task):
        return costs[task.k]

    return RoundView(t, P, tuple(pool), torch.ones(max(pool) + 1), estimate, draft, None, history)


# FedJoule


def test_a_cosine_with_the_sum_is_a_value():
    """(1, 0), (0, 1), (-1, 0) and nothing: the sum is (0, 1), the cosines 0, 1, 0 and none."""
    assert alignment_scores(vec(1, 0, 0, 1, -1, 0, 0, 0).view(4, 2)).tolist() == [
        0.5,
        1.0,
        0.5,
        0.5,
    ]
    assert alignment_scores(vec(1, 0, -3, 0).view(2, 2)).tolist() == [
        0.0,
        1.0,
    ]  # one against the sum
    assert alignment_scores(vec(2, 0, -2, 0).view(2, 2)).tolist() == [
        0.5,
        0.5,
    ]  # a sum of nothing says nothing


def test_values_are_smoothed_and_go_back_to_one():
    piece = EnergyBudgetSelector(keep=0.75, forgets=0.5)
    memory = piece.initial_state(3, 2, 2)
    assert piece.compute_client_values(memory, torch.arange(3), 1).tolist() == [1, 1, 1]
    w = torch.zeros(2)
    memory = piece.observe(
        memory, RoundEvent(1, w, w, updates([0, 1], [[1.0, 0.0], [-3.0, 0.0]]), 3)
    )
    # cosines -1 and 1 with (-2, 0): values 0 and 1 at once, for neither was seen before
    assert piece.compute_client_values(memory, torch.arange(3), 2).tolist() == [0, 1, 1]
    # two rounds later 1 - (1 - 0) / 4
    assert piece.compute_client_values(memory, torch.arange(3), 4).tolist() == [0.75, 1, 1]
    memory = piece.observe(memory, RoundEvent(4, w, w, updates([0], [[1.0, 0.0]]), 3))
    # .75 of 0 and .25 of 1
    assert piece.compute_client_values(memory, torch.arange(3), 5).tolist() == [0.25, 1, 1]
    assert grow_state_tables(memory, 5).seen.tolist() == [4, 1, 0, 0, 0]


def test_what_a_round_may_take():
    costs = [ClientCost(joules=2.0), ClientCost(joules=4.0)]
    spent = (RoundRecord(1, joules=30.0), RoundRecord(2, "abandoned", joules=10.0))
    assert EnergyBudgetSelector(share=0.5).compute_energy_limit(
        spent, costs, 4, 10, 2
    ) == pytest.approx(0.5 * 4 * 3)
    # 100 - 40 over the rounds 2 to 10
    assert EnergyBudgetSelector(joules=100.0).compute_energy_limit(
        spent, costs, 4, 10, 2
    ) == pytest.approx(60 / 9)
    assert EnergyBudgetSelector(joules=30.0).compute_energy_limit(spent, costs, 4, 10, 2) == 0
    assert (
        EnergyBudgetSelector(joules=100.0).compute_energy_limit(spent, costs, 4, 0, 2) == 60
    )  # nobody knows how many rounds


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 500)), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([BUDGET_STEPS, BUDGET_STEPS / 2]),
)
def test_the_knapsack_is_the_best_of_all_subsets(items, P, limit):
    value, joules = np.array(items, float).T
    picked = solve_knapsack(value, joules, limit, P)
    subsets = (s for size in range(P + 1) for s in itertools.combinations(range(len(items)), size))
    best = max((sum(value[list(s)]) for s in subsets if sum(joules[list(s)]) <= limit), default=0)
    assert len(set(picked)) == len(picked) <= P
    assert joules[picked].sum() <= limit
    assert value[picked].sum() == pytest.approx(best)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 3)), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_the_limit_is_kept_whatever_the_joules(items, P):
    value, joules = np.array(items).T
    picked = solve_knapsack(value, joules, 2.0, P)
    assert joules[picked].sum() <= 2.0 + 1e-9
    assert bool(picked) == bool((joules <= 2.0).any())


def test_nearly_the_best_in_less_time():
    """Values 1, .9, .8 after 100, 2 and 1 s at 1 J each; two places, 10 J."""
    value, seconds = np.array([1.0, 0.9, 0.8]), (100.0, 2.0, 1.0)
    costs = [ClientCost(joules=1.0, compute_seconds=each) for each in seconds]
    assert select_quickest_cohort(value, costs, 10.0, 2, slack=0.0) == ([0, 1], 100.0)
    # 1.7 of 1.9 is within a fifth of the best, and done after 2 s
    assert select_quickest_cohort(value, costs, 10.0, 2, slack=0.2) == ([1, 2], 2.0)
    assert select_quickest_cohort(value, costs, 1.0, 2, slack=0.0) == (
        [0],
        100.0,
    )  # one joule pays for one
    assert select_quickest_cohort(value, costs, 0.5, 2, slack=0.0) == ([], None)
    # waiting for the slow one takes 1 W from each of the others: 98 J more, which nobody pays
    idle = [replace(cost, idle_watts=1.0) for cost in costs]
    assert select_quickest_cohort(value, idle, 10.0, 2, slack=0.0) == ([1, 2], 2.0)


def test_unseen_first_then_by_value_and_joules():
    costs = [ClientCost(joules=1.0, compute_seconds=1.0)] * 3 + [
        ClientCost(joules=9.0, compute_seconds=1.0)
    ]
    piece, rng = EnergyBudgetSelector(joules=20.0, forgets=0.0), np.random.default_rng(0)
    memory = EnergyBudgetState(vec(0.2, 0.6, 0.4, 0.1), torch.tensor([1, 1, 0, 1]))
    chosen = piece.select(memory, view(2, 2, range(4), costs, T=11), rng)  # 2 J for the round
    assert set(chosen.k) == {1, 2}
    assert chosen.why["joules_for_the_round"] == 2.0
    poor = piece.select(memory, view(2, 2, range(4), costs, (RoundRecord(1, joules=19.5),)), rng)
    assert (
        len(poor.k) == 1
    )  # half a joule pays for nobody: the cheapest, which the budget then refuses
    assert poor.k[0] != 3


def budgeted(joules=0.0, **settings):
    """The tables of an experiment under a budget, as the docstring of fedjoule.py writes them."""
    selector = {"piece": "fedjoule:EnergyBudgetSelector", "joules": joules, **settings}
    recipe = {"base": "fedavg", "name": "fedjoule", "selector": selector}
    return {"recipe": recipe, **({"stop": {"joules": joules}} if joules else {})}


def learned(**settings):
    """The same of autofl.py."""
    piece = {"piece": "autofl:QLearning", **settings}
    return {"recipe": {"base": "fedavg", "name": "autofl", "selector": piece, "trainer": piece}}


def small(recipe, **changes):
    tables = {
        "rounds": 12,
        "clients": 12,
        "per_round": 4,
        "recipe": recipe,
        "train": {"epochs": 2},
        "fleet": FLEET,
    }
    return Experiment.from_tables(tables | changes)


def test_a_run_keeps_to_its_joules_and_uses_them():
    plain = runs.run(small({"name": "fedavg"}))
    budget = plain.summary["joules"] / 2
    found = runs.run(small(**budgeted(budget)))
    assert 0.8 * budget < found.summary["joules"] <= budget
    assert len(found.history) == 12
    tight = runs.run(small(**budgeted(budget / 100)))
    assert tight.summary["joules"] <= budget / 100
    assert "joules" in tight.summary["stopped"]


def test_a_budget_among_clients_that_come_and_go(tmp_path):
    """Batteries, presence and a deadline beside it; and again after a kill."""
    fleet = {
        **FLEET,
        "availability": {"piece": "chance", "share": 0.6, "slot": 5.0},
        "battery": "phone",
    }
    tables = budgeted(15.0)
    tables["recipe"]["pace"] = {"piece": "deadline", "seconds": 2.0}
    exp = small(**tables, fleet=fleet, rounds=6)

    def quit_after_two(done):
        if done.record.t == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(exp, tmp_path / "cut", watch=quit_after_two)
    runs.run(exp, tmp_path / "cut", resume=True)
    straight = runs.run(exp, tmp_path / "straight")
    assert (tmp_path / "cut/rounds.jsonl").read_bytes() == (
        tmp_path / "straight/rounds.jsonl"
    ).read_bytes()
    assert straight.summary["joules"] <= 15.0


# AutoFL


def test_a_clients_table_by_hand():
    """Two clients at 1 J and 3 J in round 1 (40 %), then the first at 1 J in round 2 (50 %), then
    none gains.
    """
    piece = QLearning(shares=(1.0, 0.2), rate=0.5, discount=0.5, accuracy=1.0, gain=2.0, every=10)
    w, both = torch.zeros(1), torch.tensor([0, 1])
    memory, history = piece.initial_state(2, 1, 1), ()
    assert piece.choose_actions(memory, both, history).tolist() == [0, 0]  # all of the epochs first
    memory = piece.observe(
        memory, RoundEvent(1, w, w, updates([0, 1], [[0.0]] * 2, [1.0, 3.0]), 2, (), history)
    )
    assert piece.compute_q_values(memory, both, history).tolist() == [
        [0, 0],
        [0, 0],
    ]  # not judged yet
    history = (RoundRecord(1, replied=("a", "b"), joules=4.0, accuracy=0.4),)
    # a joule is worth 1 / 2, the mean of round 1. R = 40 - 1 - .5 and 40 - 1 - 1.5; half of it
    # counts
    assert piece.compute_q_values(memory, both, history).tolist() == [[19.25, 0], [18.75, 0]]
    assert piece.choose_actions(memory, both, history).tolist() == [
        1,
        1,
    ]  # each share once before any twice
    memory = piece.observe(
        memory, RoundEvent(2, w, w, updates([0], [[0.0]], [1.0]), 2, (), history)
    )
    history += (RoundRecord(2, replied=("a",), joules=1.0, accuracy=0.5),)
    # R = 50 + 2 * 10 - .5 - .5; Q = .5 (69 + .5 * 19.25) = 39.3125
    assert piece.compute_q_values(memory, both, history).tolist() == [[19.25, 39.3125], [18.75, 0]]
    assert piece.choose_actions(memory, both, history).tolist() == [1, 1]
    memory = piece.observe(
        memory, RoundEvent(3, w, w, updates([0], [[0.0]], [1.0]), 2, (), history)
    )
    history += (RoundRecord(3, replied=("a",), joules=1.0, accuracy=0.5),)
    # no gain: R = 50 - 100; Q = 39.3125 + .5 (-50 + .5 * 39.3125 - 39.3125) = 4.484375
    assert piece.compute_q_values(memory, both, history).tolist() == [[19.25, 4.484375], [18.75, 0]]
    assert piece.choose_actions(memory, both, history).tolist() == [0, 1]


def test_the_figure_of_rounds_that_were_not_judged():
    history = [RoundRecord(1, accuracy=0.2), RoundRecord(2), RoundRecord(3, accuracy=0.5)]
    assert [get_metric_percent(history, t, True) for t in (1, 2, 3, 4)] == [20, 50, 50, None]
    assert [get_metric_percent(history, t, False) for t in (1, 2, 3, 4)] == [None, 20, 20, 50]
    assert (
        get_metric_percent(
            [RoundRecord(1, metric="mse", metrics={"mse": 0.3}, lower=True)], 1, True
        )
        == -30
    )


class Eager:
    """The same in plain loops: every reward is given as soon as it is known, to everybody it is
    for.
    """

    def __init__(self, piece, M):
        self.piece, self.Q = piece, [[0.0] * len(piece.shares) for _ in range(M)]
        self.visits = [[0] * len(piece.shares) for _ in range(M)]
        self.open, self.judged, self.unit = [], None, None  # (client, action, joules, round's mean)

    def action(self, k):
        times = sum(self.visits[k])
        if times < len(self.visits[k]) or times % self.piece.every == 0:
            return self.visits[k].index(min(self.visits[k]))
        return self.Q[k].index(max(self.Q[k]))

    def round(self, clients, joules, accuracy):
        p, mean = self.piece, sum(joules) / len(joules)
        self.unit = self.unit or mean
        for k, each in zip(clients, joules, strict=True):
            self.open.append((k, self.action(k), each, mean))
        for k, a, _, _ in self.open[-len(clients) :]:
            self.visits[k][a] += 1
        for k, a, each, mean in self.open:
            R = p.accuracy * accuracy - (each + mean) / self.unit
            if self.judged is not None:
                R += p.gain * (accuracy - self.judged)
                R = accuracy - 100 if accuracy <= self.judged else R
            self.Q[k][a] += p.rate * (R + p.discount * max(self.Q[k]) - self.Q[k][a])
        self.open, self.judged = [], accuracy


@settings(max_examples=20)
@given(st.data())
def test_tables_follow_the_plain_loop(data):
    M, T = 5, data.draw(st.integers(1, 25))
    piece = QLearning(
        shares=(1.0, 0.5, 0.2), every=data.draw(st.integers(1, 6)), rate=0.7, discount=0.3, gain=1.5
    )
    plain, memory, history, w, everyone = (
        Eager(piece, M),
        piece.initial_state(M, 1, 1),
        (),
        torch.zeros(1),
        torch.arange(M),
    )
    for t in range(1, T + 1):
        rows = sorted(data.draw(st.sets(st.integers(0, M - 1), min_size=1)))
        joules = data.draw(st.lists(st.floats(0.1, 9), min_size=len(rows), max_size=len(rows)))
        accuracy = data.draw(st.integers(0, 100))
        expected = [plain.action(k) for k in rows]
        assert piece.choose_actions(memory, torch.tensor(rows), history).tolist() == expected
        memory = piece.observe(
            memory, RoundEvent(t, w, w, updates(rows, [[0.0]] * len(rows), joules), M, (), history)
        )
        if data.draw(st.integers(0, 4)) == 0:
            history += (RoundRecord(t + 1, "abandoned", joules=1.0),)
        history += (
            RoundRecord(
                t, replied=tuple("x" * len(rows)), joules=sum(joules), accuracy=accuracy / 100
            ),
        )
        plain.round(rows, joules, accuracy)
        np.testing.assert_allclose(
            piece.compute_q_values(memory, everyone, history).numpy(), plain.Q, rtol=1e-9, atol=1e-9
        )


def test_the_best_are_chosen_and_told_how_long():
    piece = QLearning(shares=(1.0, 0.6, 0.2), epsilon=0.0)
    memory = replace(
        piece.initial_state(4, 1, 1), Q=vec(5, 1, 0, 0, 7, 0, -9, -1, -2, 0, 0, 9).view(4, 3)
    )
    memory = replace(memory, visits=torch.ones(4, 3, dtype=torch.long))
    seen = view(2, 2, range(4))
    chosen = piece.select(memory, seen, np.random.default_rng(0))
    assert chosen.k == (3, 1)
    assert chosen.why["least_value"] == 7.0
    tasks = piece.assign([seen.draft(k) for k in (0, 1, 2, 3)], memory, seen)
    assert [task.work.epochs for task in tasks] == [5, 3, 3, 1]  # of 5
    assert piece.assign([], memory, seen) == []
    drawn = [
        QLearning(epsilon=1.0).select(memory, seen, np.random.default_rng(i)) for i in range(20)
    ]
    assert {k for one in drawn for k in one.k} == {0, 1, 2, 3}


def test_cheap_clients_train_more_often_and_epochs_differ():
    found = runs.run(small(**learned(), rounds=20, train={"epochs": 5}))
    batches = {}
    for done in found.history:
        assert done.outcome == "committed"
        for client in done.replied:
            batches.setdefault(client, 0)
            batches[client] += 1
    assert len(batches) > 6
    plain = runs.run(small({"name": "fedavg"}, rounds=20, train={"epochs": 5}))
    assert found.summary["joules"] < plain.summary["joules"]


def test_what_does_not_go_together():
    learner = QLearning()
    with pytest.raises(BadInput, match="the same piece, set alike, as trainer"):
        replace(recipes.fedavg(), selector=learner)
    with pytest.raises(BadInput, match="the same piece"):
        replace(recipes.fedavg(), selector=learner, trainer=QLearning(epsilon=0.5))
    replace(recipes.fedavg(), selector=QLearning(shares=(1.0,)))
    replace(recipes.fedavg(), trainer=learner)
    with pytest.raises(BadInput, match="buffered"):
        replace(autofl(P=4), pace=recipes.fedbuff(P=4).pace)
    for bad in (
        {"shares": []},
        {"shares": [0.0]},
        {"shares": [1.5]},
        {"epsilon": 2.0},
        {"epsilon": "x"},
    ):
        with pytest.raises(BadInput):
            small(**learned(**bad)).build_recipe()
    for bad in ({"joules": -1.0}, {"share": 0.0}, {"slack": 1.5}):
        with pytest.raises(BadInput):
            small(**budgeted(**bad)).build_recipe()


@pytest.mark.parametrize("method", [budgeted(), learned()])
def test_they_learn_a_regression_too(method):
    """A second task, whose headline falls: the error of a line with noise of variance .01."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = (x @ np.array([3.0, -1.0, 0.5]) + 0.1 * rng.normal(size=400)).astype(np.float32)
    tables = {
        "rounds": 15,
        "clients": 10,
        "per_round": 3,
        **method,
        "fleet": FLEET,
        "train": {"lr": 0.05, "batch": 16, "epochs": 2},
        "data": {"partition": "iid"},
        "model": {"name": "linear"},
        "objective": {"name": "regression", "metrics": ["mse"]},
    }
    found = runs.run(Experiment.from_tables(tables), data=(x, y))
    assert found.history[0].lower
    assert found.summary["metrics"]["mse"] < 0.1 < float(y.var())


METHODS = {"autofl": autofl, "eafl": eafl, "fedclean": fedclean, "fedjoule": fedjoule}


def docstring_tables(name):
    lines = sys.modules[name].__doc__.splitlines()
    return tomllib.loads("\n".join(line for line in lines if line.startswith("    ")))


@pytest.mark.parametrize("name", METHODS)
def test_the_experiment_of_a_docstring_is_the_recipe_of_its_function(name):
    tables = docstring_tables(name)
    found = Experiment.from_tables(tables).build_recipe()
    joules = {"joules": tables["stop"]["joules"]} if "stop" in tables else {}
    made = METHODS[name](P=tables["per_round"], **joules)
    assert (found.selector, found.trainer, found.aggregator, found.pace, found.name) == (
        made.selector,
        made.trainer,
        made.aggregator,
        made.pace,
        name,
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_the_digits(name):
    recipe = docstring_tables(name)["recipe"]
    if name == "fedjoule":
        recipe["selector"]["joules"] = 0.0  # a share of what average clients take
    done = runs.run(small(recipe, rounds=15, train={"lr": 0.05, "batch": 16}))
    assert done.summary["accuracy"] > 0.6


@pytest.mark.parametrize("name", METHODS)
def test_the_old_name_says_where_the_method_is(name):
    with pytest.raises(
        BadInput, match=f"recipe.name = '{name}': it moved to examples/contrib/{name}.py"
    ):
        small({"name": name}).build_recipe()


def test_the_old_names_of_pieces_say_where_they_are():
    with pytest.raises(BadInput, match=r"'budgeted': it moved to examples/contrib/fedjoule\.py"):
        small({"name": "fedavg", "selector": "budgeted"}).build_recipe()
