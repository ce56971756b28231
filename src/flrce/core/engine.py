"""Where clients run: the base class of engines, with a default for everything optional; and an
engine's fleet by the clock: who is known, when a round begins, who can be asked then, who went
while it worked, and what that emitted.

simulation/simulator.py has the engine on this machine, flower/engine.py the one over Flower's
messages.
"""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flrce.core.downlink import HOST, EncodedModel, HeldPart
from flrce.core.pieces import Recipe
from flrce.core.record import read_clock
from flrce.core.roles import RoundView, default_property, overrides
from flrce.core.state_values import grow_tables
from flrce.core.types import (
    ClientCost,
    ClientRecord,
    ClientStates,
    Evaluation,
    PendingTask,
    PrimaryMetric,
    Reply,
    RoundPlan,
    RoundReplies,
    State,
    Task,
)


class Engine(ABC):
    """Where clients run: a simulator on this machine, a batch of clients on a GPU, Flower's
    nodes.
    """

    trainable: int  # trained floats at the front of w
    blocks: int = 1  # of the network, each ready to be frozen; 1: all or nothing
    judges_once: bool = False  # evaluating a model costs messages: only the final one is evaluated
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # names and shapes of the tensors of w
    fleet_dynamics: Any = None  # `devices.FleetDynamics`; None: all clients are always there

    @abstractmethod
    def clients(self, t: int) -> Sequence[str]:
        """Who can be reached in round t; 0: who is known before the first."""

    @abstractmethod
    def count_samples(self, client: str) -> int:
        """Training samples of a client, 0 where unknown."""

    @abstractmethod
    def estimate(self, task: Task) -> ClientCost:
        """The modelled cost of a task before it is run."""

    @abstractmethod
    def estimate_inquiry(self, client: str, down: int) -> ClientCost:
        """The cost of asking a client for its loss; `down`: bytes of the model it is sent."""

    @abstractmethod
    def losses(self, models: Sequence[Tensor], clients: Sequence[str]) -> Tensor:
        """(clients,) the mean loss of each client's model on its training samples."""

    @abstractmethod
    def get_task_layout(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        """Coordinates that a task trains (None: all), and names and sizes of their tensors."""

    @abstractmethod
    def get_held_part(self, task: Task) -> HeldPart:
        """What its client is sent of w."""

    @abstractmethod
    def train(
        self, pending: Sequence[PendingTask], client_states: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        """Replies to these tasks, each trained from its own `w`; with `keep`, no more good ones
        than that need be waited for.
        """

    @abstractmethod
    def evaluate(
        self, w: Tensor, t: int, last: bool, client_states: ClientStates
    ) -> Evaluation | None:
        """The model on every client's hold-out, each with what it keeps; None: no evaluation is
        due in this round, and it is not the `last`.
        """

    def begin_round(self, now: float) -> None:  # noqa: B027 - optional
        """A round is planned at `now`, in seconds of the run's clock: estimates are of then."""

    def estimate_round(self, tasks: Sequence[Task]) -> Sequence[ClientCost]:
        """The modelled costs of tasks that clients do side by side."""
        return [self.estimate(task) for task in tasks]

    def adapt_task(self, task: Task) -> Task:
        """The task as its client can do it."""
        return task

    def get_download_kind(self, model: EncodedModel) -> str:
        """How a model travels: "full", "first" or "difference"."""
        return "full" if model.download is None else model.download.kind

    def count_all_samples(self, clients: Sequence[str]) -> Tensor:
        """(clients,) float64: the training samples of each."""
        return torch.tensor([self.count_samples(k) for k in clients], dtype=torch.float64)

    def estimate_evaluation(self, t: int) -> Sequence[tuple[str, ClientCost]]:
        """What each client spends to evaluate the final model of round t: its download, and forward
        passes on its hold-out; (): nobody is asked in this round, or costs are not modelled.
        """
        return ()

    def annotate_tasks(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        """What the ledger notes about a round's tasks: the node of each client, for instance."""
        return {}

    def battery_levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) from 0 to 1, as clients report them; None where nobody does."""
        return None

    @default_property
    def primary_metric(self) -> PrimaryMetric:
        """The metric that tables, reports and stop rules use."""
        return PrimaryMetric()

    @default_property
    def model_bytes(self) -> int | None:
        """Bytes of the model as it is sent, which may be of another type than w; None: as w."""
        return None

    @default_property
    def worker_processes(self) -> tuple[int, int]:
        """Processes on this machine that train clients, and bytes that each takes."""
        return 0, 0

    @default_property
    def code_device(self) -> torch.device:
        """Where many updates or models are encoded at once."""
        return HOST

    # An engine may leave updates on its device, and is given the next model as it lies there.

    @default_property
    def updates_on_device(self) -> bool:
        """Whether a round's updates stay on the device."""
        return False

    @default_property
    def device_lock(self) -> AbstractContextManager[Any]:
        """Held while the server works on the device: one thread at a time."""
        return nullcontext()

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:  # noqa: B027 - optional
        """Note that `there`, on the device, is the model w on the host."""

    # Clients of an asynchronous engine work by themselves: replies are collected as they come.

    @default_property
    def asynchronous(self) -> bool:
        """Whether tasks are sent and replies collected, in place of `train`."""
        return overrides(self, Engine, "send")

    def send(self, pending: Sequence[PendingTask], client_states: ClientStates) -> None:
        """Send those tasks that are not under way yet; after a restart, that is all of them."""
        raise NotImplementedError(f"{type(self).__name__} is not asynchronous")

    def collect(
        self, pending: Sequence[PendingTask], size: int | None, open_ended: bool
    ) -> RoundReplies:
        """Wait for `size` good replies; None, or where fewer are under way: for all.

        Tasks without a reply by then stay under way where the pace is `open_ended`; otherwise they
        have failed.
        """
        raise NotImplementedError(f"{type(self).__name__} is not asynchronous")


log = logging.getLogger("flrce")
FLEET_STATE_KEY = "fleet"  # where a state's memory has the batteries


def initial_fleet_state(engine: Engine) -> dict[str, Any]:
    """What the fleet remembers before the first round."""
    dynamics = engine.fleet_dynamics
    charge = None if dynamics is None else dynamics.initial_state()
    return {} if charge is None else {FLEET_STATE_KEY: charge}


def reachable_clients(
    recipe: Recipe, engine: Engine, state: State, t: int, under_way: Sequence[PendingTask]
) -> tuple[float, Sequence[str], Mapping[str, int]]:
    """When round t begins, who can be reached then, and how many cannot be for which reason.

    A round waits for what its pace wants, for the fleet's interval, and until as many clients can
    be reached as it needs replies, unless some are under way.
    """
    now, dynamics = read_clock(state.history), engine.fleet_dynamics
    if dynamics is None:
        return now, engine.clients(t), {}
    charge = state.server_state.get(FLEET_STATE_KEY)
    if dynamics.interval and state.history:
        now = max(now, state.history[-1].began + dynamics.interval)
    hours = recipe.pace.forecast_hours
    if hours and dynamics.grid is not None:
        now = recipe.pace.choose_start_time(now, dynamics.grid.forecast_intensity(now, hours))
    if not under_way:
        now = dynamics.find_time_with_clients(now, recipe.minimum, charge, t)
    return now, *dynamics.find_reachable_clients(now, charge, t)


def view_with_fleet_state(view: RoundView, engine: Engine, state: State) -> RoundView:
    """The view with what a fleet that lives can report: levels of batteries, carbon intensities."""
    dynamics, roster = engine.fleet_dynamics, state.roster
    if engine.battery_levels(roster) is not None:
        return replace(view, battery=lambda k: _select_levels(engine.battery_levels(roster), k))
    if dynamics is None:
        return view
    charge = state.server_state.get(FLEET_STATE_KEY)
    levels = (
        None
        if charge is None
        else lambda k: dynamics.report_battery_levels([roster[row] for row in k], view.now, charge)
    )
    intensity = (
        None
        if dynamics.grid is None
        else lambda k: dynamics.get_carbon_intensity([roster[row] for row in k], view.now)
    )
    return replace(view, battery=levels, intensity=intensity)


def _select_levels(levels: Any, k: Sequence[int]) -> Any:
    return levels[list(k)]


def estimate_return_times(
    engine: Engine, state: State, tasks: Sequence[Task], now: float
) -> list[float]:
    """When each client will have done its task by the model of its costs, or will have left."""
    estimates, dynamics = [engine.estimate(task) for task in tasks], engine.fleet_dynamics
    if dynamics is not None and tasks:
        works = [(task.client, now, spent) for task, spent in zip(tasks, estimates, strict=True)]
        estimates = [
            spent
            for spent, _ in dynamics.simulate_work(works, state.server_state.get(FLEET_STATE_KEY))
        ]
    return [now + spent.seconds for spent in estimates]


def drop_departed_clients(
    engine: Engine, state: State, pending: Sequence[PendingTask], replies: Sequence[Reply]
) -> Sequence[Reply]:
    """The replies to these tasks; of clients that were gone before they had finished, only what
    they had spent.
    """
    dynamics = engine.fleet_dynamics
    if dynamics is None or not replies:
        return replies
    sent = {one.task.client: one.sent for one in pending}
    works = [(reply.client, sent[reply.client], reply.spent) for reply in replies]
    ends = dynamics.simulate_work(works, state.server_state.get(FLEET_STATE_KEY))
    return [
        Reply(reply.client, reply.t, error=why, spent=spent) if why else reply
        for reply, (spent, why) in zip(replies, ends, strict=True)
    ]


def add_carbon(
    engine: Engine, plan: RoundPlan
) -> Callable[[Sequence[ClientRecord]], list[ClientRecord]]:
    """Puts down on each client's line what its work emitted."""
    dynamics = engine.fleet_dynamics

    def price_records(lines: Sequence[ClientRecord]) -> list[ClientRecord]:
        if dynamics is None or dynamics.grid is None:
            return list(lines)
        grams = dynamics.compute_emissions(_list_client_work(plan, lines))
        return [
            replace(line, spent=replace(line.spent, grams=emitted))
            for line, emitted in zip(lines, grams, strict=True)
        ]

    return price_records


def estimate_carbon(
    engine: Engine, state: State, tasks: Sequence[Task], spent: Sequence[ClientCost]
) -> list[ClientCost]:
    """Estimates with what they would emit if the work began now."""
    dynamics = engine.fleet_dynamics
    if dynamics is None or dynamics.grid is None:
        return list(spent)
    now = read_clock(state.history)
    grams = dynamics.compute_emissions(
        [(task.client, now, cost) for task, cost in zip(tasks, spent, strict=True)]
    )
    return [replace(cost, grams=amount) for cost, amount in zip(spent, grams, strict=True)]


def update_batteries(
    engine: Engine, plan: RoundPlan, lines: Sequence[ClientRecord]
) -> dict[str, Any]:
    """The fleet's memory after the round."""
    charge = plan.state.server_state.get(FLEET_STATE_KEY)
    if charge is None:
        return {}
    asked = {one.task.client for one in plan.pending}
    mine = [line for line in lines if line.client in asked and line.outcome != "asked"]
    return {
        FLEET_STATE_KEY: engine.fleet_dynamics.drain_batteries(
            _list_client_work(plan, mine), charge
        )
    }


def _list_client_work(
    plan: RoundPlan, lines: Sequence[ClientRecord]
) -> list[tuple[str, float, ClientCost]]:
    sent = {one.task.client: one.sent for one in plan.pending}
    return [(line.client, sent.get(line.client, plan.began), line.spent) for line in lines]


def update_roster(
    state: State, clients: tuple[str, ...], fits: Callable[[int], bool] = lambda M: True
) -> tuple[State, tuple[int, ...]]:
    """The state with newcomers on its roster, and the rows of all who are here.

    Rows are never given up, since clients come back and the ledger speaks of rows. So that nobody
    can fill the memory with names, newcomers for whom the tables have no room (`fits` is told how
    many clients there would be) stay out.
    """
    if (
        clients is state.roster or clients == state.roster
    ):  # as a rule nobody came or went: no name is looked up
        return state, _list_all_indices(len(clients))
    here = set(clients)
    newcomers = tuple(sorted(here - set(state.roster)))
    M = len(state.roster) + len(newcomers)
    if newcomers and fits(M):
        state = replace(
            state, roster=state.roster + newcomers, server_state=grow_tables(state.server_state, M)
        )
    elif newcomers:
        log.warning(
            "%d newcomers (%.60r first) stay out: there is no memory for tables of %d clients;"
            " begin a new run, or one without a relationship map",
            len(newcomers),
            newcomers[0],
            M,
        )
    return state, tuple(k for k, client in enumerate(state.roster) if client in here)


def exclude_busy_clients(rows: tuple[int, ...], busy: set[int]) -> tuple[int, ...]:
    """Ascending rows but for those that are busy: few of many, so that what lies between them is
    taken at once.
    """
    left: list[int] = []
    start = 0
    for k in sorted(busy):
        at = bisect_left(rows, k)
        if at < len(rows) and rows[at] == k:
            left += rows[start:at]
            start = at + 1
    return (*left, *rows[start:])


def count_absent(
    roster: Sequence[str],
    pool: Sequence[int],
    busy: Collection[int],
    unreachable: Mapping[str, int],
) -> dict[str, Any]:
    """For the ledger: how many could be asked, how many were still at work, and how many could not
    be reached by reason; nothing where everybody could be asked.
    """
    if len(pool) == len(roster):
        return {}
    reasons = {"unreachable": dict(unreachable)} if unreachable else {}
    return {"reachable": len(pool), **({"busy": len(busy)} if busy else {}), **reasons}


@lru_cache(maxsize=4)
def _list_all_indices(M: int) -> tuple[int, ...]:
    return tuple(range(M))
