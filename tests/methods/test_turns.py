"""Everyone once before anyone twice, in balanced groups: worked by hand, by plain loops, and as
properties.
"""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_selectors import a_view, an_event

from flrce import Experiment
from flrce.core.sketch import make_sketch
from flrce.core.state_values import grow_state_tables
from flrce.errors import BadInput
from flrce.methods.selection import client_groups, turns
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.rng import make_stream
from flrce.simulation import runs
from training import require_valid_fields


def all_of(D, n, count, already=(), seed=0):
    """`balanced` that looks at everyone."""
    return client_groups.select_balanced(
        D, torch.as_tensor(n).double(), count, make_stream(seed, "all"), already, tries=0
    )


def test_opposites_go_together():
    """Two labels, two sizes: with the large client of one label goes the small one of the other."""
    D = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    large, small = all_of(D, [1, 9, 1, 9], 2)
    assert {large, small} in ({1, 2}, {0, 3})
    assert all_of(D, [1, 1, 1, 1], 1, already=[1]) in ([2], [3])  # one is chosen already
    assert sorted(all_of(D, [1, 1, 1, 1], 4)) == [0, 1, 2, 3]


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_balance_by_the_book(L, count, seed):
    rng = np.random.default_rng(seed)
    D, n = rng.normal(size=(L, 3)), rng.permutation(L) + 1.0
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    found = all_of(torch.from_numpy(D), n, min(count, L))
    assert found[1:] == balanced_by_the_book(D, n, min(count, L), found[0])


def balanced_by_the_book(D, n, count, first):
    """The first is drawn, as nothing is in surplus yet; the rest follow from it."""
    mean = (n[:, None] * D).sum(0) / n.sum()
    away = (D - mean) / np.linalg.norm(D - mean, axis=1, keepdims=True)
    parts = np.array_split(np.argsort(n), count)[::-1]
    assert first in parts[0]
    surplus, picked = n[first] * away[first], []
    for part in parts[1:]:
        picked.append(int(min(part, key=lambda i: float(away[i] @ surplus))))
        surplus = surplus + n[picked[-1]] * away[picked[-1]]
    return picked


def skewed(seed, M=60, labels=6):
    """Clients of few labels each: updates point along their labels, with noise, and are longer the
    more samples.
    """
    rng = np.random.default_rng(seed)
    n = np.ceil(rng.lognormal(3, 1, M))
    mix = rng.dirichlet(np.full(labels, 0.1), M)
    U = (mix @ rng.normal(size=(labels, 40)) + 0.2 * rng.normal(size=(M, 40))) * n[:, None]
    return torch.from_numpy(U), torch.from_numpy(n)


def groups_of(U, n, P, seed, by):
    """One sweep's rounds."""
    piece, M = RoundRobinSelector(by, sketch=40), len(n)
    m = piece.initial_state(M, 40, 40)
    if by == "balance":
        m.V[:], m.R[:] = client_groups.normalize_rows(U), 0
    for t in range(1, M // P + 1):
        view, _ = a_view(t=t, P=P, n=n.tolist())
        chosen = piece.select(m, view, make_stream(seed, by, t)).k
        yield list(chosen)
        m = replace(m, turn=m.turn.index_fill(0, torch.tensor(chosen), 1))


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_balance_evens_out_samples_and_directions(seed):
    """Samples a round vary less than by chance, and a round's mean direction is nearer to the
    fleet's.
    """
    U, n = skewed(seed)
    weight, D = client_groups.cap_sample_counts(n, 5.0), client_groups.normalize_rows(U)
    fleet = (weight[:, None] * D).sum(0) / weight.sum()
    spread, far = {}, {}
    for by in ("balance", "chance"):
        spread[by], far[by] = [], []
        for repeat in range(4):
            rounds = list(groups_of(U, n, 6, 10 * seed + repeat, by))
            spread[by].append(np.std([float(weight[k].sum()) for k in rounds]))
            means = [(weight[k, None] * D[k]).sum(0) / weight[k].sum() for k in rounds]
            far[by].append(np.mean([float((mean - fleet).norm()) for mean in means]))
    assert np.mean(spread["balance"]) < np.mean(spread["chance"])
    assert np.mean(far["balance"]) < np.mean(far["chance"])


@given(st.integers(0, 10**6), st.sampled_from([1e-30, 1.0, 1e9, 3e38]))
def test_lengths_are_taken_out(seed, scale):
    """Whoever sends however much: directions are the same, and nothing overflows."""
    U = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (5, 2048))).float() * scale
    found = client_groups.normalize_rows(U)
    torch.testing.assert_close(found, client_groups.normalize_rows(U / scale), rtol=1e-4, atol=1e-6)
    assert (
        client_groups.select_balanced(found, torch.ones(5).double(), 5, make_stream(seed, "x"))
        != []
    )
    assert client_groups.normalize_rows(torch.zeros(2, 3)).tolist() == [[0] * 3] * 2


