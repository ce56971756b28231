"""Who trains, drawn so that a round is like the whole: clustered sampling, tiers of like speed,
turns by size.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.pieces import NoCompression
from flrce.core.roles import RoundView
from flrce.core.state_values import grow_state_tables
from flrce.core.types import ClientCost, RoundEvent, RoundRecord, Task, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.selection import clustered
from flrce.methods.selection.client_groups import select_stratified
from flrce.methods.selection.clustered import ClusteredSampling
from flrce.methods.selection.tiers import AdaptiveTierSelector, TierSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.rng import make_stream
from flrce.simulation import runs
from training import assert_resumes


def a_view(n, P, seconds=None, t=1, pool=None):
    def estimate(task):
        return ClientCost(compute_seconds=seconds[task.k] if seconds else 1.0)

    return RoundView(
        t,
        P,
        tuple(range(len(n))) if pool is None else pool,
        torch.tensor(n, dtype=torch.float64),
        estimate,
        lambda k: Task(str(k), k, t, 0, compressor=NoCompression()),
        None,
    )


sizes = st.lists(st.integers(1, 60), min_size=3, max_size=25)


# --- clustered sampling -------------------------------------------------------------------------


def urns_by_the_book(n, P):
    """Algorithm 1 of the paper with probabilities: the largest client first, into urn 1 until it is
    full, and so on.
    """
    p, urns, k = [Fraction(x, sum(n)) for x in n], [{} for _ in range(P)], 0
    for client in sorted(range(len(n)), key=lambda i: (-n[i], i)):
        left = P * p[client]
        while left > 0:
            room = 1 - sum(urns[k].values())
            urns[k][client] = min(room, left)
            left -= urns[k][client]
            if sum(urns[k].values()) == 1:
                k += 1
    return urns


@given(sizes, st.integers(1, 8))
def test_urns_by_size_are_algorithm_1(n, P):
    P = min(P, len(n))
    found = clustered.fill_urns_by_size(np.array(n), P)
    for row, urn in zip(found, urns_by_the_book(n, P), strict=True):
        assert {i: Fraction(int(x), sum(n)) for i, x in enumerate(row) if x} == urn


def subtrees_by_the_book(points, balls, N):
    """Ward's merges in plain loops: always the two groups whose union has the least increase of
    squared distances.
    """
    groups = [[i] for i in range(len(points))]
    open_ = [True] * len(points)  # still at most N balls, so that merging goes on counting

    def spread(group):
        middle = [sum(points[i][c] for i in group) / len(group) for c in range(len(points[0]))]
        return sum((points[i][c] - middle[c]) ** 2 for i in group for c in range(len(middle)))

    kept = []
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = min(
            pairs,
            key=lambda ab: (
                spread(groups[ab[0]] + groups[ab[1]])
                - spread(groups[ab[0]])
                - spread(groups[ab[1]])
            ),
        )
        fits = open_[a] and open_[b] and sum(balls[i] for i in groups[a] + groups[b]) <= N
        if not fits:
            kept += [sorted(groups[i]) for i in (a, b) if open_[i]]
        merged = groups[a] + groups[b]
        groups = [g for i, g in enumerate(groups) if i not in (a, b)] + [merged]
        open_ = [o for i, o in enumerate(open_) if i not in (a, b)] + [fits]
    return sorted(kept + [sorted(g) for g, o in zip(groups, open_, strict=True) if o])


@given(st.integers(0, 10**6), st.integers(4, 12), st.integers(2, 4))
def test_groups_are_the_largest_subtrees_that_fit_an_urn(seed, M, P):
    rng = np.random.default_rng(seed)
    n = rng.integers(5, 60, M)
    points = rng.normal(size=(M, 3))
    found = clustered.cut_tree(clustered.build_ward_tree(points), P * n, int(n.sum()))
    assert sorted(found) == subtrees_by_the_book(points.tolist(), (P * n).tolist(), int(n.sum()))


@given(st.integers(0, 10**6), sizes, st.integers(1, 8))
def test_every_urn_is_full_and_every_client_has_its_balls(seed, n, P):
    rng, n = np.random.default_rng(seed), np.array(n)
    P = min(P, len(n))
    trees = clustered.build_ward_tree(
        clustered.pairwise_angles(torch.from_numpy(rng.normal(size=(len(n), 4))))
    )
    for urns in (
        clustered.fill_urns_by_size(n, P),
        clustered.fill_urns_by_similarity(n, P, trees, rng),
    ):
        assert urns.shape == (P, len(n))
        assert (urns >= 0).all()
        assert (urns.sum(1) == n.sum()).all()
        assert (urns.sum(0) == P * n).all()


def test_similar_clients_share_an_urn():
    """Two directions, six clients each: with P = 2 every round has one client of each."""
    V = torch.tensor([[1.0, 0.1 * i] for i in range(6)] + [[0.1 * i, 1.0] for i in range(6)])
    piece = ClusteredSampling("similarity")
    memory = piece.initial_state(12, 2, 2)
    updates = Updates(torch.arange(12), V, torch.full((12,), 10.0, dtype=torch.float64), 2)
    memory = piece.observe(memory, RoundEvent(1, torch.zeros(2), torch.zeros(2), updates, 12))
    for seed in range(30):
        chosen = piece.select(memory, a_view([10] * 12, 2), make_stream(seed, "select", 2)).k
        assert sorted(k // 6 for k in chosen) == [0, 1]


def test_angles():
    found = clustered.pairwise_angles(
        torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
    )
    right = np.pi / 2
    assert found.tolist() == pytest.approx(
        np.array([[0, right, np.pi, 0], [right, 0, right, 0], [np.pi, right, 0, 0], [0] * 4])
    )


@pytest.mark.parametrize("by", ["size", "similarity"])
def test_clients_are_drawn_in_proportion_to_their_samples(by):
    """n = 10, 10, 20, 20, 20, 40 and P = 3: N = 120, so urns {40}, {20, 20} and {20, 10, 10}, and
    nobody in two.
    """
    n, piece = [10, 10, 20, 20, 20, 40], ClusteredSampling(by)
    memory = piece.initial_state(6, 4, 4)
    hits = Counter(
        k
        for seed in range(1500)
        for k in piece.select(memory, a_view(n, 3), make_stream(seed, "select", 1)).k
    )
    for k, count in hits.items():
        assert count / 1500 == pytest.approx(3 * n[k] / 120, abs=0.06)


@given(
    st.integers(0, 10**6), st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 9)
)
def test_nobody_is_drawn_twice(seed, n, P):
    rng = np.random.default_rng(seed)
    pool = tuple(sorted(rng.permutation(len(n))[: rng.integers(1, len(n) + 1)].tolist()))
    for piece in (ClusteredSampling("size"), ClusteredSampling("similarity", sketch=2)):
        memory = piece.initial_state(len(n), 3, 3)
        memory.V[:] = torch.from_numpy(rng.normal(size=memory.V.shape))
        chosen = piece.select(memory, a_view(n, P, pool=pool), make_stream(seed, "select", 1)).k
        holders = sum(n[k] > 0 for k in pool) or len(pool)
        assert len(set(chosen)) == len(chosen) == min(P, holders)
        assert set(chosen) <= set(pool)


def test_clustered_sampling_finds_room_for_new_clients_and_weighs_alike():
    piece = ClusteredSampling("similarity")
    updates = Updates(torch.tensor([4]), torch.ones(1, 3), torch.ones(1, dtype=torch.float64), 3)
    assert (
        len(
            piece.observe(
                grow_state_tables(piece.initial_state(2, 3, 3), 5),
                RoundEvent(1, torch.zeros(3), torch.zeros(3), updates, 5),
            ).V
        )
        == 5
    )
    assert recipes.clustered_sampling().aggregator.by == "equal"
    with pytest.raises(BadInput, match=r"recipe\.by = 'sizes'"):
        recipes.clustered_sampling("sizes")


def test_recipes_load_without_a_library_for_trees():
    code = (
        "import sys, flrce.methods.catalogue.recipes; sys.exit('scipy.cluster.hierarchy' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- tiers --------------------------------------------------------------------------------------


def test_a_round_takes_clients_of_one_tier():
    # 20 clients that take 1 to 20 s in five tiers of four; P = 3
    view = a_view([1] * 20, 3, seconds=[float(k + 1) for k in range(20)])
    seen = Counter()
    for seed in range(300):
        chosen = TierSelector().select(None, view, make_stream(seed, "select", 1))
        assert {k // 4 for k in chosen.k} == {chosen.why["tier"] - 1}
        assert len(set(chosen.k)) == 3
        seen[chosen.why["tier"]] += 1
    assert all(count == pytest.approx(60, abs=30) for count in seen.values())
    fast = recipes.tifl("fast", P=3).selector
    assert all(
        k < 4
        for seed in range(20)
        for k in fast.select(None, view, make_stream(seed, "select", 1)).k
    )
    assert (
        recipes.tifl("slow", P=3)
        .selector.select(None, view, make_stream(0, "select", 1))
        .why["tier"]
        == 5
    )


def test_tiers_that_the_model_serves_badly_come_more_often():
    """Ten clients in five tiers of two; losses 1, 5, 2, 4, 3 by tier, and rounds as the records
    tell them.
    """
    by_tier, asked = [1.0, 5.0, 2.0, 4.0, 3.0], []

    def loss(rows):
        asked.append(len(rows))
        return torch.tensor([by_tier[k // 2] for k in rows])

    def at(t, history, credits=0):
        view = replace(
            a_view([1] * 10, 1, [k + 1.0 for k in range(10)], t), loss=loss, history=tuple(history)
        )
        return (
            AdaptiveTierSelector(every=3, credits=credits)
            .select(None, view, make_stream(t, "select", t))
            .why
        )

    history = []
    for t in range(1, 8):
        why = at(t, history)
        history.append(RoundRecord(t, why=why))
        assert why["odds"] == ([1.0] * 5 if t < 4 else [0.0, 4.0, 1.0, 3.0, 2.0])
        assert ("losses" in why) == (t in (4, 7))
    assert asked == [5, 5]  # P = 1 of each tier
    assert history[3].why["losses"] == by_tier
    by_tier[:] = [0.5, 0.1, 1.5, 3.5, 2.5]  # everyone became better: chances stay
    assert (
        at(
            10,
            [
                *history,
                *(RoundRecord(t, why=history[-1].why | {"losses": [9.0] * 5}) for t in (8, 9)),
            ],
        )["odds"][1]
        == 4.0
    )
    spent = [
        RoundRecord(t, why={"tier": 2, "of": 5, "odds": [0.0, 4.0, 0.0, 0.0, 0.0]}) for t in (1, 2)
    ]
    assert {at(3, spent, credits=3)["tier"]} == {2}
    assert (
        len({at(t, spent, credits=2)["tier"] for t in range(11, 60, 3)}) > 2
    )  # no credit left where there is a chance


def test_adaptive_tiers_ask_pay_and_resume(tmp_path):
    exp = Experiment(
        rounds=5,
        clients=10,
        per_round=2,
        recipe={"name": "tifl", "policy": "adaptive", "every": 2},
        engine={"workers": 1},
        fleet={"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}},
        train={"epochs": 1},
    )
    found = assert_resumes(exp, tmp_path)
    down = [record.bytes_down for record in found.history]
    assert down[2] == down[4] > down[1] == down[3]


def test_small_tiers_are_filled_up_by_their_neighbours_in_speed():
    view = a_view([1] * 10, 4, seconds=[float(k) for k in range(1, 11)])
    odds = [(1.0, 0, 0, 0, 0), (0, 0, 1.0, 0, 0), (0, 0, 0, 0, 1.0)]
    found = [
        sorted(TierSelector(5, odd).select(None, view, make_stream(0, "select", 1)).k)
        for odd in odds
    ]
    assert found == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]  # tiers of two: rows 0 1, 4 5, 8 9


def test_an_unknown_duration_is_the_middle_one():
    view = a_view(
        [1] * 5, 1, seconds=[1.0, 0.0, 3.0, 9.0, 5.0]
    )  # known 1, 3, 5, 9: the median is 4
    order = [
        TierSelector(5, tuple(float(i == tier) for i in range(5)))
        .select(None, view, make_stream(0, "select", 1))
        .k[0]
        for tier in range(5)
    ]
    assert order == [0, 2, 1, 4, 3]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TierSelector(5, (1.0, 0.0)), "2 chances for 5 tiers"),
        (lambda: TierSelector(2, (-1.0, 2.0)), "must not be negative"),
        (lambda: TierSelector(2, (0.0, 0.0)), "not all 0"),
        (lambda: recipes.tifl("fastest"), "recipe.policy"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        make()


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 12), st.integers(1, 7))
def test_any_fleet_gives_a_legal_round(seed, M, P, tiers):
    rng = np.random.default_rng(seed)
    view = a_view([1] * M, P, seconds=rng.choice([0.0, 1.0, 5.0], M).tolist())
    chosen = TierSelector(tiers).select(None, view, make_stream(seed, "select", 1)).k
    assert len(set(chosen)) == len(chosen) == min(P, M)


def test_rounds_of_one_tier_are_shorter():
    tables = {"rounds": 8, "clients": 20, "per_round": 4, "engine": {"workers": 1, "eval_every": 8}}
    tables["fleet"] = {"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}}
    spent = {
        name: runs.run(Experiment(**tables, recipe={"name": name})).summary
        for name in ("fedavg", "tifl")
    }
    assert spent["tifl"]["seconds"] < spent["fedavg"]["seconds"]


# --- turns by size ------------------------------------------------------------------------------


def test_one_client_of_each_size_goes_in_every_round():
    """Twelve clients of 1 to 12 samples, P = 4: thirds of three, one of each in each of three
    rounds.
    """
    n, piece = list(range(1, 13)), RoundRobinSelector(by="sizes")
    memory, order = piece.initial_state(12, 2, 2), []
    assert memory.V.shape == (12, 0)
    for t in range(1, 7):
        chosen = piece.select(memory, a_view(n, 4, t=t), make_stream(3, "select", t)).k
        assert sorted(k // 3 for k in chosen) == [0, 1, 2, 3]
        order.append(chosen)
        updates = Updates(
            torch.tensor(sorted(chosen)), torch.ones(4, 2), torch.ones(4, dtype=torch.float64), 2
        )
        memory = piece.observe(
            memory, RoundEvent(t, torch.zeros(2), torch.zeros(2), updates, 12, chosen)
        )
    assert sorted(k for chosen in order[:3] for k in chosen) == list(range(12))  # everyone once
    assert sorted(k for chosen in order[3:] for k in chosen) == list(
        range(12)
    )  # before anyone twice
    assert order[:3] != order[3:]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 30))
def test_strata_by_the_book(n, count):
    """Sorted by size, cut into parts as equal as can be; of each the client that comes first."""
    count = min(count, len(n))
    order = sorted(range(len(n)), key=lambda i: (n[i], i))
    long, cut, parts = len(n) % count, len(n) // count, []
    for part in range(count):
        size = cut + (part < long)
        parts.append(min(order[:size]))
        order = order[size:]
    assert select_stratified(torch.tensor(n, dtype=torch.float64), count) == parts
