"""Recurrent and other sequence networks on a CPU: a step by torch beside its products, and beside
compiled GRU steps.

    python benchmarks/cells.py [--repeats 7] [--avx2]

CPU seconds of one thread, everything in turn, ratios of the same repeat; workers' way with freed
memory (see engines/pool.py). "over products": a step's seconds over those of its products at the
speed of torch's own float32 product, of 1500 x 1500 matrices, in the same repeat.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from narrow import narrow
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.sequences import RecurrentNetwork
from flrce.simulation.workers import _retain_freed_memory
from flrce.training.cpu.gru import compile_gru_layers


@dataclass(frozen=True)
class Case:
    """A network of this project and its batch; a sequence has 80 ids of 90, and an answer after
    each.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 16

    def net(self) -> RecurrentNetwork:
        return RecurrentNetwork(90, 90, True, **self.options)

    @property
    def work(self) -> float:
        """GFLOP of a step's products; each costs as much again for either gradient."""
        cells = self.net().cells
        assert isinstance(cells, nn.GRU | nn.LSTM)
        weights = sum(p.numel() for p in cells.parameters() if p.dim() > 1) + 90 * cells.hidden_size
        return 3 * 2 * weights * self.batch * 80 / 1e9


CASES = [
    Case("char LSTM 2 x 256 (LEAF), batch 16"),
    Case("LSTM 128, batch 16", {"width": 128, "layers": 1}),
    Case(
        "GRU 128, embedding 16, batch 16",
        {"cell": "gru", "embedding": 16, "width": 128, "layers": 1},
    ),
    Case("the same, batch 64", {"cell": "gru", "embedding": 16, "width": 128, "layers": 1}, 64),
    Case("GRU 32, batch 16", {"cell": "gru", "width": 32, "layers": 1}),
    Case("GRU 2 x 256, batch 16", {"cell": "gru"}),
]


def timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def stepper(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    sgd = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        sgd.zero_grad()
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        sgd.step()

    return step


def said(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ratios(found: list[list[float]], work: float) -> list[str]:
    """A table's cells, of repeats of (torch, compiled, evaluation by torch, by compiled, product)
    in CPU seconds.

    `work`: GFLOP of a step's products. The last is 1500 x 1500 x 1500.
    """
    floors = [work * product / (2 * 1.5**3) for *_, product in found]
    return [
        f"{median(t[0] for t in found) * 1e3:.1f}",
        said([t[0] / floor for t, floor in zip(found, floors, strict=True)]),
        said([t[1] / floor for t, floor in zip(found, floors, strict=True)]),
        said([t[0] / t[1] for t in found]),
        said([t[2] / t[3] for t in found]),
    ]


def row(case: Case, repeats: int) -> str:
    """Two steps to warm up, then torch, compiled steps, evaluations by both, and the product, in
    turn.
    """
    torch.manual_seed(0)
    plain = case.net()
    fast = compile_gru_layers(copy.deepcopy(plain))
    x, y = torch.randint(0, 90, (2, case.batch, 80))
    a, steps = torch.randn(1500, 1500), [stepper(net, x, y) for net in (plain, fast)]
    found = []
    with torch.no_grad():
        judged = torch.randint(0, 90, (250, 80))
    for _ in range(repeats + 2):
        times = [timed(step) for step in steps]
        with torch.inference_mode():
            times += [timed(lambda net=net: net(judged)) for net in (plain, fast)]  # type: ignore[misc]
            times += [timed(lambda: a @ a)]
        found.append(times)
    found = found[2:]
    cells = ratios(found, case.work)
    if case.options.get("cell") != "gru":
        cells[2:] = ["", "", ""]
    return f"| {case.name} | {' | '.join(cells)} |"


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--repeats", type=int, default=7)
    ask.add_argument("--avx2", action="store_true", help="torch and compiled steps held to AVX2")
    args = ask.parse_args()
    if args.avx2:
        narrow()
    repeats = args.repeats
    torch.set_num_threads(1)
    _retain_freed_memory()
    print(
        "| network | torch, ms a step | over products | by compiled steps | torch / compiled |"
        " evaluation |"
    )
    print("|---|---|---|---|---|---|")
    for case in CASES:
        print(row(case, repeats), flush=True)


if __name__ == "__main__":
    main()
