"""Fused kernels against torch, at the paper's settings and on other networks.

    python benchmarks/native.py [--repeats 7] [--case cnn-cifar] [--avx2]

A round is 10 clients x 5 epochs of SGD and an evaluation of all validation samples, on random data
of the right shape. torch runs in its faster memory format for each net (channels last or not,
measured first); "2 processes" are two workers that hold data and nets and train half of the clients
each, native's "2 threads" are plain Python threads. CPU seconds of one-thread runs are the steadier
figure on a busy machine, so single-core ratios use them. Writes results/native.{json,md}.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
import torch
from narrow import narrow
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.core.c_compiler import find_toolchain
from flrce.models.flat import pack_model, unpack_model
from flrce.models.graph import build_layer_graph
from flrce.models.kinds import RESIDUAL_KINDS
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.models.resnet import ResNet
from flrce.models.sequences import TimeSeriesCNN
from flrce.training.batches import SampleBatches, Samples
from flrce.training.cpu import build_kernel, explain_no_kernel, stages

RESULTS = Path(__file__).resolve().parent / "results"
EPOCHS, CLIENTS, LR, SCALE, SHIFT = 5, 10, 0.05, 1 / 128, -1.0


def lenet() -> nn.Module:
    """LeCun et al. 1998, as usually written: averages and tanh."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, 10),
    )


def groups() -> nn.Module:
    """Three convolutions, each with GroupNorm and an average, then the mean."""
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


#: networks that are not the paper's: the shape of a sample, and how to make one
OTHERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "LeNet, averages": ((1, 28, 28), lenet),
    "GroupNorm, averages": ((3, 32, 32), groups),
    "series, 128 steps": ((3, 128), lambda: TimeSeriesCNN(3, 6)),
    "ResNet-8, GroupNorm": ((3, 32, 32), lambda: ResNet(3, 10)),
    "residual, widths 32 to 128": ((3, 32, 32), lambda: ResNet(3, 10, (32, 64, 128))),
    "ResNet-8, BatchNorm": ((3, 32, 32), lambda: ResNet(3, 10, norm="batch")),
    "residual, one block of 64": ((3, 32, 32), lambda: ResNet(3, 10, (64,))),
    "residual, widths 64 to 256": ((3, 32, 32), lambda: ResNet(3, 10, (64, 128, 256))),
    "ResNet-18": ((3, 32, 32), lambda: ResNet(3, 10, (64, 128, 256, 512), blocks=2)),
}


