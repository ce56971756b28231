"""Flower's simulation on Ray: one actor a core, FedAvg of flwr.serverapp, evaluation on the server.

Actors live in processes that Ray starts; they read the samples from a map of the file they share.
"""

import os
import tempfile

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1"
)
os.environ.setdefault("FLWR_HOME", tempfile.mkdtemp())

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain import evaluate, train
from torch.utils.data import DataLoader, TensorDataset
from work import BATCH, CHUNK, NOW, Meter, P, Work, options


def client(given) -> ClientApp:
    app = ClientApp()
    folder, seed = str(given.data), given.seed

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work = Work.load(folder, seed, shared=True)
        k = int(context.node_config["partition-id"])
        net = work.net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(net, DataLoader(TensorDataset(*work.tensors(work.train[k])), BATCH, shuffle=True))
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(work.train[k])}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def server(given) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        work = Work.load(given.data, given.seed)
        judges = DataLoader(TensorDataset(*work.tensors(work.held.ravel())), CHUNK)
        net, meters = work.net(), []

        def judge(t: int, arrays: ArrayRecord) -> MetricRecord:
            if t == 0:
                meters.append(Meter())
                return MetricRecord({})
            net.load_state_dict(arrays.to_torch_state_dict())
            accuracy = evaluate(net, judges)
            meters[0].round(accuracy)
            return MetricRecord({"accuracy": accuracy})

        M = len(work.train)
        strategy = FedAvg(
            fraction_train=P / M, fraction_evaluate=0, min_train_nodes=P, min_available_nodes=M
        )
        strategy.start(
            grid, ArrayRecord(net.state_dict()), num_rounds=given.rounds, evaluate_fn=judge
        )

    return app


def main() -> None:
    given = options(__doc__)
    torch.set_num_threads(given.cores)
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # for Ray's workers
    run_simulation(
        server(given),
        client(given),
        NOW.clients,
        backend_config={
            "init_args": {
                "num_cpus": given.cores,
                "include_dashboard": False,
                "logging_level": "error",
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )


if __name__ == "__main__":
    main()
