"""The seven questions that make a method, as protocols; the do-nothing answers; and Recipe, which
holds one of each.

A piece is a frozen dataclass: its fields are hyper-parameters. What changes over a run lives in
State.memory under the piece's role: `initial_state(M, d, D)` makes it (M clients, d trained floats,
D that travel), `observe(memory, event)` takes it past a committed round. Both are optional; so is
`check_recipe(recipe)`: why the piece does not go with the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import LearningRate, find_problem
from flrce.core.downlink import DENSE_DOWNLOAD, Downlink
from flrce.core.engine import (
    AsynchronousEngine as AsynchronousEngine,
)  # asked for here too, as is Engine
from flrce.core.engine import Engine as Engine
from flrce.core.renamed_methods import explain_renamed_method
from flrce.core.state_values import validate_state
from flrce.core.traits import (
    DeadlinePace,
    LinkProvider,
    PartialPiece,
    RecipeChecker,
    RoundObserver,
    StatefulPiece,
    UpdateComparer,
    find_stateful_piece,
    has_links,
)
from flrce.core.types import (
    ClientCost,
    LocalWork,
    Payload,
    RoundEvent,
    RoundRecord,
    Selection,
    Task,
    Updates,
)
from flrce.errors import BadInput


@dataclass(frozen=True)
class RoundView:
    """What a server knows when it plans a round."""

    t: int
    P: int
    pool: tuple[int, ...]  # rows of the clients that are reachable now
    n: Tensor  # (M,) training samples, 0 where unknown
    estimate: Callable[[Task], ClientCost]  # modelled cost of a task before it is run
    draft: Callable[[int], Task]  # row -> the plain task it would get
    loss: Callable[
        [Sequence[int]], Tensor
    ]  # asks clients for their loss at w; its bytes are booked
    history: tuple[RoundRecord, ...] = ()
    blocks: int = 1  # of the network, each ready to be frozen; 1: all or nothing
    w: Tensor | None = None  # (D,) the model that will be sent
    now: float = 0.0  # seconds since the run began
    battery: Callable[[Sequence[int]], Tensor] | None = (
        None  # rows -> levels, 0 to 1, of devices that report them
    )
    intensity: Callable[[Sequence[int]], Tensor] | None = (
        None  # rows -> g/kWh of their electricity now
    )


@runtime_checkable
class Selector(Protocol):
    """Who trains?"""

    def select(self, memory: Any, view: RoundView, rng: Generator) -> Selection: ...


@runtime_checkable
class LocalTrainer(Protocol):
    """How much and how? Fits each client's work, part, update and deadline; what it sends along
    goes into `tensors`.
    """

    def assign(self, tasks: list[Task], memory: Any, view: RoundView) -> list[Task]: ...


@runtime_checkable
class SubModel(Protocol):
    """Which coordinates? Sets the share of units that each client holds."""

    def assign(self, tasks: list[Task], view: RoundView) -> list[Task]: ...


@runtime_checkable
class Compressor(Protocol):
    """What travels? `layout` is the (name, size) list of the tensors that u concatenates.

    `rng` starts alike on both sides, so what is drawn from it need not travel. A compressor that
    leaves coordinates out of the mean may say which count: `coverage_mask(layout, rng)`, (d,) bool.
    """

    def encode(
        self,
        u: Tensor,
        layout: Sequence[tuple[str, int]],
        rng: Generator,
        carry: Mapping[str, Tensor],
    ) -> tuple[Payload, Mapping[str, Tensor]]: ...

    def decode(
        self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator
    ) -> Tensor: ...


@runtime_checkable
class Aggregator(Protocol):
    """What do replies become? The model that they point to, from w."""

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor: ...


@runtime_checkable
class ServerStep(Protocol):
    """How does the server go there? From w towards the aggregator's target; returns the model and
    its memory.
    """

    def step(
        self, w: Tensor, target: Tensor, updates: Updates, memory: Any
    ) -> tuple[Tensor, Any]: ...


@runtime_checkable
class Pace(Protocol):
    """When is a round over? `cohort_size`: how many are asked when some are busy;
    `max_replies`: only so many replies count.
    """

    def cohort_size(self, P: int, busy: int) -> int: ...
    def max_replies(self, P: int) -> int | None: ...


@runtime_checkable
class StopRule(Protocol):
    """Enough? A pure function of the record so far, so that it can be replayed. Returns the reason,
    or "".
    """

    def __call__(self, history: Sequence[RoundRecord]) -> str: ...


@runtime_checkable
class ServerAverage(Protocol):
    """What is handed back?"""

    def model(self, memory: Any, w: Tensor) -> Tensor: ...


class MalformedPayload(ValueError):
    """A payload that is not what its task asked for."""


@dataclass(frozen=True)
class FullModel:
    """Every client holds the whole model."""

    def assign(self, tasks: list[Task], view: RoundView) -> list[Task]:
        return tasks


@dataclass(frozen=True)
class NoCompression:
    """Every coordinate travels as float32; those of a float64 model as they are."""

    def encode(
        self,
        u: Tensor,
        layout: Sequence[tuple[str, int]],
        rng: Generator,
        carry: Mapping[str, Tensor],
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return Payload({"u": u if u.dtype == torch.float64 else u.float()}), carry

    def decode(
        self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator | None = None
    ) -> Tensor:
        return get_buffer(
            payload, "u", (torch.float32, torch.float64), sum(size for _, size in layout)
        )


@dataclass(frozen=True)
class NeverStop:
    """Only T ends the run."""

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return ""


@dataclass(frozen=True)
class ServerSGD:
    """The server goes `rate` of the way to where the replies point: 1, all of it."""

    rate: LearningRate = 1.0
    device_agnostic: ClassVar[bool] = True

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Any) -> tuple[Tensor, Any]:
        if self.rate == 1:
            return target, memory
        d = updates.trainable  # statistics of BatchNorm are no gradients
        return torch.cat([torch.lerp(w[:d], target[:d], self.rate), target[d:]]), memory


@dataclass(frozen=True)
class SynchronousPace:
    """Everyone who was asked is waited for."""

    def cohort_size(self, P: int, busy: int) -> int:
        return P

    def max_replies(self, P: int) -> int | None:
        return None


@dataclass(frozen=True)
class LastModel:
    """The last model is handed back."""

    def model(self, memory: Any, w: Tensor) -> Tensor:
        return w


def get_buffer(
    payload: Payload, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: int
) -> Tensor:
    """One buffer of a payload, checked; Malformed says what is wrong with it."""
    buffer, known = payload.buffers.get(name), dtype if isinstance(dtype, tuple) else (dtype,)
    if buffer is None:
        raise MalformedPayload(
            f"no buffer {name!r}; got"
            f" {', '.join(map(repr, sorted(payload.buffers)))[:80] or 'none'}"
        )
    if buffer.dtype not in known:
        raise MalformedPayload(f"buffer {name!r} is {buffer.dtype}, not {known[0]}")
    if tuple(buffer.shape) != (size,):
        raise MalformedPayload(f"buffer {name!r} has shape {tuple(buffer.shape)}, not ({size},)")
    return buffer


ROLES = (
    "selector",
    "trainer",
    "submodel",
    "compressor",
    "downlink",
    "aggregator",
    "server",
    "pace",
    "stop",
    "average",
)


@dataclass(frozen=True)
class Recipe:
    """A method: one answer to each question."""

    P: int
    selector: Selector
    trainer: LocalTrainer
    aggregator: Aggregator
    work: LocalWork = (
        LocalWork()
    )  # how much everyone trains, where the trainer does not say otherwise
    # how gradients become steps: a chain of links (training/update_chain.py); None: plain SGD
    update: Any = None
    augment: tuple[Any, ...] = ()  # transforms of each batch (training/augment.py)
    kept: tuple[
        str, ...
    ] = ()  # patterns of parameters that stay with their client, "norms" or "head"
    fixed: tuple[str, ...] = ()  # patterns of parameters that neither train nor travel
    submodel: SubModel = FullModel()
    compressor: Compressor = NoCompression()
    downlink: Downlink = DENSE_DOWNLOAD
    server: ServerStep = ServerSGD()
    pace: Pace = SynchronousPace()
    stop: StopRule = NeverStop()
    average: ServerAverage = LastModel()
    minimum: int = 1  # fewer replies than this abandon the round
    holdouts: bool = False  # whether clients judge w on what they hold back before they train on it
    # whether the server looks at sums over a round's clients only, as under secure aggregation
    sums: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        client = (
            ("work", self.work),
            ("update", self.update),
            *(("augment", each) for each in self.augment),
        )
        for role, piece in (*self.iter_pieces(), *client):
            why = find_problem(piece)
            if why:
                raise BadInput(f"{role} {why}")
            if role in ROLES and role != "trainer" and has_links(piece):
                name = type(piece).__name__
                raise BadInput(
                    f"{role} {name} has links, and only a trainer's reach clients; give them to the"
                    " trainer"
                )
        links = () if self.update is None else self.chain.links
        for piece in (*(piece for _, piece in self.iter_pieces()), *links):
            why = explain_renamed_method(piece)
            if not why and isinstance(piece, RecipeChecker):
                why = piece.check_recipe(self)
            if why:
                raise BadInput(why)
        chooser = self.selector
        compares = (
            chooser.compares_updates
            if isinstance(chooser, UpdateComparer)
            else isinstance(chooser, RoundObserver)
        )
        if self.sums and (self.partial_pieces or compares):
            raise BadInput(
                "sums only: no piece may look at single updates; drop recipe.selector and"
                " recipe.submodel"
            )

    @cached_property  # asked for by every task under way
    def chain(self) -> Any:
        """How clients' gradients become steps: the update, with what the trainer puts before it."""
        update = self.update
        for link in reversed(self.trainer.links if isinstance(self.trainer, LinkProvider) else ()):
            update = update.prepend_link(link)
        return update

    @property
    def partial_pieces(self) -> str:
        """The pieces that let a reply cover only some coordinates, or "" where each covers all."""
        some = [
            piece
            for _, piece in self.iter_pieces()
            if isinstance(piece, PartialPiece) and piece.partial
        ]
        return " and ".join(type(piece).__name__ for piece in some)

    def iter_pieces(self) -> Iterator[tuple[str, Any]]:
        for role in ROLES:
            yield role, getattr(self, role)

    def initial_state(self, M: int, d: int, D: int) -> dict[str, Any]:
        """What the pieces remember before the first round; d floats are trained, D travel."""
        held = {role: find_stateful_piece(piece) for role, piece in self.iter_pieces()}
        memory = {
            role: piece.initial_state(M, d, D)
            for role, piece in held.items()
            if isinstance(piece, StatefulPiece)
        }
        for role, state in memory.items():
            validate_state(role, held[role], state, M)
        return memory

    def observe(self, memory: Mapping[str, Any], event: RoundEvent) -> dict[str, Any]:
        """Every piece's memory after a committed round."""
        after: dict[str, Any] = {}
        for role, piece in (
            (role, find_stateful_piece(piece)) for role, piece in self.iter_pieces()
        ):
            if role in memory:
                after[role] = (
                    piece.observe(memory[role], event)
                    if isinstance(piece, RoundObserver)
                    else memory[role]
                )
                validate_state(role, piece, after[role], event.M)
        return after

    def build_tasks(
        self, chosen: Selection, memory: Mapping[str, Any], view: RoundView
    ) -> list[Task]:
        """What each chosen client is told."""
        tasks = [view.draft(k) for k in chosen.k]
        tasks = _validate_tasks(self.submodel, self.submodel.assign(tasks, view))
        tasks = [replace(task, compressor=self.compressor, judge=self.holdouts) for task in tasks]
        tasks = _validate_tasks(
            self.trainer, self.trainer.assign(tasks, memory.get("trainer"), view)
        )
        return (
            [self.pace.with_deadline(task) for task in tasks]
            if isinstance(self.pace, DeadlinePace)
            else tasks
        )


def _validate_tasks(piece: Any, tasks: Any) -> list[Task]:
    """What a trainer or a sub-model made of the tasks, if that is what it is."""
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, Task) for task in tasks):
        what = (
            f"a {type(tasks).__name__}"
            if not isinstance(tasks, list | tuple)
            else "something else than tasks"
        )
        raise BadInput(f"{type(piece).__name__}.assign returned {what}; return the list of tasks")
    return list(tasks)


def describe_piece(piece: Any) -> dict[str, Any]:
    """A piece as plain data: its class and fields, for the ledger and for `flrce recipes show`."""
    described: dict[str, Any] = {"piece": type(piece).__name__}
    for f in fields(piece):
        value = getattr(piece, f.name)
        described[f.name] = (
            describe_piece(value) if hasattr(value, "__dataclass_fields__") else value
        )
    return described
