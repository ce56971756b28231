"""The torch trainer called with plain numbers, as the fused kernels and the stack are; runs cut off
and resumed.
"""

import numpy as np
import pytest
import torch

from flrce import Experiment
from flrce.core.bounds import find_problem
from flrce.core.types import LocalWork, Portion, Task
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.training.batches import SampleBatches, Samples
from flrce.training.links import ClientContext
from flrce.training.update_chain import SGD, ProximalTerm, UpdateChain

#: recipes that differ most in what they keep and send; `make check` crosses these alone
DAILY = {
    "fedavg",
    "flrce",
    "oort",
    "krum",
    "fedcom",
    "heterofl",
    "fedadam",
    "fedbuff",
    "scaffold",
    "ditto",
    "fedbn",
}


def require_valid_fields(piece):
    """What every recipe, and every message that carries a piece, asks of its fields."""
    if why := find_problem(piece):
        raise BadInput(why)


def mark_slow_crossings(names, daily=DAILY):
    """All names for a parametrized test; those that are not `daily` are run by `make test` only."""
    return [name if name in daily else pytest.param(name, marks=pytest.mark.slow) for name in names]


def update(lr=0.1, mu=0.0, squared=True, links=()):
    return UpdateChain((*links, *([ProximalTerm(mu, squared)] if mu else []), SGD(lr)))


def local(trainer, sizes, first=0, chain=None, t=1, T=10, seed=0, **tensors):
    task = Task(
        "a",
        0,
        t,
        seed,
        LocalWork(1, 1),
        Portion(first=first),
        update=chain,
        rounds=T,
        tensors=tensors,
    )
    return ClientContext(task, len(sizes), int(sum(sizes)), trainer.layout)


def train(
    trainer,
    w,
    x,
    y,
    scale,
    shift,
    order,
    sizes,
    lr=0.1,
    mu=0.0,
    first=0,
    squared=True,
    chain=None,
    carry=None,
):
    chain = chain or update(lr, mu, squared)
    job = local(trainer, sizes, first, chain)
    done = trainer.train(
        w, SampleBatches(Samples(x, y, scale, shift), order, sizes), chain, job, carry or {}
    )
    return done.w, done.losses, done.squares


SAME = (
    "rounds.jsonl",
    "clients.jsonl",
    "model.safetensors",
)  # what two equal runs have to the byte


def cut_and_resumed(experiment, folder, straight, after=2, **given):
    """A run cut off after some rounds and resumed has the bytes of `straight`, one left alone."""

    def cut(done):
        if done.record.t == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(experiment, folder, watch=cut, **given)
    runs.run(experiment, folder, resume=True, **given)
    for file in SAME:
        assert (folder / file).read_bytes() == (straight / file).read_bytes(), file


def assert_resumes(experiment, folder, after=2, **given):
    """The same beside a run left alone that it makes; returns that one's result."""
    straight = runs.run(experiment, folder / "straight", **given)
    cut_and_resumed(experiment, folder / "cut", folder / "straight", after, **given)
    return straight


def like_torchs(model, train, folder):
    """A run on next ids with compiled layers and one without: two trainers, two roundings, nearly
    the same model.
    """
    x = np.random.default_rng(0).integers(0, 6, (240, 7))
    np.savez(folder / "ids.npz", x=x, y=(x + 1) % 6)
    models = []
    for kernel in ("auto", "torch"):
        exp = Experiment.from_tables(
            {
                "rounds": 2,
                "clients": 6,
                "per_round": 3,
                "data": {"path": str(folder / "ids.npz"), "partition": "iid"},
                "recipe": {"name": "fedavg"},
                "model": model,
                "train": {"epochs": 1, "batch": 8, "lr": 0.1, **train},
                "engine": {"kernel": kernel, "workers": 1},
            }
        )
        found = runs.run(exp, out=folder / kernel).model
        models.append(torch.cat([found[name].flatten() for name in sorted(found)]))
    assert not torch.equal(*models)
    assert (models[0] - models[1]).norm() < 1e-4 * models[1].norm()
