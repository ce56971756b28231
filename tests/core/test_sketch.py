"""Sketched relationship maps: unbiased products, the stated error, H close to the exact one, memory
as announced.
"""

from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.config.compose import build_piece
from flrce.core import memory_limits
from flrce.core import sketch as maps_of
from flrce.core.loop import make_initial_state
from flrce.core.relations import NEVER_SEEN
from flrce.core.roles import RoundView
from flrce.core.sketch import CountSketch, RotatedSketch, make_sketch, sketch_error_bound
from flrce.core.state_values import grow_state_tables
from flrce.core.types import Round, RoundEvent, RoundRecord, State, Task, Updates
from flrce.errors import BadInput
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.storage.checkpoint import Journal
from flrce.storage.ledger_lines import to_relation_line
from stub_engine import StubEngine
from training import require_valid_fields

MAPS = 800  # draws of the map that an average is taken over


def test_worked_example():
    # order 2, 0, 3, 1, 4 and k = 2: bucket 0 gets coordinates 2, 3, 4, bucket 1 gets 0, 1; signs in
    # that order
    S = CountSketch(2, torch.tensor([2, 0, 3, 1, 4]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]))
    # 30 + 40 - 50 = 20, -10 + 20 = 10
    assert S(torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])).tolist() == [[20.0, 10.0]]


def test_turned_blocks():
    # k = 2, blocks (10, 20), (30, 40), (50): the second is turned by one, signs -, +, +, +, -
    S = RotatedSketch(2, torch.tensor([0, 1, 0]), torch.tensor([-1, 1, 1, 1, -1], dtype=torch.int8))
    # bucket 0: -10 + 40 - 50, bucket 1: 20 + 30
    assert S(torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]])).tolist() == [[-20.0, 50.0]]


