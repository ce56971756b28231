"""An experiment's parts, built: its recipe, everybody's samples, the network, and the engine that
trains it.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flrce.config.experiment import Experiment
from flrce.config.network import resolve_network_name
from flrce.core import loop
from flrce.core.engine import Engine
from flrce.core.host import find_device
from flrce.core.linalg import LARGE_MODEL_FLOATS
from flrce.core.memory_limits import estimate_spare_bytes
from flrce.core.pieces import Recipe
from flrce.core.types import Round, State, Task
from flrce.data.federation import Federation
from flrce.data.fields import attach_fields, describe_fields
from flrce.data.partition import has_class_labels
from flrce.data.preprocessing import format_features
from flrce.data.sources import Source
from flrce.data.user import holds_clients, to_source
from flrce.devices.costs import DeviceProfile, add_network_energy, assign_devices, load_profile
from flrce.errors import BadInput
from flrce.formats.language import has_same_vocabulary
from flrce.models.adapters import get_adapter_rank, prepare_network
from flrce.models.flat import (
    FrozenParameter,
    convert_to_float32,
    fingerprint_frozen_parameters,
    freeze_parameters,
    pack_model,
)
from flrce.models.inputs import (
    initialize_lazy_layers,
    scale_inputs,
    validate_network,
    validate_single_sample_batch,
)
from flrce.models.seeds import SeedSpaceNetwork
from flrce.models.slicing import validate_recipe_network
from flrce.simulation.baseline import describe_data
from flrce.simulation.result import PersonalModels
from flrce.simulation.run_slot import DeviceSchedulers, RunSlot
from flrce.simulation.simulator import SimulatedFleet, Simulator
from flrce.simulation.update_placement import choose_placement, describe_placement
from flrce.simulation.workers import PooledWorkers, start_workers
from flrce.training.client import ClientRunner, find_personal_state
from flrce.training.dry_run import unwrap_network_output, validate_on_samples
from flrce.training.precision import resolve_cpu_precision

MAX_ESTIMATED_CLIENTS = 100  # clients whose work is estimated to say how long a run lasts
log = logging.getLogger("flrce")


@dataclass(frozen=True)
class Simulation:
    """An experiment's parts, built."""

    recipe: Recipe
    federation: Federation
    net: nn.Module
    engine: Simulator
    given_network: str = ""  # the class of a network that came from Python
    own_engine: Engine | None = None  # trains in place of the simulator

    @property
    def loop_engine(self) -> Engine:
        """Where clients run."""
        return self.engine if self.own_engine is None else self.own_engine

    def initial_state(self) -> State:
        """Before the first round."""
        return loop.make_initial_state(
            self.recipe, self.loop_engine, pack_model(self.net, self.engine.runner.layout)
        )

    def describe_clients(self) -> dict[str, Any]:
        """What was dealt to whom, whose electricity each client has, and which fixed base they
        share.
        """
        grid = None if self.engine.fleet_dynamics is None else self.engine.fleet_dynamics.grid
        where = (
            {}
            if grid is None
            else {"regions": [grid.regions[i] for i in grid.of], "begins": grid.start}
        )
        base = fingerprint_frozen_parameters(self.net)
        return {
            **describe_data(self.federation, self.engine.runner.objective),
            **where,
            **({"base": base} if base else {}),
        }

    def iterate_rounds(self, experiment: Experiment, state: State | None = None) -> Iterator[Round]:
        start = state or self.initial_state()
        return loop.rounds(self.recipe, self.loop_engine, start, experiment.rounds, experiment.seed)


def with_engine(built: Simulation, engine: Engine | Callable[[Simulator], Engine]) -> Simulation:
    """The simulation with an engine from Python, or with what a function makes of its simulator."""
    own = engine if isinstance(engine, Engine) else engine(built.engine)
    if not isinstance(own, Engine):
        raise BadInput(
            f"engine gave a {type(own).__name__}; give a subclass of flrce.Engine, or a function of"
            " the simulator that returns one"
        )
    return replace(built, own_engine=own)


