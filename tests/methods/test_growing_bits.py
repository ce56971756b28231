"""DAdaQuant: fixed-point codes, levels that double when the loss stalls, levels by samples."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce.config.compose import build_piece
from flrce.config.experiment import Experiment
from flrce.core.pending import apply_changes, find_changes
from flrce.core.pieces import MalformedPayload, NoCompression
from flrce.core.roles import RoundView
from flrce.core.types import Payload, RoundEvent, Task, Updates
from flrce.errors import BadInput
from flrce.flower.wire import read_piece, write_piece
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.growing_bits import GrowingBits, share_levels
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import TopK
from flrce.rng import make_stream
from flrce.simulation import runs
from training import assert_resumes, require_valid_fields

LAYOUT = [("a.weight", 4), ("a.bias", 2), ("b.running_mean", 1)]


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def test_fixed_point_by_hand():
    """Steps s / q = 1/2 and 1/8: multiples of them arrive as they are, whatever is drawn."""
    code, u = FixedPointCode(2), torch.tensor([0.5, -1.0, 0.0, 1.0, 0.25, -0.125, 0.3])
    payload, _ = code.encode(u, LAYOUT, rng(), {})
    assert torch.equal(code.decode(payload, LAYOUT), u)
    assert payload.buffers["scales"].tolist() == [1.0, 0.25]
    # 5 symbols need 3 bits: 6 coordinates take 18 bits, 3 bytes; 2 scales and 1 statistic 12 bytes
    assert payload.nbytes == code.estimate_bytes(LAYOUT, rng()) == 3 + 12
    # z + q: 3, 0, 2, 4, 4, 1
    assert payload.buffers["levels"].tolist() == [0b01100001, 0b01001000, 0b01000000]


@given(st.integers(1, 127), st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6))
def test_fixed_point_rounds_to_a_neighbour(levels, values):
    """A plain loop: each coordinate is the multiple of s / q below or above it."""
    code, u = FixedPointCode(levels), torch.tensor([*values, 7.0])
    payload, _ = code.encode(u, LAYOUT, rng(), {})
    got = code.decode(payload, LAYOUT)
    assert got[6] == 7
    for part in (slice(0, 4), slice(4, 6)):
        step = float(u[part].abs().max()) / levels
        for x, y in zip(u[part].tolist(), got[part].tolist(), strict=True):
            assert abs(x - y) <= step * (1 + 1e-5)
            assert abs(y) <= float(u[part].abs().max()) * (1 + 1e-6)


def test_fixed_point_has_the_right_mean():
    code, u = FixedPointCode(1), torch.tensor([0.3, -1.0, 0.0, 0.75])
    layout, draws = [("w", 4)], 4000
    total = torch.zeros(4)
    for seed in range(draws):
        total += code.decode(code.encode(u, layout, rng(seed), {})[0], layout)
    assert (total / draws - u).abs().max() < 5 * 0.5 / math.sqrt(draws)  # 5 standard deviations


def test_a_level_that_does_not_exist_is_refused():
    code = FixedPointCode(1)  # symbols 0, 1, 2 in two bits; 3 is none
    bad = Payload(
        {"levels": torch.tensor([0b11000000], dtype=torch.uint8), "scales": torch.ones(1)}
    )
    with pytest.raises(MalformedPayload, match="level beyond 1"):
        code.decode(bad, [("w", 1)])


def event(losses, n):
    updates = Updates(
        k=torch.arange(len(n)),
        U=torch.zeros(len(n), 1),
        n=torch.tensor(n, dtype=torch.float64),
        trainable=1,
        loss=torch.tensor(losses, dtype=torch.float64),
    )
    return RoundEvent(1, torch.zeros(1), torch.zeros(1), updates, 9)


def follow(piece, losses):
    """The precision after each round."""
    state, seen = piece.initial_state(9, 1, 1), []
    for loss in losses:
        state = piece.observe(state, event([loss, loss], [1, 3]))
        seen.append(state.precision)
    return seen


@given(
    st.lists(st.floats(0, 4), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_levels_double_as_in_a_plain_loop(losses, patience, smoothing):
    """q doubles after round t if G_t >= G_(t - patience) and q is the same since then."""
    piece = GrowingBits(FixedPointCode(1), 8, patience, smoothing)
    G, q, qs = [], [1], []
    for loss in losses:
        G.append(loss if not G else smoothing * G[-1] + (1 - smoothing) * loss)
        t = len(G) - 1
        steady = t >= patience and len(set(q[-patience:])) == 1 and len(q) >= patience
        grows = steady and G[t] >= G[t - patience] and 2 * q[-1] <= 8
        q.append(2 * q[-1] if grows else q[-1])
        qs.append(q[-1])
    assert follow(piece, losses) == qs


def test_growth_by_hand():
    piece = GrowingBits(FixedPointCode(1), most=4, patience=2, smoothing=0.0)
    assert follow(piece, [3, 2, 1, 1, 1, 1, 1, 1, 1]) == [1, 1, 1, 1, 2, 2, 4, 4, 4]
    bits = GrowingBits(Quantizer(2), most=4, patience=2, smoothing=0.0)
    assert follow(bits, [1] * 9) == [2, 2, 3, 3, 4, 4, 4, 4, 4]
    parts = GrowingBits(RotatedCode(0.25), most=2, patience=1, smoothing=0.0)
    assert follow(parts, [1] * 6) == [0.25, 0.5, 1, 2, 2, 2]


def test_the_loss_is_weighted_by_samples():
    piece = GrowingBits(FixedPointCode(1), patience=1, smoothing=0.5)
    state = piece.observe(piece.initial_state(9, 1, 1), event([1.0, 5.0], [3, 1]))
    assert float(state.averages[-1]) == 2.0  # (3 * 1 + 1 * 5) / 4
    state = piece.observe(state, event([4.0], [2]))
    assert float(state.averages[-1]) == 3.0  # half of 2 and half of 4


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(1, 16))
def test_levels_by_samples_keep_the_variance(n, q):
    """sum p^2 / q_k^2 is that of q for all, with no more levels; no small change saves any."""
    p, levels = np.array(n) / sum(n), np.array(share_levels(q, n))
    assert np.isclose((p**2 / levels**2).sum(), (p**2).sum() / q**2)
    assert levels.sum() <= len(n) * q * (1 + 1e-9)
    marginal = p**2 / levels**3  # variance that one more level saves: the same for everyone
    assert np.allclose(marginal, marginal[0])


def test_levels_by_samples_by_hand():
    # p = 8/9, 1/9: p^(2/3) as 4 to 1; a = 5 / 9^(2/3), b = 65 / 81 / q^2, sqrt(a / b) = q sqrt(
    # 405 / 65) / 9^(1/3)
    scale = math.sqrt(405 / 65) / 9 ** (1 / 3) / 9 ** (2 / 3)
    assert share_levels(2, [8, 1]) == pytest.approx([8 * scale, 2 * scale])


def assign(piece, n, precision):
    state = replace(piece.initial_state(9, 1, 1), precision=precision)
    view = RoundView(1, len(n), tuple(range(len(n))), torch.tensor(n), None, None, None)
    tasks = [Task(str(k), k, 1, 0, compressor=piece) for k in range(len(n))]
    return [task.compressor.inner for task in piece.assign(tasks, state, view)]


def test_tasks_carry_their_levels():
    piece = GrowingBits(EntropyCoded(FixedPointCode(1)))
    # 4 sqrt(405 / 65) / 9 = 1.109 times q^... for q = 4: 4.44 and 1.11
    assert assign(piece, [8, 1], 4.0) == [
        EntropyCoded(FixedPointCode(4)),
        EntropyCoded(FixedPointCode(1)),
    ]
    assert assign(piece, [5, 5], 4.0) == [EntropyCoded(FixedPointCode(4))] * 2
    assert assign(piece, [0, 5], 4.0) == [EntropyCoded(FixedPointCode(4))] * 2  # n is unknown
    alike = replace(piece, by_samples=False)
    assert assign(alike, [80, 1], 4.0) == [EntropyCoded(FixedPointCode(4))] * 2
    bits = GrowingBits(ErrorFeedback(Quantizer(3)))  # q = 7: 7.77 and 1.94, log2(q + 1) 3.1 and 1.6
    assert [each.inner.bits for each in assign(bits, [8, 1], 3.0)] == [3, 2]
    part = GrowingBits(RotatedCode(0.25), most=4)
    assert [each.bits for each in assign(part, [8, 1], 0.5)] == [0.5, 0.5]


def test_a_task_travels_and_is_stored():
    piece = GrowingBits(EntropyCoded(FixedPointCode(1)))
    task = replace(piece, inner=EntropyCoded(FixedPointCode(4)))
    assert read_piece("compressor", write_piece("compressor", task, "c"), "c") == task
    assert apply_changes(piece, find_changes(task, piece)) == task
    assert task.instruction_bytes == 1


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: GrowingBits(NoCompression()), "neither levels nor bits"),
        (lambda: GrowingBits(TopK(0.1)), "neither levels nor bits"),
        (lambda: GrowingBits(RotatedCode(1), most=8), "most = 8"),
        (lambda: GrowingBits(3), "compressor"),
        (lambda: FixedPointCode(0), "levels"),
        (lambda: FixedPointCode(128), "levels"),
        (lambda: replace(fedavg(), compressor=EntropyCoded(GrowingBits())), "outermost"),
        (lambda: replace(fedavg(), compressor=ErrorFeedback(GrowingBits())), "outermost"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        require_valid_fields(make())


def experiment(clients=8, rounds=6, **recipe):
    tables = {"rounds": rounds, "clients": clients, "per_round": 3}
    tables |= {"train": {"lr": 0.01, "epochs": 1}}
    return Experiment.from_tables(tables | {"recipe": recipe, "engine": {"workers": 1}})


def test_a_run_grows_and_resumes(tmp_path):
    """Without entropy coding bytes are known: 2 bits a coordinate for q = 1, 3 for q = 2 and 3."""
    growing = {"piece": "growing-bits", "inner": "fixed-point", "patience": 1, "smoothing": 0.0}
    exp = experiment(name="fedavg", compressor=growing | {"by_samples": False})
    assert_resumes(exp, tmp_path, after=3)
    rows = [json.loads(line) for line in (tmp_path / "straight/rounds.jsonl").open()]
    # of each of 3 clients: 1,946 coded floats, scales of 10 tensors, 48 BatchNorm statistics
    expected = {3 * (-(-1946 * bits // 8) + 4 * 10 + 4 * 48): bits for bits in (2, 3, 4, 5)}
    bits = [expected[row["bytes_up"]] for row in rows]
    assert bits == sorted(bits)
    assert bits[0] == 2 < bits[-1]


def test_by_samples_sends_more_of_large_clients(tmp_path):
    """Each upload has the bits of its client's levels: 10 floats, scales of two tensors."""
    code = {"piece": "growing-bits", "inner": {"piece": "fixed-point", "levels": 8}, "most": 64}
    exp = experiment(3, 1, name="fedavg", compressor=code)
    draw = np.random.default_rng(0)
    sizes = (20, 100, 500)
    data = [(draw.normal(size=(n, 4)).astype("float32"), np.arange(n) % 2) for n in sizes]
    runs.run(exp, tmp_path, data=data, model=torch.nn.Linear(4, 2))
    rows = [json.loads(line) for line in (tmp_path / "clients.jsonl").open()]
    rows.sort(key=lambda row: row["n"])
    levels = [math.floor(q + 0.5) for q in share_levels(8, [row["n"] for row in rows])]
    expected = [-(-10 * (2 * q).bit_length() // 8) + 4 * 2 for q in levels]
    assert [row["bytes_up"] for row in rows] == expected
    assert levels[0] < 8 < levels[2]


def test_pieces_by_name():
    made = build_piece("compressor", {"piece": "growing-bits", "inner": {"piece": "quantize"}})
    assert made == GrowingBits(Quantizer())
