"""Devices without torch under our server: numpy clients train logistic regression through rotated
uploads and difference downloads, as torch's clients do.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flrce.core.downlink import HeldPart, encode_model
from flrce.flower import Local, LocalGrid, RecipeStrategy, client_app
from flrce.methods.catalogue import recipes
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.downlink.chain import ChainedDownload
from flrce.methods.downlink.difference import DifferenceDownload
from flrce.methods.downlink.quantised import QuantisedDownload
from flrce.methods.registry import PIECES
from flrce_client.flower import EncodingMod, compressing, introduce

NODES, FEATURES, CLASSES, SAMPLES = 4, 40, 3, 30
LR, ROUNDS = 0.5, 5


def samples(k):
    rng = np.random.default_rng(k)
    x = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return x, (x[:, :CLASSES] + 0.1 * k).argmax(1)


def start():
    return ArrayRecord(
        {
            "weight": Array(np.zeros((CLASSES, FEATURES), np.float32)),
            "bias": Array(np.zeros(CLASSES, np.float32)),
        }
    )


def train_in_numpy(arrays, k):
    """One step of gradient descent over all samples, in float32."""
    x, y = samples(k)
    logits = x @ arrays["weight"].T + arrays["bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    g = p / np.float32(len(y))
    step = np.float32(LR)
    return {
        "weight": arrays["weight"] - step * (g.T @ x).astype(np.float32),
        "bias": arrays["bias"] - step * g.sum(0).astype(np.float32),
    }


def numpy_app(seen, mod=compressing, initial=None):
    app = introduce(ClientApp(mods=[mod]), initial=initial)

    @app.train()
    def train(message, context):
        k, t = int(context.node_config["partition-id"]), message.content["config"]["server-round"]
        arrays = {name: a.numpy() for name, a in message.content["arrays"].items()}
        seen[t, k] = arrays["weight"].tobytes()
        made = train_in_numpy(arrays, k)
        content = {
            "arrays": ArrayRecord({name: Array(value) for name, value in made.items()}),
            "metrics": MetricRecord({"num-examples": SAMPLES, "loss": 1.0}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def torch_app():
    def load(context):
        k = int(context.node_config["partition-id"])
        x, y = samples(k)
        return Local(nn.Linear(FEATURES, CLASSES), torch.from_numpy(x), torch.from_numpy(y))

    return client_app(load)


def recipe(downlink, **more):
    made = recipes.fedavg(P=NODES, epochs=1, batch=SAMPLES, lr=LR)
    return replace(made, compressor=RotatedCode(4), downlink=downlink, **more)


def run(grid, downlink, rounds=ROUNDS, **settings):
    settings = {"fraction_evaluate": 0.0, "min_available_nodes": NODES, **settings}
    strategy = RecipeStrategy(recipe(downlink), **settings)
    return strategy.start(grid, start(), rounds)


DIFFERENCE = DifferenceDownload(RotatedCode(1, "contractive"))


@pytest.mark.parametrize("downlink", [DIFFERENCE, QuantisedDownload()], ids=["difference", "full"])
def test_numpy_clients_train_as_torchs_do(downlink):
    """The same selections and bytes; models to float32's rounding of gradients and scales, which
    four bits of an upload turn into a level's width where a coordinate lies on an edge.
    """
    seen = {}
    ours = run(LocalGrid(numpy_app(seen), NODES), downlink)
    theirs = run(LocalGrid(torch_app(), NODES), downlink)
    for one, other in zip(ours.history, theirs.history, strict=True):
        assert one.chosen == other.chosen
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
        assert not one.rejected
        assert not other.rejected
    whole = 4 * NODES * CLASSES * (FEATURES + 1)
    down = [record.bytes_down for record in ours.history]
    assert down[0] == whole  # the first model is sent as it is
    assert max(down[1:]) < whole / 3
    models = {seen[2, k] for k in range(NODES)}  # a difference has each client's own randomness
    assert len(models) == (NODES if downlink is DIFFERENCE else 1)
    for name in ("weight", "bias"):
        a, b = (result.arrays[name].numpy() for result in (ours, theirs))
        np.testing.assert_allclose(a, b, atol=2e-3)
    assert float(np.abs(ours.arrays["weight"].numpy()).max()) > 0.1  # something was learnt


def test_clients_train_from_the_servers_bits():
    """What the app is given is what the server decoded: the reply's hash of it was accepted, and a
    replay of the server's code gives the same bytes.
    """
    seen = {}
    result = run(LocalGrid(numpy_app(seen), NODES), DIFFERENCE, rounds=2)
    assert [len(record.replied) for record in result.history] == [NODES, NODES]
    first = run(LocalGrid(numpy_app({}), NODES), DIFFERENCE, rounds=1)
    w = np.concatenate([a.numpy().reshape(-1) for a in first.arrays.values()])
    layout = (("weight", CLASSES * FEATURES), ("bias", CLASSES))
    code = PIECES["compressor"]["rotated"](1, "contractive")
    _, model = encode_model(
        torch.from_numpy(w), torch.zeros(len(w)), code, HeldPart(None, layout, len(w)), (0, 2, "3")
    )
    assert seen[2, 3] == model[: CLASSES * FEATURES].numpy().tobytes()


def test_a_device_that_lost_its_model_is_sent_a_whole_one():
    class Forgetful(LocalGrid):
        """Node 1002 loses what it holds before round 3."""

        def push_messages(self, messages):
            messages = list(messages)
            rounds = {m.metadata.group_id for m in messages}
            if "3" in rounds and not self.lost:
                self.lost = True
                for record in list(self.contexts[1002].state):
                    del self.contexts[1002].state[record]
            return super().push_messages(messages)

    grid = Forgetful(numpy_app({}), NODES)
    grid.lost = False
    result = run(grid, DIFFERENCE)
    assert [len(record.replied) for record in result.history] == [4, 4, 3, 4, 4]
    assert "does not hold the model" in result.history[2].rejected["2"]
    down = [record.bytes_down for record in result.history]
    whole = 4 * CLASSES * (FEATURES + 1)
    assert down[3] - down[4] == whole - down[4] // NODES  # one whole model in place of a difference
    assert [record.why["downloads"] for record in result.history][3] == {"difference": 3, "full": 1}


def zeros(context):
    return {name: array.numpy() for name, array in start().items()}


def test_a_device_that_makes_the_initial_model_does_not_download_it():
    seen = {}
    ours = run(LocalGrid(numpy_app(seen, initial=zeros), NODES), DIFFERENCE, rounds=3)
    sent = run(LocalGrid(numpy_app({}), NODES), DIFFERENCE, rounds=3)
    whole = 4 * NODES * CLASSES * (FEATURES + 1)
    assert sent.history[0].bytes_down == whole
    assert ours.history[0].bytes_down == 0  # the difference to the initial model is nothing
    assert seen[1, 0] == bytes(4 * CLASSES * FEATURES)
    for one, other in zip(ours.history[1:], sent.history[1:], strict=True):
        assert (one.bytes_down, one.chosen) == (other.bytes_down, other.chosen)
    for name in ("weight", "bias"):
        assert ours.arrays[name].numpy().tobytes() == sent.arrays[name].numpy().tobytes()


def test_a_first_contact_after_the_first_round_is_a_difference_to_the_initial_model():
    """Two of four train in round 1, so round 2 may meet others for the first time."""
    made = replace(recipe(DIFFERENCE), P=2)
    settings = {"fraction_evaluate": 0.0, "min_available_nodes": NODES}
    grid = LocalGrid(numpy_app({}, initial=zeros), NODES)
    result = RecipeStrategy(made, **settings).start(grid, start(), 6)
    kinds = [record.why["downloads"] for record in result.history]
    assert not any("full" in kind for kind in kinds)
    assert sum(kind.get("first", 0) for kind in kinds) == len(
        {k for record in result.history for k in record.chosen}
    )
    assert not any(record.rejected for record in result.history)


def test_a_chain_travels_as_whole_models_and_is_recorded_as_such():
    result = run(LocalGrid(numpy_app({}, initial=zeros), NODES), ChainedDownload(), rounds=2)
    whole = 4 * NODES * CLASSES * (FEATURES + 1)
    assert [record.bytes_down for record in result.history] == [whole, whole]
    assert [record.why["downloads"] for record in result.history] == [{"full": NODES}] * 2


def test_another_initial_model_is_sent_whole():
    def ones(context):
        return {name: values + 1 for name, values in zeros(context).items()}

    result = run(LocalGrid(numpy_app({}, initial=ones), NODES), DIFFERENCE, rounds=2)
    whole = 4 * NODES * CLASSES * (FEATURES + 1)
    assert result.history[0].bytes_down == whole
    assert not any(record.rejected for record in result.history)


def test_a_device_that_lost_its_initial_model_is_sent_a_whole_one():
    class Forgetful(LocalGrid):
        """Node 1002 loses what it holds before every round."""

        def push_messages(self, messages):
            messages = list(messages)
            if any(m.metadata.message_type == "train" for m in messages):
                for record in list(self.contexts[1002].state):
                    del self.contexts[1002].state[record]
            return super().push_messages(messages)

    result = run(Forgetful(numpy_app({}, initial=zeros), NODES), DIFFERENCE, rounds=3)
    assert [len(record.replied) for record in result.history] == [3, 4, 3]
    assert result.history[1].why["downloads"] == {"difference": 3, "full": 1}


def test_a_restarted_server_goes_on_with_differences(tmp_path):
    grid = LocalGrid(numpy_app({}), NODES)
    whole = run(LocalGrid(numpy_app({}), NODES), DIFFERENCE)
    run(grid, DIFFERENCE, rounds=3, state=tmp_path)
    resumed = run(grid, DIFFERENCE, state=tmp_path)
    assert [r.bytes_down for r in resumed.history] == [r.bytes_down for r in whole.history]
    for name in ("weight", "bias"):
        assert resumed.arrays[name].numpy().tobytes() == whole.arrays[name].numpy().tobytes()


def test_plain_clients_are_sent_whole_models():
    """They do not introduce themselves: no download of theirs is encoded."""
    app = numpy_app({}, mod=lambda message, context, call_next: call_next(message, context))
    result = RecipeStrategy(recipe(DIFFERENCE), fraction_evaluate=0.0).start(
        LocalGrid(app, NODES), start(), 3
    )
    whole = 4 * NODES * CLASSES * (FEATURES + 1)
    assert [record.bytes_down for record in result.history] == [whole] * 3


def test_holdouts_are_judged_before_training_and_costs_are_told():
    judged = []

    def holdout(arrays, context):
        judged.append(float(np.abs(arrays["weight"]).sum()))
        return 0.75, 8

    grid = LocalGrid(numpy_app({}, EncodingMod(holdout)), NODES)
    made = replace(recipe(DIFFERENCE), holdouts=True)
    result = RecipeStrategy(made, fraction_evaluate=0.0).start(grid, start(), 2)
    assert judged[:NODES] == [0.0] * NODES
    assert result.history[1].holdouts == (0.75,) * NODES
    assert result.history[1].held == (8,) * NODES
    assert all(record.seconds > 0 for record in result.history)