def build_simulation(
    experiment: Experiment,
    data: Any = None,
    model: nn.Module | None = None,
    schedulers: DeviceSchedulers | None = None,
) -> Simulation:
    """Build recipe, federation, network and engine; `data` and `model` replace what the experiment
    names.
    """
    recipe, settings = experiment.build_recipe(), experiment.engine
    on_gpu = schedulers is not None or choose_device(experiment) == "cuda"
    federation, net = build_data_and_model(experiment, data, model)
    validate_recipe_network(recipe, net, federation.source.shape)
    warn_about_unfit_network(recipe, net)
    if settings.updates == "device" and not on_gpu:
        log.warning(
            "engine.updates = 'device' is for a GPU: here clients train on the host, and sums are"
            " made there"
        )
    devices = build_devices(experiment, federation)
    dynamics = experiment.build_life(tuple(federation.clients), devices)
    engine = Simulator(
        federation,
        net,
        SimulatedFleet(devices, dynamics, experiment.build_cost_model()),
        partial(open_run_slot, experiment, recipe, schedulers)
        if on_gpu
        else partial(start_pooled_workers, experiment, recipe, federation),
        settings.eval_every,
        experiment.build_objective(federation.source.kind, federation.source.preprocessing),
        recipe.personal,
    )
    warn_about_short_clock(experiment, recipe, engine)
    return Simulation(
        recipe, federation, net, engine, "" if model is None else type(model).__name__
    )


def build_devices(experiment: Experiment, federation: Federation) -> dict[str, DeviceProfile]:
    """Client -> the device that it trains on."""
    fleet = experiment.fleet
    devices = assign_devices(fleet.profile, federation.clients, experiment.seed, fleet.clients)
    devices |= {client: load_profile(name) for client, name in federation.trouble.slow.items()}
    return add_network_energy(devices, fleet.network)


def start_pooled_workers(
    experiment: Experiment, recipe: Recipe, federation: Federation, runner: ClientRunner
) -> PooledWorkers:
    """Threads or processes on the CPU; where the experiment says "auto", as many as memory
    allows.
    """
    runner.precision = resolve_cpu_precision(experiment.engine.precision or "float32")
    largest = max(1, int(federation.n.max()))
    work = replace(recipe.work, batch=min(recipe.work.batch, largest))
    T = experiment.rounds
    task = Task("", 0, 1, 0, work, update=recipe.chain, augment=recipe.augment, rounds=T)
    count, M, layout = experiment.engine.workers, len(federation.clients), runner.layout
    if count != "auto":
        return start_workers(runner, experiment.engine.kernel, count, task, None)
    spare = estimate_spare_bytes(recipe, M, layout.trainable, layout.size)
    return start_workers(runner, experiment.engine.kernel, os.cpu_count() or 1, task, spare)


def open_run_slot(
    experiment: Experiment,
    recipe: Recipe,
    schedulers: DeviceSchedulers | None,
    runner: ClientRunner,
) -> RunSlot:
    """A slot at a GPU's scheduler, one of the `schedulers` of several runs where it is given."""
    schedulers = schedulers or DeviceSchedulers("cuda", single=True)
    d, D = runner.layout.trainable, runner.layout.size
    memory, alone, wanted = schedulers.memory_bytes, schedulers.single, experiment.engine.updates
    placement = choose_placement(recipe, d, D, memory, alone, wanted)
    if D > LARGE_MODEL_FLOATS:
        log.warning("%s", describe_placement(placement, recipe.P, D, schedulers.device))
    return schedulers.open_slot(runner, experiment.engine.precision or "float32", placement)


def warn_about_unfit_network(recipe: Recipe, net: nn.Module) -> None:
    """One line where the recipe does little with this network."""
    name = recipe.name or "the recipe"
    probes = any(link.estimates_gradient for link in recipe.chain.links)
    if probes and not isinstance(net, SeedSpaceNetwork):
        log.warning(
            "%s probes single weights of this model, which teaches it next to nothing; set"
            " model.options.seeds, such as 1024, or hand over"
            " flrce.models.seeds.SeedSpaceNetwork(network, 1024)",
            name,
        )
    if recipe.aggregator.needs_adapters and not get_adapter_rank(net):
        log.warning(
            "%s averages products of adapters, and this network has none, so that it is a plain"
            " mean; put some in by flrce.models.adapters.add_lora_adapters",
            name,
        )