def test_what_a_client_that_opposes_another_can_do():
    """Sending the victim's update turned round, it comes along more often than by chance (1 in 10),
    not always.
    """
    together = dict.fromkeys((1, 2, 0), 0)
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        D, n = (
            client_groups.normalize_rows(torch.randn(100, 64, generator=g)),
            torch.randint(10, 99, (100,), generator=g).double(),
        )
        D[1] = -D[0]
        for tries in together:
            rng, left = make_stream(seed, "steer", tries), list(range(100))
            while {0, 1} <= set(left):
                chosen = [
                    left[i]
                    for i in client_groups.select_balanced(D[left], n[left], 10, rng, tries=tries)
                ]
                left = [k for k in left if k not in chosen]
                together[tries] += {0, 1} <= set(chosen)
    assert together[1] < 12
    assert together[2] < 25 < together[0]  # of 60


def test_agreement():
    """Two that agree and one against them: mean cosines with all are 1/3, 1/3 and -1/3; a zero
    update has none.
    """
    V = torch.tensor([[2.0, 0], [1, 0], [-3, 0]])
    torch.testing.assert_close(client_groups.mean_cosines(V), torch.tensor([1 / 3, 1 / 3, -1 / 3]))
    assert client_groups.mean_cosines(torch.zeros(2, 2)).tolist() == [0, 0]


@given(
    st.sampled_from(("balance", "agreement", "sizes", "chance")),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_nobody_is_ever_two_turns_ahead(by, M, P, seed):
    """Also where fewer are considered at a time than take part."""
    piece, rng, count = RoundRobinSelector(by, sketch=2), np.random.default_rng(seed), Counter()
    m = piece.initial_state(M, 3, 3)
    for t in range(1, 15):
        view, _ = a_view(t=t, P=min(P, M), n=rng.integers(0, 9, M).tolist())
        with patch.object(turns, "MAX_CLIENTS_CONSIDERED", 1 + seed % 4):
            chosen = piece.select(m, view, make_stream(seed, "select", t)).k
        assert len(set(chosen)) == min(P, M)
        count.update(chosen)
        assert max(count.values()) - min(count[k] for k in range(M)) <= 1
        heard = [k for k in chosen if rng.random() < 0.8] or [chosen[0]]  # some never reply
        m = piece.observe(
            m, an_event(t, heard, U=rng.normal(size=(len(heard), 3)), chosen=chosen, M=M)
        )


def test_who_comes_back_or_is_new_gets_one_turn_not_all():
    piece = RoundRobinSelector("chance")
    m, count = piece.initial_state(4, 2, 2), Counter()
    for t in range(1, 13):
        pool = (0, 1, 2) if t <= 6 else (0, 1, 2, 3, 4)  # 3 was away, 4 is new
        m = grow_state_tables(m, max(pool) + 1)  # as the loop does when a client appears
        view, _ = a_view(t=t, P=1, n=(1,) * 5, pool=pool)
        (k,) = piece.select(m, view, make_stream(0, "select", t)).k
        count[k] += t > 6
        m = piece.observe(m, an_event(t, [k], M=5))
    assert sorted(count.values()) == [1, 1, 1, 1, 2]


def test_the_map_holds_directions_and_the_unheard_have_none():
    piece = RoundRobinSelector(sketch=2)
    m = piece.observe(
        piece.initial_state(4, 3, 3),
        an_event(1, [0, 1], U=[[5, 0, 0], [0, 1, 0]], chosen=(0, 1, 2), M=4),
    )
    torch.testing.assert_close(
        m.V[:2], client_groups.normalize_rows(make_sketch(3, 2)(torch.eye(3)[:2]))
    )
    assert m.V[2:].count_nonzero() == 0
    view, _ = a_view(t=2, P=2, n=(1,) * 4)
    chosen = piece.select(m, view, make_stream(0, "select", 2))
    assert chosen.k[0] == 3  # the only one due
    assert chosen.exploit
    assert chosen.why == {"due": 1, "by": "balance"}
    fresh = piece.select(piece.initial_state(4, 3, 3), view, make_stream(0, "select", 1))
    assert not fresh.exploit
    assert fresh.why == {"due": 4, "by": "chance"}


def test_by_agreement_the_unheard_go_first():
    piece = RoundRobinSelector("agreement", sketch=2)
    m = piece.observe(
        piece.initial_state(4, 2, 2),
        an_event(1, [0, 1, 2], U=[[1, 0], [1, 0], [-1, 0]], chosen=(), M=4),
    )
    view, _ = a_view(t=2, P=3, n=(1,) * 4)
    assert piece.select(m, view, make_stream(0, "select", 2)).k[0] == 3
    assert set(piece.select(m, view, make_stream(0, "select", 2)).k[1:]) == {0, 1}


def test_bad_settings_are_named():
    with pytest.raises(BadInput, match="by = 'balanse': should be 'balance'"):
        require_valid_fields(RoundRobinSelector("balanse"))
    with pytest.raises(BadInput, match="sketch"):
        require_valid_fields(RoundRobinSelector(sketch=0))
    assert RoundRobinSelector().with_sketch_size(64).sketch == 64


def test_balanced_rounds_swing_less():
    """On skewed digits the model moves from round to round by less than with random groups."""
    swings = {}
    for by in ("balance", "chance"):
        exp = Experiment(
            rounds=40,
            clients=100,
            per_round=10,
            train={"lr": 0.05, "batch": 16},
            recipe={"name": "fedavg", "selector": {"piece": "in-turn", "by": by}},
        )
        seen = [h.accuracy for h in runs.run(exp).history[12:]]
        swings[by] = np.abs(np.diff(seen)).mean()
    assert swings["balance"] < 0.85 * swings["chance"]
