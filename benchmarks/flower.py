"""What our strategy costs a Flower server, as a ratio: rounds of FLrce against Flower's FedAvg on
the same grid.

    python benchmarks/flower.py            # d = 134,902, P = 10, plain clients that all take the same time to train
    python benchmarks/flower.py --memory   # 100 MB model, 10 clients in flight: peak memory of the server's process
    python benchmarks/flower.py --table    # with evaluation: models of 0.5 and 50 MB, 10, 100 and 1,000 nodes
    python benchmarks/flower.py --table --sizes 500 --nodes 4 --per-round 4 --rounds 3 --repeats 1

Both strategies run on a LocalGrid with clients that add noise to the model and wait (--train
seconds, as a device that trains would), and neither evaluates but in --table. Rounds of the two
alternate, so that a busy machine slows both alike; medians are reported with quartiles. The
relationship map does real work each round: a (P, d) x (d, M) product and its rows.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flrce.flower import FLrce, LocalGrid, RecipeStrategy
from flrce.methods.catalogue.recipes import fedavg, flrce
from flrce.version import __version__

CASES = ("fedavg", "flrce", "flrce_committed", "paper", "paper_committed", "paper_sketched")


def model(d: int) -> ArrayRecord:
    """d float32 parameters in four arrays, as a small network has them."""
    parts = [d // 2, d // 4, d // 8]
    sizes = [*parts, d - sum(parts)]
    return ArrayRecord({f"layer{i}": Array(np.zeros(n, np.float32)) for i, n in enumerate(sizes)})


def client(seconds: float) -> ClientApp:
    """Trains for `seconds`, however small the model; its reply is the model plus noise of its
    own.
    """
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
        content = RecordDict(
            {"arrays": ArrayRecord(made), "metrics": MetricRecord({"num-examples": 100})}
        )
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
        grid,
        arrays,
        rounds,
        evaluate_fn=lambda t, _: marks.append((time.perf_counter(), time.process_time())),
    )
    grid.close()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def overhead(d: int, P: int, M: int, rounds: int, repeats: int, train: float, preset: str) -> dict:
    """Rounds of Flower's FedAvg, of FLrce, and of FLrce with every round committed to a folder,
    taking turns.
    """

    def ours(folder: str | None) -> Strategy:
        return FLrce(
            per_round=P,
            preset=preset,
            psi=P - 1,
            fraction_evaluate=0.0,
            ask_names=False,
            min_available_nodes=M,
            state=folder,
        )

    def theirs() -> Strategy:
        return FedAvg(
            fraction_train=P / M, fraction_evaluate=0.0, min_train_nodes=P, min_available_nodes=M
        )

    times: dict[str, list[tuple[float, float]]] = {"fedavg": [], "flrce": [], "flrce_committed": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, made in zip(
                times, (theirs(), ours(None), ours(f"{folder}/run")), strict=True
            ):
                times[name] += timed(made, model(d), M, rounds + 1, train, P)[
                    1:
                ]  # the first round warms up
    wall = {name: quartiles([seconds for seconds, _ in found]) for name, found in times.items()}
    work = {name: quartiles([seconds for _, seconds in found]) for name, found in times.items()}
    base = wall["fedavg"]["median"]
    extra = {
        name: work[name]["median"] - work["fedavg"]["median"] for name in times if name != "fedavg"
    }
    return {
        "d": d,
        "P": P,
        "M": M,
        "train_seconds": train,
        "threads": torch.get_num_threads(),
        "rounds": len(times["flrce"]),
        "ratio": {name: wall[name]["median"] / base for name in extra},
        "extra_seconds": {name: wall[name]["median"] - base for name in extra},
        "extra_processor_seconds": extra,
        "seconds": wall,
        "processor_seconds": work,
    }


def judged(case: str, megabytes: float, nodes: int, P: int, rounds: int) -> dict:
    """Rounds of one strategy with evaluation by all nodes, in this process: seconds, processor
    seconds, peak memory.

    Clients answer at once with what they were sent, the last float changed, and judge without
    looking at the model: what is left is the server's, the grid's, and one copy of the model for
    each client that trains.
    """
    arrays = model(round(megabytes * 250_000))
    shared = {"fraction_train": P / nodes, "min_train_nodes": P, "min_available_nodes": nodes}
    marks: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        if case == "fedavg":
            strategy: Strategy = FedAvg(**shared)
        else:
            state = f"{folder}/run" if case == "flrce_committed" else None
            strategy = FLrce(**shared, state=state)
        grid = LocalGrid(echo(), nodes)
        strategy.start(
            grid,
            arrays,
            rounds + 1,
            evaluate_fn=lambda t, _: marks.append((time.perf_counter(), time.process_time())),
        )
        grid.close()
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)][1:]  # the first round warms up
    return {
        "seconds": [wall for wall, _ in spans],
        "processor": [work for _, work in spans],
        "peak_GB": peak(),
    }


def table(
    sizes: list[float], fleets: list[int], P: int, rounds: int, repeats: int, here: bool
) -> dict:
    """Every strategy in processes of its own, taking turns, so that a busy machine slows all alike.

    With `here` all in this process: then a peak of memory is that of all before it.
    """
    rows = []
    for megabytes in sizes:
        for nodes in fleets:
            found: dict[str, list[dict]] = {"fedavg": [], "flrce": [], "flrce_committed": []}
            for _ in range(repeats):
                for case in found:
                    command = [
                        sys.executable,
                        __file__,
                        "--judged",
                        case,
                        "--sizes",
                        str(megabytes),
                        "--nodes",
                        str(nodes),
                        "--per-round",
                        str(min(P, nodes)),
                        "--rounds",
                        str(rounds),
                    ]
                    if here:
                        found[case].append(judged(case, megabytes, nodes, min(P, nodes), rounds))
                        continue
                    found[case].append(
                        json.loads(
                            subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                        )
                    )
            row: dict = {
                "megabytes": megabytes,
                "nodes": nodes,
                "P": min(P, nodes),
                "rounds": rounds * repeats,
            }
            for case, runs in found.items():
                row[case] = {
                    "seconds": quartiles([x for run in runs for x in run["seconds"]]),
                    "processor_seconds": quartiles([x for run in runs for x in run["processor"]]),
                    "peak_GB": max(run["peak_GB"] for run in runs),
                }
            work = {case: row[case]["processor_seconds"]["median"] for case in found}
            row["ratio"] = {
                case: round(work[case] / work["fedavg"], 2) for case in found if case != "fedavg"
            }
            row["memory_ratio"] = round(row["flrce"]["peak_GB"] / row["fedavg"]["peak_GB"], 2)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return {"table": rows}


def peak() -> float:
    """Most memory that this process ever had, in GB: the server, the grid and the replies it has
    fetched.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024 / 1e9


