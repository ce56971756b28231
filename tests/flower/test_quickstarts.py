"""Apps in the shape of Flower's own (torch, scikit-learn, numpy, JAX, FedProx, advanced) moved to
ours by two lines.
"""

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
from sklearn.metrics import f1_score, log_loss, recall_score
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
PROX = SERVER.replace("import FedAvg", "import FedProx").replace(
    "FedAvg(", "FedProx(proximal_mu=0.1, "
)
ADVANCED = """
from flwr.serverapp.strategy import FedAvg

class Decaying(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.1 * 0.9 ** (server_round - 1)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        metrics["replies"] = len(replies)
        return arrays, metrics
""" + SERVER.partition("FedAvg\n")[2].replace("FedAvg(", "Decaying(")
CUSTOM = SERVER.replace(
    "min_available_nodes=6", "min_available_nodes=6, evaluate_metrics_aggr_fn=by_samples"
)
MOVES = {
    SERVER: {
        "flwr.serverapp.strategy import FedAvg": "flrce.flower import FLrce",
        "FedAvg(": "FLrce(",
    },
    CUSTOM: {
        "flwr.serverapp.strategy import FedAvg": "flrce.flower import FLrce",
        "FedAvg(": "FLrce(",
    },
    PROX: {
        "flwr.serverapp.strategy import FedProx": "flrce import flower, recipes",
        "FedProx(proximal_mu=0.1, ": "flower.RecipeStrategy(recipes.fedprox(mu=0.1), ",
    },
    ADVANCED: {
        "flwr.serverapp.strategy import FedAvg": "flrce.flower import FLrce",
        "(FedAvg)": "(FLrce)",
    },
}


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


seen: list = []  # what the torch clients were told: (proximal-mu, lr)


def torch_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = map(torch.from_numpy, part(context))
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        pull, start = (
            msg.content["config"].get("proximal-mu", 0.0),
            [p.detach().clone() for p in model.parameters()],
        )
        seen.append((pull, msg.content["config"]["lr"]))
        for i in range(0, len(y), 32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[i : i + 32]), y[i : i + 32])
            far = sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), start, strict=True))
            (loss + pull / 2 * far).backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
            reply_to=msg,
        )

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        x, y = map(torch.from_numpy, part(context))
        right = (model.eval()(x).argmax(1) == y).float().mean().item()
        return Message(
            RecordDict({"metrics": MetricRecord({"eval_acc": right, "num-examples": len(y)})}),
            reply_to=msg,
        )

    return app


def judge_torch(t: int, arrays: ArrayRecord) -> MetricRecord:
    model, (x, y) = net(), samples()
    model.load_state_dict(
        {
            name: value.to(model.state_dict()[name].dtype)
            for name, value in arrays.to_torch_state_dict().items()
        }
    )
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
        metrics = MetricRecord(
            {"train_logloss": log_loss(y, model.predict_proba(x)), "num-examples": len(y)}
        )
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
    return MetricRecord(
        {"accuracy": float(regression(arrays.to_numpy_ndarrays()).score(x[1200:], y[1200:]))}
    )


def zeros() -> ArrayRecord:
    return ArrayRecord([np.zeros((64, 10), np.float32), np.zeros(10, np.float32)])


def scores(arrays: ArrayRecord, x: np.ndarray) -> np.ndarray:
    weights, bias = arrays.to_numpy_ndarrays()
    return x @ np.asarray(weights) + np.asarray(bias)


def linear_app(gradient) -> ClientApp:
    """A linear model whose gradient another library finds."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        x, y = part(context)
        weights, bias = (np.asarray(a) for a in msg.content["arrays"].to_numpy_ndarrays())
        for _ in range(20):
            by_weights, by_bias = gradient(weights, bias, x, y)
            weights, bias = weights - np.float32(0.5) * by_weights, bias - np.float32(0.5) * by_bias
        arrays = ArrayRecord([np.asarray(weights), np.asarray(bias)])
        metrics = MetricRecord(
            {"train_loss": float(np.abs(by_bias).mean()), "num-examples": len(y)}
        )
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = part(context)
        right = float((scores(msg.content["arrays"], x).argmax(1) == y).mean())
        return Message(
            RecordDict({"metrics": MetricRecord({"acc": right, "num-examples": len(y)})}),
            reply_to=msg,
        )

    return app


def numpy_app() -> ClientApp:
    def gradient(weights, bias, x, y):
        logits = x @ weights + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return (x.T @ p / len(y)).astype(np.float32), p.mean(0).astype(np.float32)

    return linear_app(gradient)


def custom_app() -> ClientApp:
    """The same with metrics of its own instead of an accuracy: macro recall and F1, and recall of
    each digit.
    """
    app = numpy_app()

    def evaluate(msg: Message, context: Context) -> Message:
        x, y = part(context)
        found = scores(msg.content["arrays"], x).argmax(1)
        each = recall_score(y, found, average=None, labels=np.arange(10), zero_division=0)
        metrics = {
            "recall": float(each.mean()),
            "f1": float(f1_score(y, found, average="macro")),
            "by-digit": each.tolist(),
            "num-examples": len(y),
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    made = ClientApp()
    made.train()(lambda msg, context: app(msg, context))
    made.evaluate()(evaluate)
    return made


def by_samples(records: list[RecordDict], weighted_by: str) -> MetricRecord:
    """A server's own sum: the worst client's F1 and everybody's recall of a seven, by samples."""
    metrics = [next(iter(record.metric_records.values())) for record in records]
    n = np.array([m[weighted_by] for m in metrics], float)
    sevens = np.array([m["by-digit"][7] for m in metrics])
    return MetricRecord(
        {"worst-f1": min(m["f1"] for m in metrics), "sevens": float(n @ sevens / n.sum())}
    )