@settings(max_examples=20)
@given(st.integers(2, 50), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_turned_products_are_unbiased_within_the_same_variance(d, k, seed, spiky):
    """Large maps, made small: every coordinate once, and the bounds of the shuffled ones."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, d)) ** (5 if spiky else 1)
    X = torch.tensor(np.stack([x / np.linalg.norm(x), y / np.linalg.norm(y)]))
    maps = [turned(d, k, draw) for draw in range(MAPS)]
    assert (maps[0](torch.eye(d)).abs().sum(1) == 1).all()
    images = torch.stack([S(X) for S in maps])
    error = (images[:, 0] * images[:, 1]).sum(1) - X[0] @ X[1]
    bound = ((1 + (X[0] @ X[1]) ** 2) / k).sqrt()
    assert error.mean().abs() <= 5 * bound / MAPS**0.5
    assert error.square().mean().sqrt() <= 1.5 * bound


def turned(d, k, seed):
    with mock.patch.object(maps_of, "MAX_SHUFFLED_FLOATS", 0):
        return make_sketch.__wrapped__(d, k, seed)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 20), st.integers(0, 2**32))
def test_every_coordinate_counts_once(d, k, n, seed):
    S = make_sketch(d, k, seed)
    image = S(torch.eye(d, dtype=torch.float64))  # (d, k)
    assert (image.abs().sum(1) == 1).all()
    sizes = image.abs().sum(0)
    assert sizes.max() - sizes.min() <= 1
    X = torch.randn(n, d, dtype=torch.float64)
    assert torch.allclose(S(X), X @ image)


def test_mean_and_variance_over_every_map():
    # d = 4, k = 2: two coordinates share a bucket in (4 - 2) / (2 * 3) = 1/3 of all orders
    x, y = torch.tensor([[1.0, 2.0, 0.0, -1.0], [3.0, 1.0, 1.0, 2.0]], dtype=torch.float64)
    products = torch.stack(
        [
            S(x[None])[0] @ S(y[None])[0]
            for order in permutations(range(4))
            for signs in product((-1.0, 1.0), repeat=4)
            for S in [CountSketch(2, torch.tensor(order), torch.tensor(signs))]
        ]
    )
    assert float(products.mean()) == pytest.approx(3.0)  # 3 + 2 - 2
    # |x|^2 |y|^2 + <x, y>^2 - 2 sum x_i^2 y_i^2 = 6 * 15 + 9 - 2 * (9 + 4 + 0 + 4) = 65; the bound is 99 / 2
    assert float(products.var(correction=0)) == pytest.approx(65 / 3)


@settings(max_examples=20)
@given(st.integers(2, 50), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_products_are_unbiased_within_the_stated_variance(d, k, seed, spiky):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, d)) ** (5 if spiky else 1)
    X = torch.tensor(np.stack([x / np.linalg.norm(x), y / np.linalg.norm(y)]))
    images = torch.stack([make_sketch(d, k, draw)(X) for draw in range(MAPS)])
    error = (images[:, 0] * images[:, 1]).sum(1) - X[0] @ X[1]
    bound = ((1 + (X[0] @ X[1]) ** 2) / k).sqrt()  # root of the variance bound, lengths being 1
    assert bound <= sketch_error_bound(k) + 1e-12
    assert error.mean().abs() <= 5 * bound / MAPS**0.5
    # products have heavy tails, so their square's mean over the draws may stray above its bound
    assert error.square().mean().sqrt() <= 1.5 * bound


def test_a_sketch_of_d_floats_is_exact():
    X = torch.randn(5, 40, dtype=torch.float64)
    for k in (40, 64):
        assert torch.allclose(make_sketch(40, k)(X) @ make_sketch(40, k)(X).T, X @ X.T)


def test_the_map_is_the_same_everywhere():
    # fixed by the counter-based generator: a resumed run must find the same one
    S = make_sketch(6, 3)
    assert (S.order.tolist(), S.signs.tolist()) == ([2, 1, 3, 5, 0, 4], [-1, 1, 1, 1, -1, -1])


def fleet(M, d, seed=0, clusters=5):
    """Unit centroids of clusters of decreasing size, and every client's update: its centroid plus
    as much noise.
    """
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, d)) / d**0.5 + rng.normal(size=d) / d**0.5
    of = np.minimum(rng.geometric(0.4, M) - 1, clusters - 1)
    return (
        torch.tensor(centres[of] + rng.normal(size=(M, d)) / d**0.5).float(),
        torch.tensor(rng.normal(size=d)).float(),
    )


def played(selector, V, w, P=20, rounds=3):
    """The selector's memory after the whole fleet was heard `rounds` times, P clients a round."""
    M, d = V.shape
    m = selector.initial_state(M, d, d)
    for t, k in enumerate(torch.arange(M).split(P) * rounds, 1):
        updates = Updates(k, V[k], torch.ones(len(k), dtype=torch.float64), d)
        m = selector.observe(m, RoundEvent(t, w, w, updates, M))
    return m


@pytest.mark.parametrize("anchor", ["origin", "model"])
def test_h_stays_within_the_bound_and_nears_the_exact_one(anchor):
    V, w = fleet(200, 4000)
    exact = played(RelationshipSelector(anchor=anchor), V, w)
    errors = {}
    for k in (64, 256, 1024):
        m = played(RelationshipSelector(anchor=anchor, sketch=k), V, w)
        assert m.Omega is None
        assert m.V.shape == (200, k)
        errors[k] = float((m.H - exact.H).square().mean().sqrt()) / len(V)
        assert errors[k] <= sketch_error_bound(k)
    assert errors[1024] < errors[256] < errors[64]
    assert errors[64] / errors[1024] > 2  # 4 = sqrt(1024 / 64), but for one draw of the map


def test_a_wide_sketch_differs_only_in_keeping_no_map():
    V, w = fleet(60, 50)
    exact, wide = (
        played(RelationshipSelector(), V, w),
        played(RelationshipSelector(sketch=50), V, w),
    )
    assert torch.equal(wide.H, exact.H)
    assert wide.Omega is None


def test_blocks_of_clients_change_nothing(monkeypatch):
    V, w = fleet(60, 50)
    whole = played(RelationshipSelector(anchor="model"), V, w)
    monkeypatch.setattr("flrce.core.relations.CLIENTS_PER_BLOCK", 7)
    parts = played(RelationshipSelector(anchor="model"), V, w)
    assert torch.allclose(parts.Omega, whole.Omega, atol=1e-6)
    assert torch.allclose(parts.H, whole.H, atol=1e-4)


def test_clients_that_appear_later():
    m = grow_state_tables(RelationshipSelector(sketch=8).initial_state(0, 40, 40), 5)
    V, w = fleet(5, 40)
    updates = Updates(torch.tensor([1, 3]), V[[1, 3]], torch.ones(2), 40)
    m = RelationshipSelector(sketch=8).observe(m, RoundEvent(1, w, w, updates, 5))
    assert m.Omega is None
    assert m.V.shape == (5, 8)
    assert m.R.tolist() == [NEVER_SEEN, 1, NEVER_SEEN, 1, NEVER_SEEN]


def test_a_checkpoint_brings_the_sketch_back(tmp_path):
    selector = RelationshipSelector(sketch=8, anchor="model")
    V, w = fleet(12, 40)
    start = State(
        0, w, {"selector": selector.initial_state(12, 40, 40)}, tuple(f"c{k}" for k in range(12))
    )
    state, journal = start, Journal(tmp_path, "same", {})
    for t, k in enumerate(torch.arange(12).split(4), 1):
        m = selector.observe(
            state.server_state["selector"],
            RoundEvent(t, w, w, Updates(k, V[k], torch.ones(4), 40), 12),
        )
        state = replace(
            state, t=t, server_state={"selector": m}, history=(*state.history, RoundRecord(t))
        )
        done = Round(state, RoundRecord(t), (), tuple(k.tolist()))
        assert "Omega" not in to_relation_line(done)
        journal.save(done, {}, lambda: None)
    fresh = replace(start, server_state={"selector": selector.initial_state(12, 40, 40)})
    found = (
        Journal(tmp_path, "same", {}).restore(fresh, lambda marks: None).server_state["selector"]
    )
    assert found.Omega is None
    for name in ("V", "R", "H", "vv", "av"):
        assert torch.equal(getattr(found, name), getattr(m, name)), name


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
def test_waiting_behind_all_others_needs_only_the_first(M, P, seed):
    """`most` looks at the head of the ranking; the plain rule over the whole pool picks the same
    clients.
    """
    rng = np.random.default_rng(seed)
    selector = RelationshipSelector(decay=0.0, most=1.5, window=3)
    history = tuple(
        RoundRecord(t, chosen=tuple(f"c{k}" for k in rng.permutation(M)[:P])) for t in range(1, 5)
    )
    m = selector.initial_state(M, 2, 2)
    m.H[:] = torch.tensor(rng.integers(-2, 3, M)).float()
    view = RoundView(
        9, P, tuple(range(M)), torch.ones(M), None, lambda k: Task(f"c{k}", k, 9, 0), None, history
    )
    counts = Counter(client for record in history[-3:] for client in record.chosen)
    waits = [counts[f"c{k}"] >= max(1.0, 1.5 * P * 3 / M) for k in range(M)]
    expected = sorted(range(M), key=lambda k: (waits[k], -float(m.H[k]), k))[:P]
    assert selector.select(m, view, np.random.default_rng(0)).k == tuple(expected)


class Names(StubEngine):
    """A fleet that is asked for nothing but its clients' names."""

    def __init__(self, M, trainable):
        self.names, self.trainable = [f"c{k}" for k in range(M)], trainable

    def clients(self, t):
        return self.names


def test_a_map_that_does_not_fit_names_the_sketch_that_would(monkeypatch):
    # 20 GB less 0.4 GB of names, 0.1 GB of updates, 0.1 GB of blocks: 4 * 1e6 * k bytes fit for k =
    # 4096, not 8192
    monkeypatch.setattr(memory_limits, "get_available_memory", lambda: 20_000_000_000)
    M, d, recipe = 1_000_000, 134_902, CATALOGUE["flrce"](P=100, preset="paper")
    with pytest.raises(BadInput, match=r'piece = "relationship", sketch = 4096\)'):
        make_initial_state(recipe, Names(M, d), torch.zeros(d))
    sketched = replace(
        recipe, selector=build_piece("selector", {"piece": "relationship", "sketch": 4096})
    )
    assert 16.4e9 < memory_limits.estimate_server_bytes(sketched, M, d, d) < 18e9
    memory_limits.check_memory(sketched, M, d, d)
    authors = CATALOGUE["flrce"](P=100, preset="authors")
    assert memory_limits.find_fitting_sketch_size(authors, M, d, d, 20_000_000_000) == 4096
    assert (
        memory_limits.find_fitting_sketch_size(CATALOGUE["fedavg"](P=100), M, d, d, 20_000_000_000)
        == 0
    )
    assert (
        memory_limits.find_fitting_sketch_size(recipe, M, d, d, 700_000_000) == 0
    )  # names, and 64 floats each
    witnessed = replace(
        CATALOGUE["fedavg"](P=100), aggregator=build_piece("aggregator", "fleet-clip")
    )
    with pytest.raises(
        BadInput, match=r'\[recipe.aggregator\] piece = "fleet-clip", sketch = 4096\)'
    ):
        memory_limits.check_memory(witnessed, M, d, d)


@pytest.mark.parametrize("wrong", [{"sketch": -1}, {"sketch": 1.5}, {"sketch": 8, "blend": 0.9}])
def test_bad_settings(wrong):
    with pytest.raises(BadInput, match="sketch"):
        require_valid_fields(RelationshipSelector(**wrong))
