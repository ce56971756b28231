"""What `flrce profile` trains to time this machine: networks by name, or an experiment's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.config import Experiment
from flrce.errors import BadInput
from flrce.fleet.costs import training_flops
from flrce.local.link import Local
from flrce.local.objective import Classification
from flrce.local.optimisers import SGD
from flrce.local.precision import on_cpu
from flrce.local.trainer import Trainer
from flrce.local.updates import Chain
from flrce.models.nets import CNNS, build
from flrce.parts import device_of, materials
from flrce.types import Task, Work

SIZES = (4, 16, 64, 128)  # samples a batch
OTHERS = (8, 32, 96)  # those that the fit is tried on


@dataclass(frozen=True)
class Trial:
    """A network to train on batches of several sizes: those that are fitted, and others that the fit is tried on."""

    name: str
    flops: float  # to train on one sample
    stepper: Callable[[int], Callable[[], int]]  # samples a batch -> takes some steps, and says how many
    sizes: tuple[int, ...] = SIZES
    others: tuple[int, ...] = OTHERS
    usual: int = 64  # samples a batch while power is measured


def by_name(name: str) -> Trial:
    """One of the networks that come with the package, on noise."""
    shape, _ = CNNS[name]
    net = build(name, shape, 10, 0)
    largest = max(*SIZES, *OTHERS)
    x, y = torch.rand(largest, *shape), torch.arange(largest) % 10
    trainer, chain = Trainer(net, shape, Classification()), Chain((SGD(1e-9),))
    return Trial(name, training_flops(net, shape), lambda size: steps(trainer, x, y, 1.0, 0.0, size, chain))


def of(file: Path, overrides: Sequence[str], trust: bool = False) -> Trial:
    """An experiment's own network, objective, optimiser and samples, on the device that it would run on.

    Two sizes are fitted, the experiment's own batch and an eighth of it: clients' last batches are smaller.
    """
    experiment = Experiment.load(file, list(overrides), trust)
    federation, net = materials(experiment)
    source, recipe, device = federation.source, experiment.build_recipe(), device_of(experiment)
    precision: Any = experiment.engine.precision or "float32"
    objective = experiment.build_objective(source.kind)
    kind = precision if device == "cuda" else on_cpu(precision)
    trainer = Trainer(net, source.shape, objective, recipe.kept, device, kind)
    flops = training_flops(net, source.shape, tokens=source.x.dtype == np.int64)
    if not flops:
        raise BadInput(f"{file}: the FLOPs of its network are unknown, so that nothing can be fitted to them")
    chain: Any = recipe.update
    x, y, batch = federation.x.to(device), federation.y.to(device), max(recipe.work.batch, 2)

    def stepper(size: int) -> Callable[[], int]:
        return steps(trainer, x, y, source.scale, source.shift, size, chain)

    fitted = (max(batch // 8, 1), batch)
    others = tuple(sorted({max(batch // 4, 1), max(batch // 2, 1), 2 * batch} - set(fitted)))
    return Trial(f"the network of {file.name}", flops, stepper, fitted, others, batch)


def steps(
    trainer: Trainer, x: Tensor, y: Tensor, scale: float, shift: float, size: int, chain: Chain, count: int = 4
) -> Callable[[], int]:
    """A function that takes `count` training steps on batches of so many samples, and says how many it took."""
    local = Local(Task("", 0, 1, 0, Work(1, size), update=chain), count, size, trainer.layout)
    order, sizes = np.arange(count * size) % len(y), np.full(count, size)
    w = trainer.w.clone()

    def run() -> int:
        trainer.train(w, x, y, scale, shift, order, sizes, chain, local)
        return count

    return run
