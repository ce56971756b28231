"""Rotated codes: DRIVE and EDEN by hand, against plain loops, and by the theory's errors."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce.config.compose import build_piece
from flrce.core.pieces import MalformedPayload
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression import hadamard
from flrce.methods.compression.buffers import (
    pack_bits,
    pack_bits_with_torch,
    unpack_bits,
    unpack_bits_with_torch,
)
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.hadamard import (
    draw_signs,
    multiply_hadamard,
    plan_chunks,
    transform_hadamard,
)
from flrce.methods.compression.rotated import BLOCKS, CENTROIDS, RotatedCode
from flrce.rng import make_stream
from flrce_client.layout import split_statistics
from flrce_client.rotated import RotatedCodec
from training import require_valid_fields

CODES = [
    RotatedCode(bits, scale)
    for bits in (0.1, 0.25, 0.5, 1, 2, 3, 4)
    for scale in ("unbiased", "contractive")
]
every = pytest.mark.parametrize("code", CODES, ids=repr)
LAYOUT = [("a.weight", 70), ("a.running_mean", 3), ("b.weight", 40), ("b.running_var", 3)]


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def there_and_back(code, u, layout, seed=0):
    payload, _ = code.encode(u, layout, rng(seed), {})
    return payload, code.decode(payload, layout, rng(seed))


class FixedSigns:
    """A generator whose bytes are known: a 1 is a minus."""

    def __init__(self, text):
        self.text = text

    def bytes(self, count):
        assert count == len(self.text) // 8
        return bytes(int(self.text[i : i + 8], 2) for i in range(0, len(self.text), 8))


def test_one_bit_by_hand():
    # D = (+, -, +, +): D x = (1, -2, 0, 1). H of it: (0, 2, -2, 4); H's rows: ++++, +-+-, ++--,
    # +--+. Signs of 0, 2, -2, 4: +, +, -, + -> bits 1101 and four zeros of padding.
    # |x|^2 = 6, <y, c> = 0 + 2 + 2 + 4 = 8: unbiased s = 6/8; contractive s = 8 / (4 * 4) = 1/2.
    # H c = (1+1-1+1, 1-1-1-1, 1+1+1-1, 1-1+1+1) = (2, -2, 2, 2); D again: (2, 2, 2, 2).
    u, layout = torch.tensor([1.0, 2.0, 0.0, 1.0]), [("w", 4)]
    for scale, s in (("unbiased", 0.75), ("contractive", 0.5)):
        code = RotatedCode(1, scale)
        payload, _ = code.encode(u, layout, FixedSigns("01000000"), {})
        assert payload.buffers["levels"].tolist() == [0b1101_0000]
        assert payload.buffers["scales"].tolist() == [s]
        assert code.decode(payload, layout, FixedSigns("01000000")).tolist() == [2 * s] * 4
        assert payload.nbytes == 1 + 4


def test_two_bits_by_hand():
    # x = (3, 1), D = (+, +): y = (4, 2), |x|^2 = 10, z = y / sqrt(10) = (1.265, 0.632). The edge
    # between 464/1024 and 1547/1024 is 0.982: levels 3 and 2, bits 11 10. <y, c> = (4 * 1547 +
    # 2 * 464) / 1024 = 7116/1024; s = 10 * 1024 / 7116; H c = (2011, 1083) / 1024.
    u, layout = torch.tensor([3.0, 1.0]), [("w", 2)]
    code = RotatedCode(2)
    payload, _ = code.encode(u, layout, FixedSigns("00000000"), {})
    assert payload.buffers["levels"].tolist() == [0b11_10_0000]
    expected = [10 * 2011 / 7116, 10 * 1083 / 7116]
    assert code.decode(payload, layout, FixedSigns("0" * 8)).tolist() == pytest.approx(expected)


def chunk_sizes(n, block, bits=1):
    return [size for g in plan_chunks(n, block, bits) for size in [g.size] * g.rows]


def test_chunks_by_hand():
    assert chunk_sizes(0, 64) == []
    assert chunk_sizes(1, 64) == [1]
    assert chunk_sizes(5, 64) == [8]
    assert chunk_sizes(64, 64) == [64]
    assert chunk_sizes(200, 64) == [64, 64, 64, 64]  # no chunk of 8 in a longer vector
    # a chunk counts for 128 bits. 202 floats: 256 + 128; 128 and 74 need 128 + 128 + 2 * 128
    assert chunk_sizes(202, 1024) == [256]
    # 300 floats: 512 + 128 bits; 256 and 64 need 320 + 2 * 128. At half a bit: 384 and 416
    assert chunk_sizes(300, 1024) == [256, 64]
    assert chunk_sizes(300, 1024, 0.5) == [512]
    # 134,902 = 32 * 4096 + 3830; 3830 = 2048 + 1024 + 512 + 246, padded to 256: 3840 b + 512 bits;
    # padded to 4096: 4096 b + 128 bits
    assert chunk_sizes(134_902, 4096, 1) == [4096] * 33
    assert chunk_sizes(134_902, 4096, 2) == [4096] * 32 + [2048, 1024, 512, 256]


@given(st.integers(65, 2000), st.sampled_from([0.25, 1, 4]))
def test_no_other_cut_into_descending_chunks_is_shorter(n, bits):
    def costs(rest, size):
        if rest <= 0:
            yield 0
        elif size >= 64:
            yield from (size * bits + 128 + more for more in costs(rest - size, size // 2))
            if rest <= size:
                yield from costs(rest, size // 2)
        elif rest <= 64:
            yield 64 * bits + 128

    best = min(costs(n, 2048))
    mine = chunk_sizes(n, 4096, bits)
    assert n <= sum(mine)
    assert sum(mine) * bits + 128 * len(mine) <= best


def test_bytes_by_hand():
    # 134,902 floats; at 2 to 4 bits 134,912 coordinates in 36 chunks, at 1 bit 135,168 in 9;
    # 44 statistics. A quarter: 8 * 4096 + 1024 bits in 9 chunks.
    layout = [("w", 134_902), ("1.running_mean", 22), ("1.running_var", 22)]
    sizes = {1: 16_896 + 36, 2: 33_728 + 144, 3: 50_592 + 144, 4: 67_456 + 144, 0.25: 4_224 + 36}
    for bits, size in sizes.items():
        code = RotatedCode(bits)
        assert code.estimate_bytes(layout, rng()) == size + 176
        assert code.encode(torch.randn(134_946), layout, rng(), {})[0].nbytes == size + 176


def test_centroids_are_lloyds():
    normal = NormalDist()
    for bits, table in CENTROIDS.items():
        if bits == 1:
            continue  # the scale holds it
        c = [i + 0.5 for i in range(len(table))]
        for _ in range(2000):
            middles = [(a + b) / 2 for a, b in itertools.pairwise(c)]
            edges = [0.0, *middles, 8.0]
            c = [
                (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
                for low, high in itertools.pairwise(edges)
            ]
        assert [round(1024 * each) for each in c] == list(table)
        assert max(table) * BLOCKS[bits] < 2**24  # so every sum of decode is exact


def loop_oracle(x, code, gen, cuts):
    """decode(encode(x)) in float64, coordinate by coordinate, with H written out."""
    n, out = len(x), []
    raw = gen.bytes((n + 7) // 8)
    sign = [-1 if raw[i // 8] >> (7 - i % 8) & 1 else 1 for i in range(n)]
    x = [a * b for a, b in zip(x, sign, strict=True)]
    at = 0
    for size in cuts:
        part = (x[at : at + size] + [0.0] * size)[:size]
        at += size
        H = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        y = [sum(H[i][j] * part[j] for j in range(size)) for i in range(size)]
        energy = sum(v * v for v in part)
        kept = set(range(size))
        if code.bits < 1:
            kept = set(gen.permutation(size)[: max(1, int(code.bits * size))].tolist())
        grid = [c / 1024 for c in CENTROIDS[max(1, int(code.bits))]]
        grid = [-c for c in grid[::-1]] + grid
        unit = math.sqrt(energy) if code.bits > 1 else 1.0
        c = [min(grid, key=lambda g, v=v: (abs(v / (unit or 1) - g), -g)) for v in y]
        if code.scale == "unbiased":
            dot = sum(a * b for a, b in zip(y, c, strict=True))
            s = size / len(kept) * energy / dot if dot else 0.0
        else:
            dot, norm = sum(y[i] * c[i] for i in kept), sum(c[i] ** 2 for i in kept)
            s = dot / (size * norm)
        c = [c[i] if i in kept else 0.0 for i in range(size)]
        out += [s * sum(H[i][j] * c[j] for j in range(size)) for i in range(size)]
    return [a * b for a, b in zip(out, sign, strict=False)]


@every
@pytest.mark.parametrize("n", [1, 2, 7, 33, 100, 200, 300])
def test_against_plain_loops(code, n):
    cuts = {1: [1], 2: [2], 7: [8], 33: [64], 100: [128], 200: [256]}.get(n, [256, 64])
    cuts = [512] if n == 300 and code.bits < 1 else cuts
    x = np.random.default_rng(n).standard_t(3, n).astype(np.float32)
    oracle = loop_oracle(x.astype(float).tolist(), code, rng(n), cuts)
    _, back = there_and_back(code, torch.from_numpy(x), [("w", n)], n)
    torch.testing.assert_close(
        back.double(), torch.tensor(oracle, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )


def test_the_transform_is_hadamards():
    for size in (1, 2, 4, 8, 64, 128):
        H = torch.tensor(
            [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        )
        x = torch.randint(-50, 50, (3, size)).float()  # integers: exact sums
        assert torch.equal(transform_hadamard(x), x @ H)
        assert torch.equal(transform_hadamard(transform_hadamard(x)), size * x)


def test_signs_are_fair_and_seeded():
    signs = draw_signs(rng(), 10_001, torch.device("cpu"))
    assert torch.equal(signs.abs(), torch.ones(10_001))
    assert abs(float(signs.mean())) < 5 / 100
    assert torch.equal(signs, draw_signs(rng(), 10_001, torch.device("cpu")))
    assert not torch.equal(signs, draw_signs(rng(1), 10_001, torch.device("cpu")))


#: error / |x|^2 of normal coordinates: with m = E[c(z)^2] of the centroids, 1/m - 1 where unbiased
#: and 1 - m where contractive; one bit has m = 2/pi, and a share p of it 1/(p m) - 1 and 1 - p m
THEORY = {1: 2 / math.pi, 2: 1 - 0.11748, 3: 1 - 0.034548, 4: 1 - 0.0095010}


@every
@pytest.mark.parametrize("kind", ["normal", "sparse", "heavy"])
def test_errors_are_the_theorys_whatever_the_update(code, kind):
    n, gen = 3 * 4096, np.random.default_rng(5)
    x = {
        "normal": gen.standard_normal(n),
        "sparse": np.where(gen.random(n) < 0.03, 9.0, 0.0),  # few coordinates hold everything
        "heavy": gen.standard_cauchy(n).clip(-1000, 1000),
    }[kind]
    u = torch.from_numpy(x).float()
    _, back = there_and_back(code, u, [("w", n)], 3)
    error = float((back - u).square().sum() / u.square().sum())
    m = THEORY[max(1, int(code.bits))] * min(1, code.bits)
    expected = 1 / m - 1 if code.scale == "unbiased" else 1 - m
    assert error == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("bits", [0.25, 1, 2])
def test_unbiased_codes_are_unbiased_and_contractive_ones_are_not(bits):
    u = torch.randn(256, generator=torch.Generator().manual_seed(1))
    means = {}
    for scale in ("unbiased", "contractive"):
        code = RotatedCode(bits, scale)
        draws = torch.stack([there_and_back(code, u, [("w", 256)], i)[1] for i in range(1500)])
        means[scale] = float(draws.double().mean(0) @ u.double() / u.double().square().sum())
        spread = draws.double().std(0) / 1500**0.5
        if scale == "unbiased":
            assert ((draws.double().mean(0) - u).abs() < 5 * spread).all()
    assert means["unbiased"] == pytest.approx(1, abs=0.02)
    m = THEORY[max(1, int(bits))] * min(1, bits)
    assert means["contractive"] == pytest.approx(m, abs=0.05)


@every
@settings(max_examples=25)
@given(st.lists(st.floats(-100, 100, width=32), min_size=116, max_size=116), st.integers(0, 99))
def test_contraction_and_exact_statistics(code, values, seed):
    u = torch.tensor(values)
    payload, back = there_and_back(code, u, LAYOUT, seed)
    assert payload.nbytes == code.estimate_bytes(LAYOUT, rng(seed))
    assert torch.equal(back[70:73], u[70:73])
    assert torch.equal(back[113:], u[113:])
    x, y = torch.cat([u[:70], u[73:113]]).double(), torch.cat([back[:70], back[73:113]]).double()
    if code.scale == "contractive":
        assert (x - y).square().sum() <= x.square().sum() * (1 + 1e-5)
    elif code.bits >= 1:
        assert float(x @ y) == pytest.approx(float(x @ x), rel=1e-4, abs=1e-30)


@every
def test_decoding_is_the_same_bits_for_any_number_of_threads(code):
    n = 2 * 4096 + 777
    payload, _ = code.encode(torch.randn(n), [("w", n)], rng(), {})
    before, backs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            backs.append(code.decode(payload, [("w", n)], rng()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(backs[0], backs[1])
    assert torch.equal(backs[0], backs[2])


@every
def test_decoding_is_exact_so_no_order_of_additions_matters(code):
    # the same decoder in float64 and with H as a matrix: one rounding at the end, the same bits
    n = 1024
    payload, back = there_and_back(code, torch.randn(n), [("w", n)], 4)
    gen = rng(4)
    signs = draw_signs(gen, n, torch.device("cpu")).double()
    count = n if code.bits >= 1 else int(code.bits * n)
    levels = unpack_bits(payload.buffers["levels"], code.level_bits, count).long()
    upper = torch.tensor(CENTROIDS[code.level_bits], dtype=torch.float64) / 1024
    c = torch.zeros(n, dtype=torch.float64)
    where = np.arange(n) if code.bits >= 1 else np.sort(gen.permutation(n)[:count])
    c[torch.from_numpy(where)] = torch.cat([-upper.flip(0), upper])[levels]
    H = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]).double()
    exact = payload.buffers["scales"].double() * (H @ c) * signs
    assert torch.equal(exact.float(), back)


@given(st.lists(st.integers(0, 255), max_size=60), st.integers(1, 7))
def test_a_device_packs_the_same_bytes(values, bits):
    levels = torch.tensor([v % 2**bits for v in values], dtype=torch.uint8)
    packed = pack_bits(levels, bits)
    assert torch.equal(pack_bits_with_torch(levels, bits), packed)
    again, rest = unpack_bits_with_torch(packed, bits, len(levels))
    assert torch.equal(again, levels)
    assert not rest.any()


def test_statistics_are_found_anywhere_in_a_layout():
    assert split_statistics(LAYOUT) == (
        [slice(0, 70), slice(73, 113)],
        [slice(70, 73), slice(113, 116)],
    )
    assert split_statistics([("a", 3), ("b", 0), ("c", 4)]) == ([slice(0, 7)], [])
    only = [("x.running_mean", 2), ("x.num_batches_tracked", 1)]
    assert split_statistics(only) == ([], [slice(0, 3)])
    u = torch.tensor([1.0, 2.0, 3.0])
    payload, back = there_and_back(RotatedCode(0.5), u, only)
    assert back.tolist() == [1, 2, 3]
    assert payload.nbytes == 12


@every
@pytest.mark.parametrize("n", [0, 1])
def test_the_least_vectors(code, n):
    payload, back = there_and_back(code, torch.ones(n), [("w", n)])
    assert back.shape == (n,)
    assert payload.nbytes == code.estimate_bytes([("w", n)], rng())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@every
def test_a_diverged_update_does_not_decode_to_finite_numbers(code, value):
    u = torch.randn(116)
    u[5] = value
    assert not torch.isfinite(there_and_back(code, u, LAYOUT)[1][:70]).all()


def damage(buffers):
    yield {name: value for name, value in buffers.items() if name != "scales"}
    yield {**buffers, "more": torch.ones(1)}
    yield {**buffers, "levels": buffers["levels"][:-1]}
    yield {**buffers, "levels": buffers["levels"].int()}
    yield {**buffers, "scales": buffers["scales"][:-1]}
    yield {**buffers, "scales": buffers["scales"].double()}
    yield {**buffers, "statistics": torch.zeros(5)}
    last = buffers["levels"].clone()
    last[-1] |= 1
    yield {**buffers, "levels": last}


@every
def test_damaged_payloads_are_malformed(code):
    layout = [("w", 5), *LAYOUT[1:2]]
    good = code.encode(torch.ones(8), layout, rng(), {})[0].buffers
    padded = 8 * good["levels"].numel() > code.level_bits * (
        8 if code.bits >= 1 else max(1, int(8 * code.bits))
    )
    cases = list(damage(good))
    for bad in cases if padded else cases[:-1]:
        with pytest.raises(MalformedPayload):
            code.decode(Payload(bad), layout, rng())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: RotatedCode(0), "bits"),
        (lambda: RotatedCode(1.5), "bits"),
        (lambda: RotatedCode(5), "bits"),
        (lambda: RotatedCode(True), "bits"),
        (lambda: RotatedCode("1"), "bits"),
        (lambda: RotatedCode(float("nan")), "bits"),
        (lambda: RotatedCode(1, "least"), "scale"),
        (lambda: ErrorFeedback(RotatedCode(0.5)), "contractive"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        require_valid_fields(make())


def test_experiment_files_name_it():
    assert build_piece("compressor", {"piece": "rotated", "bits": 0.25}) == RotatedCode(0.25)
    assert build_piece("compressor", {"piece": "rotated", "bits": 2}) == RotatedCode(2)


@pytest.mark.parametrize("code", [RotatedCode(0.25, "contractive"), RotatedCode(1)], ids=repr)
def test_feedback_keeps_the_residual_bounded(code):
    feedback, carry, sent = ErrorFeedback(code), {}, torch.zeros(1000)
    u = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    for seed in range(60):
        payload, carry = feedback.encode(u, [("w", 1000)], rng(seed), carry)
        sent += feedback.decode(payload, [("w", 1000)], rng(seed))
    # the residual of a contraction by q settles below q / (1 - q) |u|; q = sqrt(1 - 0.25 * 2/pi)
    assert carry["residual"].norm() < 12 * u.norm()
    torch.testing.assert_close(sent + carry["residual"], 60 * u, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        (9000, 1),
        (3000, 2),
        (70, 64),
        (40, 128),
        (17, 256),
        (9, 512),
        (3, 4096),
        (2, 8192),
        (2, 2**14),
    ],
)
def test_the_compiled_transform_has_the_bits_of_torchs(rows, size, monkeypatch):
    """Same additions in the same order. Skipped without a C compiler."""
    if hadamard._load_library() is None:
        pytest.skip("no C compiler")
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    before = x.clone()
    compiled, turned = hadamard.transform_hadamard(x), hadamard.transform_hadamard(x.T.clone().T)
    monkeypatch.setattr(hadamard, "_load_library", lambda: None)
    assert torch.equal(compiled, hadamard.transform_hadamard(x))
    assert torch.equal(turned, compiled)  # of rows that do not lie one after another
    assert torch.equal(x, before)


@pytest.mark.parametrize("bits", [0.25, 1, 2, 3, 4])
@pytest.mark.parametrize("scale", ["unbiased", "contractive"])
def test_nothing_leaves_the_device(bits, scale):
    """Tensors of device "meta" have no values: whatever would read one on the host raises."""
    code, u = RotatedCode(bits, scale), torch.empty(20_000, device="meta")
    layout = [("0.weight", 19_992), ("1.running_mean", 8)]
    payload, _ = code.encode(u, layout, make_stream(0, "encode"), {})
    assert {buffer.device.type for buffer in payload.buffers.values()} == {"meta"}
    assert payload.nbytes == code.estimate_bytes(layout, make_stream(0, "encode"))
    back = code.decode(payload, layout, make_stream(0, "encode"))
    assert back.device.type == "meta"
    assert back.shape == u.shape
    with pytest.raises(Exception, match="meta"):
        u.cpu()


@pytest.mark.parametrize("size", [1, 63, 64, 65])
def test_small_updates_travel_as_they_are(size: int) -> None:
    """64 coded floats and more are coded; 3 statistics are not counted."""
    layout = (("weight", size), ("norm.running_mean", 3))
    u = torch.arange(size + 3, dtype=torch.float32) / 7
    code = RotatedCode(1, exact_below=64)
    payload, _ = code.encode(u, layout, make_stream(0, "code", 1), {})
    decoded = code.decode(payload, layout, make_stream(0, "code", 1))
    assert payload.nbytes == code.estimate_bytes(layout, make_stream(0, "code", 1))
    if size < 64:
        assert payload.nbytes == 4 * (size + 3)
        assert torch.equal(decoded, u)
    else:
        assert payload.nbytes < 4 * (size + 3)
    numbers = {name: buffer.numpy() for name, buffer in payload.buffers.items()}
    by_numpy = RotatedCodec(1, exact_below=64).decode(numbers, layout, make_stream(0, "code", 1))
    assert np.array_equal(by_numpy, decoded.numpy())


@pytest.mark.parametrize("exact_below", [0, 1024])
@pytest.mark.parametrize("layout", [LAYOUT, [("a", 20_000), ("b.running_var", 3)], [("a", 0)]])
@pytest.mark.parametrize("code", [code for code in CODES if code.bits >= 1], ids=repr)
def test_many_updates_at_once_travel_and_decode_as_each_does_alone(code, layout, exact_below):
    code = RotatedCode(code.bits, code.scale, exact_below)
    updates = torch.randn(4, sum(size for _, size in layout))
    updates[2] = 0
    payloads, decoded = code.encode_batch(
        updates, layout, [make_stream(i, "encode") for i in range(4)]
    )
    for i, u in enumerate(updates):
        alone, _ = code.encode(u, layout, make_stream(i, "encode"), {})
        assert payloads[i].buffers.keys() == alone.buffers.keys()
        for name, buffer in alone.buffers.items():
            assert torch.equal(payloads[i].buffers[name], buffer)
        assert torch.equal(decoded[i], code.decode(alone, layout, make_stream(i, "encode")))
    assert not RotatedCode(0.5).encodes_batches  # each client draws other coordinates


@pytest.mark.parametrize("size", [1 << n for n in range(15)])
def test_a_transform_by_matrices_is_the_same_and_exact_for_centroids(size):
    x = torch.randn(3, size)
    torch.testing.assert_close(multiply_hadamard(x), transform_hadamard(x), rtol=1e-5, atol=1e-4)
    centroids = torch.tensor(CENTROIDS[2])[torch.randint(2, (3, min(size, 4096)))] / 1024
    assert torch.equal(multiply_hadamard(centroids), transform_hadamard(centroids))
