"""A client's epoch with gradients by the fused kernels against torch's own: python
benchmarks/updates.py [--repeats 5]

CPU seconds of one thread on random samples of the paper's shapes, both in turn; ratios of the same
repeat.
"""

import argparse
import time
from statistics import median

import numpy as np
import torch

from flrce.config.experiment import Experiment
from flrce.core.types import Task
from flrce.models.flat import pack_model
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.cpu import explain_no_kernel

CASES = {"cnn-cifar": (350, 128), "cnn-emnist": (224, 16)}  # samples of a client, batch
UPDATES = {"sgd": {}, "momentum": {"momentum": 0.9}, "adam": {"optimizer": "adam", "lr": 0.001}}


def ratios(name: str, train: dict[str, object], repeats: int) -> list[float]:
    """Torch's time over the kernels', repeat by repeat."""
    n, batch = CASES[name]
    shape = PAPER_CNNS[name][0]
    net = build_network(name, shape, 10, seed=1)
    if why := explain_no_kernel(net, shape):
        raise SystemExit(f"no kernel: {why}")
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, (n,), generator=rng)
    recipe = Experiment.from_tables(
        {"train": {"batch": batch, "epochs": 1, **train}, "recipe": {"name": "fedavg"}}
    ).build_recipe()
    task = Task(
        "a", 0, 1, 0, recipe.work, update=recipe.chain, compressor=recipe.compressor, rounds=1
    )
    runners = [ClientRunner(net, shape, Samples(x, y, 1 / 255), native) for native in (True, False)]
    found = []
    for _ in range(repeats + 1):
        spent = []
        for runner in runners:
            began = time.process_time()
            runner.train(pack_model(net), task, np.arange(n), {})
            spent.append(time.process_time() - began)
        found.append(spent[1] / spent[0])
    return found[1:]  # the first warms up


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("--repeats", type=int, default=5)
    repeats = ask.parse_args().repeats
    torch.set_num_threads(1)
    print("| network | update | torch / kernels, CPU seconds |\n|---|---|---|")
    for name in CASES:
        for update, train in UPDATES.items():
            each = ratios(name, train, repeats)
            print(
                f"| {name} | {update} | {median(each):.1f} ({min(each):.1f}-{max(each):.1f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