@dataclass(frozen=True)
class Case:
    """One of the paper's settings: samples per client, batch size, validation samples of all
    clients.
    """

    name: str
    classes: int
    n: int
    batch: int
    validation: int

    @property
    def shape(self) -> tuple[int, ...]:
        return OTHERS[self.name][0] if self.name in OTHERS else PAPER_CNNS[self.name][0]

    def net(self) -> nn.Module:
        if self.name in OTHERS:
            return OTHERS[self.name][1]()
        return build_network(self.name, self.shape, self.classes, seed=1)

    def data(self, n: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (n, *self.shape), dtype=torch.uint8, generator=rng)
        return x, torch.randint(0, self.classes, (n,), generator=rng)

    def batches(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        sizes = [self.batch] * (self.n // self.batch) + (
            [self.n % self.batch] if self.n % self.batch else []
        )
        return np.concatenate([rng.permutation(self.n) for _ in range(EPOCHS)]), np.array(
            sizes * EPOCHS
        )

    def work(self) -> tuple[float, float]:
        """GFLOP of a client's training and of the evaluation: a product costs as much again for
        each gradient.
        """
        layers = [
            node.layer for node in build_layer_graph(self.net(), self.shape, RESIDUAL_KINDS).nodes
        ]
        each = [
            2 * np.prod(a.out) * a.inside[0] * np.prod(a["kernel"] if a.kind == "conv" else 1)
            for a in layers
            if a.kind in ("conv", "linear")
        ]
        return (3 * sum(each) - each[0]) * self.n * EPOCHS / 1e9, sum(each) * self.validation / 1e9


CASES = [
    Case("cnn-cifar", 10, 350, 128, 15_000),
    Case("cnn-emnist", 62, 224, 16, 9_600),
    Case("cnn-speech", 35, 224, 16, 9_600),
    Case("LeNet, averages", 10, 224, 16, 9_600),
    Case("GroupNorm, averages", 10, 96, 32, 2_000),
    Case("series, 128 steps", 6, 224, 32, 4_000),
    Case("ResNet-8, GroupNorm", 10, 64, 32, 320),
    Case("ResNet-8, BatchNorm", 10, 64, 32, 320),
    Case("residual, widths 32 to 128", 10, 64, 32, 320),
]  # fmt: skip
#: by --case alone; wider ones are torch's in a run, and by kernels here for the sake of the
#: comparison
ASKED = [Case(name, 10, 64, 32, 320) for name in list(OTHERS)[-3:]]


class Torch:
    """A plain loop over batches of resident floats, one thread."""

    def __init__(self, case: Case, layout: torch.memory_format) -> None:
        torch.set_num_threads(1)
        self.case, self.layout = case, layout
        self.net = case.net().to(memory_format=layout)
        self.x, self.y = self._floats(case.n)
        self.vx, self.vy = self._floats(case.validation)
        self.w, (self.order, self.sizes) = pack_model(self.net), case.batches()

    def _floats(self, n: int) -> tuple[Tensor, Tensor]:
        x, y = self.case.data(n)
        return (x.float() * SCALE + SHIFT).contiguous(memory_format=self.layout), y

    def train(self) -> None:
        net = unpack_model(self.net, self.w).train()
        sgd = torch.optim.SGD(net.parameters(), LR)
        for index in torch.from_numpy(self.order).split(self.sizes.tolist()):
            sgd.zero_grad()
            F.cross_entropy(net(self.x[index]), self.y[index]).backward()
            sgd.step()

    def evaluate(self, part: slice = slice(None)) -> None:
        net = unpack_model(self.net, self.w).eval()
        with torch.no_grad():
            for x, y in zip(self.vx[part].split(200), self.vy[part].split(200), strict=True):
                (net(x).argmax(1) == y).sum()


class Native:
    """The same work by the fused kernels."""

    def __init__(self, case: Case) -> None:
        why = explain_no_kernel(case.net(), case.shape)
        if why:
            raise SystemExit(f"no kernel: {why}")
        self.k, self.w = build_kernel(case.net(), case.shape), pack_model(case.net())
        self.x, self.y = case.data(case.n)
        self.vx, self.vy = case.data(case.validation)
        self.order, self.sizes = case.batches()

    def train(self) -> None:
        samples = Samples(self.x, self.y, SCALE, SHIFT)
        self.k.train(self.w, SampleBatches(samples, self.order, self.sizes), LR)

    def evaluate(self, part: slice = slice(None)) -> None:
        self.k.evaluate(self.w, self.vx[part], self.vy[part], SCALE, SHIFT)


def half_a_round(worker: Torch | Native, half: int) -> None:
    for _ in range(CLIENTS // 2):
        worker.train()
    middle = worker.case.validation // 2 if isinstance(worker, Torch) else len(worker.vx) // 2
    worker.evaluate(slice(0, middle) if half == 0 else slice(middle, None))


def _start(case: Case, layout: torch.memory_format) -> None:
    global WORKER
    WORKER = Torch(case, layout)


def _half(half: int) -> None:
    half_a_round(WORKER, half)


def timed(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    start = clock()
    work()
    return clock() - start


def gemm() -> float:
    """GFLOP/s of torch's float32 matrix product on one core."""
    a = torch.randn(1500, 1500)
    return 2 * 1.5**3 / timed(lambda: a @ a)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


def said(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def single(case: Case, native: Native, plain: Torch, repeats: int) -> dict:
    """One thread each, by CPU seconds: training and evaluation."""
    work, rows = case.work(), []
    for _ in range(repeats):
        pair = [(timed(a.train), timed(a.evaluate)) for a in (native, plain)]
        rows.append((*pair, gemm()))
    rate = max(row[2] for row in rows)
    found: dict = {"sgemm": rate}
    for i, name in enumerate(("training", "evaluation")):
        speed = [work[i] / ours[i] for ours, _, _ in rows]
        found[name] = {
            "torch / native": spread([theirs[i] / ours[i] for ours, theirs, _ in rows]),
            "GFLOP/s": spread(speed),
            "of sgemm": spread([x / rate for x in speed]),
        }
    return found


def double(case: Case, native: Native, layout: torch.memory_format, repeats: int) -> dict:
    """A whole round on two cores, by the clock."""
    spawn = get_context("spawn")
    with (
        ThreadPoolExecutor(2) as pool,
        ProcessPoolExecutor(2, spawn, _start, (case, layout)) as workers,
    ):

        def threads() -> None:
            list(pool.map(lambda half: half_a_round(native, half), range(2)))

        def processes() -> None:
            list(workers.map(_half, range(2)))

        threads()
        processes()
        rows = [
            [timed(work, time.perf_counter) for work in (threads, processes)]
            for _ in range(repeats)
        ]
    ours, theirs = ([row[i] for row in rows] for i in (0, 1))
    return {
        "native": spread(ours),
        "torch": spread(theirs),
        "torch / native": spread([b / a for a, b in rows]),
    }


def measure(case: Case, repeats: int) -> dict:
    native = Native(case)
    formats = [torch.contiguous_format, torch.channels_last][
        : 2 if len(case.shape) == 3 else 1
    ]  # a series has no last
    both = [Torch(case, f) for f in formats]
    for worker in (native, *both):
        worker.train()
        worker.evaluate()
    plain = min(both, key=lambda t: min(timed(t.train) for _ in range(2)))
    name = "channels last" if plain.layout == torch.channels_last else "contiguous"
    return {
        "network": case.name,
        "samples": case.n,
        "batch": case.batch,
        "format": name,
        "one thread": single(case, native, plain, repeats),
        "two cores": double(case, native, plain.layout, repeats),
    }


def page(found: dict) -> str:
    """The results as Markdown."""
    text = [
        "# The fused kernels against torch and the matrix product",
        "",
        found["about"],
        "",
        "| one thread, CPU seconds | of | torch / native | native, GFLOP/s | of sgemm's |",
        "|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        for part in ("training", "evaluation"):
            cells = [said(value) for value in case["one thread"][part].values()]
            head = f"{case['network']}, {case['samples']} samples in batches of {case['batch']}"
            text.append(
                f"| {head} | {part} | {' | '.join(cells)} of {case['one thread']['sgemm']:.0f} |"
            )
    text += [
        "",
        "| a round on two cores, s | native, 2 threads | torch, 2 processes | torch / native |",
        "|---|---|---|---|",
    ]
    for case in found["cases"]:
        cells = [said(value) for value in case["two cores"].values()]
        text.append(f"| {case['network']} (torch: {case['format']}) | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--repeats", type=int, default=7)
    names = [c.name for c in (*CASES, *ASKED)]
    ask.add_argument("--case", choices=names, help="only this one: printed, not written")
    ask.add_argument("--avx2", action="store_true", help="both held to AVX2; with --case")
    args = ask.parse_args()
    if args.avx2:
        if not args.case:
            ask.error("--avx2 needs --case: results/native.md is of the machine as it is")
        narrow()
    if args.case in [c.name for c in ASKED]:
        stages.WEIGHTS = 1 << 40
    torch.set_num_threads(1)
    # 16: AVX-512, 8: AVX2, 4: NEON
    machine = f"{platform.machine()}, vectors of {find_toolchain()[2].lanes} floats"
    about = (
        f"{machine}, torch {torch.__version__}, {args.repeats} interleaved repeats: median"
        " (min-max); "
    )
    wanted = [case for case in (*CASES, *ASKED) if args.case == case.name] if args.case else CASES
    cases = [measure(case, args.repeats) for case in wanted]
    found = {"about": f"{about}load average {os.getloadavg()[0]:.1f} at the end.", "cases": cases}
    print(page(found))
    if not args.case:
        (RESULTS / "native.json").write_text(json.dumps(found, indent=1))
        (RESULTS / "native.md").write_text(page(found))


if __name__ == "__main__":
    main()
