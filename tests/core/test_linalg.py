"""Compiled passes over the updates of a large model against plain loops and against torch's
sums.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flrce.core import linalg
from flrce.core.c_compiler import KernelUnavailable, find_toolchain
from flrce.core.sketch import RotatedSketch
from flrce.core.types import Updates
from flrce.methods.aggregation.mean import WeightedMean, add_weighted_mean

try:
    find_toolchain()
except KernelUnavailable as why:
    pytestmark = pytest.mark.skip(reason=str(why))


@pytest.fixture(autouse=True)
def for_any_size(monkeypatch):
    monkeypatch.setattr(linalg, "MIN_COMPILED_FLOATS", 0)


def rows(P: int, d: int, seed: int, beside: int = 0) -> torch.Tensor:
    """(P, d) floats of many magnitudes, each row followed by `beside` others in memory."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((P, d + beside)) * 10.0 ** rng.integers(-6, 3, (P, d + beside))
    return torch.from_numpy(values.astype(np.float32))[:, :d]


def updates(U: torch.Tensor, n: list[float]) -> Updates:
    return Updates(torch.arange(len(U)), U, torch.tensor(n, dtype=torch.float64), U.shape[1])


SHAPES = st.tuples(
    st.integers(1, 11), st.integers(1, 700), st.integers(0, 2**32 - 1), st.integers(0, 3)
)


def test_products_worked_by_hand():
    U = torch.tensor([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0], [0.0, 0.0, -1.0]])
    # 1 + 4 + 9; 4 - 10 + 18; -3; 16 + 25 + 36; -6; 1
    assert linalg.compiled_gram(U).tolist() == [
        [14.0, 12.0, -3.0],
        [12.0, 77.0, -6.0],
        [-3.0, -6.0, 1.0],
    ]


@given(SHAPES)
def test_products_of_all_pairs(shape):
    U = rows(*shape)
    wide = U.double().numpy()
    expected = np.array([[float(np.dot(a, b)) for b in wide] for a in wide])
    size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    found = linalg.compiled_gram(U).numpy()
    assert np.all(np.abs(found - expected) <= 1e-13 * size)
    assert np.array_equal(found, found.T)


def test_a_sign_that_float32_would_lose():
    # 1e8 * 1e8 - 1e8 * 1e8 - 1: in float32 nothing is left of the 1
    U = torch.tensor([[1e8, 1e8, 1.0], [1e8, -1e8, -1.0]])
    assert float(linalg.compiled_gram(U)[0, 1]) == -1.0
    assert linalg.mean_conflicts(linalg.gram_matrix(U)) == 1.0


@given(SHAPES, st.lists(st.integers(1, 10_000_000), min_size=11, max_size=11))
def test_means_have_torchs_bits(shape, n):
    U = rows(*shape)
    w, weights = rows(1, U.shape[1], shape[2] + 1)[0], [float(each) for each in n[: len(U)]]
    found = torch.empty_like(w)
    assert linalg.write_weighted_mean(w, U, torch.tensor(weights, dtype=torch.float64), found)
    expected = w.double() + sum(a * u for a, u in zip(weights, U.double(), strict=True)) / sum(
        weights
    )
    assert torch.equal(found, expected.float())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linalg, "_load_library", lambda: None)
        assert torch.equal(
            add_weighted_mean(w, updates(U, weights), torch.tensor(weights, dtype=torch.float64)),
            found,
        )


@given(SHAPES, st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]))
def test_differences_have_numpys_bits_and_say_how_large_they_are(shape, odd):
    values, w = rows(1, *shape[1:])[0].numpy().copy(), rows(1, shape[1], 7)[0].numpy()
    values[shape[2] % len(values)] += np.float32(odd)
    found = np.empty_like(w)
    largest = linalg.write_difference(values, w, found)
    assert found.tobytes() == (values - w).tobytes()
    # numpy's largest is NaN where any value is
    assert np.array_equal(largest, np.abs(values - w).max(), equal_nan=True)


def test_differences_of_other_types_and_orders_are_left_to_numpy():
    x, into = np.ones(8, np.float32), np.zeros(4, np.float32)
    odd = np.frombuffer(b"-" + x.tobytes(), np.float32, 4, 1)  # between two floats
    for values in (x[:4].astype(float), x[::2], odd):
        assert linalg.write_difference(values, x[:4], into) is None
    assert not into.any()


def test_what_nobody_moves_keeps_the_sign_of_its_zero():
    w, U = torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([[0.0, 0.0, 2.0], [0.0, -0.0, 4.0]])
    found = WeightedMean()(w, updates(U, [1.0, 1.0]), None)
    assert found.tolist() == [0.0, 0.0, 4.0]
    assert str(found[0].item()) == "-0.0"


@given(SHAPES, st.integers(1, 64))
def test_sketches_have_numpys_bits(shape, k):
    U, rng = rows(*shape), np.random.default_rng(shape[2])
    d = U.shape[1]
    signs = torch.from_numpy(rng.integers(0, 2, d, dtype=np.int8)).mul_(2).sub_(1)
    S = RotatedSketch(k, torch.from_numpy(rng.integers(0, k, -(-d // k))), signs)
    found = S(U)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linalg, "_load_library", lambda: None)
        assert torch.equal(S(U), found)


def test_what_is_not_plain_floats_in_memory_is_left_to_torch(monkeypatch):
    U, n, w = rows(3, 50, 0), torch.ones(3, dtype=torch.float64), torch.zeros(50)
    assert linalg.compiled_gram(U.double()) is None
    assert linalg.compiled_gram(U.T) is None  # columns lie apart
    assert linalg.compiled_gram(U[:1].expand(3, 50)) is None  # rows that are one
    assert not linalg.write_weighted_mean(w.double(), U, n, w)
    assert not linalg.write_weighted_mean(
        w, U, n / 3, w
    )  # products would be rounded, and torch's otherwise
    monkeypatch.setattr(linalg, "MIN_COMPILED_FLOATS", 50)
    assert linalg.compiled_gram(U) is None
    assert torch.allclose(linalg.gram_matrix(U), U.double() @ U.double().T)


def test_without_a_compiler_torch_does_it(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    linalg._load_library.cache_clear()
    try:
        with caplog.at_level("INFO", logger="flrce"):
            assert linalg.compiled_gram(rows(2, 9, 0)) is None
            assert linalg.compiled_gram(rows(2, 9, 0)) is None
        assert [
            line for line in caplog.messages if "made by torch: no C compiler" in line
        ] == caplog.messages[:1]
        assert len(caplog.messages) == 1
    finally:
        linalg._load_library.cache_clear()
