"""The seven questions that make a method, as protocols; the do-nothing answers; and Recipe, which holds one of each.

A piece is a frozen dataclass: its fields are hyper-parameters. What changes over a run lives in State.memory under
the piece's role: `init(M, d, D)` makes it (M clients, d trained floats, D that travel), `observe(memory, event)`
takes it past a committed round. Both are optional; so is `objection(recipe)`: why the piece does not go with the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.bounds import Rate, problem
from flrce.engine import Asynchronous as Asynchronous  # asked for here too, as is Engine
from flrce.engine import Engine as Engine
from flrce.errors import BadInput
from flrce.state_values import validate_state
from flrce.traits import Compares, Linked, Objects, Observes, Partial, Remembers, Tells, has_links, holder
from flrce.types import Event, Payload, Record, Selection, Spent, Task, Updates, Work


@dataclass(frozen=True)
class View:
    """What a server knows when it plans a round."""

    t: int
    P: int
    pool: tuple[int, ...]  # rows of the clients that are reachable now
    n: Tensor  # (M,) training samples, 0 where unknown
    estimate: Callable[[Task], Spent]  # modelled cost of a task before it is run
    draft: Callable[[int], Task]  # row -> the plain task it would get
    loss: Callable[[Sequence[int]], Tensor]  # asks clients for their loss at w; its bytes are booked
    history: tuple[Record, ...] = ()
    blocks: int = 1  # of the network, each ready to be frozen; 1: all or nothing
    w: Tensor | None = None  # (D,) the model that will be sent
    now: float = 0.0  # seconds since the run began
    battery: Callable[[Sequence[int]], Tensor] | None = None  # rows -> levels, 0 to 1, of devices that report them
    intensity: Callable[[Sequence[int]], Tensor] | None = None  # rows -> g/kWh of their electricity now


@runtime_checkable
class Selector(Protocol):
    """Who trains?"""

    def select(self, memory: Any, view: View, rng: Generator) -> Selection: ...


@runtime_checkable
class LocalTrainer(Protocol):
    """How much and how? Fits each client's work, part, update and deadline; what it sends along goes into `tensors`."""

    def assign(self, tasks: list[Task], memory: Any, view: View) -> list[Task]: ...


@runtime_checkable
class SubModel(Protocol):
    """Which coordinates? Sets the share of units that each client holds."""

    def assign(self, tasks: list[Task], view: View) -> list[Task]: ...


@runtime_checkable
class Compressor(Protocol):
    """What travels? `layout` is the (name, size) list of the tensors that u concatenates.

    `rng` starts alike on both sides, so what is drawn from it need not travel. A compressor that leaves coordinates out
    of the mean may say which count: `covers(layout, rng)`, (d,) bool.
    """

    def encode(
        self, u: Tensor, layout: Sequence[tuple[str, int]], rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]: ...

    def decode(self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator) -> Tensor: ...


@runtime_checkable
class Aggregator(Protocol):
    """What do replies become? The model that they point to, from w."""

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor: ...


@runtime_checkable
class ServerStep(Protocol):
    """How does the server go there? From w towards the aggregator's target; returns the model and its memory."""

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Any) -> tuple[Tensor, Any]: ...


@runtime_checkable
class Pace(Protocol):
    """When is a round over? `room`: how many are asked when some are busy; `keep`: only so many replies count."""

    def room(self, P: int, busy: int) -> int: ...
    def keep(self, P: int) -> int | None: ...


@runtime_checkable
class StopRule(Protocol):
    """Enough? A pure function of the record so far, so that it can be replayed. Returns the reason, or ""."""

    def __call__(self, history: Sequence[Record]) -> str: ...


@runtime_checkable
class ServerAverage(Protocol):
    """What is handed back?"""

    def model(self, memory: Any, w: Tensor) -> Tensor: ...


class Malformed(ValueError):
    """A payload that is not what its task asked for."""


@dataclass(frozen=True)
class Full:
    """Every client holds the whole model."""

    def assign(self, tasks: list[Task], view: View) -> list[Task]:
        return tasks


@dataclass(frozen=True)
class Dense:
    """Every coordinate travels as float32; those of a float64 model as they are."""

    def encode(
        self, u: Tensor, layout: Sequence[tuple[str, int]], rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return Payload({"u": u if u.dtype == torch.float64 else u.float()}), carry

    def decode(self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator | None = None) -> Tensor:
        return take(payload, "u", (torch.float32, torch.float64), sum(size for _, size in layout))


@dataclass(frozen=True)
class Never:
    """Only T ends the run."""

    def __call__(self, history: Sequence[Record]) -> str:
        return ""


@dataclass(frozen=True)
class Step:
    """The server goes `rate` of the way to where the replies point: 1, all of it."""

    rate: Rate = 1.0
    anywhere: ClassVar[bool] = True

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Any) -> tuple[Tensor, Any]:
        if self.rate == 1:
            return target, memory
        d = updates.trainable  # statistics of BatchNorm are no gradients
        return torch.cat([torch.lerp(w[:d], target[:d], self.rate), target[d:]]), memory


@dataclass(frozen=True)
class Synchronous:
    """Everyone who was asked is waited for."""

    def room(self, P: int, busy: int) -> int:
        return P

    def keep(self, P: int) -> int | None:
        return None


@dataclass(frozen=True)
class Last:
    """The last model is handed back."""

    def model(self, memory: Any, w: Tensor) -> Tensor:
        return w


