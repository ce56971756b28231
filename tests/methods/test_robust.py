"""Robust aggregators against their definitions in plain loops, and against attackers on digits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core import loop
from flrce.core.types import Payload, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.robust import (
    ClippedMean,
    CoordinateMedian,
    Krum,
    TrimmedMean,
    rank_by_krum_score,
)
from flrce.methods.catalogue import recipes
from flrce.models.flat import pack_model
from flrce.simulation import runs
from training import require_valid_fields


def updates_of(U, n=None, trainable=None, covered=None):
    U = torch.as_tensor(np.asarray(U, np.float32))
    n = (
        torch.ones(len(U), dtype=torch.float64)
        if n is None
        else torch.tensor(n, dtype=torch.float64)
    )
    return Updates(
        torch.arange(len(U)), U, n, U.shape[1] if trainable is None else trainable, covered
    )


def values(seed, P, d):
    """Updates with ties, zeros and a wild one now and then."""
    rng = np.random.default_rng(seed)
    U = rng.integers(-3, 4, (P, d)) * rng.choice([1.0, 0.5], (P, d))
    return U * rng.choice([1.0, 1e6], (P, 1), p=[0.9, 0.1])


cases = st.tuples(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5))


# --- trimmed mean and median --------------------------------------------------------------------


def trimmed_by_the_book(U, share, held=None):
    out = []
    for j in range(len(U[0])):
        column = sorted(U[i][j] for i in range(len(U)) if held is None or held[i][j])
        cut = min(math.ceil(share * len(column) - 1e-9), (len(column) - 1) // 2) if column else 0
        column = column[cut : len(column) - cut]
        out.append(sum(column) / len(column) if column else 0.0)
    return out


def test_a_trimmed_mean_worked_by_hand():
    # five values, share .2: one cut at either end, (2 + 3 + 4) / 3
    got = TrimmedMean(0.2)(torch.zeros(1), updates_of([[3], [1e9], [2], [4], [-1e9]]), None)
    assert got.tolist() == [3.0]


def test_medians_worked_by_hand():
    assert CoordinateMedian()(torch.ones(1), updates_of([[5], [-9], [2]]), None).tolist() == [3.0]
    assert CoordinateMedian()(torch.zeros(1), updates_of([[5], [-9], [2], [4]]), None).tolist() == [
        3.0
    ]  # (2 + 4) / 2


@given(cases, st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.45]))
def test_trimming_by_the_book(case, share):
    U = values(*case)
    got = TrimmedMean(share)(torch.zeros(U.shape[1]), updates_of(U), None)
    expected = torch.tensor(trimmed_by_the_book(U.tolist(), share), dtype=torch.float64)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


@given(cases)
def test_median_is_numpys(case):
    U = values(*case)
    got = CoordinateMedian()(torch.zeros(U.shape[1]), updates_of(U), None)
    np.testing.assert_allclose(got.numpy(), np.median(U, 0), rtol=1e-6)


@given(cases, st.sampled_from([0.2, 0.45]))
def test_trimming_works_among_those_who_hold_a_coordinate(case, share):
    U, held = values(*case), np.random.default_rng(case[0]).random(case[1:]) < 0.6
    w = torch.linspace(1, 2, U.shape[1])
    got = TrimmedMean(share)(w, updates_of(U * held, covered=torch.from_numpy(held)), None)
    expected = w.double() + torch.tensor(trimmed_by_the_book(U.tolist(), share, held.tolist()))
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[~torch.from_numpy(held).any(0)], w[~torch.from_numpy(held).any(0)])


@given(st.integers(0, 10**6), st.integers(3, 12), st.floats(0.05, 0.45))
def test_attackers_within_the_share_cannot_leave_the_honest_range(seed, P, share):
    rng = np.random.default_rng(seed)
    U = rng.normal(size=(P, 4))
    bad = min(math.floor(share * P), (P - 1) // 2)
    U[:bad] = rng.choice([-1e30, 1e30], (bad, 4))
    got = TrimmedMean(share)(torch.zeros(4), updates_of(U), None).numpy()
    assert (got >= U[bad:].min(0) - 1e-6).all()
    assert (got <= U[bad:].max(0) + 1e-6).all()


# --- Krum ---------------------------------------------------------------------------------------


def krum_by_the_book(U, attackers):
    P = len(U)
    score = []
    for i in range(P):
        squares = sorted(math.dist(U[i], U[j]) ** 2 for j in range(P) if j != i)
        score.append(sum(squares[: min(max(P - attackers - 2, 1), P - 1)]))
    return sorted(range(P), key=lambda i: (score[i], i))


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_krum_by_the_book(seed, P, d, attackers):
    U = np.random.default_rng(seed).normal(size=(P, d))  # no ties, up to chance
    assert rank_by_krum_score(torch.from_numpy(U), attackers) == krum_by_the_book(
        U.tolist(), attackers
    )


def test_krum_worked_by_hand():
    # five updates on a line, one attacker: 5 - 1 - 2 = 2 neighbours; scores 0: 1+4, 1: 1+1, 2: 1+1,
    # 3: 1+4, far one
    updates = updates_of([[0], [1], [2], [3], [1000]])
    assert rank_by_krum_score(updates.U, 1) == [1, 2, 0, 3, 4]
    assert Krum(attackers=1, keep=1)(torch.zeros(1), updates, None).tolist() == [1.0]
    assert Krum(attackers=1)(torch.zeros(1), updates, None).tolist() == [
        1.5
    ]  # all but one: (0 + 1 + 2 + 3) / 4


def test_krum_looks_at_trained_coordinates_only():
    # as above, with a BatchNorm statistic behind each update that would make the attacker
    # everybody's neighbour
    updates = updates_of([[0, 900], [1, -900], [2, 500], [3, -500], [1000, 0]], trainable=1)
    assert Krum(attackers=1, keep=1)(torch.zeros(2), updates, None).tolist() == [1.0, -900.0]


@given(st.integers(0, 10**6))
def test_multi_krum_keeps_no_attacker_far_away(seed):
    rng = np.random.default_rng(seed)
    U = np.concatenate([rng.normal(size=(8, 3)), rng.normal(size=(2, 3)) * 1e6 + 1e7])
    assert not {8, 9} & set(rank_by_krum_score(torch.from_numpy(U), 2)[:8])


def test_krum_refuses_parts_and_too_many_attackers_before_anything_runs():
    with pytest.raises(BadInput, match=r"at most \(P - 3\) / 2 = 3 attackers, got 4"):
        recipes.krum(attackers=4, P=10)
    with pytest.raises(BadInput, match="krum compares whole updates, but RandomUnits"):
        Experiment.from_tables({"recipe": {"name": "dropout", "aggregator": "krum"}})
    with pytest.raises(BadInput, match="whole updates"):
        Krum()(torch.zeros(2), updates_of([[1, 0]], covered=torch.tensor([[True, False]])), None)
    assert recipes.krum(attackers=2).minimum == 7  # fewer replies than 2 f + 3 abandon the round


# --- clipping -----------------------------------------------------------------------------------


def clipped_by_the_book(U, n, most):
    total = [0.0] * len(U[0])
    for u, weight in zip(U, n, strict=True):
        norm = math.hypot(*u)
        shrink = min(1.0, most / norm) if norm else 1.0
        total = [a + weight * shrink * x for a, x in zip(total, u, strict=True)]
    return [x / sum(n) for x in total]


def test_clipping_worked_by_hand():
    # norms 5, 10, 1: the median is 5, so (6, 8) becomes (3, 4); n = 1, 1, 2: ((3,4) + (3,4) + 2
    # (0,1)) / 4
    updates = updates_of([[3, 4], [6, 8], [0, 1]], n=[1, 1, 2])
    assert ClippedMean()(torch.zeros(2), updates, None).tolist() == [1.5, 2.5]
    assert ClippedMean(norm=100.0)(torch.zeros(2), updates, None).tolist() == [2.25, 3.5]


def test_the_median_of_an_even_number_of_lengths_lies_between_the_middle_two():
    # norms 1, 2, 4, 10: the median is 3, so 4 and 10 become 3: (1 + 2 + 3 + 3) / 4
    updates = updates_of([[1.0], [2.0], [4.0], [10.0]])
    assert ClippedMean()(torch.zeros(1), updates, None).tolist() == [2.25]


@given(cases, st.floats(0.1, 20.0))
def test_clipping_by_the_book(case, most):
    U = values(*case)
    n = np.random.default_rng(case[0]).integers(1, 9, len(U)).astype(float).tolist()
    got = ClippedMean(most)(torch.zeros(U.shape[1]), updates_of(U, n), None)
    expected = torch.tensor(clipped_by_the_book(U.tolist(), n, most), dtype=torch.float64)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_statistics_are_clipped_apart_from_parameters():
    # the last column is a BatchNorm statistic: norms 1, 1, 1e6, median 1; the parameters are all
    # within theirs
    updates = updates_of([[1, 1], [1, 1], [1, 1e6]], trainable=1)
    assert ClippedMean()(torch.zeros(2), updates, None).tolist() == [1, 1]


@given(st.integers(0, 10**6), st.sampled_from([10.0, 1e3, 1e6]))
def test_scaling_an_update_gains_nothing_beyond_the_median(seed, factor):
    U = np.random.default_rng(seed).normal(size=(5, 4))
    scaled = U.copy()
    longest = int(np.linalg.norm(U, axis=1).argmax())
    scaled[longest] *= factor
    plain, attacked = (ClippedMean()(torch.zeros(4), updates_of(x), None) for x in (U, scaled))
    torch.testing.assert_close(attacked, plain, rtol=1e-5, atol=1e-6)


@given(cases)
def test_nothing_to_resist_is_the_plain_mean(case):
    U = values(*case)
    w, updates = torch.zeros(U.shape[1]), updates_of(U)
    plain = WeightedMean()(w, updates, None)
    torch.testing.assert_close(TrimmedMean(0.0)(w, updates, None), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ClippedMean(1e9)(w, updates, None), plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(Krum(attackers=0)(w, updates, None), plain, rtol=1e-6, atol=1e-6)


ALL = (TrimmedMean(0.2), CoordinateMedian(), Krum(1), ClippedMean(), ClippedMean(1.0, by="equal"))


@pytest.mark.parametrize("piece", ALL, ids=lambda p: repr(p))
@given(
    st.integers(0, 10**6), st.integers(5, 9)
)  # with fewer, two mutual nearest tie in Krum and rows decide
def test_order_of_replies_and_extreme_values_do_no_harm(piece, seed, P):
    rng = np.random.default_rng(seed)
    U = (rng.normal(size=(P, 5)) * rng.choice([0.0, 1.0, 1e30], (P, 1))).astype(np.float32)
    got = piece(torch.zeros(5), updates_of(U, trainable=3), None)
    assert torch.isfinite(got).all()
    order = rng.permutation(P)
    again = piece(torch.zeros(5), updates_of(U[order], trainable=3), None)
    torch.testing.assert_close(again, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TrimmedMean(0.5), "share = 0.5: should be less than 0.5"),
        (lambda: Krum(-1), "attackers = -1"),
        (lambda: ClippedMean("mean"), "norm = 'mean'"),
        (lambda: ClippedMean(0.0), "norm = 0.0"),
        (lambda: ClippedMean(by="n"), "by = 'n'"),
    ],
)
def test_senseless_settings_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        require_valid_fields(make())


def test_a_senseless_setting_in_a_file_is_one_line():
    with pytest.raises(BadInput, match=r"share = 0\.7: should be less than 0\.5"):
        Experiment.from_tables({"recipe": {"name": "trimmed-mean", "share": 0.7}})


# --- attackers on digits ------------------------------------------------------------------------


def multiply_updates(engine, attackers, factor):
    """Some clients of the engine multiply their updates, but not the statistics: the gate would
    notice.
    """
    train, trainable = engine.train, engine.trainable

    def twist(reply):
        if reply.client not in attackers:
            return reply
        u = reply.payload.buffers["u"].clone()
        u[:trainable] *= factor
        return replace(reply, payload=Payload({"u": u}))

    engine.train = lambda *order: [twist(reply) for reply in train(*order)]


def accuracy(recipe, factor, rounds=25, seed=0):
    """Mean accuracy over the last ten rounds, with every tenth client an attacker."""
    exp = Experiment(
        rounds=rounds,
        clients=30,
        per_round=10,
        seed=seed,
        recipe={"name": recipe},
        engine={"workers": 1},
    )
    built = runs.build_simulation(exp)
    try:
        bad = frozenset(built.federation.clients[::10])
        multiply_updates(built.engine, bad, factor)
        start = loop.make_initial_state(built.recipe, built.engine, pack_model(built.net))
        done = loop.rounds(built.recipe, built.engine, start, rounds, seed)
        seen = [r.record.accuracy or 0.0 for r in done]  # None: abandoned, all replies went astray
    finally:
        built.engine.close()
    return sum(seen[-10:]) / 10


@pytest.fixture(scope="module")
def undisturbed():
    return accuracy("clipped-mean", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [10.0, 1e6])
def test_scaled_updates_cost_at_most_two_points_with_clipping(undisturbed, factor):
    assert accuracy("clipped-mean", factor) >= undisturbed - 0.02


@pytest.mark.slow
def test_the_same_attack_ruins_the_plain_mean():
    assert accuracy("fedavg", 1e6) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["trimmed-mean", "median", "krum"])
def test_a_tenth_of_sign_flippers_is_resisted(recipe):
    assert accuracy(recipe, -1.0) >= 0.7
