"""What our strategy costs a Flower server, as a ratio: rounds of FLrce against Flower's FedAvg on the same grid.

    python benchmarks/flower.py            # d = 134,902, P = 10, plain clients that all take the same time to train
    python benchmarks/flower.py --memory   # 100 MB model, 10 clients in flight: peak memory of the server's process

Both strategies run on a LocalGrid with clients that add noise to the model and wait (--train seconds, as a device that
trains would), and neither evaluates. Rounds of the two alternate, so that a busy machine slows both alike; medians are
reported with quartiles. The relationship map does real work each round: a (P, d) x (d, M) product and its rows.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from itertools import pairwise

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flrce.flower import FLrce, LocalGrid, RecipeStrategy
from flrce.recipes import fedavg
from flrce.version import __version__


def model(d: int) -> ArrayRecord:
    """d float32 parameters in four arrays, as a small network has them."""
    parts = [d // 2, d // 4, d // 8]
    sizes = [*parts, d - sum(parts)]
    return ArrayRecord({f"layer{i}": Array(np.zeros(n, np.float32)) for i, n in enumerate(sizes)})


def client(seconds: float) -> ClientApp:
    """Trains for `seconds`, however small the model; its reply is the model plus noise of its own."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        start = time.perf_counter()
        rng = np.random.default_rng(context.node_id)
        noise = rng.standard_normal(4096, np.float32) * np.float32(1e-3)
        made = {}
        for name, array in message.content["arrays"].items():
            value = array.numpy()
            made[name] = Array(value + np.resize(noise, value.shape))
        content = RecordDict({"arrays": ArrayRecord(made), "metrics": MetricRecord({"num-examples": 100})})
        time.sleep(max(seconds - (time.perf_counter() - start), 0))
        return Message(content, reply_to=message)

    return app


def timed(
    strategy: Strategy, arrays: ArrayRecord, nodes: int, rounds: int, train: float, threads: int
) -> list[tuple[float, float]]:
    """(seconds, processor seconds) of each round."""
    grid = LocalGrid(client(train), nodes, threads=threads)
    marks: list[tuple[float, float]] = []
    strategy.start(
        grid, arrays, rounds, evaluate_fn=lambda t, _: marks.append((time.perf_counter(), time.process_time()))
    )
    grid.close()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def overhead(d: int, P: int, M: int, rounds: int, repeats: int, train: float) -> dict:
    def ours() -> Strategy:
        return FLrce(per_round=P, psi=P - 1, fraction_evaluate=0.0, ask_names=False, min_available_nodes=M)

    def theirs() -> Strategy:
        return FedAvg(fraction_train=P / M, fraction_evaluate=0.0, min_train_nodes=P, min_available_nodes=M)

    times: dict[str, list[tuple[float, float]]] = {"flrce": [], "fedavg": []}
    for _ in range(repeats):
        for name, make in (("fedavg", theirs), ("flrce", ours)):
            times[name] += timed(make(), model(d), M, rounds + 1, train, P)[1:]  # the first round warms up
    wall = {name: quartiles([seconds for seconds, _ in found]) for name, found in times.items()}
    work = {name: quartiles([seconds for _, seconds in found]) for name, found in times.items()}
    extra = work["flrce"]["median"] - work["fedavg"]["median"]
    return {
        "d": d, "P": P, "M": M, "train_seconds": train, "rounds": len(times["flrce"]),
        "ratio": wall["flrce"]["median"] / wall["fedavg"]["median"],
        "ratio_by_processor_time": 1 + extra / wall["fedavg"]["median"],  # what is left of it on an idle machine
        "extra_processor_seconds": extra, "seconds": wall, "processor_seconds": work,
    }  # fmt: skip


def peak() -> float:
    """Peak memory of this process in GB: the server, the grid and the clients' replies."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def echo() -> ClientApp:
    """Answers with a copy of the model's bytes, the last float changed: it holds nothing that is not in its reply."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        last = np.float32(1e-3 * context.node_id).tobytes()
        arrays = message.content["arrays"]
        made = ArrayRecord()
        for name in arrays:
            a = arrays[name]
            made[name] = Array(a.dtype, a.shape, a.stype, a.data[:-4] + last)
        return Message(RecordDict({"arrays": made, "metrics": MetricRecord({"num-examples": 100})}), reply_to=message)

    return app


class Fetched(LocalGrid):
    """Runs a client when its reply is fetched, so that what clients and a SuperLink hold is not counted."""

    def push_messages(self, messages):
        found = list(messages)
        for at, message in enumerate(found):
            message.metadata.__dict__["_message_id"] = str(self.sent + at)
        self.kept = {message.metadata.message_id: message for message in found}
        self.sent += len(found)
        return list(self.kept)

    def pull_messages(self, message_ids):
        return [self._handle(self.kept.pop(key)) for key in message_ids if key in self.kept]


def memory(megabytes: int, P: int, recipe: str) -> dict:
    before = peak()
    arrays = model(megabytes * 250_000)
    keep = {"fraction_evaluate": 0.0, "ask_names": False}
    strategy = FLrce(per_round=P, psi=P - 1, **keep) if recipe == "flrce" else RecipeStrategy(fedavg(P), **keep)
    grid = Fetched(echo(), P)
    strategy.start(grid, arrays, 2)
    return {"megabytes": megabytes, "P": P, "recipe": recipe, "peak_GB": peak(), "before_GB": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=134_902)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", type=float, default=0.5, help="seconds a client trains")
    parser.add_argument("--memory", choices=["fedavg", "flrce"], nargs="?", const="fedavg")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    import logging

    logging.getLogger("flwr").setLevel(logging.WARNING)
    if wanted.memory:
        found = memory(100, wanted.per_round, wanted.memory)
    else:
        found = overhead(wanted.d, wanted.per_round, wanted.clients, wanted.rounds, wanted.repeats, wanted.train)
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    found["versions"] = f"flrce {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