def warn_about_short_clock(experiment: Experiment, recipe: Recipe, engine: Simulator) -> None:
    """One line where the run ends, by its modelled clock, before clients come or go."""
    dynamics = engine.fleet_dynamics
    if dynamics is None:
        return
    tasks = [
        Task(client, k, 1, experiment.seed, recipe.work, update=recipe.chain, rounds=1)
        for k, client in enumerate(engine.federation.clients[:MAX_ESTIMATED_CLIENTS])
    ]
    longest = max(engine.estimate(task).seconds for task in tasks)
    seconds = experiment.rounds * max(longest, dynamics.interval)
    if warning := dynamics.describe_short_clock(seconds, recipe.minimum):
        log.warning("%s", warning)


def with_given_clients(
    experiment: Experiment, data: Any = None, read: Callable[[Experiment], Source] | None = None
) -> tuple[Experiment, Any]:
    """The experiment whose clients are the groups of its data, where data come by client or
    data.group names them and it says nothing else; and the data, read if that was necessary.
    """
    d, fields_set = experiment.data, experiment.model_fields_set
    if "partition" in d.model_fields_set and (d.partition != "given" or "clients" in fields_set):
        return experiment, data
    if not (holds_clients(data) or d.group is not None or "partition" in d.model_fields_set):
        return _with_possible_partition(experiment, data, read)
    if data is None and "clients" not in fields_set:
        data = read(experiment) if read else d.read_source()
    pool = None if "clients" in fields_set else to_source(data, **d.reader_options())
    changes: dict[str, Any] = {"data": d.model_copy(update={"partition": "given"})}
    if pool is not None and pool.group is not None:
        count = int(pool.group.max()) + 1
        changes["clients"] = count
        if "per_round" not in fields_set:
            changes["per_round"] = min(experiment.per_round, count)
    if "partition" not in d.model_fields_set:
        log.info(
            "each group of the data is a client (data.partition = 'given'); set another partition"
            " to share the samples out anew"
        )
    changed = experiment.model_copy(update=changes)
    if changed.per_round > changed.clients:
        raise BadInput(
            f"per_round = {changed.per_round}, but the data have {changed.clients} clients; lower"
            " it"
        )
    return changed, data if pool is None else pool


def _with_possible_partition(
    experiment: Experiment, data: Any, read: Callable[[Experiment], Source] | None
) -> tuple[Experiment, Any]:
    """The experiment, with data.partition = "iid" where its own data have no classes that the
    default partition could share out; and the data, read if that was necessary.
    """
    d = experiment.data
    if data is None:
        if d.path is None:
            return experiment, None
        data = read(experiment) if read else d.read_source()
    pool = to_source(data, **d.reader_options())
    if has_class_labels(pool):
        return experiment, pool
    log.info("%s has %s: data.partition = 'iid' shares its samples out", pool.name, pool.kind)
    return experiment.model_copy(update={"data": d.model_copy(update={"partition": "iid"})}), pool


def build_data_and_model(
    experiment: Experiment, data: Any = None, model: nn.Module | None = None
) -> tuple[Federation, nn.Module]:
    """The samples of every client, and the network."""
    pool = read_samples(experiment, data)
    federation = experiment.federate(pool)
    fields = pool.preprocessing.fields if pool.preprocessing else ()
    if model is None:
        net = build_named_network(experiment, pool)
    else:
        net = attach_fields(model, fields)
        if fields:
            log.info("using the PyTorch trainer; the fast kernels take networks with one input")
    sample_inputs = scale_inputs(torch.from_numpy(np.array(pool.x[:2])), pool.scale, pool.shift)
    recipe = experiment.build_recipe()
    net = finish_network(net, sample_inputs, experiment, recipe.frozen)
    if model is None and experiment.model.name == "auto":
        own = data is not None or experiment.data.path is not None
        chosen = resolve_network_name("auto", pool.spec)
        described = describe_network(chosen, net, experiment.per_round)
        log.log(logging.WARNING if own else logging.INFO, "%s", described)
    refuse_too_many_probes(recipe, net)
    # one output for each
    counted = experiment.objective is None and pool.kind in ("classes", "tokens")
    outputs = pool.outputs if counted else None
    validate_network(
        net, sample_inputs, outputs, f"the inputs {describe_fields(fields)}" if fields else ""
    )
    objective = experiment.build_objective(pool.kind, pool.preprocessing)
    net = unwrap_network_output(net, sample_inputs, objective)
    validate_on_samples(
        net, sample_inputs, torch.from_numpy(np.array(pool.y[:2])), objective, recipe.augment
    )
    if experiment.train.batch == 1:
        validate_single_sample_batch(net, sample_inputs)
    return federation, net


