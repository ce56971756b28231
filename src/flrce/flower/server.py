"""An experiment file's recipe, data and model on Flower: what its ServerApp and its ClientApp
do.
"""

import logging
import threading
import tomllib
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import nn

from flrce.config.experiment import Experiment
from flrce.core.host import find_device
from flrce.core.types import Round
from flrce.core.user_code import Trust
from flrce.data.federation import Federation
from flrce.errors import BadInput
from flrce.flower.arrays import to_array_record
from flrce.flower.client import Local, client_app
from flrce.flower.grid import LocalGrid
from flrce.flower.options import ServerContext
from flrce.flower.session import Result
from flrce.flower.strategy import RecipeStrategy
from flrce.methods.own_pieces import register_recipe_pieces
from flrce.models.flat import freeze_parameters, make_layout, pack_model
from flrce.simulation.baseline import describe_data
from flrce.simulation.build import build_devices
from flrce.simulation.cost_model import FleetCostModel
from flrce.storage.disk import make_folder
from flrce.storage.run_model import write_model_card
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner

log = logging.getLogger("flrce")
DataAndModel = tuple[Federation, Any]  # samples and network
_build_lock = threading.Lock()


def serve(
    grid: Grid,
    experiment: Experiment,
    state: Path | str | None = None,
    built: DataAndModel | None = None,
    watch: Callable[[Round], None] | None = None,
    **settings: Any,
) -> Result:
    """All rounds of an experiment over a grid; `state` is its run directory, from which a killed
    run goes on.

    With `modelled`, costs are those of the experiment's fleet, as in the simulator, not what the
    clocks here say. `built` takes the place of the experiment's own samples and network; `watch` is
    shown every round.
    """
    find_device(experiment.engine.device, "flower")
    federation, net = built or _get_data_and_model(experiment)
    if state is not None and built is None:
        make_folder(Path(state))
        write_model_card(Path(state), federation.source.spec.to_json())
    modelled = settings.pop("modelled", False)
    costs = build_cost_model(experiment, federation, net) if modelled else None
    if experiment.fleet.costs is not None and not modelled:
        log.warning("fleet.costs has no effect: on a deployment costs are measured")
    timeout = float(settings.pop("timeout", 3600.0))
    strategy = build_strategy(experiment, federation, net, state=state, **settings)
    objective = experiment.build_objective(federation.source.kind, federation.source.preprocessing)
    dealt = describe_data(federation, objective)
    strategy.set_server_context(
        ServerContext(experiment.to_toml(), dealt, costs, watch, objective.evaluation_metrics)
    )
    return strategy.start(grid, to_initial_arrays(net), experiment.rounds, timeout)


def build_strategy(
    experiment: Experiment, federation: Federation, net: nn.Module, **settings: Any
) -> RecipeStrategy:
    """The experiment's recipe as a strategy; `settings` go before those of the experiment."""
    defaults = {
        "seed": experiment.seed,
        "eval_every": experiment.engine.eval_every,
        "min_train_nodes": 1,
        "min_available_nodes": min(experiment.per_round, experiment.clients),
        "device": _find_common_profile(experiment),
        "model": net,
        "sample_shape": federation.source.shape,
    }
    recipe = experiment.build_recipe()
    register_recipe_pieces(recipe)
    return RecipeStrategy(recipe, **{**defaults, **settings})


def to_initial_arrays(net: nn.Module) -> ArrayRecord:
    """The first model as the clients of an experiment know it."""
    return to_array_record(make_layout(net).view_tensors(pack_model(net)))


def build_initial_arrays(experiment: Experiment) -> ArrayRecord:
    """The experiment's first model."""
    _, net = _get_data_and_model(experiment)
    return to_initial_arrays(net)


def local_of(experiment: Experiment, context: Context, built: DataAndModel | None = None) -> Local:
    """What the node with partition-id k trains with: the samples of client k of the experiment."""
    federation, net = built or _get_data_and_model(experiment)
    k = context.node_config.get("partition-id")
    if type(k) is not int or not 0 <= k < len(federation.clients):
        raise BadInput(
            f"partition-id {k!r}: set it with --node-config, from 0 to"
            f" {len(federation.clients) - 1}"
        )
    origin, recipe = federation.source, experiment.build_recipe()
    register_recipe_pieces(recipe)  # links and compressors that the local file names
    return Local(
        net,
        federation.x,
        federation.y,
        federation.train[k],
        federation.held[k],
        origin.scale,
        origin.shift,
        federation.clients[k],
        experiment.build_objective(origin.kind, origin.preprocessing),
        recipe.personal,
        experiment.engine.kernel,
    )


def build_experiment_client(experiment: Experiment, built: DataAndModel | None = None) -> ClientApp:
    """A ClientApp whose node with partition-id k is client k of the experiment."""
    locals_by_node: dict[Any, Local] = {}  # a node asks at every message

    def load(context: Context) -> Local:
        k = context.node_config.get("partition-id")
        if k not in locals_by_node:
            locals_by_node[k] = local_of(experiment, context, built)
        return locals_by_node[k]

    return client_app(load)


def run_on_local_grid(
    experiment: Experiment,
    state: Path | str | None = None,
    threads: int = 2,
    built: DataAndModel | None = None,
    **settings: Any,
) -> Result:
    """An experiment on Flower's message layer within this process: one node per client."""
    with closing(
        LocalGrid(build_experiment_client(experiment, built), experiment.clients, threads=threads)
    ) as grid:
        defaults = {"min_available_nodes": experiment.clients, "modelled": True}
        defaults |= {"by_class": True}  # all samples are here: there is nobody to tell label counts
        return serve(grid, experiment, state, built, **{**defaults, **settings})


def build_cost_model(
    experiment: Experiment, federation: Federation, net: nn.Module
) -> FleetCostModel:
    """The simulator's books of the experiment's fleet."""
    source, devices = federation.source, build_devices(experiment, federation)
    kept = experiment.build_recipe().personal
    samples = Samples(federation.x, federation.y, source.scale, source.shift)
    runner = ClientRunner(net, source.shape, samples, kept=kept)
    return FleetCostModel(runner, federation, devices, experiment.build_cost_model())


def _get_data_and_model(experiment: Experiment) -> DataAndModel:
    """Samples and network of an experiment, made once per process."""
    with _build_lock:
        return _build_data_and_model(experiment.to_toml(), experiment.get_trust)


@lru_cache(maxsize=2)
def _build_data_and_model(text: str, trust: Trust) -> DataAndModel:
    experiment = Experiment.from_tables(tomllib.loads(text), trust=trust)
    d = experiment.data
    pool = d.read_source()
    federation = experiment.federate(pool)
    net = experiment.complete_network(experiment.build_network(pool))
    return federation, freeze_parameters(net, experiment.build_recipe().frozen)


def _find_common_profile(experiment: Experiment) -> str | None:
    """The device that models joules, where all clients have the same."""
    fleet = experiment.fleet
    return fleet.profile if isinstance(fleet.profile, str) and not fleet.clients else None
