"""What codes cost and save: CPU time against local training, and bits of real updates.

    PYTHONPATH=src python benchmarks/codes.py time [--repeats 7] [--json FILE] [--only NAME]
    PYTHONPATH=src python benchmarks/codes.py bits [--npz FILE --net cnn-cifar] [--rounds 6]

`time`: CPU seconds of one thread for a client's round (500 samples, batches of 64, 5 epochs, the
fastest trainer of this machine) and for encoding and decoding its update, in turn; medians.
`bits`: bits per float and relative squared error of each code, on the updates of a few rounds of
FedAvg (20 clients, Dirichlet(0.1), 5 epochs); the digits, or arrays x (uint8) and y of a file.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.pieces import NoCompression
from flrce.core.types import LocalWork, Task
from flrce.data.sources import read_digits
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.rotated import RotatedCode
from flrce.methods.compression.sparsify import TopK
from flrce.methods.compression.ternary import SparseTernary
from flrce.models.flat import pack_model
from flrce.models.nets import build_network
from flrce.rng import make_stream
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.objectives import NextToken
from flrce.training.optimizers import SGD
from flrce.training.update_chain import UpdateChain

CODES: list[Any] = [
    RotatedCode(0.25, "contractive"),
    RotatedCode(1),
    RotatedCode(2),
    RotatedCode(4),
    EntropyCoded(RotatedCode(1)),
    EntropyCoded(RotatedCode(2)),
    SparseTernary(0.01),
    TopK(0.01, "indices", bits=4),
    EntropyCoded(TopK(0.01, "indices", bits=4)),
    EntropyCoded(TopK(0.01, "indices")),
    Quantizer(4),
    EntropyCoded(Quantizer(4)),
    EntropyCoded(Quantizer(2)),
    EntropyCoded(FixedPointCode(1)),
]
LIMIT_PERCENT = 5.0  # of local training, which encoding and decoding together may take
SAMPLES, BATCH, EPOCHS = 500, 64, 5


def make_runner(name: str) -> ClientRunner:
    """A client's trainer on random samples."""
    rng = torch.Generator().manual_seed(0)
    if name == "gpt":
        shape: tuple[int, ...] = (80,)
        net = build_network("gpt", shape, 80, 0, vocabulary=80, every=True)
        x = torch.randint(0, 80, (SAMPLES, 80), generator=rng)
        y = torch.randint(0, 80, (SAMPLES, 80), generator=rng)
        return ClientRunner(net, shape, Samples(x, y), True, NextToken())
    shape = (3, 32, 32)
    x = torch.randint(0, 256, (SAMPLES, *shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, (SAMPLES,), generator=rng)
    net = build_network(name, shape, 10, 0)
    return ClientRunner(net, shape, Samples(x, y, 1 / 255), True)


def make_task(client: str, t: int, lr: float) -> Task:
    chain = UpdateChain((SGD(lr),))
    work = LocalWork(EPOCHS, BATCH)
    return Task(client, 0, t, 0, work, update=chain, compressor=NoCompression(), rounds=1)


def measure_time(repeats: int, only: str = "") -> dict[str, Any]:
    """CPU seconds of training, and of each code in per cent of it, by network."""
    found: dict[str, Any] = {}
    for name in [only] if only else ["cnn-cifar", "resnet-8", "gpt"]:
        runner = make_runner(name)
        w, layout = pack_model(runner.net).clone(), runner.all.names
        task = make_task("a", 1, 0.01)
        u = train_update(runner, w, task, np.arange(SAMPLES))
        spent: dict[str, list[float]] = {}
        for _ in range(repeats + 1):
            began = time.process_time()
            train_update(runner, w, task, np.arange(SAMPLES))
            spent.setdefault("training", []).append(time.process_time() - began)
            for code in CODES:
                began = time.process_time()
                payload, _ = code.encode(u, layout, make_stream(0, "encode"), {})
                code.decode(payload, layout, make_stream(0, "encode"))
                spent.setdefault(repr(code), []).append(time.process_time() - began)
        training = median(spent.pop("training")[1:])
        print(f"{name}: {len(u)} floats, training {training:.3f} CPU s")
        shares = {label: 100 * median(times[1:]) / training for label, times in spent.items()}
        found[name] = {"floats": len(u), "training": training, "percent": shares}
        for label, share in shares.items():
            over = "" if share <= LIMIT_PERCENT else ", above the limit"
            print(f"  {label}: {10 * share * training:.1f} ms, {share:.2f} %{over}")
    return found


def write_results(path: Path, shares: dict[str, Any]) -> None:
    """The shares with the machine and the command that they were measured by."""
    machine = {"processor": name_processor(), "torch": torch.__version__, "threads": 1}
    command = f"PYTHONPATH=src OMP_NUM_THREADS=1 python {' '.join(sys.argv)}"
    record = {"machine": machine, "command": command, "networks": shares}
    path.write_text(json.dumps(record, indent=1) + "\n")


def name_processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def train_update(runner: ClientRunner, w: Tensor, task: Task, index: NDArray[np.int64]) -> Tensor:
    reply = runner.train(w, task, index, {})
    if reply.error or reply.payload is None:
        raise SystemExit(reply.error)
    return reply.payload.buffers["u"]


def measure_bits(path: str, name: str, rounds: int) -> None:
    if path:
        data = np.load(path)
        x, y = data["x"], data["y"].astype(np.int64)
        x = x[:, None] if x.ndim == 3 else x
    else:
        digits = read_digits()
        x, y = np.asarray(digits.x), np.asarray(digits.y)
    shape = tuple(x.shape[1:])
    net = build_network(name, shape, int(y.max()) + 1, 0)
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y), scale)
    runner = ClientRunner(net, shape, samples, True)
    updates = collect_updates(runner, y, rounds)
    layout = runner.all.names
    print(f"{path or 'digits'}, {name}: {len(updates)} updates of {len(updates[0])} floats")
    plain = [c for c in CODES if not isinstance(c, EntropyCoded)] + [
        Quantizer(2),
        SparseTernary(0.01),
        TopK(0.01, "indices"),
        TopK(0.01, "indices", bits=4),
        TopK(0.1),
        NoCompression(),
    ]
    for code in plain:
        sizes: list[list[float]] = [[], [], []]
        for i, u in enumerate(updates):
            payload, _ = code.encode(u, layout, make_stream(i, "encode"), {})
            coded, _ = EntropyCoded(code).encode(u, layout, make_stream(i, "encode"), {})
            back = code.decode(payload, layout, make_stream(i, "encode"))
            sizes[0].append(8 * payload.nbytes / len(u))
            sizes[1].append(8 * coded.nbytes / len(u))
            sizes[2].append(float((back - u).square().sum() / u.square().sum()))
        before, after, error = (float(np.mean(size)) for size in sizes)
        print(
            f"  {code}: {before:.3f} bits, coded {after:.3f} ({before / after:.2f}x), {error:.3g}"
        )