def read_samples(experiment: Experiment, data: Any = None) -> Source:
    """All samples of the experiment, or those that take their place; a line about what is odd."""
    d = experiment.data
    log.info("preparing the samples of %d clients", experiment.clients)
    pool = d.read_source() if data is None else to_source(data, **d.reader_options())
    if pool.kind == "classes" and pool.outputs < 2:
        log.warning(
            "every sample is of class %r: there is nothing to tell apart; is data.target right?",
            *pool.classes,
        )
    if pool.features:
        log.warning(
            "%s: features: %s (data.ignore leaves columns out)",
            pool.name,
            format_features(pool.features),
        )
    return pool


def build_named_network(experiment: Experiment, pool: Source) -> nn.Module:
    """The network that the experiment names; BadInput where the text has ids of another model."""
    tokenizer, options = experiment.data.tokenizer, experiment.model.options or {}
    if experiment.model.name == "llama" and tokenizer is not None:
        _require_same_vocabulary(tokenizer, str(options.get("path", "smollm2")))
    net: nn.Module = experiment.build_network(pool)
    return net


def refuse_too_many_probes(recipe: Recipe, net: nn.Module) -> None:
    """BadInput where a step probes more directions than there are numbers to train."""
    links = (link for link in recipe.chain.links if link.estimates_gradient)
    probes = max((link.forward_passes // 2 for link in links), default=0)
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    if probes > count:
        raise BadInput(
            f"a step probes {probes} directions, and {count} numbers train; lower"
            " recipe.directions, or raise model.options.seeds"
        )


def describe_network(name: str, net: nn.Module, per_round: int) -> str:
    """The network that "auto" chose: its size, and what it costs to send to a cohort and back."""
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    sent = 2 * per_round * 4 * count / 1e6
    return (
        f"model.name = 'auto' is {name}: {count:,} parameters, {sent:.3g} MB per round of"
        f" {per_round} clients before compression"
    )


def finish_network(
    net: nn.Module, x: Tensor, experiment: Experiment, fixed: Sequence[str]
) -> nn.Module:
    """The network as it trains on samples x (n, ...): adapters in, lazy layers sized, float32,
    low-rank where the experiment says so, frozen.
    """
    net = convert_to_float32(initialize_lazy_layers(prepare_network(net), x, experiment.seed))
    return freeze_parameters(experiment.complete_network(net), fixed)


def _require_same_vocabulary(tokenizer: str, path: str) -> None:
    """BadInput where the ids of the text are words of another model."""
    if not has_same_vocabulary(tokenizer, path):
        raise BadInput(
            f"data.tokenizer = {tokenizer!r} numbers its tokens otherwise than the model of"
            f" model.options.path = {path!r}: every id would be another word; set both alike"
        )


def choose_device(experiment: Experiment) -> str:
    """Where an experiment trains, "cuda" or "cpu"; BadInput where it requires a GPU that is not
    there.
    """
    return find_device(experiment.engine.device, experiment.engine.name)


def get_final_model(recipe: Recipe, state: State) -> Tensor:
    return recipe.average.model(state.server_state.get("average"), state.w)


def name_model_tensors(built: Simulation, w: Tensor) -> dict[str, Tensor]:
    """The model as named tensors: what travels, what is fixed, and what clients keep as it was at
    first.
    """
    tensors = {
        name: view.clone() for name, view in built.engine.runner.layout.view_tensors(w).items()
    }
    return add_untravelled_tensors(tensors, built.net)


def get_personal_models(built: Simulation, state: State) -> PersonalModels:
    """The models that clients are judged with, where these are not the one that all share."""
    owns = {
        client: own
        for client, kept in state.client_states.items()
        if (own := find_personal_state(kept)) is not None
    }
    where = built.engine.runner.layout
    held = {slot.name for slot in where.local_layout.slots}
    rest = (
        {name: x for name, x in add_untravelled_tensors({}, built.net).items() if name not in held}
        if owns
        else {}
    )
    return PersonalModels(where, get_final_model(built.recipe, state), owns, rest)


def add_untravelled_tensors(found: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """What travelled, and what of the network did not: fixed parameters that lie in no file, and
    what clients keep.
    """
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if (
            name not in found
            and tensor.is_floating_point()
            and not isinstance(tensor, FrozenParameter)
        ):
            found[name] = tensor.detach().clone()
    return found
