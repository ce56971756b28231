"""What a link of an update is: one step of the way from a gradient to a change of w, and what it
may do besides.

A link is any object with one of

    step(g, w, state) -> (g, state)        g, w (..., d): the gradient so far, the trained weights
    probe(g, w, state, batch) -> (g, state)  the same, with more: `batch.gradient_at(at)`, ...
    estimate(losses, w, state) -> (losses, g)  beside step: a gradient of its own, from losses alone
    loss_term(batch, state) -> (n,)        added to the loss of each sample before the gradient

and, where it remembers something within a round, `begin_round(w, local, carry) -> state` with a
state of named tensors. `end_round(w, state) -> (carry, extras)` says what stays with the client
until its next task, and what travels to the server, where it arrives as `updates.extras`;
`list_extra_sizes(d)` declares its names and sizes. `frozen_coordinates(state)` names coordinates
that do not move in this step. The torch trainer runs any link; faster trainers say which ones they
fuse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from flrce.core.traits import CachedProtocolMeta
from flrce.core.types import Task
from flrce.models.flat import ModelLayout
from flrce.training.schedules import Schedule

NamedTensors = Mapping[str, Tensor]
# among what a link's `end_round` keeps: the whole model (size,) that the client is judged by
PERSONAL_MODEL_KEY = "personal"


@dataclass(frozen=True)
class ClientContext:
    """What a client knows as it starts."""

    task: Task
    steps: int  # batches it will train on
    n: int  # its training samples
    layout: ModelLayout  # where tensors lie in w
    whole: Tensor | None = (
        None  # (size,) its whole model, statistics included, as it is *now*: clone it to keep it
    )


class Batch(Protocol):
    """The batch of one step, as links see it. A point `at` is a vector of trained weights (d,), or
    a whole one (size,).

    Whatever is asked, w and BatchNorm's statistics stay as they are, and random layers draw what
    they drew before.
    """

    y: Tensor  # (n, ...) targets
    out: Any  # what the network gives, with its graph
    g: Tensor  # (d,) the plain gradient of this step, once there is one
    step: int  # number of this step in the round, from 0
    rate: float  # how far this step goes

    @property
    def features(self) -> Tensor:
        """(n, ...) what the network's last layer is given, with its graph."""
        ...

    @property
    def rng(self) -> Generator:
        """Randomness by seed, round and client."""
        ...

    def gradient_at(self, at: Tensor) -> Tensor:
        """(d,) of the mean loss at another point, terms included."""
        ...

    def sample_gradients(self, at: Tensor | None = None) -> Tensor:
        """(n, d) of each sample's loss, here or at another point."""
        ...

    def forward_at(self, at: Tensor) -> tuple[Any, Tensor]:
        """(out, features) of the network with other weights, in eval mode and without a graph."""
        ...


@runtime_checkable
class Link(Protocol, metaclass=CachedProtocolMeta):
    """One step of the way from a gradient to a change of w."""

    def step(self, g: Tensor, w: Tensor, state: NamedTensors) -> tuple[Tensor, NamedTensors]: ...


@runtime_checkable
class ProbingLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that asks for more than one gradient a step: SAM, DP-SGD, a second model. Called
    instead of `step`.
    """

    def probe(
        self, g: Tensor, w: Tensor, state: NamedTensors, batch: Batch
    ) -> tuple[Tensor, NamedTensors]: ...


@runtime_checkable
class GradientEstimator(Link, Protocol):
    """A link that finds each step's gradient by itself, from losses alone, with
    `forward_passes` forward passes a step and none backward.

    `losses()` are those of the batch at w as it is, which the link may move meanwhile; returned are
    losses and g.
    """

    @property
    def forward_passes(self) -> int: ...
    def estimate(
        self, losses: Callable[[], Tensor], w: Tensor, state: NamedTensors
    ) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class LossTermLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that adds to each sample's loss, (n,): a contrast of features, distillation. It needs
    no `step`.
    """

    def loss_term(self, batch: Batch, state: NamedTensors) -> Tensor: ...


@runtime_checkable
class FreezingLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that keeps coordinates where they are, whatever the links behind it remember: (d,)
    bool, or None.
    """

    def frozen_coordinates(self, state: NamedTensors) -> Tensor | None: ...


@runtime_checkable
class BatchableLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that says whether it works on any number of leading dimensions, so that a stack may
    run it at once.
    """

    @property
    def supports_client_batches(self) -> bool: ...


@runtime_checkable
class FinalLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that can end a chain: it says how far a step goes."""

    @property
    def lr(self) -> float: ...


@runtime_checkable
class ScheduledLink(FinalLink, Protocol):
    """One whose rate changes: by the factor that a schedule makes of (step, steps, t, T)."""

    @property
    def schedule(self) -> Schedule: ...


@runtime_checkable
class MultiPassLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that needs more than one forward and backward pass a step: so many more, for the
    books.
    """

    @property
    def extra_passes(self) -> float: ...


@runtime_checkable
class StatefulLink(Protocol, metaclass=CachedProtocolMeta):
    """A link with a state of its own during a round."""

    def begin_round(self, w: Tensor, local: ClientContext, carry: NamedTensors) -> NamedTensors: ...


@runtime_checkable
class ExtrasLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that sends tensors back: their names and sizes for a model of d floats, so that gate
    and books know.
    """

    def list_extra_sizes(self, d: int) -> Mapping[str, int]: ...


@runtime_checkable
class RoundEndLink(Protocol, metaclass=CachedProtocolMeta):
    """A link that keeps something with the client, or sends something back, when the round is
    over.
    """

    def end_round(self, w: Tensor, state: NamedTensors) -> tuple[NamedTensors, NamedTensors]: ...
