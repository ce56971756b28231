"""An experiment file's recipe, data and model on Flower: what its ServerApp and its ClientApp do."""

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

from flrce.config import Experiment
from flrce.data.federation import Federation
from flrce.engines.baseline import describe_data
from flrce.engines.simulator import Simulator
from flrce.errors import BadInput
from flrce.fleet.costs import fleet
from flrce.flower.arrays import record
from flrce.flower.client import Local, client_app
from flrce.flower.grid import LocalGrid
from flrce.flower.options import Known
from flrce.flower.session import Result
from flrce.flower.strategies import RecipeStrategy
from flrce.host import find_device
from flrce.models.flat import fix, layout, pack
from flrce.types import Reply, Round, Spent, Task
from flrce.user_code import Trust

Built = tuple[Federation, Any]  # samples and network
_loading = threading.Lock()


def serve(
    grid: Grid, experiment: Experiment, state: Path | str | None = None, built: Built | None = None,
    watch: Callable[[Round], None] | None = None, **settings: Any,
) -> Result:  # fmt: skip
    """All rounds of an experiment over a grid; `state` is its run directory, from which a killed run goes on.

    With `modelled`, costs are those of the experiment's fleet, as in the simulator, not what the clocks here say.
    `built` takes the place of the experiment's own samples and network; `watch` is shown every round.
    """
    find_device(experiment.engine.device, "flower")
    federation, net = built or _built(experiment)
    costs = _Modelled(experiment, federation, net) if settings.pop("modelled", False) else None
    given = {
        "seed": experiment.seed, "eval_every": experiment.engine.eval_every, "min_train_nodes": 1,
        "min_available_nodes": min(experiment.per_round, experiment.clients), "device": _profile(experiment),
    }  # fmt: skip
    timeout = float(settings.pop("timeout", 3600.0))
    strategy = RecipeStrategy(
        experiment.build_recipe(), state=state, model=net, sample_shape=federation.source.shape, **{**given, **settings}
    )
    objective = experiment.build_objective(federation.source.kind)
    dealt = describe_data(federation, objective)
    strategy.told(Known(experiment.toml(), dealt, costs, watch, objective.judges))
    return strategy.start(grid, record(layout(net).views(pack(net))), experiment.rounds, timeout)


def arrays(experiment: Experiment) -> ArrayRecord:
    """The experiment's first model."""
    _, net = _built(experiment)
    return record(layout(net).views(pack(net)))


def local_of(experiment: Experiment, context: Context, built: Built | None = None) -> Local:
    """What the node with partition-id k trains with: the samples of client k of the experiment."""
    federation, net = built or _built(experiment)
    k = context.node_config.get("partition-id")
    if type(k) is not int or not 0 <= k < len(federation.clients):
        raise BadInput(f"partition-id {k!r}: set it with --node-config, from 0 to {len(federation.clients) - 1}")
    origin = federation.source
    return Local(
        net, federation.x, federation.y, federation.train[k], federation.held[k], origin.scale, origin.shift,
        federation.clients[k], experiment.build_objective(origin.kind), experiment.build_recipe().kept,
        experiment.engine.kernel,
    )  # fmt: skip


def experiment_client(experiment: Experiment, built: Built | None = None) -> ClientApp:
    """A ClientApp whose node with partition-id k is client k of the experiment."""
    return client_app(lambda context: local_of(experiment, context, built))


def run(
    experiment: Experiment, state: Path | str | None = None, threads: int = 2, built: Built | None = None,
    **settings: Any,
) -> Result:  # fmt: skip
    """An experiment on Flower's message layer within this process: one node per client."""
    with closing(LocalGrid(experiment_client(experiment, built), experiment.clients, threads=threads)) as grid:
        given = {"min_available_nodes": experiment.clients, "modelled": True}
        given |= {"by_class": True}  # all samples are here: there is nobody to tell label counts
        return serve(grid, experiment, state, built, **{**given, **settings})


class _Modelled:
    """The simulator's books without its workers."""

    def __init__(self, experiment: Experiment, federation: Federation, net: Any) -> None:
        devices = fleet(experiment.fleet.profile, federation.clients, experiment.seed, experiment.fleet.clients)
        kept = experiment.build_recipe().kept
        self.simulator = Simulator(federation, net, devices, lambda runner: None, kept=kept)  # type: ignore[arg-type, return-value]

    def includes(self, client: str) -> bool:
        return client in self.simulator.fleet

    def estimate(self, task: Task) -> Spent:
        return self.simulator.estimate(task)

    def booked(self, task: Task, reply: Reply) -> Reply:
        return self.simulator._booked(task, reply)

    def inquiry(self, client: str, down: int) -> Spent:
        return self.simulator.inquiry(client, down)


def _built(experiment: Experiment) -> Built:
    """Samples and network of an experiment, made once per process."""
    with _loading:
        return _build(experiment.toml(), experiment.trust)


@lru_cache(maxsize=2)
def _build(text: str, trust: Trust) -> Built:
    experiment = Experiment.of(tomllib.loads(text), trust=trust)
    d = experiment.data
    pool = d.read()
    federation = experiment.federate(pool)
    net = experiment.build_network(pool)
    return federation, fix(net, experiment.build_recipe().fixed)


def _profile(experiment: Experiment) -> str | None:
    """The device that models joules, where all clients have the same."""
    told = experiment.fleet
    return told.profile if isinstance(told.profile, str) and not told.clients else None
