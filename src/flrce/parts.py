"""An experiment's parts, built: its recipe, everybody's samples, the network, and the engine that trains it."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flrce import loop
from flrce.aggregators.products import Products
from flrce.config import Experiment
from flrce.data.federation import Federation
from flrce.data.own import adopt, holds_clients
from flrce.engines.baseline import describe_data
from flrce.engines.seat import Decks, Seat
from flrce.engines.simulator import Simulator
from flrce.engines.workers import Pooled, hire
from flrce.errors import BadInput
from flrce.fleet.costs import fleet, profile
from flrce.formats.language import alike
from flrce.host import find_device
from flrce.linalg import LARGE
from flrce.local.client import Runner, own_of
from flrce.local.link import Estimates
from flrce.local.precision import Precision, on_cpu
from flrce.local.rehearsal import bare, rehearsed
from flrce.models.adapters import accepted, rank_of
from flrce.models.flat import Fixed, fingerprint, fix, pack, single
from flrce.models.inputs import alone, inputs, sized, tried
from flrce.models.seeds import Seeded
from flrce.models.slicing import suits
from flrce.outcome import Personal
from flrce.pieces import Recipe
from flrce.round.memory import spare
from flrce.round.near import Placing, Wanted, placing, told
from flrce.tryout import misfit
from flrce.types import Round, State, Task

log = logging.getLogger("flrce")


@dataclass(frozen=True)
class Parts:
    """An experiment's parts, built."""

    recipe: Recipe
    federation: Federation
    net: nn.Module
    engine: Simulator

    def initial(self) -> State:
        """Before the first round."""
        return loop.initial(self.recipe, self.engine, pack(self.net, self.engine.runner.layout))

    def describe(self) -> dict[str, Any]:
        """What was dealt to whom, whose electricity each client has, and which fixed base they share."""
        grid = None if self.engine.life is None else self.engine.life.grid
        where = {} if grid is None else {"regions": [grid.regions[i] for i in grid.of], "begins": grid.start}
        base = fingerprint(self.net)
        return {
            **describe_data(self.federation, self.engine.runner.objective),
            **where,
            **({"base": base} if base else {}),
        }

    def rounds(self, experiment: Experiment, state: State | None = None) -> Iterator[Round]:
        start = state or self.initial()
        return loop.rounds(self.recipe, self.engine, start, experiment.rounds, experiment.seed)


def parts(
    experiment: Experiment, data: Any = None, model: nn.Module | None = None, decks: Decks | None = None
) -> Parts:
    """Build recipe, federation, network and engine; `data` and `model` replace what the experiment names."""
    recipe = experiment.build_recipe()
    on_gpu = decks is not None or device_of(experiment) == "cuda"
    federation, net = materials(experiment, data, model)
    suits(recipe, net, federation.source.shape)
    if not isinstance(net, Seeded) and any(isinstance(link, Estimates) for link in recipe.chain.links):
        log.warning(
            "%s probes single weights of this model, which teaches it next to nothing; set model.options.seeds, "
            "such as 1024, or hand over flrce.models.seeds.Seeded(network, 1024)", recipe.name or "the recipe",
        )  # fmt: skip
    if isinstance(recipe.aggregator, Products) and not rank_of(net):
        log.warning(
            "%s averages products of adapters, and this network has none, so that it is a plain mean; put some in by "
            "flrce.models.adapters.adapt", recipe.name or "the recipe",
        )  # fmt: skip
    devices = fleet(experiment.fleet.profile, federation.clients, experiment.seed, experiment.fleet.clients)
    devices |= {client: profile(name) for client, name in federation.trouble.slow.items()}
    workers = experiment.engine.workers
    count = (os.cpu_count() or 1) if workers == "auto" else workers
    precision: Precision = experiment.engine.precision or "float32"

    def pooled(runner: Runner) -> Pooled:
        runner.precision = on_cpu(precision)
        work = replace(recipe.work, batch=min(recipe.work.batch, max(1, int(federation.n.max()))))
        task = Task("", 0, 1, 0, work, update=recipe.chain, augment=recipe.augment, rounds=experiment.rounds)
        found = runner.layout
        left = spare(recipe, len(federation.clients), found.trainable, found.size) if workers == "auto" else None
        return hire(runner, experiment.engine.kernel, count, task, left)

    def seated(runner: Runner) -> Seat:
        deck = decks or Decks("cuda", single=True)
        size = runner.layout.size
        found = placed(recipe, runner.layout.trainable, size, deck, experiment.engine.updates)
        if size > LARGE:
            log.warning("%s", told(found, recipe.P, size, deck.device))
        return deck.hire(runner, precision, found)

    if experiment.engine.updates == "device" and not on_gpu:
        log.warning("engine.updates = 'device' is for a GPU: here clients train on the host, and sums are made there")
    engine = Simulator(
        federation, net, devices, seated if on_gpu else pooled, experiment.engine.eval_every,
        experiment.build_objective(federation.source.kind), recipe.kept, experiment.build_availability(),
        experiment.build_life(tuple(federation.clients), devices),
    )  # fmt: skip
    return Parts(recipe, federation, net, engine)