def take(payload: Payload, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: int) -> Tensor:
    """One buffer of a payload, checked; Malformed says what is wrong with it."""
    buffer, known = payload.buffers.get(name), dtype if isinstance(dtype, tuple) else (dtype,)
    if buffer is None:
        raise Malformed(f"no buffer {name!r}; got {', '.join(map(repr, sorted(payload.buffers)))[:80] or 'none'}")
    if buffer.dtype not in known:
        raise Malformed(f"buffer {name!r} is {buffer.dtype}, not {known[0]}")
    if tuple(buffer.shape) != (size,):
        raise Malformed(f"buffer {name!r} has shape {tuple(buffer.shape)}, not ({size},)")
    return buffer


ROLES = ("selector", "trainer", "submodel", "compressor", "aggregator", "server", "pace", "stop", "average")


@dataclass(frozen=True)
class Recipe:
    """A method: one answer to each question."""

    P: int
    selector: Selector
    trainer: LocalTrainer
    aggregator: Aggregator
    work: Work = Work()  # how much everyone trains, where the trainer does not say otherwise
    update: Any = None  # how gradients become steps: a chain of links (local/updates.py); None: plain SGD
    augment: tuple[Any, ...] = ()  # transforms of each batch (local/augment.py)
    kept: tuple[str, ...] = ()  # patterns of parameters that stay with their client, "norms" or "head"
    fixed: tuple[str, ...] = ()  # patterns of parameters that neither train nor travel
    submodel: SubModel = Full()
    compressor: Compressor = Dense()
    server: ServerStep = Step()
    pace: Pace = Synchronous()
    stop: StopRule = Never()
    average: ServerAverage = Last()
    minimum: int = 1  # fewer replies than this abandon the round
    holdouts: bool = False  # whether clients judge w on what they hold back before they train on it
    sums: bool = False  # whether the server looks at sums over a round's clients only, as under secure aggregation
    name: str = ""

    def __post_init__(self) -> None:
        client = (("work", self.work), ("update", self.update), *(("augment", each) for each in self.augment))
        for role, piece in (*self.pieces(), *client):
            why = problem(piece)
            if why:
                raise BadInput(f"{role} {why}")
            if role in ROLES and role != "trainer" and has_links(piece):
                name = type(piece).__name__
                raise BadInput(f"{role} {name} has links, and only a trainer's reach clients; give them to the trainer")
        links = () if self.update is None else self.chain.links
        for piece in (*(piece for _, piece in self.pieces()), *links):
            why = piece.objection(self) if isinstance(piece, Objects) else ""
            if why:
                raise BadInput(why)
        chooser = self.selector
        compares = chooser.compares if isinstance(chooser, Compares) else isinstance(chooser, Observes)
        if self.sums and (self.partial or compares):
            raise BadInput("sums only: no piece may look at single updates; drop recipe.selector and recipe.submodel")

    @cached_property  # asked for by every task under way
    def chain(self) -> Any:
        """How clients' gradients become steps: the update, with what the trainer puts before it."""
        update = self.update
        for link in reversed(self.trainer.links if isinstance(self.trainer, Linked) else ()):
            update = update.before(link)
        return update

    @property
    def partial(self) -> str:
        """The pieces that let a reply cover only some coordinates, or "" where each covers all."""
        some = [piece for _, piece in self.pieces() if isinstance(piece, Partial) and piece.partial]
        return " and ".join(type(piece).__name__ for piece in some)

    def pieces(self) -> Iterator[tuple[str, Any]]:
        for role in ROLES:
            yield role, getattr(self, role)

    def init(self, M: int, d: int, D: int) -> dict[str, Any]:
        """What the pieces remember before the first round; d floats are trained, D travel."""
        held = {role: holder(piece) for role, piece in self.pieces()}
        memory = {role: piece.init(M, d, D) for role, piece in held.items() if isinstance(piece, Remembers)}
        for role, state in memory.items():
            validate_state(role, held[role], state, M)
        return memory

    def observe(self, memory: Mapping[str, Any], event: Event) -> dict[str, Any]:
        """Every piece's memory after a committed round."""
        after: dict[str, Any] = {}
        for role, piece in ((role, holder(piece)) for role, piece in self.pieces()):
            if role in memory:
                after[role] = piece.observe(memory[role], event) if isinstance(piece, Observes) else memory[role]
                validate_state(role, piece, after[role], event.M)
        return after

    def tasks(self, chosen: Selection, memory: Mapping[str, Any], view: View) -> list[Task]:
        """What each chosen client is told."""
        tasks = [view.draft(k) for k in chosen.k]
        tasks = _assigned(self.submodel, self.submodel.assign(tasks, view))
        tasks = [replace(task, compressor=self.compressor, judge=self.holdouts) for task in tasks]
        tasks = _assigned(self.trainer, self.trainer.assign(tasks, memory.get("trainer"), view))
        return [self.pace.told(task) for task in tasks] if isinstance(self.pace, Tells) else tasks


def _assigned(piece: Any, tasks: Any) -> list[Task]:
    """What a trainer or a sub-model made of the tasks, if that is what it is."""
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, Task) for task in tasks):
        what = f"a {type(tasks).__name__}" if not isinstance(tasks, list | tuple) else "something else than tasks"
        raise BadInput(f"{type(piece).__name__}.assign returned {what}; return the list of tasks")
    return list(tasks)


def describe(piece: Any) -> dict[str, Any]:
    """A piece as plain data: its class and fields, for the ledger and for `flrce recipes show`."""
    described: dict[str, Any] = {"piece": type(piece).__name__}
    for f in fields(piece):
        value = getattr(piece, f.name)
        described[f.name] = describe(value) if hasattr(value, "__dataclass_fields__") else value
    return described
