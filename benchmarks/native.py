"""Fused kernels against torch at the paper's settings: python benchmarks/native.py [--repeats 7] [--case cnn-cifar]

A round is 10 clients x 5 epochs of SGD and an evaluation of all validation samples, on random data of the right
shape. torch runs in its faster memory format for each net (channels last or not, measured first); "2 processes" are
two workers that hold data and nets and train half of the clients each, native's "2 threads" are plain Python threads.
CPU seconds of one-thread runs are the steadier figure on a busy machine, so single-core ratios use them.
"""

import argparse
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.chain import chain
from flrce.models.flat import pack, unpack
from flrce.models.nets import CNNS, build
from flrce.native import Kernel, kernel

EPOCHS, CLIENTS, LR, SCALE, SHIFT = 5, 10, 0.05, 1 / 128, -1.0


@dataclass(frozen=True)
class Case:
    """One of the paper's settings: samples per client, batch size, validation samples of all clients."""

    name: str
    classes: int
    n: int
    batch: int
    validation: int

    @property
    def shape(self) -> tuple[int, ...]:
        return CNNS[self.name][0]

    def net(self) -> nn.Module:
        return build(self.name, self.shape, self.classes, seed=1)

    def data(self, n: int) -> tuple[Tensor, Tensor]:
        rng = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (n, *self.shape), dtype=torch.uint8, generator=rng)
        return x, torch.randint(0, self.classes, (n,), generator=rng)

    def batches(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        sizes = [self.batch] * (self.n // self.batch) + ([self.n % self.batch] if self.n % self.batch else [])
        return np.concatenate([rng.permutation(self.n) for _ in range(EPOCHS)]), np.array(sizes * EPOCHS)

    def work(self) -> tuple[float, float]:
        """GFLOP of a client's training and of the evaluation: a product costs as much again for each gradient."""
        each = [2 * np.prod(a.out) * a.inside[0] * np.prod(a["kernel"] if a.kind == "conv" else 1) for a in
                chain(self.net(), self.shape).trained]  # fmt: skip
        return (3 * sum(each) - each[0]) * self.n * EPOCHS / 1e9, sum(each) * self.validation / 1e9


CASES = [
    Case("cnn-cifar", 10, 350, 128, 15_000),
    Case("cnn-emnist", 62, 224, 16, 9_600),
    Case("cnn-speech", 35, 224, 16, 9_600),
]  # fmt: skip


class Torch:
    """A plain loop over batches of resident floats, one thread."""

    def __init__(self, case: Case, layout: torch.memory_format) -> None:
        torch.set_num_threads(1)
        self.case, self.layout = case, layout
        self.net = case.net().to(memory_format=layout)
        self.x, self.y = self._floats(case.n)
        self.vx, self.vy = self._floats(case.validation)
        self.w, (self.order, self.sizes) = pack(self.net), case.batches()

    def _floats(self, n: int) -> tuple[Tensor, Tensor]:
        x, y = self.case.data(n)
        return (x.float() * SCALE + SHIFT).contiguous(memory_format=self.layout), y

    def train(self) -> None:
        net = unpack(self.net, self.w).train()
        sgd = torch.optim.SGD(net.parameters(), LR)
        for index in torch.from_numpy(self.order).split(self.sizes.tolist()):
            sgd.zero_grad()
            F.cross_entropy(net(self.x[index]), self.y[index]).backward()
            sgd.step()

    def evaluate(self, part: slice = slice(None)) -> None:
        net = unpack(self.net, self.w).eval()
        with torch.no_grad():
            for x, y in zip(self.vx[part].split(200), self.vy[part].split(200), strict=True):
                (net(x).argmax(1) == y).sum()


class Native:
    """The same work by the fused kernels."""

    def __init__(self, case: Case) -> None:
        k = kernel(case.net(), case.shape)
        if not isinstance(k, Kernel):
            raise SystemExit(f"no kernel: {k}")
        self.k, self.w = k, pack(case.net())
        self.x, self.y = case.data(case.n)
        self.vx, self.vy = case.data(case.validation)
        self.order, self.sizes = case.batches()

    def train(self) -> None:
        self.k.train(self.w, self.x, self.y, SCALE, SHIFT, self.order, self.sizes, LR)

    def evaluate(self, part: slice = slice(None)) -> None:
        self.k.evaluate(self.w, self.vx[part], self.vy[part], SCALE, SHIFT)


def half_a_round(worker: Torch | Native, half: int) -> None:
    for _ in range(CLIENTS // 2):
        worker.train()
    middle = worker.case.validation // 2 if isinstance(worker, Torch) else len(worker.vx) // 2
    worker.evaluate(slice(0, middle) if half == 0 else slice(middle, None))


def _serve(case: Case, layout: torch.memory_format, half: int, pipe) -> None:  # type: ignore[no-untyped-def]
    worker = Torch(case, layout)
    pipe.send("ready")
    while pipe.recv():
        half_a_round(worker, half)
        pipe.send("done")


class Processes:
    """Two torch workers."""

    def __init__(self, case: Case, layout: torch.memory_format) -> None:
        spawn = get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(2)]
        self.pipes = [mine for mine, _ in pairs]
        for half, (_, theirs) in enumerate(pairs):
            spawn.Process(target=_serve, args=(case, layout, half, theirs), daemon=True).start()
        for pipe in self.pipes:
            pipe.recv()

    def round(self) -> None:
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


def timed(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    start = clock()
    work()
    return clock() - start


def gemm() -> float:
    """GFLOP/s of torch's float32 matrix product on one core."""
    a = torch.randn(1500, 1500)
    return 2 * 1.5**3 / timed(lambda: a @ a)


def spread(values: list[float]) -> str:
    return f"{median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


def single(case: Case, native: Native, plain: Torch, repeats: int) -> None:
    """One thread each, by CPU seconds."""
    train, evaluate = case.work()
    rows = []
    for _ in range(repeats):
        pair = [(timed(a.train), timed(a.evaluate)) for a in (native, plain)]
        rows.append((*pair[0], *pair[1], gemm()))
    rate = max(r[4] for r in rows)
    _line("1 thread", "torch / native", [r[2] / r[0] for r in rows], [r[3] / r[1] for r in rows])
    speeds = [train / r[0] for r in rows], [evaluate / r[1] for r in rows]
    _line("", "native, GFLOP/s", *speeds)
    _line("", f"of sgemm's {rate:.0f}", *([x / rate for x in one] for one in speeds))


def _line(who: str, what: str, train: list[float], evaluate: list[float]) -> None:
    print(f"  {who:10s} {what:18s} training {spread(train)}   evaluation {spread(evaluate)}")


def double(case: Case, native: Native, layout: torch.memory_format, repeats: int) -> None:
    """A whole round on two cores, by the clock."""
    processes, pool = Processes(case, layout), ThreadPoolExecutor(2)

    def threads() -> None:
        list(pool.map(lambda half: half_a_round(native, half), range(2)))

    threads()
    processes.round()
    rows = [(timed(threads, time.perf_counter), timed(processes.round, time.perf_counter)) for _ in range(repeats)]
    processes.stop()
    native_s, torch_s = ([r[i] for r in rows] for i in (0, 1))
    print(f"  2 cores    s/round            native {spread(native_s)}   torch, 2 processes {spread(torch_s)}")
    print(f"             torch / native     {spread([b / a for a, b in rows])}")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--repeats", type=int, default=7)
    ask.add_argument("--case", choices=[c.name for c in CASES], help="only this one")
    args = ask.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, {args.repeats} interleaved repeats: median (min-max)")
    for case in CASES:
        if args.case in (None, case.name):
            native = Native(case)
            both = [Torch(case, f) for f in (torch.contiguous_format, torch.channels_last)]
            for worker in (native, *both):
                worker.train()
                worker.evaluate()
            plain = min(both, key=lambda t: min(timed(t.train) for _ in range(2)))
            name = "channels last" if plain.layout == torch.channels_last else "contiguous"
            print(f"{case.name}: {case.n} samples a client, batches of {case.batch}; torch is faster with {name}")
            single(case, native, plain, args.repeats)
            double(case, native, plain.layout, args.repeats)


if __name__ == "__main__":
    main()
