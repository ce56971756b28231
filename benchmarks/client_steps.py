"""A client's steps by the PyTorch trainer beside a loop written by hand.

    python benchmarks/client_steps.py [--repeats 9] [--only gpt,lstm] [--compiled]

Both train one client from the same weights: the trainer makes its whole reply, the loop copies a
state, steps by torch.optim.SGD on samples that were scaled beforehand, and copies the state again.
CPU seconds of one thread, both in turn, ratios of the same repeat; freed memory is kept, as in
workers. Each network also evaluates four clients' samples.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.core.pieces import NoCompression
from flrce.core.types import LocalWork, Task
from flrce.models.flat import pack_model
from flrce.models.gpt import GPT
from flrce.models.inputs import scale_inputs
from flrce.simulation.workers import _retain_freed_memory
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.optimizers import SGD
from flrce.training.update_chain import UpdateChain

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import nets

CHUNK = 250  # samples that are evaluated together
LR = 0.05


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 10))


@dataclass(frozen=True)
class Case:
    """A network, a client's samples (80 token ids, or 3 x 32 x 32 bytes) and its work."""

    make: Callable[[], nn.Module]
    n: int
    batch: int
    epochs: int
    tokens: bool = False

    def draw_samples(self) -> Samples:
        """Those of four clients."""
        if self.tokens:
            return Samples(
                torch.randint(0, 80, (4 * self.n, 80)), torch.randint(0, 80, (4 * self.n,))
            )
        x = torch.randint(0, 256, (4 * self.n, 3, 32, 32), dtype=torch.uint8)
        return Samples(x, torch.randint(0, 10, (4 * self.n,)), 1 / 127.5, -1.0)


CASES = {
    "gpt": Case(lambda: nets.GPT(80), 32, 16, 1, tokens=True),
    "gpt-own": Case(lambda: GPT(80, 80, 80, False, 4, 128), 32, 16, 1, tokens=True),
    "lstm": Case(lambda: nets.LSTM(80), 32, 16, 1, tokens=True),
    "resnet-8": Case(lambda: nets.resnet(10), 64, 32, 2),
    "cnn": Case(lambda: nets.cnn(10), 350, 128, 5),
    "mlp": Case(perceptron, 350, 32, 5),
}


@dataclass(frozen=True)
class HandWrittenLoop:
    """What one would write for this case alone."""

    net: nn.Module
    state: dict[str, Tensor]
    x: Tensor
    y: Tensor
    case: Case

    def train(self) -> dict[str, Tensor]:
        self.net.load_state_dict(self.state)
        self.net.train()
        sgd = torch.optim.SGD(self.net.parameters(), LR)
        for _ in range(self.case.epochs):
            for index in torch.randperm(self.case.n).split(self.case.batch):
                sgd.zero_grad()
                F.cross_entropy(self.net(self.x[index]), self.y[index]).backward()
                sgd.step()
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    @torch.no_grad()
    def evaluate(self) -> int:
        self.net.eval()
        parts = zip(self.x.split(CHUNK), self.y.split(CHUNK), strict=True)
        return sum(int((self.net(x).argmax(1) == y).sum()) for x, y in parts)


def build_functions(case: Case, compiled: bool) -> list[Callable[[], object]]:
    """Training by hand and by the trainer, evaluation by hand and by the trainer."""
    torch.manual_seed(0)
    net, samples = case.make(), case.draw_samples()
    scaled = scale_inputs(samples.x, samples.scale, samples.shift)
    state = copy.deepcopy(net.state_dict())
    loop = HandWrittenLoop(copy.deepcopy(net), state, scaled, samples.y, case)
    runner = ClientRunner(net, tuple(samples.x.shape[1:]), samples)
    runner.compiled = compiled
    w, chain = pack_model(net), UpdateChain((SGD(LR),))
    work = LocalWork(epochs=case.epochs, batch=case.batch)
    task = Task("0", 0, 1, 0, work, update=chain, compressor=NoCompression())
    mine, all_samples = np.arange(case.n), np.arange(4 * case.n)
    return [
        loop.train,
        lambda: runner.train(w, task, mine, {}),
        loop.evaluate,
        lambda: runner.evaluate(w, all_samples),
    ]


def measure_seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def format_ratios(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def measure_row(name: str, repeats: int, compiled: bool) -> str:
    """Two repeats to warm up, then all four functions in turn."""
    case = CASES[name]
    calls = build_functions(case, compiled)
    times = [[measure_seconds(call) for call in calls] for _ in range(repeats + 2)][2:]
    steps = case.epochs * -(-case.n // case.batch)
    cells = [
        f"{1e3 * median(row[0] for row in times) / steps:.2f}",
        format_ratios([row[1] / row[0] for row in times]),
        format_ratios([row[3] / row[2] for row in times]),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--repeats", type=int, default=9)
    ask.add_argument("--only", default=",".join(CASES))
    ask.add_argument("--compiled", action="store_true", help="with compiled layers")
    args = ask.parse_args()
    torch.set_num_threads(1)
    _retain_freed_memory()
    print("| network | by hand, ms a step | trainer / by hand | evaluation |")
    print("|---|---|---|---|")
    for name in args.only.split(","):
        print(measure_row(name, args.repeats, args.compiled), flush=True)


if __name__ == "__main__":
    main()
