"""Sparse codes of a few bits: STC's ternary values with Golomb gaps, and quantised top-k values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce.config.compose import build_piece
from flrce.core.pieces import MalformedPayload
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.sparsify import TopK
from flrce.methods.compression.ternary import (
    SparseTernary,
    choose_golomb_bits,
    decode_golomb,
    encode_golomb,
)
from flrce.rng import make_stream
from training import require_valid_fields

LAYOUT = [("a.weight", 60), ("a.running_var", 4), ("b.weight", 40)]


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def there_and_back(code, u, layout):
    payload, _ = code.encode(u, layout, rng(), {})
    return payload, code.decode(payload, layout, rng())


def test_ternary_by_hand():
    # K = floor(.25 * 12) = 3: -5, 3 and 4 at 1, 6 and 11; mu = 4. p = 1/4: ln(.618) / ln(.75) =
    # 1.673, its log2 is .742, so b = 1. Gaps 1, 4, 4: quotients 0, 2, 2 -> 0 110 110 and a zero of
    # padding, remainders 1 0 0, signs - + +.
    u = torch.tensor([1.0, -5, 0, 1, -1, 2, 3, 0, 0, 1, 2, 4])
    payload, back = there_and_back(SparseTernary(0.25), u, [("w", 12)])
    assert back.tolist() == [0, -4, 0, 0, 0, 0, 4, 0, 0, 0, 0, 4]
    assert payload.buffers["quotients"].tolist() == [0b0110110_0]
    assert payload.buffers["remainders"].tolist() == [0b100_00000]
    assert payload.buffers["signs"].tolist() == [0b011_00000]
    assert payload.buffers["magnitude"].tolist() == [4]
    assert payload.nbytes == 1 + 1 + 1 + 4


def test_golombs_parameter_by_hand():
    # p = 0.01: ln(.618) / ln(.99) = 47.9, log2 5.58, so b = 6; 8.108 bits a position on average
    assert choose_golomb_bits(100, 1) == 6
    b, p = 6, 0.01
    assert b + 1 / (1 - (1 - p) ** (2**b)) == pytest.approx(8.108, abs=0.001)
    assert choose_golomb_bits(100, 50) == 0
    assert choose_golomb_bits(100, 100) == 0
    assert choose_golomb_bits(0, 0) == 0


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2])
def test_golombs_parameter_is_the_best_for_random_positions(share):
    n = 200_000
    gen = np.random.default_rng(0)
    where = np.sort(gen.permutation(n)[: int(share * n)])
    gaps = np.diff(where, prepend=-1) - 1
    lengths = [int(((gaps >> b) + 1 + b).sum()) for b in range(14)]
    b = choose_golomb_bits(n, len(where))
    assert lengths[b] <= 1.005 * min(lengths)
    p = share
    entropy = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p
    assert entropy <= lengths[b] / len(where) <= 1.05 * entropy


def golomb_oracle(gaps, b):
    """The two streams as text, gap by gap."""
    return "".join("1" * (g >> b) + "0" for g in gaps), "".join(
        f"{g & (1 << b) - 1:0{b}b}" if b else "" for g in gaps
    )


@given(st.integers(1, 400), st.data())
def test_golomb_against_plain_loops(n, data):
    where = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    b = choose_golomb_bits(n, len(where))
    gaps = np.diff(np.array(where), prepend=-1) - 1
    quotients, remainders = encode_golomb(gaps, b)
    for packed, text in zip((quotients, remainders), golomb_oracle(gaps.tolist(), b), strict=True):
        digits = "".join(f"{byte:08b}" for byte in packed.tolist())
        assert digits[: len(text)] == text
        assert len(digits) - len(text) < 8
        assert "1" not in digits[len(text) :]
    payload = Payload({"quotients": quotients, "remainders": remainders})
    assert decode_golomb(payload, n, len(where)).tolist() == where


def ternary_oracle(x, share):
    K = max(1, int(share * len(x) + 1e-9))
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:K]
    mu = sum(abs(x[i]) for i in order) / K
    return [(mu if x[i] >= 0 else -mu) if i in order else 0.0 for i in range(len(x))]


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=104, max_size=104),
    st.sampled_from([0.01, 0.05, 0.3, 1.0]),
)
def test_ternary_against_plain_loops(values, share):
    code, u = SparseTernary(share), torch.tensor(values)
    payload, back = there_and_back(code, u, LAYOUT)
    oracle = ternary_oracle(values[:60] + values[64:], share)
    assert back[60:64].tolist() == u[60:64].tolist()
    torch.testing.assert_close(torch.cat([back[:60], back[64:]]), torch.tensor(oracle))
    assert payload.nbytes <= code.estimate_bytes(LAYOUT, rng())


@given(st.integers(1, 2000), st.floats(0.002, 1), st.integers(0, 99))
def test_no_payload_is_heavier_than_its_estimate(n, share, seed):
    code, layout = SparseTernary(share), [("w", n)]
    count = max(1, math.floor(round(share * n, 6)))
    last = torch.zeros(n)
    last[n - count :] = 1  # one gap as long as can be
    for u in (last, torch.from_numpy(np.random.default_rng(seed).normal(size=n)).float()):
        payload, _ = code.encode(u, layout, rng(), {})
        bound = code.estimate_bytes(layout, rng())
        assert payload.nbytes <= bound <= 1.35 * payload.nbytes + 8


def test_bytes_of_a_percent_by_hand():
    # n = 134,902, K = 1349, b = 6: 1349 signs in 169 bytes, 1349 * 6 bits in 1012, and at most 1349
    # + (133,553 >> 6 = 2086) = 3435 bits of quotients in 430; a magnitude; 44 statistics
    layout = [("w", 134_902), ("1.running_mean", 44)]
    bound = SparseTernary(0.01).estimate_bytes(layout, rng())
    assert bound == 169 + 1012 + 430 + 4 + 176
    gen = torch.Generator().manual_seed(0)
    payload, _ = SparseTernary(0.01).encode(torch.randn(134_946, generator=gen), layout, rng(), {})
    assert 0.94 * bound < payload.nbytes <= bound  # 0.095 bits a float; indices and floats: 0.64


def damage(buffers):
    yield {name: value for name, value in buffers.items() if name != "signs"}
    yield {**buffers, "magnitude": torch.zeros(2)}
    yield {**buffers, "signs": buffers["signs"][:-1]}
    yield {**buffers, "quotients": buffers["quotients"][:-1]}
    yield {**buffers, "quotients": torch.full_like(buffers["quotients"], 255)}
    yield {**buffers, "quotients": torch.cat([buffers["quotients"], torch.zeros(1).byte()])}
    yield {**buffers, "quotients": torch.full((20,), 0b11111110).byte()}  # beyond the end
    yield {**buffers, "quotients": buffers["quotients"].int()}
    yield {**buffers, "remainders": torch.zeros(9).byte()}
    yield {**buffers, "remainders": buffers["remainders"] | 1}
    yield {**buffers, "more": torch.zeros(1)}
    yield {**buffers, "statistics": torch.zeros(3)}


def test_damaged_payloads_are_malformed():
    u = torch.linspace(-3, 2, 104)
    code = SparseTernary(0.05)  # 5 of 100: b = 4, 20 bits of remainders
    good = code.encode(u, LAYOUT, rng(), {})[0].buffers
    code.decode(Payload(good), LAYOUT, rng())
    for bad in damage(good):
        with pytest.raises(MalformedPayload):
            code.decode(Payload(bad), LAYOUT, rng())


def test_top_k_in_three_bits_by_hand():
    # K = 4 of 8: -7, 1, 3, 5; magnitudes 1 to 7 in 3 steps of 2: levels 3, 0, 1, 2; signs - + + +
    u = torch.tensor([0.0, -7, 0.5, 1, 3, 0, -0.5, 5])
    code = TopK(0.5, "bitmap", bits=3)
    payload, back = there_and_back(code, u, [("w", 8)])
    assert payload.buffers["levels"].tolist() == [0b011_100_10, 0b1_110_0000]
    assert payload.buffers["ranges"].tolist() == [1, 2]
    assert back.tolist() == [0, -7, 0, 1, 3, 0, 0, 5]
    assert payload.nbytes == 1 + 2 + 8 == code.estimate_bytes([("w", 8)], rng())
    # one bit: the mean magnitude, as STC
    _, back = there_and_back(TopK(0.5, bits=1), u, [("w", 8)])
    assert back.tolist() == [0, -4, 0, 4, 4, 0, 0, 4]


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=104, max_size=104),
    st.sampled_from([0.05, 0.3, 1.0]),
    st.integers(2, 8),
)
def test_quantised_top_k_is_within_half_a_step(values, keep, bits):
    u, code = torch.tensor(values), TopK(keep, dense_bn=False, bits=bits)
    payload, back = there_and_back(code, u, LAYOUT)
    exact = there_and_back(TopK(keep), u, LAYOUT)[1]
    kept = exact[exact != 0].abs()
    low, high = (float(kept.min()), float(kept.max())) if len(kept) else (0.0, 0.0)
    low = 0.0 if len(kept) < max(1, int(keep * 104)) else low
    step = (high - low) / (2 ** (bits - 1) - 1)
    assert (back - exact).abs().max() <= step / 2 * (1 + 1e-4) + 1e-4 * high + 1e-37
    assert payload.nbytes == code.estimate_bytes(LAYOUT, rng())


@pytest.mark.parametrize("code", [TopK(0.1, "bitmap", bits=4), TopK(0.1, "indices", bits=3)])
def test_damaged_top_k_levels_are_malformed(code):
    good = code.encode(torch.linspace(-1, 1, 104), LAYOUT, rng(), {})[0].buffers
    for name, value in (
        ("levels", good["levels"][:-1]),
        ("levels", good["levels"].int()),
        ("ranges", torch.zeros(3)),
        ("values", torch.zeros(10)),
    ):
        with pytest.raises(MalformedPayload):
            code.decode(Payload({**good, name: value}), LAYOUT, rng())


@pytest.mark.parametrize(
    "code", [SparseTernary(0.05), TopK(0.05, bits=4), EntropyCoded(TopK(0.05, "indices", bits=3))]
)
def test_feedback_sends_everything_in_the_end(code):
    feedback, carry, sent = ErrorFeedback(code), {}, torch.zeros(104)
    u = torch.randn(104, generator=torch.Generator().manual_seed(1))
    for _ in range(80):
        payload, carry = feedback.encode(u, LAYOUT, rng(), carry)
        sent += feedback.decode(payload, LAYOUT, rng())
    torch.testing.assert_close(sent + carry["residual"], 80 * u, rtol=1e-3, atol=1e-2)
    assert carry["residual"].norm() < 20 * u.norm()


def test_settings():
    assert build_piece("compressor", {"piece": "ternary", "share": 0.02}) == SparseTernary(0.02)
    assert build_piece("compressor", {"piece": "topk", "bits": 4}) == TopK(bits=4)
    for make, word in (
        (lambda: SparseTernary(0), "share"),
        (lambda: SparseTernary(1.5), "share"),
        (lambda: TopK(0.1, bits=0), "bits"),
        (lambda: TopK(0.1, bits=9), "bits"),
        (lambda: TopK(0.1, bits=2.0), "bits"),
        (lambda: TopK(0.1, "dense", bits=2), "dense"),
    ):
        with pytest.raises(BadInput, match=word):
            require_valid_fields(make())
