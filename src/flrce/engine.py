"""Where clients run: what every engine does, and what one may be able to do besides.

engines/ has the simulator and its stacks, flower/engine.py the one over Flower's messages.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from flrce.types import Arrivals, Carry, Evaluation, Flight, Reply, Spent, Task, Yardstick


class Engine(Protocol):
    """Where clients run: a simulator on this machine, a stack on a GPU, Flower's nodes."""

    trainable: int  # trained floats at the front of w
    blocks: int  # of the network, each ready to be frozen; 1: all or nothing
    judges_once: bool  # whether judging a model costs messages, so that only the one to hand back is judged

    def clients(self, t: int) -> Sequence[str]: ...  # who is reachable in round t; 0: who is known before
    def samples(self, client: str) -> int: ...  # training samples, 0 where unknown
    def accept(self, task: Task) -> Task: ...  # as its client can do it
    def estimate(self, task: Task) -> Spent: ...  # modelled cost, before it is run
    def inquiry(self, client: str, down: int) -> Spent: ...  # what asking for its loss costs
    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor: ...
    def holdings(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]: ...  # coordinates, layout

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Carry, keep: int | None = None) -> Sequence[Reply]:
        """Replies to these tasks; with `keep`, no more good ones than that need be waited for."""
        ...

    def evaluate(self, w: Tensor, t: int, last: bool, carry: Carry) -> Evaluation | None:
        """What clients think of w, each with what it keeps; None: not due in this round, nor the `last`."""
        ...


@runtime_checkable
class Asynchronous(Protocol):
    """An engine whose clients work by themselves: tasks are sent, and replies collected as they come."""

    def send(self, flights: Sequence[Flight], carry: Carry) -> None:
        """Send those tasks that are not under way yet; after a restart, that is all of them."""
        ...

    def collect(self, flights: Sequence[Flight], size: int | None, open_ended: bool) -> Arrivals:
        """Wait for `size` good replies; None, or where fewer are under way: for all.

        Tasks without a reply by then stay under way where the pace is `open_ended`; otherwise they have failed.
        """
        ...


@runtime_checkable
class Measures(Protocol):
    """An engine that knows what the headline metric is."""

    @property
    def yardstick(self) -> Yardstick: ...


@runtime_checkable
class Notes(Protocol):
    """An engine with something to say about a round's tasks, for the ledger: the node of each client, for instance."""

    def notes(self, tasks: Sequence[Task]) -> Mapping[str, Any]: ...


@runtime_checkable
class Reports(Protocol):
    """An engine whose clients tell what their batteries hold: (clients,) from 0 to 1, or None where nobody does."""

    def levels(self, clients: Sequence[str]) -> Tensor | None: ...


@runtime_checkable
class Lives(Protocol):
    """An engine whose clients live by the run's clock: a `fleet.life.Life`, or None where all are always there."""

    @property
    def life(self) -> Any: ...


@runtime_checkable
class Shaped(Protocol):
    """An engine that knows the names and shapes of the tensors that w concatenates."""

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...


@runtime_checkable
class Weighs(Protocol):
    """An engine that knows how many bytes the model has as it is sent, which may be another type than w's."""

    @property
    def model_bytes(self) -> int: ...


@runtime_checkable
class Near(Protocol):
    """An engine that may leave updates on its device, and is given the next model as it lies there."""

    @property
    def near(self) -> bool: ...  # whether a round's updates stay there
    @property
    def turn(self) -> AbstractContextManager[Any]: ...  # held while work is done there: one thread at a time
    def hold(self, w: Tensor, there: Tensor) -> None: ...  # the model on the host, and the same on the device


@runtime_checkable
class Staffed(Protocol):
    """An engine whose clients are trained by processes on this machine."""

    @property
    def staff(self) -> tuple[int, int]: ...  # how many there are, and bytes that each takes


@runtime_checkable
class Counts(Protocol):
    """An engine that knows everybody's samples at once: (M,) float64."""

    def counts(self, clients: Sequence[str]) -> Tensor: ...