def jax_app() -> ClientApp:
    jax = pytest.importorskip("jax", reason="needs JAX; numpy stands for it")
    import jax.numpy as jnp

    def loss(weights, bias, x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ weights + bias), y[:, None], 1).mean()

    return linear_app(jax.grad(loss, (0, 1)))


def judge_linear(t: int, arrays: ArrayRecord) -> MetricRecord:
    x, y = samples()
    return MetricRecord(
        {"accuracy": float((scores(arrays, x[1200:]).argmax(1) == y[1200:]).mean())}
    )


def torch_start() -> ArrayRecord:
    return ArrayRecord(net().state_dict())


APPS = {
    "torch": (SERVER, torch_app, judge_torch, torch_start),
    "fedprox": (PROX, torch_app, judge_torch, torch_start),
    "advanced": (ADVANCED, torch_app, judge_torch, torch_start),
    "sklearn": (
        SERVER,
        sklearn_app,
        judge_sklearn,
        lambda: ArrayRecord([np.zeros((10, 64)), np.zeros(10)]),
    ),
    "numpy": (SERVER, numpy_app, judge_linear, zeros),
    "custom-metrics": (CUSTOM, custom_app, judge_linear, zeros),
    "jax": (SERVER, jax_app, judge_linear, zeros),
}


def moved(source: str) -> str:
    """The same with two lines changed."""
    made = source
    for old, new in MOVES[source].items():
        made = made.replace(old, new)
    assert sum(a != b for a, b in zip(source.splitlines(), made.splitlines(), strict=True)) == 2
    return made


@pytest.mark.parametrize("name", sorted(APPS))
def test_a_flower_app_moves_by_two_lines_and_learns_as_much(name):
    server, client, judge, first = APPS[name]
    results: list = []
    told: list = []
    for source in (server, moved(server)):
        app: ServerApp = ServerApp()
        names = {"app": app, "results": results, "first": first, "judge": judge, "ROUNDS": ROUNDS}
        exec(
            source, {**names, "ConfigRecord": ConfigRecord, "Grid": Grid, "by_samples": by_samples}
        )
        grid = LocalGrid(client(), CLIENTS)
        seen.clear()
        app(grid, next(iter(grid.contexts.values())))
        told.append(sorted(seen))
        grid.close()
    assert told[0] == told[1]  # rates of each round, and FedProx's pull
    theirs, ours = (result.evaluate_metrics_serverapp for result in results)
    assert ours.keys() == theirs.keys() == set(range(ROUNDS + 1))
    assert theirs[ROUNDS]["accuracy"] > 0.6
    assert (
        ours[ROUNDS]["accuracy"] > theirs[ROUNDS]["accuracy"] - 0.05
    )  # other clients train, so not the same figure
    assert ours[ROUNDS]["accuracy"] == judge(ROUNDS, results[1].arrays)["accuracy"]
    for key, value in results[0].train_metrics_clientapp[1].items():
        assert np.isfinite(value)
        assert key in results[1].train_metrics_clientapp[1]
    assert (
        results[1].evaluate_metrics_clientapp.keys() == results[0].evaluate_metrics_clientapp.keys()
    )
    assert [set(m) for m in results[1].evaluate_metrics_clientapp.values()] == [
        set(m) for m in results[0].evaluate_metrics_clientapp.values()
    ]
    # scikit-learn's clients answer in float32 to a float64 model, and Flower turns BatchNorm's
    # counter into float64
    assert {n: a.dtype for n, a in results[1].arrays.items()} == {
        n: a.dtype for n, a in first().items()
    }
