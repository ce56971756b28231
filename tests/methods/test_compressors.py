"""What travels: decode(encode(u)) keeps what each compressor promises, and nothing else is
accepted.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flrce.config.compose import build_piece, compose_recipe
from flrce.config.experiment import Experiment
from flrce.core.gate import validate_replies
from flrce.core.payloads import ReplyContext
from flrce.core.pieces import MalformedPayload, NoCompression
from flrce.core.types import Payload, Reply, Task
from flrce.errors import BadInput
from flrce.methods.compression.buffers import mask_largest, pack_bits, unpack_bits
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.growing_bits import GrowingBits
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.skipped_layers import SkippedLayers
from flrce.methods.compression.sparsify import RandomK, TopK
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.compression.ternary import SparseTernary
from flrce.rng import make_stream
from training import require_valid_fields

LAYOUT = [("0.weight", 12), ("0.bias", 3), ("1.weight", 5), ("1.running_mean", 2)]
D = sum(size for _, size in LAYOUT)
COMPRESSORS = [
    NoCompression(),
    TopK(0.6),
    TopK(0.1),
    TopK(1.0),
    TopK(0.3, "bitmap"),
    TopK(0.3, "indices"),
    TopK(0.3, "dense"),
    TopK(0.5, dense_bn=True),
    RandomK(0.4),
    RandomK(0.4, scaled=True),
    Quantizer(),
    Quantizer(3, stochastic=False),
    Quantizer(1),
    TensorDropout(0.5),
    TensorDropout(0.5, coverage=True),
    TensorDropout(1.0),
    ErrorFeedback(TopK(0.2)),
    ErrorFeedback(Quantizer(2)),
    ErrorFeedback(RandomK(0.2)),
    RotatedCode(1),
    RotatedCode(0.3),
    RotatedCode(3, "contractive"),
    ErrorFeedback(RotatedCode(0.5, "contractive")),
    EntropyCoded(Quantizer(3)),
    EntropyCoded(TopK(0.8, "indices")),
    EntropyCoded(NoCompression()),
    SparseTernary(0.2),
    ErrorFeedback(SparseTernary(0.1)),
    TopK(0.3, bits=3),
    TopK(0.3, "indices", bits=1),
    EntropyCoded(TopK(0.3, bits=2)),
    FixedPointCode(1),
    FixedPointCode(20),
    GrowingBits(EntropyCoded(FixedPointCode(3))),
    SkippedLayers(skipped="0.weight"),
    SkippedLayers(1, Quantizer(3), "1.weight,0.bias"),
]
every = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
floats = st.floats(-100, 100, width=32)
updates = st.lists(floats, min_size=D, max_size=D).map(torch.tensor)


def rng(seed=0):
    return make_stream(seed, "encode", 1, "a")


def there_and_back(compressor, u, seed=0, layout=LAYOUT):
    payload, _ = compressor.encode(u, layout, rng(seed), {})
    return payload, compressor.decode(payload, layout, rng(seed))


def test_top_k_by_hand():
    u = torch.tensor(
        [3.0, -1.0, 2.0, -3.0, 0.5]
    )  # K = floor(.6 * 5) = 3; then floor(.2 * 5) = 1: 3 and -3 tie
    assert there_and_back(TopK(0.6), u, layout=[("w", 5)])[1].tolist() == [3, 0, 2, -3, 0]
    assert there_and_back(TopK(0.2), u, layout=[("w", 5)])[1].tolist() == [3, 0, 0, 0, 0]
    assert there_and_back(TopK(0.01), u, layout=[("w", 5)])[1].tolist() == [
        3,
        0,
        0,
        0,
        0,
    ]  # at least one


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0.01, 1))
def test_top_k_is_a_stable_sort(values, keep):
    u = torch.tensor(values, dtype=torch.float32)
    K = max(1, int(round(keep * len(u), 6)))
    order = sorted(range(len(u)), key=lambda i: (-abs(values[i]), i))
    oracle = [values[i] if i in order[:K] else 0 for i in range(len(u))]
    for coding in ("auto", "bitmap", "indices", "dense"):
        assert there_and_back(TopK(keep, coding), u, layout=[("w", len(u))])[1].tolist() == oracle


@pytest.mark.parametrize("K", [1, 7, 300, 2999, 5999])
@pytest.mark.parametrize("kind", ["normal", "ties", "late", "nan"])
def test_the_largest_of_many(kind, K):
    """As a stable sort, where a sample of them is looked at first."""
    u = torch.randn(6000, generator=torch.Generator().manual_seed(K))
    if kind == "ties":
        u = (2 * u).round()
    elif kind == "late":  # the sample sees none of the large ones
        u[1::16] *= 100
    elif kind == "nan":
        u[[5, 4000]] = torch.nan
    size = u.abs().nan_to_num(nan=torch.inf).tolist()
    order = sorted(range(6000), key=lambda i: (-size[i], i))
    assert mask_largest(u, K).nonzero()[:, 0].tolist() == sorted(order[:K])


def test_a_share_that_binary_fractions_miss():
    assert int(mask_largest(torch.rand(100), 29).sum()) == 29
    payload, _ = there_and_back(TopK(0.29, "indices"), torch.rand(100), layout=[("w", 100)])
    assert len(payload.buffers["values"]) == 29  # .29 * 100 = 28.999999999999996


@given(st.integers(1, 300), st.floats(0.001, 1))
def test_auto_is_the_shortest_coding(d, keep):
    u, layout = torch.randn(d), [("w", d)]
    sizes = [
        there_and_back(TopK(keep, c), u, layout=layout)[0].nbytes
        for c in ("bitmap", "indices", "dense")
    ]
    assert there_and_back(TopK(keep), u, layout=layout)[0].nbytes == min(sizes)


def test_the_coding_is_named_and_no_other_is_taken():
    for coding in ("bitmap", "indices", "dense"):
        payload, _ = TopK(0.3, coding).encode(torch.randn(D), LAYOUT, rng(), {})
        assert coding in payload.buffers
        for other in {"bitmap", "indices", "dense"} - {coding}:
            with pytest.raises(MalformedPayload):
                TopK(0.3, other).decode(payload, LAYOUT, rng())


def test_statistics_stay_whole():
    u = torch.tensor([1e-6] * 20 + [0.0] + [1e-9])
    _, back = there_and_back(TopK(0.1, dense_bn=True), u)
    assert back[-2:].tolist() == u[-2:].tolist()
    assert int(back[:20].count_nonzero()) == 2  # floor(.1 * 20)


@pytest.mark.parametrize(
    "buffers",
    [
        {"indices": torch.tensor([0, 0], dtype=torch.int32), "values": torch.ones(2)},
        {"indices": torch.tensor([3, 1], dtype=torch.int32), "values": torch.ones(2)},
        {"indices": torch.tensor([-1, 1], dtype=torch.int32), "values": torch.ones(2)},
        {"indices": torch.tensor([1, D], dtype=torch.int32), "values": torch.ones(2)},
        {"indices": torch.tensor([1, 2]), "values": torch.ones(2)},
        {"indices": torch.tensor([1], dtype=torch.int32), "values": torch.ones(1)},
        {
            "indices": torch.tensor([1, 2], dtype=torch.int32),
            "values": torch.ones(2),
            "more": torch.ones(1),
        },
        {"values": torch.ones(2)},
        {},
    ],
)
def test_indices_must_ascend_within_the_update(buffers):
    with pytest.raises(MalformedPayload):
        TopK(0.1, "indices").decode(Payload(buffers), LAYOUT, rng())


def test_bitmaps_must_mark_as_many_as_asked():
    good = TopK(0.1, "bitmap").encode(torch.randn(D), LAYOUT, rng(), {})[0].buffers
    for bitmap in (
        torch.zeros_like(good["bitmap"]),
        good["bitmap"] ^ torch.tensor([0, 0, 1], dtype=torch.uint8),
    ):
        with pytest.raises(
            MalformedPayload, match="bitmap"
        ):  # the second marks a coordinate past the end
            TopK(0.1, "bitmap").decode(Payload({**good, "bitmap": bitmap}), LAYOUT, rng())
    with pytest.raises(MalformedPayload, match="not zero"):
        TopK(0.1, "dense").decode(Payload({"dense": torch.ones(D)}), LAYOUT, rng())


@given(updates, st.integers(0, 99))
def test_random_k_keeps_a_share_that_both_sides_draw(u, seed):
    payload, back = there_and_back(RandomK(0.4), u, seed)
    assert list(payload.buffers) == ["values"]
    assert payload.nbytes == 4 * 8  # floor(.4 * 22)
    kept = torch.zeros(D, dtype=torch.bool)
    kept[torch.from_numpy(rng(seed).permutation(D)[:8].copy())] = True
    assert torch.equal(back, u.where(kept, 0.0))


def test_scaled_random_k_is_unbiased():
    u = torch.linspace(-1, 1, D)
    mean = torch.stack(
        [there_and_back(RandomK(0.4, scaled=True), u, seed)[1] for seed in range(1000)]
    ).mean(0)
    # a coordinate is u/p with probability p = 8/22: standard error |u| sqrt((1-p)/p/1000) < .042
    assert (mean - u).abs().max() < 5 * 0.042


def test_quantised_by_hand():
    # mean 1, range 0..3 in 3 steps of 1: 0.4 and 0.6 round to 0 and 1, the ends are exact
    u = torch.tensor([0.0, 3.0, 0.4, 0.6])
    payload, back = there_and_back(Quantizer(2, stochastic=False), u, layout=[("w", 4)])
    assert back.tolist() == [0, 3, 0, 1]
    assert payload.buffers["ranges"].tolist() == [1, 1, 1]
    assert payload.buffers["levels"].tolist() == [0b00_11_00_01]


@given(updates, st.integers(1, 8), st.booleans())
@example(torch.tensor([0.0] * (D - 1) + [1.4e-45]), 2, False)  # no float lies between its levels
def test_quantised_values_are_within_a_step(u, bits, stochastic):
    _, back = there_and_back(Quantizer(bits, stochastic), u)
    at = 0
    for _, size in LAYOUT:
        x, y = u[at : at + size], back[at : at + size]
        step = float(x.max() - x.min()) / (2**bits - 1)
        rounding = (
            1e-4 * float(x.abs().max()) + torch.finfo(torch.float32).tiny
        )  # below which floats are coarse
        assert (x - y).abs().max() <= step * (1 if stochastic else 0.5) * (1 + 1e-4) + rounding
        if step == 0:
            assert torch.equal(x, y)
        at += size


def test_the_stochastic_quantiser_is_unbiased():
    u = torch.randn(D, generator=torch.Generator().manual_seed(1))
    draws = torch.stack([there_and_back(Quantizer(2), u, seed)[1] for seed in range(800)]).double()
    error = draws.std(0) / 800**0.5 + 1e-6
    assert ((draws.mean(0) - u).abs() < 5 * error).all()
    nearest = there_and_back(Quantizer(2, stochastic=False), u)[1]
    assert ((nearest - u).abs() > 5 * error).any()  # so the bound tells the two apart


@given(st.lists(st.integers(0, 255), max_size=40), st.integers(1, 8))
def test_bits_are_packed_without_gaps(values, bits):
    levels = torch.tensor([v % 2**bits for v in values], dtype=torch.uint8)
    packed = pack_bits(levels, bits)
    digits = "".join(f"{int(v):0{bits}b}" for v in levels)
    digits += "0" * (-len(digits) % 8)
    assert packed.tolist() == [int(digits[i : i + 8], 2) for i in range(0, len(digits), 8)]
    assert torch.equal(unpack_bits(packed, bits, len(levels)), levels)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bits_beyond_the_last_level_are_refused(bits):
    packed = pack_bits(torch.ones(5, dtype=torch.uint8), bits)
    packed[-1] |= 1
    with pytest.raises(MalformedPayload, match="beyond the last level"):
        unpack_bits(packed, bits, 5)


def test_dropped_tensors_weigh_nothing_and_count_as_unchanged():
    u, seen = torch.randn(D), set()
    for seed in range(40):
        payload, back = there_and_back(TensorDropout(0.5), u, seed)
        at = sent = 0
        for name, size in LAYOUT:
            part = back[at : at + size]
            kept = bool(part.count_nonzero())
            assert torch.equal(part, u[at : at + size] if kept else torch.zeros(size))
            sent += size * kept
            seen.add((name, kept))
            at += size
        assert payload.nbytes == 4 * sent
    assert len(seen) == 2 * len(LAYOUT)


def test_coverage_leaves_dropped_tensors_out_of_the_mean():
    tasks = [
        Task(c, k, t=1, seed=3, compressor=TensorDropout(0.5, coverage=True))
        for k, c in enumerate("abcdef")
    ]
    encoded = [make_stream(3, "encode", 1, task.client) for task in tasks]
    payloads = [
        t.compressor.encode(torch.ones(D), LAYOUT, r, {})[0]
        for t, r in zip(tasks, encoded, strict=True)
    ]
    replies = [Reply(t.client, 1, p, n=1) for t, p in zip(tasks, payloads, strict=True)]
    got, rejected = validate_replies(
        tasks, replies, ReplyContext(lambda task: (None, LAYOUT), D, D)
    )
    assert rejected == {}
    assert got.covered is not None
    assert torch.equal(got.covered, got.U == 1)
    counted = validate_replies(
        [t.__class__(t.client, t.k, 1, 3, compressor=TensorDropout(0.5)) for t in tasks],
        replies,
        ReplyContext(lambda task: (None, LAYOUT), D, D),
    )[0]
    assert counted.covered is None
    assert torch.equal(counted.U, got.U)


@given(
    st.lists(updates, min_size=1, max_size=6),
    st.sampled_from([TopK(0.2), Quantizer(2), RandomK(0.3)]),
)
def test_feedback_loses_nothing(us, inner):
    compressor, carry, total = ErrorFeedback(inner), {}, torch.zeros(D)
    for seed, u in enumerate(us):
        payload, carry = compressor.encode(u, LAYOUT, rng(seed), carry)
        total += compressor.decode(payload, LAYOUT, rng(seed))
    torch.testing.assert_close(
        total + carry["residual"], torch.stack(us).sum(0), rtol=1e-4, atol=1e-3
    )


def test_feedback_forgets_a_residual_of_other_coordinates():
    _, carry = ErrorFeedback(TopK(0.2)).encode(
        torch.ones(D), LAYOUT, rng(), {"residual": torch.ones(D + 1)}
    )
    assert carry["residual"].shape == (D,)
    assert carry["residual"].max() == 1


@every
def test_a_diverged_client_is_sent_and_refused_at_the_gate(compressor):
    u = torch.randn(D)
    u[4], u[13] = torch.nan, torch.inf
    for seed in range(8):
        task = Task("a", 0, t=1, seed=seed, compressor=compressor)
        payload, _ = compressor.encode(u, LAYOUT, make_stream(seed, "encode", 1, "a"), {})
        got, rejected = validate_replies(
            [task], [Reply("a", 1, payload, n=1)], ReplyContext(lambda task: (None, LAYOUT), D, D)
        )
        assert torch.isfinite(got.U).all()
        assert "malformed" not in rejected.get("a", "")


@every
@settings(max_examples=10)
@given(updates, st.integers(0, 99))
def test_decoding_gives_finite_floats_of_the_right_shape(compressor, u, seed):
    _, back = there_and_back(compressor, u, seed)
    assert back.shape == (D,)
    assert back.dtype == torch.float32
    assert torch.isfinite(back).all()


@every
def test_an_update_of_zero_arrives_as_zero(compressor):
    assert not there_and_back(compressor, torch.zeros(D))[1].any()


DTYPES = [torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool, torch.float16]
NAMES = [
    "u",
    "values",
    "bitmap",
    "indices",
    "dense",
    "levels",
    "ranges",
    "scales",
    "statistics",
    "x",
]


@st.composite
def buffers(draw):
    """Any tensor: wrong kinds, shapes and contents, of lengths that a true payload may have."""
    shape = draw(
        st.sampled_from([(), (0,), (2, 2), *((n,) for n in (1, 2, 3, 6, 8, 9, 12, 13, 22))])
    )
    raw = np.frombuffer(draw(st.binary(min_size=200, max_size=200)), np.uint8).copy()
    count = int(torch.Size(shape).numel())
    dtype = draw(st.sampled_from(DTYPES))
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        return torch.from_numpy(raw[:count] > 127).reshape(shape)
    return torch.from_numpy(raw[: count * size]).view(dtype).reshape(shape)


@every
@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from(NAMES), buffers(), max_size=4), st.data())
def test_strange_payloads_are_malformed_and_nothing_else(compressor, junk, data):
    true = compressor.encode(torch.linspace(-1, 1, D), LAYOUT, rng(), {})[0].buffers
    kept = data.draw(st.sets(st.sampled_from(sorted(true)))) if true else set()
    for mixed in (junk, {**true, **junk}, {**{name: true[name] for name in kept}, **junk}):
        try:
            got = compressor.decode(Payload(mixed), LAYOUT, rng())
        except MalformedPayload:
            continue
        assert isinstance(got, Tensor)
        assert got.shape == (D,)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TopK(0), "keep"),
        (lambda: TopK(1.1), "keep"),
        (lambda: TopK("x"), "keep"),
        (lambda: TopK(True), "keep"),
        (lambda: TopK(0.5, "bitmaps"), "bitmap"),
        (lambda: RandomK(-1), "keep"),
        (lambda: Quantizer(9), "bits"),
        (lambda: Quantizer(8.0), "bits"),
        (lambda: TensorDropout(1.5), "rate"),
        (lambda: ErrorFeedback(3), "compressor"),
        (lambda: ErrorFeedback(RandomK(0.1, scaled=True)), "scaled"),
    ],
)
def test_bad_settings_are_refused(make, word):
    with pytest.raises(BadInput, match=word):
        require_valid_fields(make())


def test_experiment_files_nest_compressors():
    wanted = {"piece": "error-feedback", "inner": {"piece": "topk", "keep": 0.25}}
    assert build_piece("compressor", wanted) == ErrorFeedback(TopK(0.25))
    recipe = Experiment(
        recipe={"name": "flrce", "preset": "default", "compressor": wanted}
    ).build_recipe()
    assert recipe.compressor == ErrorFeedback(TopK(0.25))


def test_feedback_objects_to_coordinates_that_change():
    for table in ({"name": "dropout"}, {"name": "timelyfl"}):
        with pytest.raises(BadInput, match="residual"):
            compose_recipe(
                {**table, "compressor": {"piece": "error-feedback", "inner": "topk"}}, {"P": 4}, {}
            )
    compose_recipe(
        {"name": "heterofl", "compressor": {"piece": "error-feedback", "inner": "topk"}},
        {"P": 4},
        {},
    )
