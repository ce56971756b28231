"""Who trains: Oort, Power-of-Choice, DivFL; and PyramidFL's workloads. By hand-worked sums and
plain loops.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import RoundView
from flrce.core.state_values import grow_state_tables
from flrce.core.types import ClientCost, LocalWork, RoundEvent, RoundRecord, Task, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.client.pyramidfl import FewerEpochs, PyramidState, PyramidTraining
from flrce.methods.client.workload import with_epochs
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.selection import diverse, power_of_choice, utility
from flrce.methods.selection.diverse import DivFL
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.methods.selection.rooted import RootClientSampling
from flrce.methods.selection.utility import UtilitySelector
from flrce.models.flat import make_layout
from flrce.models.nets import build_network
from flrce.rng import draw_weighted, make_stream
from flrce.simulation import runs
from training import require_valid_fields


def a_view(t=1, P=2, n=(10,) * 6, seconds=(1.0,) * 6, transfer=0.0, losses=None, pool=None):
    """A server's view of clients with these samples, durations and losses; `asked` collects who was
    asked for one.
    """
    asked = []

    def loss(rows):
        asked.extend(rows)
        return torch.tensor([losses[k] for k in rows], dtype=torch.float64)

    def estimate(task):
        epochs, steps = task.work.epochs, task.work.steps
        work = epochs / 5 if steps is None else steps / 10
        return ClientCost(
            compute_seconds=seconds[task.k] * work,
            transfer_seconds=transfer,
            batches=steps or 2 * epochs,
        )

    view = RoundView(
        t,
        P,
        tuple(range(len(n))) if pool is None else pool,
        torch.tensor(n, dtype=torch.float64),
        estimate,
        lambda k: Task(f"c{k}", k, t, 0, compressor=TensorDropout(0.0)),
        loss,
    )
    return view, asked


def an_event(t, k, loss_square=None, n=None, U=None, chosen=(), M=6, loss=None, seconds=None):
    P = len(k)
    U = torch.zeros(P, 2) if U is None else torch.tensor(U, dtype=torch.float32)
    column = lambda values, fill: torch.tensor(values or [fill] * P, dtype=torch.float64)  # noqa: E731
    w = torch.zeros(U.shape[1])
    updates = Updates(
        torch.tensor(k),
        U,
        column(n, 10.0),
        U.shape[1],
        loss=column(loss, 0.0),
        loss_square=column(loss_square, 1.0),
        seconds=column(seconds, 1.0),
    )
    return RoundEvent(t, w, w, updates, M, chosen or tuple(k))


# --- drawing ------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(0, 99),
)
def test_drawn_positions_are_different_and_weightless_ones_come_last(weights, count, seed):
    count = min(count, len(weights))
    picked = draw_weighted(make_stream(seed, "x"), weights, count)
    assert len(picked) == len(set(picked)) == count
    heavy = [weights[i] > 0 for i in picked]
    assert heavy == sorted(heavy, reverse=True)
    assert sum(heavy) == min(count, sum(w > 0 for w in weights))


def test_draws_follow_the_weights():
    hits = np.bincount([draw_weighted(make_stream(s, "x"), [1, 3], 1)[0] for s in range(2000)])
    assert hits[1] / 2000 == pytest.approx(0.75, abs=0.03)  # 3 standard deviations


# --- Oort ---------------------------------------------------------------------------------------


def test_a_utility_score_worked_by_hand():
    # U = 1, 2, 11: least = .999, range = 11 - .999 = 10.001; t = 10, L = 1, 2, 5
    got = utility.utility_scores(
        torch.tensor([1.0, 2.0, 11.0], dtype=torch.float64), torch.tensor([1, 2, 5]), 10, clip=1.0
    )
    ln = math.log(10)
    expected = [
        0.001 / 10.001 + math.sqrt(0.1 * ln / 1),
        1.001 / 10.001 + math.sqrt(0.1 * ln / 2),
        1 + math.sqrt(0.02 * ln),
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_largest_utilities_are_clipped_at_the_98th_percentile():
    U = torch.arange(1.0, 101.0, dtype=torch.float64)  # sorted[int(100 * .98)] = 99
    got = utility.utility_scores(U, torch.full((100,), 7), 7)
    assert got[99] == got[98] > got[97]


def test_slow_clients_are_penalised_by_the_square_of_their_delay():
    # four durations, 50th percentile: sorted[2] = 4; the client of 8 s scores (4/8)^2
    seconds = torch.tensor([1.0, 8.0, 2.0, 4.0], dtype=torch.float64)
    preferred = utility.duration_percentile(seconds, 50)
    assert preferred == 4
    assert utility.slowness_penalty(seconds, preferred, 2.0).tolist() == [1, 0.25, 1, 1]
    assert utility.duration_percentile(seconds, 100) == math.inf
    assert utility.slowness_penalty(seconds, math.inf, 2.0).tolist() == [1, 1, 1, 1]


def test_utility_is_samples_times_the_root_of_the_mean_squared_loss():
    selector = UtilitySelector()
    m = selector.observe(
        selector.initial_state(6, 2, 2), an_event(3, [1, 4], loss_square=[4.0, 0.25], n=[10, 100])
    )
    assert m.U.tolist() == [0, 20, 0, 0, 50, 0]  # 10 * 2, 100 * .5
    assert m.L.tolist() == [0, 3, 0, 0, 3, 0]


def test_spares_whose_replies_did_not_count_are_credited_the_mean():
    selector = UtilitySelector()
    event = an_event(3, [1, 4], loss_square=[4.0, 0.25], n=[10, 100], chosen=(1, 4, 5))
    m = selector.observe(selector.initial_state(6, 2, 2), event)
    assert float(m.U[5]) == 35
    assert int(m.L[5]) == 3


def test_epsilon_decays_to_its_floor():
    selector = UtilitySelector()
    assert selector.exploration_probability(1) == 0.9
    assert selector.exploration_probability(2) == pytest.approx(0.855)
    assert selector.exploration_probability(100) == 0.2


def test_the_first_round_is_uniform_and_asks_spares():
    view, _ = a_view(t=1, P=10, n=(1,) * 50 + (1000,) * 11, seconds=(1.0,) * 61)
    picks = np.zeros(61)
    for seed in range(300):
        chosen = UtilitySelector().select(
            UtilitySelector().initial_state(61, 2, 2), view, make_stream(seed, "select", 1)
        )
        assert len(set(chosen.k)) == 11  # 1.1 P, rounded down as in the released code
        assert chosen.keep == 10
        assert not chosen.exploit
        picks[list(chosen.k)] += 1
    assert picks[50:].mean() == pytest.approx(
        picks[:50].mean(), rel=0.15
    )  # 11 / 61 each, whatever the samples


def test_later_rounds_explore_in_proportion_to_samples():
    view, _ = a_view(t=2, P=10, n=(1,) * 50 + (1000,) * 11, seconds=(1.0,) * 61)
    m = UtilitySelector().initial_state(61, 2, 2)
    m = replace(
        m, L=m.L.index_fill(0, torch.arange(5), 1), U=m.U.index_fill(0, torch.arange(5), 1.0)
    )
    chosen = UtilitySelector().select(m, view, make_stream(0, "select", 2))
    assert (
        sum(k >= 50 for k in chosen.k) >= 9
    )  # eleven clients hold all but half a percent of the samples


def test_clip_and_scale_look_at_those_never_seen_too():
    # U = 1, 2, 11 as above; with an unseen client of 20 samples the range is 20 - .999, with one of
    # .5 the least .4995
    U, L, ln = (
        torch.tensor([1.0, 2.0, 11.0], dtype=torch.float64),
        torch.tensor([1, 2, 5]),
        math.log(10),
    )
    stale = [math.sqrt(0.1 * ln / L_i) for L_i in (1, 2, 5)]
    got = utility.utility_scores(U, L, 10, 1.0, torch.tensor([20.0]))
    expected = [(u - 0.999) / 19.001 + s for u, s in zip((1, 2, 11), stale, strict=True)]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    got = utility.utility_scores(U, L, 10, 1.0, torch.tensor([0.5]))
    expected = [(u - 0.4995) / 10.5005 + s for u, s in zip((1, 2, 11), stale, strict=True)]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(BadInput, match="over"):
        replace(recipes.oort(), selector=UtilitySelector(over="unseen"))


def test_the_blacklist_by_hand():
    count = torch.tensor([3, 7, 2, 5, 7, 0])  # above 2: 0, 1, 3, 4; asked most: 1 and 4, then 3
    found = [utility.find_blacklisted(count, 2, share).tolist() for share in (1.0, 0.5, 0.1)]
    assert found == [
        [True, True, False, True, True, False],
        [False, True, False, True, True, False],
        [False] * 6,
    ]
    assert not utility.find_blacklisted(count, 7, 1.0).any()  # more than 7, not 7 times


def test_a_client_asked_more_than_the_blacklist_allows_is_not_chosen():
    selector = UtilitySelector(overcommit=1.0, blacklist=2, blacklist_share=0.5)
    view, _ = a_view(t=4, P=2, n=(10,) * 6, seconds=(1.0,) * 6)
    m = selector.initial_state(6, 2, 2)
    for t in (1, 2, 3):  # clients 1 and 4 are asked three times; the reply of 5 does not count
        m = selector.observe(m, an_event(t, [1, 4], [100.0, 100.0], n=[10, 10], chosen=(1, 4, 5)))
    assert m.count.tolist() == [0, 3, 0, 0, 3, 3]
    for seed in range(20):
        chosen = selector.select(m, view, make_stream(seed, "select", 4))
        assert set(chosen.k) <= {0, 2, 3}
        assert chosen.why["blacklisted"] == 3
    # with three clients left and P = 4, nobody is kept out
    view, _ = a_view(t=4, P=4, n=(10,) * 6, seconds=(1.0,) * 6)
    assert selector.select(m, view, make_stream(0, "select", 4)).why["blacklisted"] == 0


def test_the_blacklist_survives_a_resume(tmp_path):
    tables = {"rounds": 6, "clients": 8, "per_round": 2, "recipe": {"name": "oort", "blacklist": 1}}
    whole = runs.run(Experiment.from_tables(tables), tmp_path / "whole")
    runs.run(Experiment.from_tables(tables | {"rounds": 3}), tmp_path / "cut")
    cut = runs.run(Experiment.from_tables(tables), tmp_path / "cut", resume=True)
    assert all(torch.equal(cut.model[name], x) for name, x in whole.model.items())


def test_unknown_durations_are_the_middle_one():
    # half the clients never measured: they would be the fastest ten percent, and everybody else
    # would score nothing
    selector, M = UtilitySelector(overcommit=1.0), 20
    m = replace(
        selector.initial_state(M, 2, 2),
        L=torch.tensor([1] * 10 + [0] * 10),
        U=torch.ones(M, dtype=torch.float64),
    )
    view, _ = a_view(
        t=5,
        P=5,
        n=(10,) * M,
        seconds=(1.0, 1.0, 1.0, 1.0, 5.0, 9.0, 9.0, 9.0, 9.0, 9.0) + (0.0,) * 10,
    )
    assert utility.estimate_durations(m, view)[10:].tolist() == [7.0] * 10
    assert utility.duration_percentile(utility.estimate_durations(m, view), 10) == 1.0
    slow = utility.slowness_penalty(utility.estimate_durations(m, view), 1.0, 2.0)
    assert slow[:4].tolist() == [1.0] * 4  # the known fast ones keep their scores
    nobody, _ = a_view(t=5, P=5, n=(10,) * M, seconds=(0.0,) * M)
    chosen = selector.select(m, nobody, make_stream(0, "select", 5))
    assert chosen.why["preferred_seconds"] is None
    assert (
        utility.slowness_penalty(utility.estimate_durations(m, nobody), math.inf, 2.0).tolist()
        == [1.0] * M
    )


def test_exploitation_takes_the_high_scores_and_exploration_the_unseen():
    selector = UtilitySelector(epsilon=0.5, floor=0.5, overcommit=1.0)
    m = selector.initial_state(8, 2, 2)
    U = torch.tensor([100.0, 100, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    m = replace(m, U=U, L=torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
    view, _ = a_view(t=2, P=4, n=(10,) * 8, seconds=(1.0,) * 8)
    for seed in range(20):
        chosen = selector.select(m, view, make_stream(seed, "select", 2))
        # (1 - .5) * 4 = 2 by score: the cut-off is .7 times the third best, and all are within it
        assert sum(k < 4 for k in chosen.k) == 2
        assert sum(k >= 4 for k in chosen.k) == 2
        assert len(set(chosen.k)) == 4


def test_only_scores_near_the_edge_may_be_drawn():
    score = torch.tensor(
        [1.0, 0.9, 0.8, 0.5, 0.1], dtype=torch.float64
    )  # edge for two places: .7 * .8 = .56
    for seed in range(50):
        assert set(utility.draw_near_top(score, 2, make_stream(seed, "x"))) <= {0, 1, 2}


def test_once_nobody_is_unseen_every_place_goes_by_score():
    selector = UtilitySelector(overcommit=1.0)
    m = replace(
        selector.initial_state(6, 2, 2),
        L=torch.ones(6, dtype=torch.long),
        U=torch.arange(6.0, dtype=torch.float64),
    )
    view, _ = a_view(t=2, P=3)
    assert selector.select(m, view, make_stream(0, "select", 2)).why["by_score"] == 3


def test_slow_clients_are_picked_less():
    # 20 clients alike but for half of them being 10 times slower; percentile 10 prefers the fast
    selector, M = UtilitySelector(overcommit=1.0), 20
    m = replace(
        selector.initial_state(M, 2, 2),
        L=torch.ones(M, dtype=torch.long),
        U=torch.ones(M, dtype=torch.float64),
    )
    seconds = (1.0,) * 10 + (10.0,) * 10
    view, _ = a_view(t=5, P=5, n=(10,) * M, seconds=seconds)
    picks = [k for s in range(200) for k in selector.select(m, view, make_stream(s, "select", 5)).k]
    slow = sum(k >= 10 for k in picks)
    assert slow < 0.05 * len(picks)
    indifferent = UtilitySelector(overcommit=1.0, percentile=100.0)
    m = replace(m, threshold=100.0)
    picks = [
        k for s in range(200) for k in indifferent.select(m, view, make_stream(s, "select", 5)).k
    ]
    assert sum(k >= 10 for k in picks) == pytest.approx(0.5 * len(picks), rel=0.1)


def paced(gains, pace=2):
    """The pacer's threshold after each round in which one client, seen before, gains this
    utility.
    """
    selector = UtilitySelector(pace=pace)
    m = replace(selector.initial_state(2, 2, 2), L=torch.tensor([1, 1]))
    seen = []
    for t, gain in enumerate(gains, 1):
        m = selector.observe(m, an_event(t, [0], loss_square=[gain**2], n=[1], M=2))
        seen.append(m.threshold)
    return seen


def test_the_pacer_accepts_slower_clients_when_utility_is_flat():
    assert paced([1, 1, 1, 1, 1.05, 1.05]) == [10, 10, 10, 15, 15, 20]  # windows sum to 2, 2, 2.1


def test_the_pacer_tightens_when_utility_leaps_and_rests_in_between():
    assert paced([1, 1, 6, 6]) == [10, 10, 10, 5]  # |12 - 2| >= 5 * 2
    assert paced([1, 1, 2, 2]) == [10, 10, 10, 10]  # between a tenth and fivefold
    assert paced([1, 1, 6, 6, 36, 36])[-1] == 5  # never below its own step


def test_exploring_alone_gives_the_pacer_nothing():
    selector = UtilitySelector(pace=1)
    m = selector.observe(selector.initial_state(6, 2, 2), an_event(1, [0, 1]))  # both unseen before
    assert m.before == 0


@given(st.integers(1, 30), st.integers(1, 12), st.integers(2, 25), st.integers(0, 10**6))
def test_any_history_gives_a_legal_choice(t, P, M, seed):
    rng = np.random.default_rng(seed)
    selector = UtilitySelector()
    m = replace(
        selector.initial_state(M, 2, 2),
        U=torch.from_numpy(rng.choice([0.0, 1e-9, 1.0, 1e9], M)),
        L=torch.from_numpy(rng.integers(0, t + 1, M)),
    )
    pool = tuple(sorted(rng.permutation(M)[: rng.integers(1, M + 1)].tolist()))
    view, _ = a_view(
        t, P, tuple(rng.choice([0, 5, 500], M)), tuple(rng.choice([0.0, 1.0, 50.0], M)), pool=pool
    )
    chosen = selector.select(m, view, make_stream(seed, "select", t))
    assert len(set(chosen.k)) == len(chosen.k) == min(int(1.1 * P + 1e-9), len(pool))
    assert set(chosen.k) <= set(pool)
    assert chosen.k == selector.select(m, view, make_stream(seed, "select", t)).k


def test_new_clients_find_room():
    selector = UtilitySelector()
    m = selector.observe(
        grow_state_tables(selector.initial_state(2, 2, 2), 5), an_event(1, [4], M=5)
    )
    assert len(m.U) == 5


# --- Power-of-Choice ----------------------------------------------------------------------------


def test_the_worst_of_the_candidates_train():
    view, asked = a_view(P=2, losses={k: float(k) for k in range(6)})
    chosen = PowerOfChoice(candidates=4).select(None, view, make_stream(0, "select", 1))
    assert len(asked) == 4
    assert chosen.k == tuple(sorted(asked, reverse=True)[:2])


def test_stale_losses_ask_nobody_and_let_the_unseen_go_first():
    view, asked = a_view(P=2)
    piece = PowerOfChoice(candidates=6, stale=True)
    m = piece.observe(
        piece.initial_state(6, 2, 2), an_event(1, [0, 1, 2, 3, 4], loss=[0.5, 3.0, 1.0, 2.0, 0.1])
    )
    chosen = piece.select(m, view, make_stream(0, "select", 2))
    assert chosen.k == (5, 1)
    assert asked == []


def test_clients_of_unknown_size_are_candidates_as_those_of_mean_size():
    """An engine says 0 of clients whose samples it does not know."""
    found = Counter()
    for t in range(2000):
        view, asked = a_view(P=1, n=(0, 6, 2, 0), losses=dict.fromkeys(range(4), 1.0))
        PowerOfChoice(candidates=1).select(None, view, make_stream(0, "select", t))
        found.update(asked)
    # weights 4, 6, 2, 4 of 16
    assert [found[k] / 2000 for k in range(4)] == pytest.approx(
        [0.25, 0.375, 0.125, 0.25], abs=0.04
    )


def test_new_clients_have_an_unknown_loss():
    assert grow_state_tables(
        power_of_choice.PowerOfChoiceState(torch.zeros(1, dtype=torch.float64)), 2
    ).loss.tolist() == [0, math.inf]


def test_the_bytes_of_asking():
    # D = 8 candidates, P = 3: D downloads of 4d bytes, P uploads, and 4 (D - P) bytes of answers
    quick = Experiment(
        rounds=2,
        clients=10,
        per_round=3,
        recipe={"name": "power-of-choice", "candidates": 8},
        engine={"workers": 1},
    )
    result = runs.run(quick)
    d = result.summary["floats_on_the_wire"]
    for h in result.history:
        assert h.bytes_down == 8 * 4 * d
        assert h.bytes_up == 3 * 4 * d
        assert h.bytes_framing == 3 * 8 + 4 * (8 - 3)
    free = runs.run(
        quick.model_copy(
            update={"recipe": {"name": "power-of-choice", "candidates": 8, "stale": True}}
        )
    )
    assert [h.bytes_down for h in free.history] == [3 * 4 * d] * 2
    assert result.history[0].joules > free.history[0].joules


def test_fewer_candidates_than_places_are_refused():
    with pytest.raises(BadInput, match="candidates must be at least per_round = 10, got 4"):
        recipes.power_of_choice(candidates=4, P=10)


# --- DivFL --------------------------------------------------------------------------------------


def facilities_by_the_book(V, count):
    """Greedy facility location in plain loops."""
    picked = []
    for _ in range(count):
        costs = {}
        for i in range(len(V)):
            if i not in picked:
                costs[i] = sum(min(math.dist(v, V[j]) for j in [*picked, i]) for v in V)
        picked.append(min(costs, key=lambda i: (round(costs[i], 9), i)))
    return picked


def test_two_clusters_are_covered_by_one_client_each():
    V = torch.tensor([[0.0, 0], [0, 1], [0, 2], [9, 9], [9, 10], [9, 11]])
    first, second = sorted(diverse.select_facilities(torch.cdist(V, V).double(), 2))
    assert first in (0, 1, 2)
    assert (
        second == 4
    )  # the middle of its cluster; the greedy first pick is drawn towards the other


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 10**6))
def test_facility_location_by_the_book(M, P, seed):
    """Each pick lowers the cost as far as the book's does; where two would do so equally, rounding
    decides.
    """
    V = np.random.default_rng(seed).normal(size=(M, 3))
    P = min(P, M)
    D = torch.cdist(torch.from_numpy(V), torch.from_numpy(V))
    ours, book = diverse.select_facilities(D, P), facilities_by_the_book(V.tolist(), P)
    assert len(set(ours)) == P
    for count in range(1, P + 1):
        costs = [float(D[:, picked[:count]].min(1).values.sum()) for picked in (ours, book)]
        assert costs[0] == pytest.approx(costs[1], abs=1e-9)


@given(
    st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=8
    ),
    st.integers(0, 99),
)
def test_distances_are_those_of_the_latest_updates(cohorts, seed):
    piece, rng = DivFL(), np.random.default_rng(seed)
    m, V = piece.initial_state(6, 3, 3), np.zeros((6, 3), np.float32)
    for t, k in enumerate(cohorts, 1):
        U = rng.normal(size=(len(k), 3)).astype(np.float32)
        V[k] = U
        m = piece.observe(m, an_event(t, k, U=U.tolist()))
    heard = (m.R > NEVER_SEEN).nonzero()[:, 0]
    D = diverse.pairwise_distances(m)[heard][:, heard]
    W = torch.from_numpy(V)[heard].double()
    torch.testing.assert_close(D, (W[:, None] - W[None]).norm(dim=2), rtol=1e-4, atol=2e-3)


def test_the_unheard_go_first():
    piece = DivFL()
    m = piece.observe(
        piece.initial_state(6, 2, 2), an_event(1, [0, 1, 2, 3], U=[[0, 0], [0, 1], [9, 9], [9, 8]])
    )
    view, _ = a_view(t=2, P=4)
    chosen = piece.select(m, view, make_stream(0, "select", 2))
    assert set(chosen.k[:2]) == {4, 5}
    assert len({0, 1} & set(chosen.k)) == len({2, 3} & set(chosen.k)) == 1
    assert not chosen.exploit


def test_the_gram_table_grows():
    m = grow_state_tables(DivFL().initial_state(2, 3, 3), 5)
    assert m.G.shape == (5, 5)
    assert m.R.tolist() == [NEVER_SEEN] * 5


# --- PyramidFL ----------------------------------------------------------------------------------


def tasks_of(view, rows):
    return [view.draft(k) for k in rows]


def test_upload_dropout_follows_the_rank_of_the_gradient():
    trainer = PyramidTraining()
    m = trainer.observe(
        trainer.initial_state(6, 2, 2), an_event(1, [0, 1], n=[10, 10], U=[[3, 4], [0, 1]])
    )  # 50, 10
    view, _ = a_view(P=4, n=(10, 10, 30, 5, 1, 1))
    rates = [task.compressor.rate for task in trainer.assign(tasks_of(view, [0, 1, 2, 3]), m, view)]
    # utilities 50, 10, and n for the unseen: 30, 5; so ranks 0, 2, 1, 3 and rates .1 + rank (.6 -
    # .1) / 4
    assert rates == pytest.approx([0.1, 0.35, 0.225, 0.475])
    view, _ = a_view(P=10, n=tuple(range(1, 11)), seconds=(1.0,) * 10)
    rates = [
        t.compressor.rate
        for t in trainer.assign(tasks_of(view, range(10)), trainer.initial_state(10, 2, 2), view)
    ]
    assert sum(rates) / 10 == pytest.approx(0.325)


def test_upload_dropout_saves_a_third_of_the_uploads():
    # ten clients of the paper's CIFAR-10 net, ranks 0 to 9: rates average .325, so .675 of 4 d
    # bytes each (the expectation does not depend on the sizes; a fiftieth of them is quicker)
    names = [
        (s.name, max(s.size // 50, 1))
        for s in make_layout(build_network("cnn-cifar", (3, 32, 32), 10, 0)).slots
    ]
    u = torch.zeros(sum(size for _, size in names))
    sent = [
        TensorDropout(0.1 + 0.05 * rank)
        .encode(u, names, make_stream(0, "encode", t, str(rank)), {})[0]
        .nbytes
        for rank in range(10)
        for t in range(300)
    ]
    assert sum(sent) / len(sent) == pytest.approx(
        0.675 * 4 * len(u), rel=0.03
    )  # two standard deviations


def test_fast_clients_fill_the_round():
    # one epoch is 2 batches; client 0 needs 1 s for it, client 1 3 s: 2 s to spare at .5 s a step
    # are 4 more steps
    view, _ = a_view(P=2, seconds=(5.0, 15.0), n=(1, 1))
    trainer = PyramidTraining(low=0.0, high=0.0)
    tasks = [with_epochs(task, 1) for task in tasks_of(view, [0, 1])]
    done = trainer.assign(tasks, trainer.initial_state(2, 2, 2), view)
    assert [task.work.steps for task in done] == [6, None]
    halved = replace(trainer, beta=0.5).assign(tasks, trainer.initial_state(2, 2, 2), view)
    assert [task.work.steps for task in halved] == [4, None]
    capped = replace(trainer, most=2.0).assign(tasks, trainer.initial_state(2, 2, 2), view)
    assert [task.work.steps for task in capped] == [4, None]


def test_fast_clients_train_longer_at_any_number_of_epochs():
    # E = 5, 10 batches of .1 s each; client 1 takes 15 s, so 140 more steps would fit; `most`
    # allows 5 times the 10
    view, _ = a_view(P=2, seconds=(1.0, 15.0), n=(1, 1))
    trainer = PyramidTraining(low=0.0, high=0.0)
    done = trainer.assign(tasks_of(view, [0, 1]), trainer.initial_state(2, 2, 2), view)
    assert [task.work.steps for task in done] == [50, None]
    limitless = replace(trainer, most=100.0).assign(
        tasks_of(view, [0, 1]), trainer.initial_state(2, 2, 2), view
    )
    assert [task.work.steps for task in limitless] == [
        110,
        None,
    ]  # the released code's eleven times
    with pytest.raises(ValueError, match="most"):
        require_valid_fields(PyramidTraining(most=0.5))


def test_on_unequal_devices_pyramidfl_lets_some_train_longer():
    exp = Experiment(
        rounds=4,
        clients=12,
        per_round=6,
        recipe={"name": "pyramidfl"},
        train={"epochs": 5},
        fleet={"profile": {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}},
        engine={"workers": 1},
    )
    plain = runs.build_simulation(exp)
    plain.engine.close()
    longer = 0
    for done in runs.rounds(exp):
        for line in done.clients:
            task = Task(
                line.client,
                0,
                1,
                0,
                LocalWork(exp.train.epochs, exp.train.batch),
                compressor=TensorDropout(0.0),
            )
            longer += line.spent.batches > plain.engine.estimate(task).batches
    assert longer >= 4


def test_spares_slower_than_the_round_do_not_stretch_it():
    view, _ = a_view(P=2, seconds=(5.0, 15.0, 500.0), n=(1, 1, 1))
    trainer = PyramidTraining(low=0.0, high=0.0)
    tasks = [with_epochs(task, 1) for task in tasks_of(view, [0, 1, 2])]
    assert [
        task.work.steps for task in trainer.assign(tasks, trainer.initial_state(3, 2, 2), view)
    ] == [6, None, None]


def test_without_dropout_and_with_equal_speeds_it_is_plain_sgd():
    view, _ = a_view(P=3, transfer=0.5)
    tasks = tasks_of(view, [0, 2, 4])
    assert (
        PyramidTraining(low=0.0, high=0.0).assign(
            tasks, PyramidState(torch.zeros(6, dtype=torch.float64)), view
        )
        == tasks
    )
    assert FewerEpochs().assign(tasks, None, view) == tasks


def test_slow_clients_train_fewer_epochs_as_flrce_describes_it():
    # durations 1, 2, 4, 50 at E = 5; the 25th percentile is sorted[1] = 2: floor(5 * 2 / t) in 1..5
    view, _ = a_view(P=4, n=(1,) * 4, seconds=(1.0, 2.0, 4.0, 50.0))
    done = FewerEpochs(percentile=25).assign(tasks_of(view, range(4)), None, view)
    assert [task.work.epochs for task in done] == [5, 5, 2, 1]


def test_who_was_never_measured_sets_nobodys_pace():
    # durations 2, 4, 10 and one unknown; the 34th percentile of those known is sorted[1] = 4
    view, _ = a_view(P=4, n=(1,) * 4, seconds=(2.0, 4.0, 10.0, 0.0))
    done = FewerEpochs(percentile=34).assign(tasks_of(view, range(4)), None, view)
    assert [task.work.epochs for task in done] == [5, 5, 2, 5]
    nobody, _ = a_view(P=4, n=(1,) * 4, seconds=(0.0,) * 4)
    assert [
        task.work.epochs for task in FewerEpochs().assign(tasks_of(nobody, range(4)), None, nobody)
    ] == [5] * 4


def test_upload_dropout_needs_a_compressor_that_can_drop():
    with pytest.raises(BadInput, match="drop-tensors"):
        replace(recipes.fedavg(), trainer=PyramidTraining())


def test_pyramidfl_is_fedavg_in_the_limit():
    """No dropout, equal devices and numbers of batches, the same cohort and weights: the same
    bits.
    """
    base = {
        "data": {"partition": "iid"},
        "rounds": 3,
        "clients": 6,
        "per_round": 6,
        "engine": {"workers": 1},
    }
    base["train"] = {
        "batch": 32
    }  # 209 or 210 samples: 7 batches (13 or 14 of 16, where a batch of one is left out)
    plain = runs.run(
        Experiment(
            **base, recipe={"name": "fedavg", "aggregator": {"piece": "mean", "by": "equal"}}
        )
    )
    trainer = {"piece": "fill-the-round", "low": 0.0, "high": 0.0}
    pyramid = runs.run(
        Experiment(**base, recipe={"name": "pyramidfl", "trainer": trainer, "selector": "uniform"})
    )
    assert all(torch.equal(plain.model[name], pyramid.model[name]) for name in plain.model)
    assert [h.bytes_up for h in plain.history] == [h.bytes_up for h in pyramid.history]
    # sizes differ by a sample or so, and E_i rounds down: only the slowest as T leaves all at E
    fewer = runs.run(
        Experiment(
            **base,
            recipe={
                "name": "pyramidfl",
                "preset": "flrce",
                "selector": "uniform",
                "trainer": {"piece": "fewer-epochs", "percentile": 100.0},
                "aggregator": {"piece": "mean", "by": "equal"},
            },
        )
    )
    assert all(torch.equal(plain.model[name], fewer.model[name]) for name in plain.model)


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["oort", "pyramidfl", "power-of-choice", "heterofl"])
def test_replies_count_alike_where_the_released_code_has_it_so(name):
    """Power-of-Choice draws its candidates by n_k already; Oort, PyramidFL and HeteroFL average
    without weights.
    """
    U = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    updates = Updates(torch.tensor([0, 1]), U, torch.tensor([1.0, 99.0], dtype=torch.float64), 2)
    recipe = recipes.CATALOGUE[name]()
    assert recipe.aggregator(torch.zeros(2), updates, None).tolist() == [0.5, 0.5]


# --- every recipe of this family ----------------------------------------------------------------

FAMILY = [
    {"name": "oort"},
    {"name": "pyramidfl"},
    {"name": "pyramidfl", "preset": "flrce"},
    {"name": "power-of-choice"},
    {"name": "power-of-choice", "stale": True},
    {"name": "divfl"},
    {"name": "trimmed-mean"},
    {"name": "median"},
    {"name": "krum"},
    {"name": "clipped-mean"},
]


def name_of(recipe):
    return "-".join(str(value) for value in recipe.values())


@pytest.mark.parametrize("recipe", FAMILY, ids=name_of)
def test_it_learns_digits(recipe):
    exp = Experiment(rounds=40, clients=30, per_round=6, recipe=recipe, engine={"workers": 1})
    seen = 0.0
    for done in runs.rounds(exp):
        seen = max(seen, done.record.accuracy)
        if seen > 0.7:
            return
    pytest.fail(f"best accuracy {seen:.3f} in 40 rounds")


class Killed(Exception):
    pass


@pytest.mark.parametrize("recipe", FAMILY, ids=name_of)
def test_resumed_equals_straight(recipe, tmp_path):
    mix = {"jetson-nano": 0.5, "raspberry-pi-4": 0.5}
    exp = Experiment(
        rounds=6,
        clients=12,
        per_round=5,
        recipe=recipe,
        engine={"workers": 1},
        fleet={"profile": mix},
        train={"epochs": 1},
    )
    runs.run(exp, tmp_path / "straight")

    def kill(done):
        if done.record.t == 3:
            raise Killed

    with pytest.raises(Killed):
        runs.run(exp, tmp_path / "killed", watch=kill)
    runs.run(exp, tmp_path / "killed", resume=True)
    for name in ("rounds.jsonl", "clients.jsonl", "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "straight" / name
        ).read_bytes(), name


def test_a_round_keeps_the_fastest_of_those_asked():
    exp = Experiment(
        rounds=3, clients=12, per_round=4, recipe={"name": "pyramidfl"}, engine={"workers": 1}
    )
    for h in runs.run(exp).history:
        assert isinstance(h, RoundRecord)
        assert len(h.chosen) == 5  # floor(1.3 * 4)
        assert len(h.replied) == 4
        assert set(h.rejected.values()) == {"slower than the replies that were waited for"}
        assert h.bytes_wasted > 0


def test_a_root_beside_spares_takes_no_place_of_theirs():
    """P = 4 with 1.5 times as many asked: the root and int(1.5 * 3) = 4 others, of whom the fastest
    four count.
    """
    rooted = RootClientSampling(UtilitySelector(overcommit=1.5))
    view, _ = a_view(P=4)
    chosen = rooted.select(rooted.initial_state(6, 2, 2), view, make_stream(0, "x"))
    assert chosen.k[0] == 0
    assert (len(chosen.k), chosen.keep) == (5, 4)