def echo() -> ClientApp:
    """Answers with a copy of the model's bytes, the last float changed: it holds nothing that is
    not in its reply.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        last = np.float32(1e-3 * context.node_id).tobytes()
        arrays = message.content["arrays"]
        made = ArrayRecord()
        for name in arrays:
            a = arrays[name]
            made[name] = Array(a.dtype, a.shape, a.stype, a.data[:-4] + last)
        return Message(
            RecordDict({"arrays": made, "metrics": MetricRecord({"num-examples": 100})}),
            reply_to=message,
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 100})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Fetched(LocalGrid):
    """Runs a client when its reply is fetched, so that what clients and a SuperLink hold is not
    counted.
    """

    def push_messages(self, messages):
        found = list(messages)
        for at, message in enumerate(found):
            message.metadata.__dict__["_message_id"] = str(self.sent + at)
        self.kept = {message.metadata.message_id: message for message in found}
        self.sent += len(found)
        return list(self.kept)

    def pull_messages(self, message_ids):
        return [self._handle_message(self.kept.pop(key)) for key in message_ids if key in self.kept]


def memory(case: str, megabytes: int, P: int, rounds: int = 3) -> dict:
    """Peak memory over some rounds of one of CASES, with P clients that all train in every
    round.
    """
    before = peak()
    arrays = model(megabytes * 250_000)
    recipe = (
        fedavg(P)
        if case == "fedavg"
        else flrce(P - 1, "paper" if case.startswith("paper") else "default", P=P)
    )
    if case == "paper_sketched":
        recipe = replace(recipe, selector=recipe.selector.with_sketch_size(2**16))
    with tempfile.TemporaryDirectory() as folder:
        state = f"{folder}/run" if case.endswith("_committed") else None
        strategy = RecipeStrategy(recipe, fraction_evaluate=0.0, ask_names=False, state=state)
        result = strategy.start(Fetched(echo(), P), arrays, rounds)
    assert [len(record.replied) for record in result.history] == [P] * rounds
    return {"case": case, "megabytes": megabytes, "P": P, "peak_GB": peak(), "before_GB": before}


def memories(P: int) -> dict:
    """Every case in a process of its own."""
    found = []
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--per-round", str(P)]
        found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    return {"memory": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d", type=int, default=134_902)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", type=float, default=0.5, help="seconds a client trains")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--threads", type=int, default=1, help="of the server's linear algebra")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.5, 50], help="megabytes, with --table"
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[10, 100, 1000], help="with --table"
    )
    parser.add_argument(
        "--here", action="store_true", help="with --table: in one process; no peaks of memory"
    )
    parser.add_argument(
        "--judged", choices=("fedavg", "flrce", "flrce_committed"), help="one of --table, here"
    )
    parser.add_argument("--case", choices=CASES, help="one case of --memory, in this process")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    import logging

    logging.getLogger("flwr").setLevel(logging.WARNING)
    if wanted.case:
        print(json.dumps(memory(wanted.case, 100, wanted.per_round)))
        return
    if wanted.judged:
        found = judged(
            wanted.judged, wanted.sizes[0], wanted.nodes[0], wanted.per_round, wanted.rounds
        )
        print(json.dumps(found))
        return
    if wanted.table:
        found = table(
            wanted.sizes, wanted.nodes, wanted.per_round, wanted.rounds, wanted.repeats, wanted.here
        )
    elif wanted.memory:
        found = memories(wanted.per_round)
    else:
        found = overhead(
            wanted.d,
            wanted.per_round,
            wanted.clients,
            wanted.rounds,
            wanted.repeats,
            wanted.train,
            wanted.preset,
        )
    found["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    found["versions"] = (
        f"flrce {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    )
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
