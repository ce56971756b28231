"""Where clients run: what every engine does, and what one may be able to do besides.

engines/ has the simulator and its stacks, flower/engine.py the one over Flower's messages.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from flrce.core.downlink import HeldPart
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


class Engine(Protocol):
    """Where clients run: a simulator on this machine, a stack on a GPU, Flower's nodes."""

    trainable: int  # trained floats at the front of w
    blocks: int  # of the network, each ready to be frozen; 1: all or nothing
    judges_once: (
        bool  # whether judging a model costs messages, so that only the one to hand back is judged
    )

    def clients(
        self, t: int
    ) -> Sequence[str]: ...  # who is reachable in round t; 0: who is known before
    def count_samples(self, client: str) -> int: ...  # training samples, 0 where unknown
    def adapt_task(self, task: Task) -> Task: ...  # as its client can do it
    def estimate(self, task: Task) -> ClientCost: ...  # modelled cost, before it is run
    def estimate_inquiry(
        self, client: str, down: int
    ) -> ClientCost: ...  # what asking for its loss costs
    # mean loss of each client's model on its training samples
    def losses(self, models: Sequence[Tensor], clients: Sequence[str]) -> Tensor: ...
    def get_task_layout(
        self, task: Task
    ) -> tuple[Tensor | None, Sequence[tuple[str, int]]]: ...  # coordinates, layout

    def get_held_part(self, task: Task) -> HeldPart: ...  # what its client is sent of w

    def train(
        self, pending: Sequence[PendingTask], carry: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        """Replies to these tasks, each trained from its own `w`; with `keep`, no more good ones
        than that need be waited for.
        """
        ...

    def evaluate(self, w: Tensor, t: int, last: bool, carry: ClientStates) -> Evaluation | None:
        """What clients think of w, each with what it keeps; None: not due in this round, nor the
        `last`.
        """
        ...


@runtime_checkable
class AsynchronousEngine(Protocol):
    """An engine whose clients work by themselves: tasks are sent, and replies collected as they
    come.
    """

    def send(self, flights: Sequence[PendingTask], carry: ClientStates) -> None:
        """Send those tasks that are not under way yet; after a restart, that is all of them."""
        ...

    def collect(
        self, flights: Sequence[PendingTask], size: int | None, open_ended: bool
    ) -> RoundReplies:
        """Wait for `size` good replies; None, or where fewer are under way: for all.

        Tasks without a reply by then stay under way where the pace is `open_ended`; otherwise they
        have failed.
        """
        ...


@runtime_checkable
class MetricEngine(Protocol):
    """An engine that knows what the headline metric is."""

    @property
    def primary_metric(self) -> PrimaryMetric: ...


@runtime_checkable
class AnnotatingEngine(Protocol):
    """An engine with something to say about a round's tasks, for the ledger: the node of each
    client, for instance.
    """

    def annotate_tasks(self, tasks: Sequence[Task]) -> Mapping[str, Any]: ...


@runtime_checkable
class BatteryEngine(Protocol):
    """An engine whose clients tell what their batteries hold: (clients,) from 0 to 1, or None where
    nobody does.
    """

    def battery_levels(self, clients: Sequence[str]) -> Tensor | None: ...


@runtime_checkable
class DynamicFleetEngine(Protocol):
    """An engine whose clients live by the run's clock: `devices.FleetDynamics`, or None where
    all are always there.
    """

    @property
    def fleet_dynamics(self) -> Any: ...


@runtime_checkable
class ShapedEngine(Protocol):
    """An engine that knows the names and shapes of the tensors that w concatenates."""

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...


@runtime_checkable
class ModelBytesEngine(Protocol):
    """An engine that knows how many bytes the model has as it is sent, which may be another type
    than w's.
    """

    @property
    def model_bytes(self) -> int: ...


@runtime_checkable
class DeviceEngine(Protocol):
    """An engine that may leave updates on its device, and is given the next model as it lies
    there.
    """

    @property
    def updates_on_device(self) -> bool: ...  # whether a round's updates stay there
    @property
    def device_lock(
        self,
    ) -> AbstractContextManager[Any]: ...  # held while work is done there: one thread at a time
    def remember_device_copy(
        self, w: Tensor, there: Tensor
    ) -> None: ...  # the model on the host, and the same on the device


@runtime_checkable
class WorkerEngine(Protocol):
    """An engine whose clients are trained by processes on this machine."""

    @property
    def worker_processes(
        self,
    ) -> tuple[int, int]: ...  # how many there are, and bytes that each takes


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that knows everybody's samples at once: (M,) float64."""

    def count_all_samples(self, clients: Sequence[str]) -> Tensor: ...
