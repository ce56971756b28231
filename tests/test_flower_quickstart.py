"""Apps in the shape of Flower's quick starts (torch, scikit-learn), on digits, moved to ours by two lines."""

import warnings
from functools import lru_cache

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from torch import nn

from flrce.flower import LocalGrid

CLIENTS, ROUNDS = 6, 6
SERVER = """
from flwr.serverapp.strategy import FedAvg

@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=0.5, min_available_nodes=6)
    results.append(strategy.start(
        grid=grid, initial_arrays=first(), train_config=ConfigRecord({"lr": 0.1}), num_rounds=ROUNDS,
        evaluate_fn=judge,
    ))
"""


@lru_cache
def samples() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y


def part(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Every sixth sample; the last third of all is the server's."""
    x, y = samples()
    mine = slice(int(context.node_config["partition-id"]), 1200, CLIENTS)
    return x[mine], y[mine]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def torch_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = map(torch.from_numpy, part(context))
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        for i in range(0, len(y), 32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[i : i + 32]), y[i : i + 32])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = map(torch.from_numpy, part(context))
        right = (model.eval()(x).argmax(1) == y).float().mean().item()
        return Message(RecordDict({"metrics": MetricRecord({"eval_acc": right, "num-examples": len(y)})}), reply_to=msg)

    return app


def judge_torch(t: int, arrays: ArrayRecord) -> MetricRecord:
    model, (x, y) = net(), samples()
    model.load_state_dict({name: value.to(model.state_dict()[name].dtype) for name, value in
                           arrays.to_torch_state_dict().items()})  # fmt: skip
    found = model.eval()(torch.from_numpy(x[1200:])).argmax(1).numpy()
    return MetricRecord({"accuracy": float((found == y[1200:]).mean())})


def regression(arrays: list[np.ndarray]) -> LogisticRegression:
    model = LogisticRegression(max_iter=2, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = arrays
    return model


def sklearn_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = regression(msg.content["arrays"].to_numpy_ndarrays()), part(context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x, y)
        metrics = MetricRecord({"train_logloss": log_loss(y, model.predict_proba(x)), "num-examples": len(y)})
        arrays = ArrayRecord([model.coef_, model.intercept_])
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model, (x, y) = regression(msg.content["arrays"].to_numpy_ndarrays()), part(context)
        metrics = {"test_logloss": log_loss(y, model.predict_proba(x)), "num-examples": len(y)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def judge_sklearn(t: int, arrays: ArrayRecord) -> MetricRecord:
    x, y = samples()
    return MetricRecord({"accuracy": float(regression(arrays.to_numpy_ndarrays()).score(x[1200:], y[1200:]))})


APPS = {
    "torch": (torch_app, judge_torch, lambda: ArrayRecord(net().state_dict())),
    "sklearn": (sklearn_app, judge_sklearn, lambda: ArrayRecord([np.zeros((10, 64)), np.zeros(10)])),
}


@pytest.mark.parametrize("name", sorted(APPS))
def test_a_quick_start_moves_by_two_lines_and_learns_as_much(name):
    client, judge, first = APPS[name]
    moved = SERVER.replace("from flwr.serverapp.strategy import FedAvg", "from flrce.flower import FLrce").replace(
        "FedAvg(", "FLrce("
    )
    results: list = []
    for source in (SERVER, moved):
        app: ServerApp = ServerApp()
        names = {"app": app, "results": results, "first": first, "judge": judge, "ROUNDS": ROUNDS}
        exec(source, {**names, "ConfigRecord": ConfigRecord, "Grid": Grid})
        grid = LocalGrid(client(), CLIENTS)
        app(grid, next(iter(grid.contexts.values())))
        grid.close()
    theirs, ours = (result.evaluate_metrics_serverapp for result in results)
    assert ours.keys() == theirs.keys() == set(range(ROUNDS + 1))
    assert theirs[ROUNDS]["accuracy"] > 0.6
    assert ours[ROUNDS]["accuracy"] > theirs[ROUNDS]["accuracy"] - 0.05  # other clients train, so not the same figure
    assert ours[ROUNDS]["accuracy"] == judge(ROUNDS, results[1].arrays)["accuracy"]
    for key, value in results[0].train_metrics_clientapp[1].items():
        assert np.isfinite(value)
        assert key in results[1].train_metrics_clientapp[1]
    assert results[1].evaluate_metrics_clientapp.keys() == results[0].evaluate_metrics_clientapp.keys()
    # scikit-learn's clients answer in float32 to a float64 model, and Flower turns BatchNorm's counter into float64
    assert {n: a.dtype for n, a in results[1].arrays.items()} == {n: a.dtype for n, a in first().items()}
