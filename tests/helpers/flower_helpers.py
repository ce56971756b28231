"""Small real Flower apps for tests: clients in plain numpy that know nothing of flrce, and ones
that misbehave.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

TARGET = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def start() -> ArrayRecord:
    """A model in Flower's usual form: named arrays, one of them an integer counter."""
    return ArrayRecord(
        {
            "layer.weight": Array(np.zeros((4, 3), np.float32)),
            "layer.bias": Array(np.zeros(3, np.float32)),
            "norm.running_mean": Array(np.zeros(3, np.float32)),
            "norm.num_batches_tracked": Array(np.array(7)),
        }
    )


def n_of(context: Context) -> int:
    return 10 + int(context.node_config["partition-id"])


def step(arrays: dict[str, np.ndarray], partition: int, t: int) -> dict[str, np.ndarray]:
    """Half way to a target of the client's own."""
    pull = np.float32(0.1) * np.random.default_rng([partition, t]).standard_normal((4, 3)).astype(
        np.float32
    )
    arrays["layer.weight"] = arrays["layer.weight"] + np.float32(0.5) * (
        TARGET + pull - arrays["layer.weight"]
    )
    arrays["layer.bias"] = arrays["layer.bias"] + np.float32(0.1)
    return arrays


def plain_app(
    spoil=lambda content, partition, t: None,
    calls: list | None = None,
    misjudge=dict,
    train_mods=None,
    **options,
) -> ClientApp:
    """Flower's quick-start shape of client; `spoil` changes a reply before it is sent, `misjudge`
    what it finds.
    """
    app = ClientApp(**options)

    @app.train(mods=train_mods)
    def train(message: Message, context: Context) -> Message:
        partition, t = (
            int(context.node_config["partition-id"]),
            int(message.content["config"]["server-round"]),
        )
        if calls is not None:
            calls.append((t, partition))
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        made = step(dict(arrays), partition, t)
        content = RecordDict(
            {
                "arrays": ArrayRecord(
                    {name: Array(np.asarray(value)) for name, value in made.items()}
                ),
                "metrics": MetricRecord({"train_loss": 1.0 / t, "num-examples": n_of(context)}),
            }
        )
        spoil(content, partition, t)
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        gap = float(np.abs(message.content["arrays"]["layer.weight"].numpy() - TARGET).mean())
        metrics = {"eval_loss": gap, "eval_acc": 1 - min(gap, 1.0), "num-examples": n_of(context)}
        return Message(RecordDict({"metrics": MetricRecord(misjudge(metrics))}), reply_to=message)

    return app


def config(**entries) -> ConfigRecord:
    return ConfigRecord(entries)