def placed(recipe: Recipe, d: int, D: int, decks: Decks, wanted: Wanted) -> Placing:
    """Where a round's updates of d trained floats, of D, are summed and compared."""
    found = placing(recipe, d, D, decks.memory, decks.single, wanted)
    why = misfit(recipe, decks.device) if found.near else ""
    if why and wanted == "device":
        raise BadInput(f"engine.updates = 'device': {why}; leave it out, or set 'host'")
    return replace(found, near=False, why=why) if why else found


def with_given_clients(experiment: Experiment, data: Any) -> Experiment:
    """The experiment, with data.partition = "given" where data come by client and it says nothing else."""
    d = experiment.data
    if "partition" in d.model_fields_set or not holds_clients(data):
        return experiment
    log.info("data come by client: data.partition = 'given'; set another one to share the samples out anew")
    return experiment.model_copy(update={"data": d.model_copy(update={"partition": "given"})})


def materials(experiment: Experiment, data: Any = None, model: nn.Module | None = None) -> tuple[Federation, nn.Module]:
    """The samples of every client, and the network."""
    d = experiment.data
    log.info("preparing the samples of %d clients", experiment.clients)
    pool = d.read() if data is None else adopt(data, **d.how())
    if pool.kind == "classes" and pool.outputs < 2:
        log.warning("every sample is of class %r: there is nothing to tell apart; is data.target right?", *pool.classes)
    federation = experiment.federate(pool)
    named = experiment.model
    if model is None and named.name == "llama" and d.tokenizer is not None:
        _same_words(d.tokenizer, str((named.options or {}).get("path", "smollm2")))
    net = experiment.build_network(pool) if model is None else model
    net = accepted(net)
    few = inputs(torch.from_numpy(np.array(pool.x[:2])), pool.scale, pool.shift)
    recipe, objective = experiment.build_recipe(), experiment.build_objective(pool.kind)
    net = fix(single(sized(net, few, experiment.seed)), recipe.fixed)
    probes = max((link.looks // 2 for link in recipe.chain.links if isinstance(link, Estimates)), default=0)
    moving = sum(p.numel() for p in net.parameters() if p.requires_grad)
    if probes > moving:
        raise BadInput(
            f"a step probes {probes} directions, and {moving} numbers train; lower recipe.directions, or raise "
            "model.options.seeds"
        )
    counted = experiment.objective is None and pool.kind in ("classes", "tokens")  # one output for each
    tried(net, few, pool.outputs if counted else None)
    net = bare(net, few, objective)
    rehearsed(net, few, torch.from_numpy(np.array(pool.y[:2])), objective, recipe.augment)
    if experiment.train.batch == 1:
        alone(net, few)
    return federation, net


def _same_words(tokenizer: str, path: str) -> None:
    """BadInput where the ids of the text are words of another model."""
    if not alike(tokenizer, path):
        raise BadInput(
            f"data.tokenizer = {tokenizer!r} numbers its tokens otherwise than the model of model.options.path = "
            f"{path!r}: every id would be another word; set both alike"
        )


def device_of(experiment: Experiment) -> str:
    """Where an experiment trains, "cuda" or "cpu"; BadInput where it requires a GPU that is not there."""
    return find_device(experiment.engine.device, experiment.engine.name)


def handed_back(recipe: Recipe, state: State) -> Tensor:
    return recipe.average.model(state.memory.get("average"), state.w)


def named(built: Parts, w: Tensor) -> dict[str, Tensor]:
    """The model as named tensors: what travels, what is fixed, and what clients keep as it was at first."""
    found = {name: view.clone() for name, view in built.engine.runner.layout.views(w).items()}
    return with_rest(found, built.net)


def personal(built: Parts, state: State) -> Personal:
    """The models that clients are judged with, where these are not the one that all share."""
    owns = {client: own for client, kept in state.carry.items() if (own := own_of(kept)) is not None}
    where = built.engine.runner.layout
    held = {slot.name for slot in where.local.slots}
    rest = {name: x for name, x in with_rest({}, built.net).items() if name not in held} if owns else {}
    return Personal(where, handed_back(built.recipe, state), owns, rest)


def with_rest(found: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """What travelled, and what of the network did not: fixed parameters that lie in no file, and what clients keep."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if name not in found and tensor.is_floating_point() and not isinstance(tensor, Fixed):
            found[name] = tensor.detach().clone()
    return found
