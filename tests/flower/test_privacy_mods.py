"""Flower's privacy tools and our strategies: mods at the client, wrappers at the server."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flower_helpers import plain_app, start
from flrce.flower import FLrce, Guarded, RecipeStrategy, introduce
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue import recipes

NAMES = {"wait_for_nodes": 5.0}


def floats():
    """Without the counter, which neither noise nor clipping goes with."""
    arrays = start()
    arrays.pop("norm.num_batches_tracked")
    return arrays


def test_clipping_and_noise_on_train_leave_names_and_evaluation_alone():
    """`@app.train(mods=[...])` is the form that works: app-wide, the mod fails whatever carries no
    arrays.
    """
    private = LocalDpMod(clipping_norm=0.1, sensitivity=0.01, epsilon=10.0, delta=1e-5)
    on_train = introduce(plain_app(train_mods=[private]))
    result = FLrce(**NAMES).start(LocalGrid(on_train, 3), floats(), 2)
    assert [record.replied for record in result.history] == [("0", "1", "2")] * 2
    assert set(result.evaluate_metrics_clientapp) == {1, 2}
    assert (
        0 < np.linalg.norm(result.arrays["layer.weight"].numpy()) < 0.3
    )  # twice 0.1, and noise; 1.8 without
    everywhere = FLrce(**NAMES).start(
        LocalGrid(introduce(plain_app(mods=[private])), 3), floats(), 2
    )
    assert [len(record.replied) for record in everywhere.history] == [3, 3]
    assert not everywhere.evaluate_metrics_clientapp  # Flower's own FedAvg is no better off:
    fedavg = FedAvg(min_available_nodes=3).start(
        LocalGrid(plain_app(mods=[private]), 3), floats(), 1
    )
    assert not fedavg.evaluate_metrics_clientapp


@pytest.mark.parametrize("form", ["inside", "guarded"])
def test_flowers_server_side_clipping(form):
    """Around ours in Flower's loop, or guarded by ours with early stop and resume."""

    def private(inner):
        return DifferentialPrivacyServerSideFixedClipping(
            inner, 0.01, clipping_norm=0.1, num_sampled_clients=3
        )

    if form == "inside":
        ours = RecipeStrategy(recipes.fedavg(3), fraction_evaluate=0.0, **NAMES)
        result = private(ours).start(LocalGrid(plain_app(), 3), floats(), 2)
    else:
        theirs = FedAvg(min_available_nodes=3, min_train_nodes=3, fraction_evaluate=0.0)
        result = Guarded(private(theirs), **NAMES).start(LocalGrid(plain_app(), 3), floats(), 2)
    assert 0 < np.linalg.norm(result.arrays["layer.weight"].numpy()) < 0.3
