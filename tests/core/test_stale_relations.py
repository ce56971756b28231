"""Relations under asynchrony: an old update is as stale as the model it started from."""

import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core.relations import NEVER_SEEN
from flrce.core.types import RoundEvent, Updates
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.simulation import runs


def heard(selector, m, t, w, k, U, age=None, base=None):
    updates = Updates(torch.tensor(k), torch.tensor(U), torch.ones(len(k)), 2, age=age, base=base)
    return selector.observe(m, RoundEvent(t, w, w, updates, 3))


def test_an_old_reply_is_compared_as_a_stale_one():
    # w = (3, 4); client 1's v = (1, 0) comes in round 9 from the model of round 5. Client 0's u =
    # (0, -2) takes the model from 4 to 2 away from v's line: 1 - 2/4. Had v been fresh, it would
    # have been the cosine, 0.
    w, selector = torch.tensor([3.0, 4.0]), RelationshipSelector()
    old, fresh = selector.initial_state(3, 2, 2), selector.initial_state(3, 2, 2)
    both = [[0.0, -2.0], [1.0, 0.0]]
    found = heard(selector, old, 9, w, [0, 1], both, torch.tensor([0, 4]), (w, torch.zeros(2)))
    assert found.R.tolist() == [9, 5, NEVER_SEEN]
    assert found.Omega[0].tolist() == [0.0, 0.5, 0.0]
    assert heard(selector, fresh, 9, w, [0, 1], both).Omega[0].tolist() == [0.0, 0.0, 0.0]


def test_an_anchored_line_passes_through_the_model_that_was_sent():
    # v = (1, 0) started from (0, 2): its line is y = 2, from which w = (3, 4) is 2 away, and w + u
    # = (3, 3) 1: 1 - 1/2
    w, selector = torch.tensor([3.0, 4.0]), RelationshipSelector(anchor="model")
    m = selector.initial_state(3, 2, 2)
    base = torch.tensor([0.0, 2.0])
    found = heard(
        selector, m, 9, w, [0, 1], [[0.0, -1.0], [1.0, 0.0]], torch.tensor([0, 4]), (w, base)
    )
    assert found.Omega[0, 1].item() == pytest.approx(0.5)
    assert sorted(found.A) == [5, 9]


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_flrce_stops_early_under_asynchrony(preset, tmp_path):
    recipe = {"name": "flrce", "preset": preset, "pace": {"piece": "buffered", "size": 3}}
    recipe |= {"psi": 0.5} if preset == "paper" else {}
    fleet = {"profile": {"phone": 0.5, "raspberry-pi-4": 0.5}}
    experiment = Experiment(
        rounds=250, clients=10, per_round=6, recipe=recipe, fleet=fleet, train={"epochs": 1}
    )
    found = runs.run(experiment, tmp_path / "run")
    assert found.summary["rounds"] < 250
    assert found.summary["stopped"]
    assert any(record.ages for record in found.history)