def collect_updates(runner: ClientRunner, y: NDArray[np.int64], rounds: int) -> list[Tensor]:
    """The updates of the last of some rounds of FedAvg, six clients each."""
    rng = np.random.default_rng(0)
    parts: list[list[int]] = [[] for _ in range(20)]
    for label in range(int(y.max()) + 1):
        index = rng.permutation(np.flatnonzero(y == label))
        cuts = (np.cumsum(rng.dirichlet([0.1] * 20))[:-1] * len(index)).astype(int)
        for part, share in zip(parts, np.split(index, cuts), strict=True):
            part += share.tolist()
    able = [k for k in range(20) if len(parts[k]) > 20]
    w = pack_model(runner.net).clone()
    for t in range(1, rounds + 1):
        cohort = rng.permutation(able)[:6]
        updates = [
            train_update(runner, w, make_task(str(k), t, 0.1), np.array(parts[k])) for k in cohort
        ]
        n = torch.tensor([float(len(parts[k])) for k in cohort])
        w = w + n @ torch.stack(updates) / n.sum()
    return updates


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("what", choices=["time", "bits"])
    ask.add_argument("--repeats", type=int, default=7)
    ask.add_argument("--json", default="")
    ask.add_argument("--only", default="")
    ask.add_argument("--npz", default="")
    ask.add_argument("--net", default="mlp")
    ask.add_argument("--rounds", type=int, default=6)
    asked = ask.parse_args()
    torch.set_num_threads(1)
    if asked.what == "time":
        shares = measure_time(asked.repeats, asked.only)
        if asked.json:
            write_results(Path(asked.json), shares)
    else:
        measure_bits(asked.npz, asked.net, asked.rounds)


if __name__ == "__main__":
    main()
