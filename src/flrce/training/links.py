"""What a link of an update is: one step of the way from a gradient to a change of w, and what it
may do besides.

The torch trainer runs any link; faster trainers say which ones they fuse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Generator, Tensor

from flrce.core.roles import default_property, overrides
from flrce.core.types import Task
from flrce.models.flat import ModelLayout
from flrce.training.schedules import ConstantRate, Schedule

Tensors = Mapping[str, Tensor]
# among what a link's `end_round` keeps: the whole model (size,) that the client is judged by
PERSONAL_MODEL_KEY = "personal"
LINK_METHODS = ("step", "probe", "loss_term")  # a link has one of them


@dataclass(frozen=True)
class ClientContext:
    """What a client knows as it starts."""

    task: Task
    steps: int  # batches it will train on
    n: int  # its training samples
    layout: ModelLayout  # where tensors lie in w
    # (size,) its whole model, statistics included, as it is *now*: clone it to keep it
    whole: Tensor | None = None
    samples: Any = None  # (n,) their places in the pool of samples
    # the mean loss of its training samples at `whole` as it is now, without training
    mean_loss: Callable[[], float] | None = None


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


class Link:
    """One step of the way from a gradient to a change of w.

    A link overrides at least one of `step`, `probe` and `loss_term`. It never changes: what it
    remembers within a round is its state, named tensors that `begin_round` makes.
    """

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        """The state at the start of a round; `client_state` is what the client kept."""
        return {}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The gradient (..., d) that the next link gets, and the state after the step."""
        return g, state

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """`step` for a link that needs more than one gradient: SAM, DP-SGD, a second model."""
        return self.step(g, w, state)

    def loss_term(self, batch: Batch, state: Tensors) -> Tensor:
        """(n,) added to the loss of each sample: a contrast of features, distillation."""
        raise NotImplementedError(f"{type(self).__name__} has no loss_term")

    def estimate(
        self, losses: Callable[[], Tensor], w: Tensor, state: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Losses and a gradient from losses alone, with `forward_passes` forward passes and none
        backward. `losses()` are those of the batch at w, which the link may move meanwhile.
        """
        raise NotImplementedError(f"{type(self).__name__} has no estimate")

    def frozen_coordinates(self, state: Tensors) -> Tensor | None:
        """(d,) bool: coordinates that do not move in this step, whatever the next links do."""
        return None

    def ends_training(self, state: Tensors) -> bool:
        """Whether the client stops after this step, before all of its batches: early exit, a limit
        of its own. What it did is booked, not what was planned.
        """
        return False

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        """What the client keeps until its next task, and what travels to the server as
        `updates.extras`.
        """
        return {}, {}

    def list_extra_sizes(self, d: int) -> Mapping[str, int]:
        """Names and sizes of what travels, for a model of d floats."""
        return {}

    def check_recipe(self, recipe: Any) -> str:
        """Why the link does not work in this recipe; "" if it does."""
        return ""

    @default_property
    def lr(self) -> float | None:
        """How far a step goes; a link with a rate can end a chain."""
        return None

    @default_property
    def schedule(self) -> Schedule:
        """The factor of `lr` by (step, steps, t, T)."""
        return ConstantRate()

    @default_property
    def extra_passes(self) -> float:
        """Forward and backward passes of a step beyond the first, which are booked."""
        return 0.0

    @default_property
    def evaluations(self) -> int:
        """How often `begin_round` asks for `local.mean_loss()`, which is booked."""
        return 0

    @default_property
    def model_groups(self) -> int:
        """Of how many global models the network consists; `ModelGroups` is made of it then."""
        return 1

    @default_property
    def forward_passes(self) -> int:
        """Forward passes of `estimate` in a step."""
        return 0

    @default_property
    def supports_client_batches(self) -> bool:
        """Whether it works on any number of leading dimensions, so that a GPU can run it for many
        clients at once.
        """
        return False

    @default_property
    def has_step(self) -> bool:
        """Whether it changes gradients, by `step` or `probe`."""
        return overrides(self, Link, "step") or self.probes_batch

    @default_property
    def probes_batch(self) -> bool:
        """Whether it asks for more of a batch than its gradient, by `probe`."""
        return overrides(self, Link, "probe")

    @default_property
    def has_loss_term(self) -> bool:
        """Whether it adds to the samples' losses."""
        return overrides(self, Link, "loss_term")

    @default_property
    def estimates_gradient(self) -> bool:
        """Whether it finds each step's gradient by itself."""
        return overrides(self, Link, "estimate")

    @default_property
    def ends_rounds(self) -> bool:
        """Whether it keeps something with the client, or sends something, after a round."""
        return overrides(self, Link, "end_round")

    @default_property
    def may_end_early(self) -> bool:
        """Whether it may stop a client before all of its batches."""
        return overrides(self, Link, "ends_training")

    @default_property
    def declares_extras(self) -> bool:
        """Whether it names what it sends."""
        return overrides(self, Link, "list_extra_sizes")


def explain_wrong_link(link: Any) -> str:
    """Why an object, or a class, is no link; "" if it is."""
    kind = link if isinstance(link, type) else type(link)
    if not issubclass(kind, Link):
        return f"class {kind.__name__} must subclass flrce.Link; see docs/piece-link.md"
    if not any(getattr(kind, name) is not getattr(Link, name) for name in LINK_METHODS):
        return f"class {kind.__name__} has no step(g, w, state), so it is no link"
    return ""
