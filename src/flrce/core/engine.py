"""Where clients run: the base class of engines, with a default for everything optional.

simulation/simulator.py has the engine on this machine, flower/engine.py the one over Flower's
messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flrce.core.downlink import HeldPart
from flrce.core.roles import default_property, overrides
from flrce.core.types import (
    ClientCost,
    ClientStates,
    Evaluation,
    PendingTask,
    PrimaryMetric,
    Reply,
    RoundReplies,
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
