"""Whole rounds on one GPU, and the kernels inside them: milliseconds a round and start-up time.

    PYTHONPATH=src python3 benchmarks/h200_rounds.py [--profile] [--quick] [--rows mlp,cnn]

M = 100 clients, P = 10 a round. Each row has processes of its own, with a time limit, so that one
failure does not end the others:

  first    empty caches: start-up (from the call of flrce.rounds to the end of round 1, less a usual
           round), rounds of fedavg and of the default recipe, a plain FedAvg loop, client steps of
           the kernels alone, and the distance of the batched clients from the torch trainer,
           without dropout, which each of them draws in its own way
  second   the caches of the first process: start-up again

Writes rounds.json, rounds.md and, with --profile, profile-ROW.txt to $OUT or benchmarks/results.
Random samples: speed does not depend on them. Imports and the start of CUDA are not counted.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from h200_networks import undropped
from others import ViT
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.config.experiment import Experiment
from flrce.core.types import Task
from flrce.data.sources import Source
from flrce.models.flat import pack_model
from flrce.models.nets import build_network
from flrce.models.resnet import ResNet
from flrce.models.sequences import RecurrentNetwork
from flrce.simulation.build import Simulation, build_simulation
from flrce.simulation.run_slot import DeviceSchedulers

HERE = Path(__file__).resolve().parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, PER_ROUND, TOKENS, LENGTH = 100, 10, 80, 80
MEASURED_ROUNDS, WARMUP_ROUNDS, PLAIN_ROUNDS, KERNEL_CALLS = 10, 3, 3, 5
CHECKED_STEPS = 2
QUICK = False
EVALUATION_BATCH = 250  # samples at once in the plain loop's evaluation


class UNet(nn.Module):
    """Two levels down and up, BatchNorm after each convolution; (N, 3, 32, 32) -> (N, 1024)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.middle = _block(3, width), _block(width, 2 * width)
        self.deepest = _block(2 * width, 4 * width)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join1 = _block(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.head = _block(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.middle(F.max_pool2d(a, 2))
        y = self.deepest(F.max_pool2d(b, 2))
        y = self.join1(torch.cat([b, self.up1(y)], 1))
        y = self.join2(torch.cat([a, self.up2(y)], 1))
        return self.head(y).flatten(1)


def _block(before: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (before, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Row:
    """A network and its work: samples of a client (a fifth held out), batch and epochs."""

    title: str
    make: Callable[[], nn.Module]
    samples: int = 160
    batch: int = 32
    epochs: int = 1
    kind: str = "images"  # or "tokens", "maps"


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


def make_cnn() -> nn.Module:
    return build_network("cnn-cifar", (3, 32, 32), 10, seed=0)


ROWS = {
    "cnn": Row("paper's CNN, B = 128, E = 5", make_cnn, 500, 128, 5),
    "resnet8": Row("ResNet-8, GroupNorm", partial(ResNet, 3, 10)),
    "unet": Row("U-Net, BatchNorm", UNet, kind="maps"),
    "vit": Row("ViT, 4 layers of 96", ViT),
    "gru": Row(
        "GRU 2 x 192",
        partial(RecurrentNetwork, TOKENS, TOKENS, cell="gru", width=192),
        kind="tokens",
    ),
    "mlp": Row("MLP 3072-200-10", make_mlp),
}


def make_source(row: Row) -> Source:
    rng = np.random.default_rng(0)
    N = CLIENTS * (10 if QUICK else row.samples)
    if row.kind == "tokens":
        x, y = rng.integers(0, TOKENS, (N, LENGTH)), rng.integers(0, TOKENS, N)
        return Source("random", x, y, tuple(map(str, range(TOKENS))))
    x = rng.integers(0, 256, (N, 3, 32, 32), dtype=np.uint8)
    scaling = {"scale": 1 / 64, "shift": -2.0}
    if row.kind == "maps":
        values = rng.standard_normal((N, 1024), dtype=np.float32)
        return Source("random", x, values, (), kind="values", **scaling)
    classes = tuple(map(str, range(10)))
    return Source("random", x, rng.integers(0, 10, N), classes, **scaling)


def make_net(row: Row) -> nn.Module:
    torch.manual_seed(0)
    return row.make()


def make_experiment(row: Row, recipe: str, rounds: int) -> Experiment:
    return Experiment.from_tables(
        {
            "rounds": rounds,
            "clients": CLIENTS,
            "per_round": PER_ROUND,
            "data": {"partition": "iid", "holdout": 0.2},
            "train": {"batch": row.batch, "epochs": row.epochs, "lr": 0.01},
            "recipe": {"name": recipe},
            "engine": {"device": DEVICE},
        }
    )


def build(
    row: Row, source: Source, experiment: Experiment, net: nn.Module | None = None
) -> Simulation:
    """The experiment with client batches, on the CPU too."""
    net = make_net(row) if net is None else net
    return build_simulation(experiment, source, net, DeviceSchedulers(DEVICE, single=True))


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call; one call before them warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - begin)
    return seconds


def iterate_seconds(row: Row, source: Source, recipe: str, rounds: int) -> Iterator[float]:
    """Seconds of each round; those of the first include the build of the simulation."""
    # 1,000: the bits of a long run; the stop rule reads no round here
    experiment = make_experiment(row, recipe, 1000)
    wait()
    begin = time.perf_counter()
    built = build(row, source, experiment)
    with closing(built.engine):
        for done in built.iterate_rounds(experiment):
            wait()
            yield time.perf_counter() - begin
            if done.record.t >= rounds:
                return
            begin = time.perf_counter()


def measure_rounds(row: Row, source: Source, recipe: str) -> dict[str, Any]:
    seconds = list(iterate_seconds(row, source, recipe, WARMUP_ROUNDS + MEASURED_ROUNDS))
    usual = sorted(seconds[WARMUP_ROUNDS:])
    return {
        "ms": 1e3 * statistics.median(usual),
        "least": 1e3 * usual[0],
        "most": 1e3 * usual[-1],
        "startup_s": seconds[0] - statistics.median(usual),
        "first_rounds_ms": [1e3 * s for s in seconds[:WARMUP_ROUNDS]],
    }


class PlainLoop:
    """FedAvg as one writes it by hand: torch's layers and SGD on the GPU, client by client."""

    def __init__(self, row: Row, built: Simulation) -> None:
        runner, federation = built.engine.runner, built.federation
        self.row, self.federation, self.objective = row, federation, runner.objective
        self.x, self.y = runner.x.to(DEVICE), runner.y.to(DEVICE)
        self.scale, self.shift = runner.scale, runner.shift
        self.net = make_net(row).to(DEVICE)
        self.rng = np.random.default_rng(1)

    def gather(self, index: Tensor) -> Tensor:
        x = self.x[index]
        return x if self.row.kind == "tokens" else x.float() * self.scale + self.shift

    def train_client(self, samples: np.ndarray) -> int:
        """Every epoch of one client; the number of steps."""
        optimizer, steps = torch.optim.SGD(self.net.parameters(), lr=0.01), 0
        for _ in range(self.row.epochs):
            order = torch.from_numpy(self.rng.permutation(samples)).to(DEVICE)
            for index in order.split(self.row.batch):
                optimizer.zero_grad()
                out = self.net(self.gather(index))
                self.objective.losses(out, self.y[index]).mean().backward()
                optimizer.step()
                steps += 1
        return steps

    def train_clients(self) -> int:
        """P clients, and the mean of their models."""
        start = {name: value.clone() for name, value in self.net.state_dict().items()}
        chosen = self.rng.permutation(CLIENTS)[:PER_ROUND]
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        steps = 0
        self.net.train()
        for client in chosen:
            self.net.load_state_dict(start)
            steps += self.train_client(self.federation.train[client])
            for name, value in self.net.state_dict().items():
                total[name] += value / PER_ROUND if value.is_floating_point() else 0
        self.net.load_state_dict(total)
        return steps

    @torch.no_grad()
    def evaluate(self) -> float:
        index = torch.from_numpy(self.federation.holdout_index[0]).to(DEVICE)
        self.net.eval()
        total = 0.0
        for part in index.split(EVALUATION_BATCH):
            total += float(self.objective.losses(self.net(self.gather(part)), self.y[part]).sum())
        return total / len(index)

    def run_round(self) -> float:
        self.train_clients()
        return self.evaluate()


def measure_kernels(row: Row, built: Simulation, plain: PlainLoop) -> dict[str, Any]:
    """Microseconds of a client step: batched clients, and the plain loop's training alone."""
    slot: Any = built.engine.workers
    trainer = slot.scheduler.get_batch_trainer(slot.runner.all)
    if isinstance(trainer, str):
        return {"error": trainer}
    rng = np.random.default_rng(2)
    chosen = rng.permutation(CLIENTS)[:PER_ROUND]
    orders, sizes = [], []
    for client in chosen:
        samples = built.federation.train[client]
        orders.append(np.concatenate([rng.permutation(samples) for _ in range(row.epochs)]))
        each = [len(part) for part in np.split(samples, range(row.batch, len(samples), row.batch))]
        sizes.append(np.array(each * row.epochs))
    steps = sum(map(len, sizes))
    w = pack_model(built.net, slot.runner.layout).to(DEVICE).repeat(PER_ROUND, 1)
    call = partial(trainer.train, w, orders, sizes, 0.01)
    us = 1e6 * statistics.median(measure(call, KERNEL_CALLS)) / steps
    times = {trainer.default_variant.value: us}
    count = plain.train_clients()
    loop = 1e6 * statistics.median(measure(plain.train_clients, PLAIN_ROUNDS)) / count
    return {"us": times, "plain_us": loop, "steps": steps}


def check_row(row: Row, source: Source) -> dict[str, Any]:
    """Distance of batched clients' updates of two steps from the torch trainer's, relative to their
    norm. Nothing is dropped: client batches and torch draw dropout from different generators, so
    that two correct updates are unrelated where it is active.
    """
    built = build(row, source, make_experiment(row, "fedavg", 1000), undropped(make_net(row)))
    with closing(built.engine):
        return {"distance": measure_distance(row, built)}


def measure_distance(row: Row, built: Simulation) -> float:
    """The largest distance of three clients."""
    slot: Any = built.engine.workers
    recipe = built.recipe
    w = pack_model(built.net, slot.runner.layout)
    orders = []
    for k in range(3):
        client = built.federation.clients[k]
        task = Task(client, k, 1, 0, recipe.work, update=recipe.chain, compressor=recipe.compressor)
        orders.append((w, task, built.federation.train[k][: CHECKED_STEPS * row.batch], {}))
    replies = slot.train(orders)
    tasks = [slot.runner.prepare_task(*order) for order in orders]
    worst = 0.0
    for task, reply in zip(tasks, replies, strict=True):
        alone = slot.scheduler.train_and_reply(task, {}).payload.buffers["u"].cpu()
        batched = reply.payload.buffers["u"].cpu()
        worst = max(worst, float((batched - alone).norm() / alone.norm()))
    return worst


def profile_row(row: Row, source: Source, out: Path, name: str) -> None:
    """The functions and kernels that take the time of a round, for both recipes."""
    text = io.StringIO()
    for recipe in ("fedavg", "frugal"):
        experiment = make_experiment(row, recipe, 1000)
        built = build(row, source, experiment)
        with closing(built.engine):
            rounds = built.iterate_rounds(experiment)
            for _ in range(WARMUP_ROUNDS):
                next(rounds)
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(5):
                next(rounds)
            profiler.disable()
            for order in ("tottime", "cumulative"):
                print(f"==== {name}, {recipe}, 5 rounds by {order}", file=text)
                pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(40)
            if DEVICE == "cuda":
                with torch.profiler.profile() as kernels:
                    next(rounds)
                    wait()
                table = kernels.key_averages()
                for key in ("self_cuda_time_total", "self_cpu_time_total"):
                    print(f"==== {name}, {recipe}, one round by {key}", file=text)
                    print(table.table(sort_by=key, row_limit=30), file=text)
            rounds.close()
    (out / f"profile-{name}.txt").write_text(text.getvalue())


def run_row(name: str, part: str, out: Path, profile: bool) -> None:
    """One process' share of a row; prints one line of JSON."""
    row, source = ROWS[name], make_source(ROWS[name])
    if DEVICE == "cuda":
        torch.zeros(8, device=DEVICE).add_(1)  # starts CUDA
        torch.randn(64, 64, device=DEVICE) @ torch.randn(64, 64, device=DEVICE)
    wait()
    report: dict[str, Any] = {}
    if part == "second":
        seconds = list(iterate_seconds(row, source, "fedavg", 4))
        report["startup_s"] = seconds[0] - statistics.median(seconds[2:])
        print(json.dumps(report), flush=True)
        return
    for recipe in ("fedavg", "frugal"):
        attempt(report, recipe, partial(measure_rounds, row, source, recipe))
        print(json.dumps(report), flush=True)
    experiment = make_experiment(row, "fedavg", 1000)
    built = build(row, source, experiment)
    with closing(built.engine):
        next(rounds := built.iterate_rounds(experiment))
        plain = PlainLoop(row, built)
        attempt(report, "plain_ms", lambda: 1e3 * min(measure(plain.run_round, PLAIN_ROUNDS)))
        attempt(report, "kernels", partial(measure_kernels, row, built, plain))
        attempt(report, "check", partial(check_row, row, source))
        rounds.close()
    print(json.dumps(report), flush=True)
    if profile:
        attempt(report, "profile", partial(profile_row, row, source, out, name))
    print(json.dumps(report), flush=True)


def attempt(report: dict[str, Any], key: str, call: Callable[[], Any]) -> None:
    """Keep what a part of the measurement returns, or why it failed."""
    try:
        report[key] = call()
    except Exception as why:
        report[key] = {"error": f"{type(why).__name__}: {why}"[:300]}
        traceback.print_exc()


def start_process(name: str, part: str, args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """The last line of JSON that the process printed before its end or its time limit."""
    command = [sys.executable, __file__, "--rows", name, "--part", part, "--out", str(args.out)]
    command += ["--profile"] * args.profile + ["--quick"] * args.quick
    env = {
        **os.environ,
        "FLRCE_CACHE": str(cache / "flrce"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    log = args.out / f"log-{name}-{part}.txt" if args.profile else cache / "log"
    with open(log, "w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )
        try:
            text, _ = process.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    report = json.loads(lines[-1]) if lines else {}
    if process.returncode:
        last = log.read_text().strip().splitlines()[-3:]
        report["failed"] = f"exit code {process.returncode}: {' / '.join(last)}"[:400]
    return report


def format_table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['device']}, torch {report['torch']}. Milliseconds a round, M = {CLIENTS}, P ="
        f" {PER_ROUND}, median of {MEASURED_ROUNDS} rounds; hold-outs of all clients are evaluated"
        " in every round. Share: of the kernels' ratio. Distance: of batched clients' updates of two"
        " steps from the torch trainer's, relative to their norm, worst of three clients, without"
        " dropout; 1e-5 to 1e-3 where a ReLU or max-pool decides the other way in float32.",
        "",
        "| network | plain loop | `fedavg` | share | `frugal` | share | over fedavg | start-up cold"
        " | warm | kernel us | plain us | ratio | variant | distance |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in report["rows"].items():
        lines.append("| " + " | ".join(format_row(name, found)) + " |")
    return "\n".join(lines) + "\n"


def read(found: dict[str, Any], *keys: str) -> float:
    """A number of a report; NaN where that part failed."""
    value: Any = found
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else float("nan")


def format_row(name: str, found: dict[str, Any]) -> list[str]:
    plain, fedavg, frugal = (
        read(found, "plain_ms"),
        read(found, "fedavg", "ms"),
        read(found, "frugal", "ms"),
    )
    kernels = found.get("kernels") or {}
    variants = kernels.get("us") or {}
    variant = min(variants, key=lambda v: variants[v], default="-")
    us = variants.get(variant, float("nan"))
    ratio = read(found, "kernels", "plain_us") / us
    return [
        ROWS[name].title,
        f"{plain:.0f}",
        f"{fedavg:.1f} ({plain / fedavg:.1f}x)",
        f"{plain / fedavg / ratio:.0%}" if ratio == ratio else "-",
        f"{frugal:.1f} ({plain / frugal:.1f}x)",
        f"{plain / frugal / ratio:.0%}" if ratio == ratio else "-",
        f"{frugal / fedavg:.2f}",
        f"{read(found, 'fedavg', 'startup_s'):.1f} s",
        f"{read(found, 'startup_warm_s'):.1f} s",
        f"{us:.1f}",
        f"{read(found, 'kernels', 'plain_us'):.0f}",
        f"{ratio:.1f}",
        variant,
        f"{read(found, 'check', 'distance'):.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--profile", action="store_true", help="profiles of a round, and logs")
    parser.add_argument("--quick", action="store_true", help="few samples: see that it runs")
    parser.add_argument("--limit", type=float, default=60, help="seconds of one process")
    parser.add_argument("--total", type=float, default=1e9, help="seconds; later rows are left out")
    parser.add_argument("--skip-warm", action="store_true", help="no second process")
    parser.add_argument("--part", choices=("first", "second"), help="one process; used inside")
    default = os.environ.get("OUT", str(HERE / "results"))
    parser.add_argument("--out", type=Path, default=Path(default))
    args = parser.parse_args()
    if args.quick:
        global MEASURED_ROUNDS, WARMUP_ROUNDS, CLIENTS, QUICK
        MEASURED_ROUNDS, WARMUP_ROUNDS, CLIENTS, QUICK = 2, 1, 20, True
    if args.part:
        run_row(args.rows, args.part, args.out, args.profile)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    about = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    report: dict[str, Any] = {"device": about, "torch": torch.__version__, "rows": {}}
    started = time.perf_counter()
    for name in args.rows.split(","):
        begin = time.perf_counter()
        args.limit = min(args.limit, args.total - (begin - started))
        if args.limit < 15:
            print(f"{name}: no time is left", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = start_process(name, "first", args, Path(folder))
            again = {} if args.skip_warm else start_process(name, "second", args, Path(folder))
        found["startup_warm_s"] = again.get("startup_s")
        found["seconds"] = time.perf_counter() - begin
        report["rows"][name] = found
        (args.out / "rounds.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "rounds.md").write_text(format_table(report))
        print(" | ".join(format_row(name, found)), f"({found['seconds']:.0f} s)", flush=True)
        if "failed" in found:
            print(found["failed"], flush=True)
    print(format_table(report))


if __name__ == "__main__":
    main()
