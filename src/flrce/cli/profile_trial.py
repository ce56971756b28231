"""What `flrce profile` trains to time this machine: networks by name, or an experiment's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flrce.config.experiment import Experiment
from flrce.core.types import LocalWork, Task
from flrce.devices.costs import count_step_traffic, training_flops
from flrce.errors import BadInput
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.simulation.build import build_data_and_model, choose_device
from flrce.training.batches import SampleBatches, Samples
from flrce.training.links import ClientContext
from flrce.training.objectives import Classification
from flrce.training.optimizers import SGD
from flrce.training.precision import resolve_cpu_precision
from flrce.training.trainer import TorchTrainer
from flrce.training.update_chain import UpdateChain

FITTED_BATCH_SIZES = (4, 16, 64, 128)  # samples a batch
TEST_BATCH_SIZES = (8, 32, 96)  # those that the fit is tried on


@dataclass(frozen=True)
class SpeedTrial:
    """A network to time: batch sizes to fit, and others to test the fit on."""

    name: str
    flops: float  # to train on one sample
    # samples a batch -> takes some steps, and says how many
    stepper: Callable[[int], Callable[[], int]]
    sizes: tuple[int, ...] = FITTED_BATCH_SIZES
    others: tuple[int, ...] = TEST_BATCH_SIZES
    usual: int = 64  # samples a batch while power is measured
    # operations of a step, bytes that they move whatever the batch, bytes of a sample; () unknown
    traffic: tuple[float, ...] = ()


def build_named_trial(name: str) -> SpeedTrial:
    """One of the networks that come with the package, on noise."""
    shape, _ = PAPER_CNNS[name]
    net = build_network(name, shape, 10, 0)
    largest = max(*FITTED_BATCH_SIZES, *TEST_BATCH_SIZES)
    x, y = torch.rand(largest, *shape), torch.arange(largest) % 10
    trainer, chain = TorchTrainer(net, shape, Classification()), UpdateChain((SGD(1e-9),))
    return SpeedTrial(
        name,
        training_flops(net, shape),
        lambda size: build_step_function(trainer, Samples(x, y), size, chain),
        traffic=count_step_traffic(net, shape),
    )


def build_experiment_trial(file: Path, overrides: Sequence[str], trust: bool = False) -> SpeedTrial:
    """An experiment's own network, objective, optimiser and samples, on its device.

    Two sizes are fitted, the experiment's own batch and an eighth of it: clients' last batches are
    smaller.
    """
    experiment = Experiment.load(file, list(overrides), trust)
    federation, net = build_data_and_model(experiment)
    source, recipe, device = federation.source, experiment.build_recipe(), choose_device(experiment)
    precision: Any = experiment.engine.precision or "float32"
    objective = experiment.build_objective(source.kind, source.preprocessing)
    kind = precision if device == "cuda" else resolve_cpu_precision(precision)
    trainer = TorchTrainer(net, source.shape, objective, recipe.personal, device, kind)
    flops = training_flops(net, source.shape, tokens=source.x.dtype == np.int64)
    if not flops:
        raise BadInput(
            f"{file}: the FLOPs of its network are unknown, so that nothing can be fitted to them"
        )
    chain: Any = recipe.update
    batch = max(recipe.work.batch, 2)
    samples = Samples(federation.x.to(device), federation.y.to(device), source.scale, source.shift)

    def build_step(size: int) -> Callable[[], int]:
        return build_step_function(trainer, samples, size, chain)

    fitted = (max(batch // 8, 1), batch)
    others = tuple(sorted({max(batch // 4, 1), max(batch // 2, 1), 2 * batch} - set(fitted)))
    return SpeedTrial(f"the network of {file.name}", flops, build_step, fitted, others, batch)


def build_step_function(
    trainer: TorchTrainer, samples: Samples, size: int, chain: UpdateChain, count: int = 4
) -> Callable[[], int]:
    """A function that takes `count` training steps on batches of `size` and returns `count`."""
    task = Task("", 0, 1, 0, LocalWork(1, size), update=chain)
    local = ClientContext(task, count, size, trainer.layout)
    order, sizes = np.arange(count * size) % len(samples.y), np.full(count, size)
    batches = SampleBatches(samples, order, sizes)
    w = trainer.w.clone()

    def run_steps() -> int:
        trainer.train(w, batches, chain, local)
        return count

    return run_steps
