"""Geometric median, centred clipping and mixing against plain loops, and against what they are
for.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from flrce.config.compose import build_piece
from flrce.config.experiment import Experiment
from flrce.core.types import RoundEvent, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.defences import (
    Bucketing,
    CentredClip,
    CentredClipState,
    GeometricMedian,
    NearestNeighbourMixing,
    centred_clipping,
    geometric_median,
    mix_nearest_neighbours,
)
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.robust import CoordinateMedian, TrimmedMean
from flrce.methods.aggregation.root_trust import FLTrust
from flrce.methods.catalogue import recipes
from flrce.methods.submodel.units import RandomUnits
from flrce.rng import make_stream
from flrce.simulation import runs
from training import assert_resumes

RULES = [
    GeometricMedian(),
    CentredClip(),
    NearestNeighbourMixing(),
    NearestNeighbourMixing(CoordinateMedian(), 3),
]


def updates(U, trainable=None):
    U = torch.as_tensor(U, dtype=torch.float32)
    return Updates(
        torch.arange(len(U)), U, torch.ones(len(U), dtype=torch.float64), trainable or U.shape[1]
    )


def memory_of(rule, D):
    return rule.initial_state(1, D, D) if hasattr(rule, "initial_state") else None


rows = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).normal(size=(9, 4)).astype(np.float32)
)


@settings(max_examples=15)
@given(rows)
def test_the_geometric_median_has_the_least_sum_of_distances(U):
    def cost(v):
        return float(np.linalg.norm(U.astype(np.float64) - v, axis=1).sum())

    best = minimize(
        cost,
        U.mean(0),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-7, "maxiter": 1000},
    ).fun
    found = cost(geometric_median(torch.from_numpy(U), 100).numpy())
    assert found <= best * (1 + 1e-4)
    assert cost(geometric_median(torch.from_numpy(U), 8).numpy()) <= best * 1.02


@given(rows, st.sampled_from([0.1, 1.0, 50.0]), st.integers(1, 4))
def test_centred_clipping_is_its_formula(U, tau, steps):
    v = np.full(4, 0.3)
    for _ in range(steps):
        total = np.zeros(4)
        for u in U.astype(np.float64):
            away = u - v
            total += away * min(1.0, tau / np.linalg.norm(away))
        v = v + total / len(U)
    found = centred_clipping(
        torch.from_numpy(U), torch.full((4,), 0.3, dtype=torch.float64), tau, steps
    )
    np.testing.assert_allclose(found.numpy(), v, rtol=1e-9, atol=1e-12)


@given(rows, st.integers(0, 4))
def test_mixing_is_the_mean_of_the_nearest(U, attackers):
    wanted = []
    for u in U.astype(np.float64):
        order = sorted(
            range(len(U)), key=lambda j: (np.linalg.norm(U[j].astype(np.float64) - u), j)
        )
        wanted.append(
            np.mean([U[j].astype(np.float64) for j in order[: len(U) - attackers]], axis=0)
        )
    np.testing.assert_allclose(
        mix_nearest_neighbours(torch.from_numpy(U), attackers).numpy(),
        wanted,
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("size", [10.0, 1e6])
def test_two_of_ten_do_not_move_the_model(rule, size):
    """Eight updates near (1, 1, 1, 1), two far away on one side: the mean moves by `size` / 5,
    these by less than 1.
    """
    U = 1 + 0.1 * torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    U[8:] = -size
    memory = CentredClipState(torch.ones(4)) if isinstance(rule, CentredClip) else None
    moved = rule(torch.zeros(4), updates(U), memory)
    assert float((moved - 1).norm()) < 1
    assert float((WeightedMean()(torch.zeros(4), updates(U), None) - 1).norm()) > size / 5


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_alike_updates_are_their_mean(rule):
    u = torch.tensor([0.5, -2.0, 0.0, 3.0])
    w = torch.tensor([1.0, 1.0, 1.0, 1.0])
    memory = CentredClipState(u.clone()) if isinstance(rule, CentredClip) else None
    torch.testing.assert_close(rule(w, updates(u.repeat(10, 1)), memory), w + u)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_statistics_are_aggregated_apart(rule):
    """Whatever the statistics are, the trained part is the same."""
    U = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    other = torch.cat(
        [U[:, :2], 1e3 * torch.randn(10, 2, generator=torch.Generator().manual_seed(2))], 1
    )
    first, second = (rule(torch.zeros(4), updates(x, 2), memory_of(rule, 4)) for x in (U, other))
    assert torch.equal(first[:2], second[:2])


def test_centred_clipping_remembers_the_last_step():
    rule = CentredClip()
    event = RoundEvent(
        1, torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), updates(torch.zeros(1, 3)), 1
    )
    assert rule.observe(rule.initial_state(1, 3, 3), event).v.tolist() == [1.0, 2.0, 3.0]


def test_what_they_refuse():
    fedavg = recipes.fedavg()
    for rule in RULES:
        with pytest.raises(BadInput, match="compares whole updates"):
            replace(fedavg, aggregator=rule, submodel=RandomUnits(0.5))
    with pytest.raises(BadInput, match="honest majority"):
        replace(fedavg, aggregator=NearestNeighbourMixing(attackers=5))
    with pytest.raises(BadInput, match="without memory"):
        replace(fedavg, aggregator=NearestNeighbourMixing(CentredClip()))
    with pytest.raises(BadInput, match="tau = 0: should be"):
        build_piece("aggregator", {"piece": "centred-clip", "tau": 0})


@pytest.mark.parametrize("name", ["geometric-median", "centred-clip", "mixed"])
def test_they_learn_and_resume_to_the_same_bits(name, tmp_path):
    assert isinstance(
        build_piece("aggregator", {"piece": "mixed", "inner": "trimmed"}).inner, TrimmedMean
    )
    exp = Experiment.from_tables(
        {
            "rounds": 12,
            "clients": 20,
            "per_round": 6,
            "engine": {"workers": 1},
            "train": {"lr": 0.05},
            "data": {"alpha": 1.0},
            "recipe": {"name": "fedavg", "aggregator": name},
        }
    )
    straight = assert_resumes(exp, tmp_path, after=3)
    assert straight.summary["accuracy"] > 0.6


def test_bucketing_by_the_book():
    """The inner rule sees the means of shuffled pairs; each round shuffles anew."""
    piece, w = Bucketing(CoordinateMedian(), 2), torch.zeros(3)
    U = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for t in (0, 1):
        order = make_stream(0, "buckets", t).permutation(5)
        means = [U[order[i : i + 2]].mean(0) for i in (0, 2, 4)]
        found = piece(
            w,
            updates(U),
            piece.observe(piece.initial_state(5, 3, 3), None)
            if t
            else piece.initial_state(5, 3, 3),
        )
        np.testing.assert_allclose(found, np.median(means, 0), rtol=1e-5)
    assert "cannot remember" in Bucketing(CentredClip()).check_recipe(recipes.fedavg())


def test_root_trust_by_the_book():
    """FLTrust: against the root counts nothing, its direction counts in full, lengths are the
    root's.
    """
    U = np.array([[0, 2, 0], [0, 9, 0], [3, 3, 0], [0, -1, 5]], np.float32)
    trust = [1, 0.5**0.5, 0]
    expected = (1 * np.array([0, 2, 0]) + trust[1] * 2 * np.array([0.5**0.5, 0.5**0.5, 0])) / sum(
        trust
    )
    np.testing.assert_allclose(FLTrust()(torch.zeros(3), updates(U), None), expected, rtol=1e-6)
    told = np.array(
        [[1, 0, 3.0], [1, 0, 30], [-1, 0, 5]], np.float32
    )  # the last float is a statistic
    np.testing.assert_allclose(
        FLTrust()(torch.zeros(3), updates(told, 2), None), [1, 0, 3], rtol=1e-6
    )
    w = torch.ones(3)
    assert FLTrust(root=7)(w, updates(U), None) is w
    assert FLTrust()(w, updates([[0, 1, 0], [0, -1, 0]]), None) is w


def test_the_root_is_in_every_round():
    built = Experiment(
        rounds=3,
        clients=8,
        per_round=3,
        data={"trouble": [{"piece": "server-sample", "samples": 20}]},
        model={"name": "mlp"},
        recipe={"name": "fedavg", "selector": "rooted", "aggregator": "root-trust"},
    )
    done = runs.run(built)
    assert all(record.chosen[0] == "0" and len(record.chosen) == 3 for record in done.history)
    with pytest.raises(BadInput, match="needs its root"):
        Experiment(recipe={"name": "fedavg", "aggregator": "root-trust"})
