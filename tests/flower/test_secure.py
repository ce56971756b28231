"""The preset `private` under Flower's SecAgg+, with real masks: sums, the stop through them, who
drops out, resume.
"""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.server.workflow import SecAggPlusWorkflow
from torch import nn

from flrce.errors import BadInput, UnfinishedRun
from flrce.flower import FLrce, Local, LocalGrid, Masked, RecipeStrategy, client_app, masked_app
from flrce.flower.session import describe_headline
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.marginal_gain import MarginalGain

NODES, SAMPLES = 5, 24


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def load(context):
    k = int(context.node_config["partition-id"])
    rng = np.random.default_rng(k)
    x = rng.normal(size=(SAMPLES + 4 * k, 4)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    cut = len(x) - 8
    return Local(
        network(), torch.from_numpy(x), torch.from_numpy(y), np.arange(cut), np.arange(cut, len(x))
    )


def workflow(**more):
    return SecAggPlusWorkflow(num_shares=NODES, reconstruction_threshold=3, max_weight=50.0, **more)


class Overheard(LocalGrid):
    """Keeps what clients upload."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heard = []

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        self.heard += [reply for reply in replies if not reply.has_error()]
        return replies


def arrays():
    return ArrayRecord(network().state_dict())


def test_the_masked_run_is_the_plain_one():
    """Same clients, same model but for the rounding of sums, the same figure a round; and nobody's
    model is seen.
    """
    settings = {"epochs": 1, "batch": 8, "lr": 0.2}
    grid = Overheard(masked_app(load), NODES)
    masked = Masked(workflow(), per_round=NODES, seed=3, **settings).start(grid, arrays(), 3)
    recipe = recipes.flrce(preset="private", P=NODES, **settings)
    plain = RecipeStrategy(recipe, seed=3, fraction_evaluate=0.0).start(
        LocalGrid(client_app(load), NODES), arrays(), 3
    )
    assert [h.chosen for h in masked.history] == [h.chosen for h in plain.history]
    for ours, theirs in zip(masked.history, plain.history, strict=True):
        assert len(ours.replied) == NODES
        assert len(ours.holdouts) == len(ours.held) == 1
        assert ours.holdouts[0] == pytest.approx(
            theirs.holdouts[0], abs=0.15
        )  # weighed by samples, not by hold-outs
        assert ours.bytes_up > theirs.bytes_up
    for name, array in plain.arrays.items():
        assert np.allclose(array.numpy(), masked.arrays[name].numpy(), atol=1e-3)
    uploads = [
        m
        for m in grid.heard
        if Key.MASKED_PARAMETERS in m.content.config_records[RECORD_KEY_CONFIGS]
    ]
    assert len(uploads) == 3 * NODES
    for upload in uploads:
        assert not any(len(record) for record in upload.content.array_records.values())
        values = np.load(
            BytesIO(upload.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS][1])
        )
        assert len(np.unique(values)) == values.size  # 32 bits of noise each


def test_the_stop_reads_the_masked_figure_and_the_run_resumes(tmp_path):
    """Twice the rounds must bring 40 points: that ends soon. Cut off and resumed, it is the same
    run.

    But for rounding: Flower rounds sums at random, and not by our seed.
    """

    def run(folder, rounds):
        strategy = Masked(
            workflow(),
            per_round=NODES,
            batch=8,
            lr=0.3,
            state=folder,
            stop=MarginalGain(points=40.0),
        )
        return strategy.start(LocalGrid(masked_app(load), NODES), arrays(), rounds)

    whole = run(tmp_path / "whole", 60)
    assert "clients' reports" in whole.stopped or "Predicted gain" in whole.stopped
    assert len(whole.history) < 60
    run(tmp_path / "cut", 2)
    resumed = run(tmp_path / "cut", 4)
    assert [h.t for h in resumed.history] == [1, 2, 3, 4]
    for ours, theirs in zip(whole.history, resumed.history, strict=False):
        assert ours.chosen == theirs.chosen
        assert ours.holdouts[0] == pytest.approx(theirs.holdouts[0], abs=0.1)


def test_who_drops_out_costs_its_share_alone():
    def failing(context):
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("flat battery")
        return load(context)

    result = Masked(workflow(), per_round=NODES, ask_names=False).start(
        LocalGrid(masked_app(failing), NODES), arrays(), 2
    )
    assert [len(h.replied) for h in result.history] == [4, 4]
    assert all(
        "dropped out" in why and "flat battery" in why
        for h in result.history
        for why in h.rejected.values()
    )


def test_positions_may_be_a_range_and_the_log_has_the_metric():
    def ranges(context):
        local = load(context)
        cut = len(local.x) - 8
        return replace(local, train=range(cut), held=list(range(cut, len(local.x))))

    results = [
        Masked(workflow(), per_round=NODES, batch=8).start(
            LocalGrid(masked_app(own), NODES), arrays(), 1
        )
        for own in (load, ranges)
    ]
    assert [len(h.replied) for h in results[1].history] == [NODES]
    first, second = (result.history[0].holdouts[0] for result in results)
    assert first == pytest.approx(second, abs=0.01)  # Flower rounds sums at random
    assert f"accuracy {second:.4f} before the round" in describe_headline(results[1].history[0])
    with pytest.raises(BadInput, match="holds float64 of shape"):
        Local(network(), torch.zeros(3, 4), torch.zeros(3), train=[0.5])


def test_too_few_for_the_protocol_abandon_the_round():
    def failing(context):
        if context.node_config["partition-id"] > 1:
            raise RuntimeError("flat battery")
        return load(context)

    with pytest.raises(UnfinishedRun, match="abandoned 3 times in a row"):
        Masked(workflow(), per_round=NODES, ask_names=False).start(
            LocalGrid(masked_app(failing), NODES), arrays(), 2
        )


class Older(NumPyClient):
    """As Flower's older quick-starts have it; moves every parameter by 0.25."""

    def fit(self, parameters, config):
        return [p + np.float32(0.25) for p in parameters], 10, {}


def test_clients_of_the_older_interface_join_unchanged():
    app = ClientApp(client_fn=lambda context: Older().to_client(), mods=[secaggplus_mod])
    seen = []
    result = Masked(workflow(), per_round=NODES, ask_names=False).start(
        LocalGrid(app, NODES), arrays(), 2, evaluate_fn=lambda t, model: seen.append(t)
    )
    assert seen == [0, 1, 2]
    for name, array in arrays().items():
        assert np.allclose(result.arrays[name].numpy(), array.numpy() + 0.5, atol=1e-3)


def test_nothing_goes_out_unmasked():
    class Own(Masked):
        def configure_train(self, server_round, arrays, config, grid):
            return super().configure_train(server_round, arrays, config, grid)

    with pytest.raises(BadInput, match="use start"):
        Own(workflow(), per_round=NODES).start(LocalGrid(masked_app(load), NODES), arrays(), 1)
    norms = ArrayRecord(nn.BatchNorm1d(4).state_dict())
    with pytest.raises(BadInput, match="num_batches_tracked"):
        Masked(workflow(), per_round=NODES).start(LocalGrid(masked_app(load), NODES), norms, 1)
    with pytest.raises(BadInput, match="private"):
        FLrce(preset="private", psi="50%").start(LocalGrid(masked_app(load), NODES), arrays(), 1)
