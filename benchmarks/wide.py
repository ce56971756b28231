"""Transformers and wide perceptrons on a CPU: a step by torch beside its products, and beside
compiled layers.

    python benchmarks/wide.py [--repeats 7] [--avx2]

CPU seconds of one thread, everything in turn, ratios of the same repeat; "over products" as in
cells.py.
"""

import argparse
import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from cells import ratios, timed
from h200_networks import products
from narrow import narrow
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.gpt import GPT
from flrce.simulation.workers import _retain_freed_memory
from flrce.training.cpu.compiled_calls import CompiledCalls


@dataclass(frozen=True)
class Case:
    """A network, the shape of a batch (ids where `ids`), and the classes it tells apart."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    ids: bool = True
    classes: int = 80

    def batch(self, n: int) -> Tensor:
        shape = (n, *self.shape[1:])
        return torch.randint(0, 80, shape) if self.ids else torch.randn(shape)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(48, 256),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(64 * 256, 10),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )


CASES = [
    Case(
        "GPT 4 x 128, 80 tokens, last answers, batch 16",
        lambda: GPT(80, 80, 80, False, 4, 128),
        (16, 80),
    ),
    Case("the same, an answer after each token", lambda: GPT(80, 80, 80, True, 4, 128), (16, 80)),
    Case("GPT 2 x 64, 80 tokens, batch 16", lambda: GPT(80, 80, 80, True, 2, 64), (16, 80)),
    Case("encoder 2 x 256, 64 patches, batch 32", encoder, (32, 64, 48), False, 10),
    Case("perceptron 784-1024-1024-10, batch 64", perceptron, (64, 784), False, 10),
]


def row(case: Case, repeats: int) -> str:
    """Two steps to warm up, then torch, compiled layers, evaluations by both, and the product, in
    turn.
    """
    torch.manual_seed(0)
    nets = [case.make()]
    nets.append(copy.deepcopy(nets[0]))
    modes: list[Callable[[], AbstractContextManager[object]]] = [nullcontext, CompiledCalls]
    x, judged, a = case.batch(case.shape[0]), case.batch(160), torch.randn(1500, 1500)
    work = 3 * case.shape[0] * products(case.make(), x[:1]) / 1e9
    found = []
    for _ in range(repeats + 2):
        times = []
        for net, mode in zip(nets, modes, strict=True):
            began = time.thread_time()
            with mode():
                net.train().zero_grad()
                out = net(x).reshape(-1, case.classes)
                F.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64)).backward()
            times.append(time.thread_time() - began)
        for net, mode in zip(nets, modes, strict=True):
            with mode(), torch.inference_mode():
                net.eval()
                times.append(timed(lambda net=net: net(judged)))  # type: ignore[misc]
        found.append([*times, timed(lambda: a @ a)])
    cells = ratios(found[2:], work)
    return f"| {case.name} | {' | '.join(cells)} |"


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--repeats", type=int, default=7)
    ask.add_argument("--avx2", action="store_true", help="torch and compiled layers held to AVX2")
    args = ask.parse_args()
    if args.avx2:
        narrow()
    torch.set_num_threads(1)
    _retain_freed_memory()
    print(
        "| network | torch, ms a step | over products | by compiled layers | torch / compiled |"
        " evaluation |"
    )
    print("|---|---|---|---|---|---|")
    for case in CASES:
        print(row(case, args.repeats), flush=True)


if __name__ == "__main__":
    main()
