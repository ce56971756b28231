"""Sums only: masks that cancel out in the sum, as secure aggregation adds them, change nothing that
the server does.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flrce.config.experiment import Experiment
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.simulation import runs

SHAPE = {
    "rounds": 8,
    "clients": 12,
    "per_round": 4,
    "engine": {"kernel": "torch", "workers": 1},
    "model": {
        "name": "logistic"
    },  # the gate looks at BatchNorm's variances, which a mask makes negative
}


def masked(replies, scale, seed):
    """Every update with a large vector on top; n times these vectors adds up to nothing."""
    n = torch.tensor([float(reply.n) for reply in replies], dtype=torch.float64)
    size = len(replies[0].payload.buffers["u"])
    masks = torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (len(replies), size)))
    masks[-1] = -(n[:-1, None] * masks[:-1]).sum(0) / n[-1]
    updates = [
        reply.payload.buffers["u"].double() + mask
        for reply, mask in zip(replies, masks, strict=True)
    ]
    return [
        replace(r, payload=Payload({"u": u.float()})) for r, u in zip(replies, updates, strict=True)
    ]


def driven(scale):
    experiment = Experiment.from_tables(SHAPE | {"recipe": {"name": "flrce", "preset": "private"}})
    built = runs.build_simulation(experiment)
    train = built.engine.train
    built.engine.train = lambda pending, *more: masked(
        train(pending, *more), scale, pending[0].task.t
    )
    done = list(built.iterate_rounds(experiment))
    built.engine.close()
    return done


def test_no_single_update_is_looked_at():
    """Masks a thousand times as long as the updates: whoever read one would choose, flag or stop
    otherwise.
    """
    plain, hidden = driven(0.0), driven(10.0)
    for a, b in zip(plain, hidden, strict=True):
        assert a.record.chosen == b.record.chosen
        assert a.record.flagged == b.record.flagged == {}
        assert a.record.held == b.record.held
        assert (
            float((a.state.w - b.state.w).norm() / a.state.w.norm()) < 1e-2
        )  # what float32 leaves of large masks
    assert plain[-1].record.accuracy == pytest.approx(hidden[-1].record.accuracy, abs=0.03)


def test_one_figure_a_round_is_kept_and_the_stop_reads_it():
    recipe = {"name": "flrce", "preset": "private", "stop": {"piece": "worth", "points": 10.0}}
    engine = {"eval_every": 100, "workers": 1}
    result = runs.run(
        Experiment.from_tables(SHAPE | {"rounds": 80, "recipe": recipe, "engine": engine})
    )
    assert all(len(h.holdouts) == len(h.held) == 1 for h in result.history)
    assert "Predicted gain" in result.summary["stopped"]  # only clients judged the model


@pytest.mark.parametrize(
    "more", [{"selector": "in-turn"}, {"submodel": "random-units"}, {"psi": 5.0}]
)
def test_what_looks_at_single_updates_is_refused(more):
    with pytest.raises(BadInput, match="sums only"):
        Experiment.from_tables({"recipe": {"name": "flrce", "preset": "private", **more}})
