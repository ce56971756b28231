"""Sources, partitions, federations."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flrce.data.federation import federate
from flrce.data.partition import PARTITION_SCHEMES, partition_samples
from flrce.data.sources import Source, load_source, read_digits
from flrce.data.user import from_arrays
from flrce.data.user import from_npz as arrays
from flrce.errors import BadInput
from flrce.rng import make_stream


def made(N=600, classes=5, groups=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 255, (N, 1, 2, 2)).astype(np.uint8)
    codes = np.concatenate([np.arange(groups).repeat(6), rng.integers(0, groups, N - 6 * groups)])
    return Source("made", x, rng.integers(0, classes, N), tuple(map(str, range(classes))), codes)


@given(
    scheme=st.sampled_from(sorted(set(PARTITION_SCHEMES) - {"given"})),
    M=st.integers(2, 30),
    alpha=st.floats(0.05, 10),
    seed=st.integers(0, 99),
)
def test_every_sample_goes_to_one_client_and_everyone_gets_enough(scheme, M, alpha, seed):
    parts = partition_samples(made(), scheme, M, alpha, 5, make_stream(seed, "p"))
    every = np.concatenate(parts)
    assert len(parts) == M
    assert min(map(len, parts)) >= 5
    assert len(set(every.tolist())) == len(every)
    if scheme != "natural":
        assert len(every) == 600


@pytest.mark.parametrize("scheme", sorted(set(PARTITION_SCHEMES) - {"given"}))
def test_partitions_are_seeded(scheme):
    one, two, three = (
        partition_samples(made(), scheme, 10, 0.1, 5, make_stream(s, "p")) for s in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, three, strict=True))


def test_dirichlet_skews_labels_and_quantity_only_sizes():
    pool = made(6000)

    def entropy(parts):
        counts = np.array([np.bincount(pool.y[p], minlength=5) for p in parts]) + 1e-9
        p = counts / counts.sum(1, keepdims=True)
        return -(p * np.log(p)).sum(1).mean()

    skewed, sized = (
        partition_samples(pool, s, 20, 0.1, 5, make_stream(0, "p"))
        for s in ("dirichlet", "quantity")
    )
    assert entropy(skewed) < 1.0 < entropy(sized)  # ln 5 = 1.61 for labels at random
    n = np.sort([len(p) for p in sized])
    assert n[-4:].sum() == pytest.approx(
        0.8 * 6000, rel=0.1
    )  # a fifth of the clients hold four fifths


def test_topping_up_keeps_the_skew():
    """Only what is lacking moves; the largest client stays by far the largest."""
    pool = made(2000)
    n = np.sort(
        [len(p) for p in partition_samples(pool, "dirichlet", 50, 0.1, 5, make_stream(0, "p"))]
    )
    assert n[0] == 5
    assert n[-1] > 3 * n.mean()


def test_natural_clients_are_groups():
    federation = federate(made(), "natural", 8, 0)
    for k, client in enumerate(federation.clients):
        owned = np.concatenate([federation.train[k], federation.held[k]])
        assert set(federation.source.group[owned].tolist()) == {int(client)}


def test_natural_clients_have_enough_samples():
    """Four groups of 2, 9, 3 and 7 samples: of those with at least 5 there are two, whatever the
    draw.
    """
    pool = dataclasses.replace(made(21, groups=3), group=np.repeat([0, 1, 2, 3], [2, 9, 3, 7]))
    for seed in range(5):
        parts = partition_samples(pool, "natural", 2, 0.0, 5, make_stream(seed, "p"))
        assert [sorted(part.tolist()) for part in parts] == [
            list(range(2, 11)),
            list(range(14, 21)),
        ]
    with pytest.raises(BadInput, match=r"have data.minimum = 5 samples"):
        partition_samples(pool, "natural", 3, 0.0, 5, make_stream(0, "p"))


def test_hold_out():
    federation = federate(made(), "iid", 10, 0, holdout=0.3)
    assert [len(h) for h in federation.held] == [18] * 10
    assert not set(federation.train[0].tolist()) & set(federation.held[0].tolist())
    index, rows = federation.holdout_index
    assert len(index) == 180
    assert np.array_equal(rows, np.repeat(np.arange(10), 18))


def test_no_hold_out_at_all():
    federation = federate(made(), "iid", 10, 0, holdout=0.0)
    assert federation.holdout_index[0].size == 0


def test_description_counts_labels():
    described = federate(made(), "iid", 10, 0).describe()
    assert [sum(row) for row in described["labels"]] == described["train"]


@pytest.mark.parametrize(
    ("scheme", "M", "match"),
    [
        ("iid", 200, "needs 1000 samples"),
        ("by-group", 41, "only 40 groups"),
        ("natural", 41, "only 40 groups"),
    ],
)
def test_impossible_partitions_are_refused(scheme, M, match):
    with pytest.raises(BadInput, match=match):
        federate(made(), scheme, M, 0)


def test_groups_are_needed_for_group_partitions():
    with pytest.raises(BadInput, match="digits has none"):
        federate(read_digits(), "by-group", 10, 0)


def test_groups_are_codes_and_large_enough():
    x, y = np.zeros((12, 3), np.float32), np.arange(12) % 2
    named = Source("mine", x, y, ("a", "b"), np.array(["amy", "bob"] * 6))
    with pytest.raises(
        BadInput, match="mine's group is <U3; give whole numbers from 0 on, and names in groups"
    ):
        federate(named, "given", 2, 0)
    alone = Source("mine", x, y, ("a", "b"), np.array([0] * 11 + [1]))
    with pytest.raises(
        BadInput, match=r"client '1' has 1 sample; data\.minimum is 2; leave that client out"
    ):
        federate(alone, "given", 2, 0, minimum=2)


def test_arrays_of_one_s_own(tmp_path):
    x, y = np.random.rand(30, 4, 4), np.arange(30) % 3
    np.savez(tmp_path / "mine.npz", x=x, y=y, group=np.array(["amy", "bob", "cyd"] * 10))
    mine = load_source("digits", str(tmp_path / "mine.npz"))
    assert mine.shape == (1, 4, 4)
    assert mine.groups == ("amy", "bob", "cyd")
    assert federate(mine, "natural", 3, 0).clients == ("amy", "bob", "cyd")


def test_bad_arrays_are_named(tmp_path):
    good = np.zeros((4, 2))
    for x, y, match in [
        (None, np.zeros(4, int), "lacks x"),
        (good, np.zeros(3, int), "4 samples but 3 labels"),
        (good, np.full(4, np.inf), "y holds NaN or infinity"),
        (good, np.zeros((4, 2, 2), int), "one class a sample"),
        (np.full((4, 2), np.nan), np.zeros(4, int), "NaN"),
    ]:
        with pytest.raises(BadInput, match=match):
            from_arrays(x, y)
    (tmp_path / "no.npz").write_bytes(b"nonsense")
    np.savez(tmp_path / "evil.npz", x=np.array([print], dtype=object), y=np.zeros(1, int))
    for name, match in [
        ("missing.npz", "does not exist"),
        ("no.npz", "no plain .npz"),
        ("evil.npz", "holds object"),
    ]:
        with pytest.raises(BadInput, match=match):
            arrays(tmp_path / name)


def test_sets_that_are_not_prepared_say_how(monkeypatch, tmp_path):
    monkeypatch.setenv("FLRCE_DATA", str(tmp_path))
    with pytest.raises(BadInput, match="flrce data prepare cifar10 --from DIR"):
        load_source("cifar10")
