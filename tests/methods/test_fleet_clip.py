"""Centred clipping with the fleet as its witness: worked by hand, against a plain loop, and what a
minority can do.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce import Experiment
from flrce.core.relations import NEVER_SEEN
from flrce.core.sketch import make_sketch
from flrce.core.types import RoundEvent, Updates
from flrce.errors import BadInput
from flrce.methods.aggregation.defences import CentredClip
from flrce.methods.aggregation.fleet_clip import FleetClip, share_weight, trusted_centred_clipping
from training import assert_resumes


def updates(U, k=None, covered=None, trainable=None):
    U = torch.as_tensor(U, dtype=torch.float32)
    k = torch.arange(len(U)) if k is None else torch.as_tensor(k)
    held = None if covered is None else torch.as_tensor(covered)
    return Updates(k, U, torch.ones(len(U), dtype=torch.float64), trainable or U.shape[1], held)


def after(piece, M, *rounds):
    """Memory after rounds of (rows, updates) in which the model did not move."""
    d = len(rounds[0][1][0])
    memory = piece.initial_state(M, d, d)
    for t, (k, U) in enumerate(rounds, 1):
        memory = piece.observe(
            memory, RoundEvent(t, torch.zeros(d), torch.zeros(d), updates(U, k), M)
        )
    return memory


def test_a_round_of_liars_is_judged_by_the_fleet():
    """Three clients sent (1, 0) before; now two send (-4, 0) and one (1, 0).

    Median cosines: the liars' with +1 (each other), -1, -1, -1, -1 is -1; the honest one's with -1,
    -1, 1, 1, 1 is 1. Scores of the six: -1, -1, 1, 1, 1, 1, so the median (lower middle) is 1 and
    the liars count nothing. tau is the least of 1, the believed one's distance from 0, and of the
    median of 4, 4, 1, 1, 1, 1, which is 1. The mean is over P / 2 = 1.5 where fewer are believed:
    after three steps of two thirds each, 1 - (1/3)^3 = 26/27 of the way is gone.
    """
    piece = FleetClip()
    memory = after(piece, 6, ([0, 1, 2], [[1.0, 0]] * 3))
    now = updates([[-4.0, 0], [-4, 0], [1, 0]], [3, 4, 5])
    score, trust = piece.score_replies(now, memory)
    assert (score.tolist(), trust.tolist()) == ([-1, -1, 1], [0, 0, 1])
    torch.testing.assert_close(piece(torch.zeros(2), now, memory), torch.tensor([26 / 27, 0.0]))
    round_alone = CentredClip()
    assert round_alone(torch.zeros(2), now, round_alone.initial_state(6, 2, 2))[0] < -3


def test_nobody_believed_leaves_the_model():
    piece, w = FleetClip(), torch.tensor([0.5, -0.0])
    memory = after(piece, 6, ([0, 1, 2, 3], [[1.0, 0]] * 4))
    assert torch.equal(piece(w, updates([[-1.0, 0]], [4]), memory), w)
    assert torch.equal(piece(w, updates([[0.0, 0]], [4]), memory), w)


def test_where_data_differ_too_much_everybody_is_believed():
    """Four along the axes: cosines 0, so nobody agrees with most."""
    piece = FleetClip()
    now = updates([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert piece.score_replies(now, piece.initial_state(4, 2, 2))[1].tolist() == [1] * 4


def test_lengths_are_the_fleets():
    """Four were 1 away; now all three are 1e6 long and agree: each is shortened to 1, so the step
    is 1, not 1e6.
    """
    piece = FleetClip(steps=1)
    memory = after(piece, 7, ([0, 1, 2, 3], [[1.0, 0]] * 4))
    moved = piece(torch.zeros(2), updates([[1e6, 0]] * 3, [4, 5, 6]), memory)
    torch.testing.assert_close(moved, torch.tensor([1.0, 0]))


def test_replies_that_are_alike_share_their_weight():
    """Three send (1, 0), one (0, 1): crowds of 3 and 1, so each of the three counts a third."""
    directions, ones = torch.tensor([[1.0, 0]] * 3 + [[0, 1]]), torch.ones(4, dtype=torch.float64)
    assert share_weight(directions, ones, 2.0).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert share_weight(directions, ones, 0.0).tolist() == [1] * 4
    some = torch.tensor([0.0, 0, 1, 1], dtype=torch.float64)
    assert share_weight(directions, some, 2.0).tolist() == [0, 0, 1, 1]
    assert share_weight(torch.zeros(4, 2), ones, 2.0).tolist() == [1] * 4


def test_the_last_step_does_not_go_on_by_itself():
    """The fleet went (1, 0); now all send nothing, and the model stays where it is."""
    piece, w = FleetClip(), torch.zeros(2)
    memory = piece.observe(
        piece.initial_state(8, 2, 2),
        RoundEvent(1, w, torch.tensor([1.0, 0]), updates([[1.0, 0]] * 4), 8),
    )
    assert torch.equal(piece(w, updates(torch.zeros(4, 2), [4, 5, 6, 7]), memory), w)


def test_only_the_last_witnesses_are_heard():
    piece = FleetClip(witnesses=2)
    memory = after(piece, 5, ([0, 1], [[1.0, 0]] * 2), ([2, 3], [[0.0, 1]] * 2))
    assert piece._find_recent_clients(memory, torch.tensor([4])).tolist() == [2, 3]
    assert piece._find_recent_clients(memory, torch.tensor([3])).tolist() == [2, 0]
    assert memory.R.tolist() == [1, 1, 2, 2, NEVER_SEEN]


rows = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).normal(size=(7, 5)).astype(np.float32)
)


@given(rows, st.integers(0, 100), st.sampled_from([0.2, 1.0, 50.0]), st.integers(1, 4))
def test_it_is_its_formula(U, seed, most, steps):
    rng = np.random.default_rng(seed)
    trust, held = rng.random(7) * (rng.random(7) < 0.7), rng.random((7, 5)) < 0.6
    trust[0] = 1.0
    v = start = rng.normal(size=5)
    for _ in range(steps):
        away = [np.where(h, u - v, 0.0) for u, h in zip(U.astype(np.float64), held, strict=True)]
        norms = [float(np.linalg.norm(a)) for a in away]
        believed = sorted(n for n, t in zip(norms, trust, strict=True) if t > 0)
        tau = min(believed[(len(believed) - 1) // 2], most)
        total = np.zeros(5)
        for a, n, t in zip(away, norms, trust, strict=True):
            total += t * a * (min(1.0, tau / n) if n else 1.0)
        v = v + total / max(sum(trust), 3.5)
    found = trusted_centred_clipping(
        *(torch.from_numpy(x).double() for x in (U, start, trust)),
        torch.from_numpy(held),
        most,
        steps,
    )
    np.testing.assert_allclose(found, v, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([1.0, 1e3, 1e12, -1e12]), st.integers(1, 3))
def test_a_minority_moves_the_model_by_a_bounded_step(seed, size, steps):
    """Whatever 3 of 8 send, each step goes no farther than tau from the last one, and tau is an
    honest distance.
    """
    rng = np.random.default_rng(seed)
    honest, bad = rng.normal(1, 0.5, size=(5, 6)), rng.normal(size=(3, 6)) * size
    piece = FleetClip(steps=steps)
    memory = after(piece, 16, (list(range(8, 16)), rng.normal(1, 0.5, size=(8, 6))))
    moved = piece(torch.zeros(6), updates(np.concatenate([honest, bad])), memory)
    farthest = np.linalg.norm(honest, axis=1).max()
    assert float(moved.norm()) <= steps * farthest * (1 + 1e-6)


@given(st.integers(0, 10_000))
def test_order_and_names_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    piece, U, order = FleetClip(), rng.normal(size=(6, 4)), rng.permutation(6)
    memory = after(piece, 12, (list(range(6, 12)), rng.normal(size=(6, 4))))
    one, other = (piece(torch.zeros(4), updates(U[o], o), memory) for o in (np.arange(6), order))
    torch.testing.assert_close(one, other)


def test_sub_models_count_as_the_last_step_where_they_hold_nothing():
    """Two replies, of which the second lacks the first coordinate; nobody holds the third, whose
    bits stay.

    tau is the lower median of the distances 2 and 2. One step from v = 0: (2, 0) / 2 and (0, 2) /
    2.
    """
    piece, w = FleetClip(steps=1), torch.tensor([1.0, 1.0, -0.0])
    now = updates([[2.0, 0, 0], [0, 2, 0]], covered=[[True, True, False], [False, True, False]])
    moved = piece(w, now, piece.initial_state(2, 3, 3))
    assert moved.tolist() == [2.0, 2.0, 0.0]
    assert torch.signbit(moved[2])


def test_statistics_are_clipped_apart():
    U = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    other = torch.cat(
        [U[:, :2], 1e3 * torch.randn(8, 2, generator=torch.Generator().manual_seed(2))], 1
    )
    piece = FleetClip()
    first, second = (
        piece(torch.zeros(4), updates(x, trainable=2), piece.initial_state(8, 2, 4))
        for x in (U, other)
    )
    assert torch.equal(first[:2], second[:2])


def test_a_known_sketch_is_blind_to_what_was_made_for_it():
    """u is -v but for what makes S u = S v; kept whole, or sketched by a map that nobody knows, it
    is seen.
    """
    d, size = 64, 8
    v = torch.randn(1, d, generator=torch.Generator().manual_seed(3))
    S = make_sketch(d, size)(
        torch.eye(d)
    ).T  # (size, d): every bucket sums d / size coordinates, so S S' = 8 I
    u = -v + 2 * (S @ v[0] @ S)[None] / (d / size)
    torch.testing.assert_close((S @ u[0]), S @ v[0])
    believed = []
    for piece in (FleetClip(sketch=size), FleetClip(), FleetClip(sketch=size, seed=12345)):
        memory = after(piece, 6, ([0, 1, 2, 3], v.repeat(4, 1)))
        believed.append(float(piece.score_replies(updates(u, [4]), memory)[1]))
    assert believed == [1.0, 0.0, 0.0]


SHAPES = {
    "alone": {"per_round": 1},
    "two": {"per_round": 2},
    "sub-models": {"recipe": {"name": "flrce-dropout", "preset": "hardened"}},
    "sub-models, psi": {"recipe": {"name": "flrce-dropout", "preset": "hardened", "psi": "50%"}},
    "sparse": {"recipe": {"name": "flrce-topk", "preset": "hardened"}},
    "quantised": {"recipe": {"name": "flrce", "preset": "hardened", "compressor": "quantize"}},
    "sketched": {
        "recipe": {
            "name": "flrce",
            "preset": "default",
            "aggregator": {"piece": "fleet-clip", "sketch": 64, "seed": 3},
        }
    },
    "come and go": {"fleet": {"availability": "diurnal"}},
    "buffered": {
        "recipe": {"name": "flrce", "preset": "hardened", "pace": {"piece": "buffered", "size": 3}}
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_hardened_learns_and_resumes_to_the_same_bits(shape, tmp_path):
    tables = {
        "rounds": 12,
        "clients": 20,
        "per_round": 6,
        "engine": {"workers": 1},
        "train": {"lr": 0.05},
        "data": {"alpha": 1.0},
        "recipe": {"name": "flrce", "preset": "hardened"},
        **SHAPES[shape],
    }
    exp = Experiment.from_tables(tables)
    straight = assert_resumes(exp, tmp_path, after=3)
    assert straight.summary["accuracy"] > (0.4 if shape == "alone" else 0.5)


@pytest.mark.parametrize("psi", [None, "50%"])
def test_hardened_on_flower_resumes_to_the_same_bits(psi, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="needs flrce[flower]")
    from flower_helpers import plain_app, start
    from flrce.flower import FLrce, introduce
    from flrce.flower.grid import LocalGrid
    from flrce.storage import failpoint

    def run(folder):
        strategy = FLrce(
            psi=psi,
            preset="hardened",
            per_round=3,
            state=tmp_path / folder,
            seed=5,
            wait_for_nodes=5.0,
        )
        return strategy.start(LocalGrid(introduce(plain_app(), compresses=False), 6), start(), 6)

    calm = run("calm")
    monkeypatch.setenv("FLRCE_FAILPOINT", "commit.ready:3:ENOSPC")
    failpoint.call_counts.clear()
    with pytest.raises(BadInput, match="No space left"):
        run("cut")
    monkeypatch.delenv("FLRCE_FAILPOINT")
    resumed = run("cut")
    assert [r.chosen for r in resumed.history] == [r.chosen for r in calm.history]
    assert all(array.data == resumed.arrays[name].data for name, array in calm.arrays.items())
