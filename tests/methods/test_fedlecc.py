"""FedLECC: groups by labels, the largest losses first, and what it costs to tell labels."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flrce import Experiment
from flrce.core.roles import RoundView
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.client.label_census import LABEL_SHARES_KEY, LabelCensus
from flrce.methods.selection.fedlecc import FedLECC, FedLECCState, cluster_by_labels
from flrce.simulation import runs


def view(P, M):
    return RoundView(2, P, tuple(range(M)), torch.ones(M), None, None, None)


def test_groups_by_hellingers_distance():
    """(.5, .5, 0) is as far from (.6, .4, 0) as sqrt shares say, and far from (0, 0, 1); nothing
    told is -1.
    """
    shares = np.array(
        [[0.5, 0.5, 0], [0, 0, 1], [0.6, 0.4, 0], [0, 0, 0], [0, 0.1, 0.9]], np.float32
    )
    found = cluster_by_labels(shares, 2)
    assert found[0] == found[2] != found[1]
    assert found[1] == found[4]
    assert found[3] == -1
    assert cluster_by_labels(shares[:1], 2).tolist() == [0]


def test_the_worst_groups_and_in_them_the_worst_clients():
    """Groups {0, 1}, {2, 3}, {4, 5} with mean losses 1, 3, 2: of two groups 2 and 3's, and the
    worst of 4 and 5.
    """
    shares = torch.eye(3).repeat_interleave(2, 0)
    memory = FedLECCState(torch.tensor([0.5, 1.5, 2.0, 4.0, 2.5, 1.5]), shares)
    chosen = FedLECC(groups=3, some=2, classes=3).select(
        memory, view(2, 6), np.random.default_rng(0)
    )
    assert chosen.k == (3, 4)
    chosen = FedLECC(groups=3, some=2, classes=3).select(
        memory, view(3, 6), np.random.default_rng(0)
    )
    assert chosen.k == (3, 2, 4)
    whole = FedLECC(groups=3, some=1, classes=3).select(
        memory, view(5, 6), np.random.default_rng(0)
    )
    assert whole.k[:3] == (3, 2, 4)  # more than the group has: the largest losses of the others
    assert set(whole.k[3:]) == {1, 5}


def test_those_never_heard_from_go_first():
    shares = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    memory = FedLECCState(torch.tensor([9.0, 9.0, math.inf, math.inf]), shares)
    chosen = FedLECC(groups=2, some=1, classes=2).select(
        memory, view(2, 4), np.random.default_rng(0)
    )
    assert set(chosen.k) == {2, 3}


def test_shares_of_what_was_trained_on():
    class Batch:
        y = torch.tensor([0, 2, 2])

    link, g = LabelCensus(3), torch.tensor([1.0, -2.0])
    state = link.begin_round(g, None, {})
    for _ in range(2):
        out, state = link.probe(g, g, state, Batch())
        assert out is g
    assert link.end_round(g, state)[1][LABEL_SHARES_KEY].tolist() == pytest.approx(
        [1 / 3, 0, 2 / 3]
    )
    for y in (torch.tensor([0, 3]), torch.tensor([-1]), torch.tensor([0.5])):
        Batch.y = y
        with pytest.raises(BadInput, match=r"recipe\.classes = 3, but targets"):
            link.probe(g, g, state, Batch())


def test_a_run_learns_the_labels_and_books_them():
    tables = {
        "rounds": 3,
        "clients": 6,
        "per_round": 3,
        "data": {"name": "digits"},
        "engine": {"workers": 1},
    }
    told = runs.run(Experiment(**tables, recipe={"name": "fedlecc"}))
    plain = runs.run(Experiment(**tables, recipe={"name": "fedavg"}))
    more = [a.bytes_up - b.bytes_up for a, b in zip(told.history, plain.history, strict=True)]
    assert more == [3 * 10 * 4] * 3
    assert (
        len({client for h in told.history[:2] for client in h.chosen}) == 6
    )  # everyone once before anyone twice


def test_it_wants_labels_to_be_told():
    with pytest.raises(BadInput, match="counting"):
        replace(recipes.fedavg(2), selector=FedLECC())
    with pytest.raises(BadInput, match="classes = 5"):
        replace(recipes.fedlecc(P=2), selector=FedLECC(classes=5))
