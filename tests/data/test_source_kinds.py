"""Sources of every kind: classes, values, next symbols, several labels; and splits that the data
brings along.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from flrce import Experiment, run
from flrce.config.experiment import build_net
from flrce.data.federation import federate
from flrce.data.partition import partition_samples
from flrce.data.sources import IGNORED_TARGET, Source, read_digits
from flrce.errors import BadInput
from flrce.models.inputs import scale_inputs
from flrce.rng import make_stream

SYMBOLS = tuple("abcdefgh")


def windows(N=240, L=6, groups=12):
    """Next symbol after a window of ids: the window's last, plus one."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, len(SYMBOLS), (N, L))
    return Source("windows", x, (x[:, -1] + 1) % 8, SYMBOLS, np.arange(N) % groups, kind="tokens")


def values(N=240, K=None):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, 3)).astype(np.float32)
    y = x.sum(1) if K is None else x[:, :K]
    return Source("values", x, y.astype(np.float32), (), np.arange(N) % 12, kind="values")


def labels(N=240):
    rng = np.random.default_rng(2)
    return Source(
        "labels",
        rng.random((N, 4), np.float32),
        rng.integers(0, 2, (N, 3)).astype(np.uint8),
        ("wet", "cold", "dark"),
        np.arange(N) % 12,
        kind="labels",
    )


def test_how_many_numbers_a_network_gives():
    assert read_digits().outputs == 10
    assert windows().outputs == 8
    assert values().outputs == 1
    assert values(K=2).outputs == 2
    assert labels().outputs == 3


def test_int64_means_token_ids_and_they_are_never_computed_with():
    pool = windows()
    assert (pool.has_token_ids, pool.vocabulary) == (True, 8)
    assert (read_digits().has_token_ids, read_digits().vocabulary) == (False, 0)
    seen = scale_inputs(torch.from_numpy(pool.x), 1 / 255, 1.0)
    assert seen.dtype == torch.int64
    assert torch.equal(seen, torch.from_numpy(pool.x))
    assert scale_inputs(
        torch.tensor([51], dtype=torch.uint8), 1 / 255, 1.0
    ).item() == pytest.approx(1.2)


def test_a_vocabulary_covers_ids_beyond_the_classes():
    pool = windows()
    told = replace(
        pool, y=pool.x[:, 0] % 2, classes=("no", "yes"), kind="classes"
    )  # a text's class
    assert (told.outputs, told.vocabulary) == (2, 8)


def test_scaling_leaves_the_samples_alone():
    x = torch.ones(3, 2)
    scale_inputs(x, 0.5, 1.0)
    assert torch.equal(x, torch.ones(3, 2))


@pytest.mark.parametrize(
    "pool", [windows(), values(), values(K=2), labels()], ids=lambda s: f"{s.name}{s.y.ndim}"
)
@pytest.mark.parametrize("scheme", ["iid", "quantity", "natural", "given", "by-group"])
def test_every_kind_is_shared_out_and_described(pool, scheme):
    described = federate(pool, scheme, 12, 0).describe()
    assert described["kind"] == pool.kind
    assert "labels" not in described
    assert sum(described["train"]) + sum(described["held"]) == 240


@pytest.mark.parametrize("pool", [values(), labels()], ids=lambda s: s.name)
def test_dirichlet_is_for_classes(pool):
    with pytest.raises(BadInput, match="use quantity, iid or, with groups, natural"):
        federate(pool, "dirichlet", 12, 0)


def test_another_target_is_another_data_set():
    pool = values()
    other = replace(pool, y=pool.y + 1)
    assert (
        federate(pool, "iid", 12, 0).describe()["digest"]
        != federate(other, "iid", 12, 0).describe()["digest"]
    )


def test_the_datas_own_test_split_is_kept():
    pool = replace(windows(), held=np.arange(240) % 24 < 12)
    federation = federate(pool, "natural", 12, 0, holdout=0.1)
    for train, held in zip(federation.train, federation.held, strict=True):
        assert not pool.held[train].any()
        assert pool.held[held].all()
        assert len(train) == len(held) == 10


def test_the_split_is_part_of_the_fingerprint():
    pool, test = windows(), np.arange(240) % 24 < 12
    first, second = (
        federate(replace(pool, held=h), "iid", 12, 0).describe() for h in (test, ~test)
    )
    assert first["digest"] != second["digest"]


def test_a_client_with_nothing_to_train_on_is_named():
    pool = replace(windows(), held=np.arange(240) % 12 == 3)
    with pytest.raises(
        BadInput, match="client '3' has 0 training samples beside the test split of windows"
    ):
        federate(pool, "natural", 12, 0)


def test_a_partition_of_ones_own_is_taken_as_it_is():
    pool = replace(windows(), groups=tuple(f"hospital {k}" for k in range(12)))
    one, two = (
        partition_samples(pool, "given", 12, 0.1, 5, make_stream(seed, "p")) for seed in (0, 1)
    )
    for k in range(12):
        assert sorted(one[k]) == sorted(two[k]) == list(range(k, 240, 12))
    assert federate(pool, "given", 12, 0).clients[3] == "hospital 3"
    with pytest.raises(BadInput, match="set clients = 12"):
        federate(pool, "given", 10, 0)


class Last(nn.Module):
    """A table of the last symbol's successors; asks for what it needs by name."""

    def __init__(self, vocabulary, outputs):
        super().__init__()
        self.table = nn.Embedding(vocabulary, outputs)

    def forward(self, ids):
        return self.table(ids[:, -1])


def test_an_embedding_learns_from_ids():
    experiment = Experiment(
        rounds=30,
        clients=12,
        per_round=6,
        data={"partition": "natural"},
        train={"lr": 8.0},
        recipe={"name": "fedavg"},
        engine={"workers": 1},
    )
    result = run(
        experiment, data=windows(), model=build_net("test_source_kinds:Last", windows().spec, 0)
    )
    assert result.summary["accuracy"] > 0.9


def test_ignored_positions_have_a_name():
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_TARGET
