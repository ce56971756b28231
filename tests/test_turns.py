"""Everyone once before anyone twice, in balanced groups: worked by hand, by plain loops, and as properties."""

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment, runs
from flrce.errors import BadInput
from flrce.rng import stream
from flrce.round.tables import grow_one
from flrce.selectors import turns
from flrce.selectors.sketch import sketch
from flrce.selectors.turns import ORDERS, InTurn
from test_selectors import a_view, an_event


def balanced_by_the_book(S, count):
    """Greedy, in plain loops: the first, then whoever brings the sum nearest to the group's share of the total."""
    picked, mean = [0], np.mean(S, 0)
    while len(picked) < count:
        misses = {
            i: float(np.sum((np.sum([S[j] for j in [*picked, i]], 0) - (len(picked) + 1) * mean) ** 2))
            for i in range(len(S))
            if i not in picked
        }
        picked.append(min(misses, key=lambda i: (misses[i], i)))
    return picked


def test_opposites_go_together():
    """Two labels, two clients each: whoever is drawn first gets one of the other label along."""
    S = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    assert turns.balanced(S, S[:0], 2) == [0, 2]
    assert turns.balanced(S[[0, 2, 3]], S[[1]], 1) == [1]  # one is chosen already
    assert turns.balanced(S, S[:0], 4) == [0, 2, 1, 3]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_balance_by_the_book(L, count, seed):
    S = np.random.default_rng(seed).normal(size=(L, 3))
    assert turns.balanced(torch.from_numpy(S), torch.zeros(0, 3), min(count, L)) == balanced_by_the_book(
        S, min(count, L)
    )


def test_agreement():
    """Two that agree and one against them: mean cosines with all are 1/3, 1/3 and -1/3; a zero update has none."""
    V = torch.tensor([[2.0, 0], [1, 0], [-3, 0]])
    torch.testing.assert_close(turns.agreement(V), torch.tensor([1 / 3, 1 / 3, -1 / 3]))
    assert turns.agreement(torch.zeros(2, 2)).tolist() == [0, 0]


@given(st.sampled_from(ORDERS), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_nobody_is_ever_two_turns_ahead(by, M, P, seed):
    """Also where fewer are considered at a time than take part."""
    piece, rng, count = InTurn(by, sketch=2), np.random.default_rng(seed), Counter()
    m = piece.init(M, 3, 3)
    for t in range(1, 15):
        view, _ = a_view(t=t, P=min(P, M), n=rng.integers(0, 9, M).tolist())
        with patch.object(turns, "CROWD", 1 + seed % 4):
            chosen = piece.select(m, view, stream(seed, "select", t)).k
        assert len(set(chosen)) == min(P, M)
        count.update(chosen)
        assert max(count.values()) - min(count[k] for k in range(M)) <= 1
        heard = [k for k in chosen if rng.random() < 0.8] or [chosen[0]]  # some never reply
        m = piece.observe(m, an_event(t, heard, U=rng.normal(size=(len(heard), 3)), chosen=chosen, M=M))


def test_who_comes_back_or_is_new_gets_one_turn_not_all():
    piece = InTurn("chance")
    m, count = piece.init(4, 2, 2), Counter()
    for t in range(1, 13):
        pool = (0, 1, 2) if t <= 6 else (0, 1, 2, 3, 4)  # 3 was away, 4 is new
        m = grow_one(m, max(pool) + 1)  # as the loop does when a client appears
        view, _ = a_view(t=t, P=1, n=(1,) * 5, pool=pool)
        (k,) = piece.select(m, view, stream(0, "select", t)).k
        count[k] += t > 6
        m = piece.observe(m, an_event(t, [k], M=5))
    assert sorted(count.values()) == [1, 1, 1, 1, 2]


def test_the_unheard_go_first_and_the_map_is_sketched():
    piece = InTurn(sketch=2)
    m = piece.observe(piece.init(4, 3, 3), an_event(1, [0, 1], U=[[1, 0, 0], [0, 1, 0]], chosen=(0, 1, 2), M=4))
    torch.testing.assert_close(m.V[:2], 10 * sketch(3, 2)(torch.eye(3)[:2]))  # of ten samples each
    view, _ = a_view(t=2, P=2, n=(1,) * 4)
    chosen = piece.select(m, view, stream(0, "select", 2))
    assert chosen.k[0] == 3  # the only one due; 2 never replied, so of the next sweep it goes first
    assert chosen.k[1] == 2
    assert not chosen.exploit
    assert chosen.why == {"due": 1, "by": "chance"}


def test_bad_settings_are_named():
    with pytest.raises(BadInput, match="did you mean 'balance'"):
        InTurn("balanse")
    with pytest.raises(BadInput, match="sketch"):
        InTurn(sketch=0)
    assert InTurn().sketched(64).sketch == 64


def test_balanced_rounds_swing_less():
    """On skewed digits the model moves from round to round by less than half as much as with random groups."""
    swings = {}
    for by in ("balance", "chance"):
        exp = Experiment(rounds=40, clients=100, per_round=10, train={"lr": 0.05, "batch": 16},
                         recipe={"name": "fedavg", "selector": {"piece": "in-turn", "by": by}})  # fmt: skip
        seen = [h.accuracy for h in runs.run(exp).history[12:]]
        swings[by] = np.abs(np.diff(seen)).mean()
    assert swings["balance"] < 0.5 * swings["chance"]
