"""The ten questions that make a method: one base class for each, with what its pieces may do.

A piece subclasses the base of its role and is a frozen dataclass: its fields are hyper-parameters.
It must answer the abstract method. Everything else has a default, which a piece overrides as it
needs. What changes over a run is kept in State.server_state under the piece's role: `initial_state`
makes it, `observe` updates it after each committed round.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from numpy.random import Generator
from torch import Tensor

from flrce.core.types import (
    ClientCost,
    Download,
    Payload,
    PendingTask,
    RoundEvent,
    RoundRecord,
    Selection,
    Task,
    Updates,
)
from flrce.rng import FIRST_STREAMS, RoundStreams

if TYPE_CHECKING:
    from flrce.core.downlink import DownloadRequest, EncodedModel
    from flrce.core.pieces import Recipe

    default_property = property
else:

    class default_property:
        """A property of a base class that a piece may override with a field, a ClassVar or a
        property.

        It has no setter and does not exist on the class, so a dataclass field of the same name is
        stored in the instance and does not take this property for its default value.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute = compute
            self.__doc__ = compute.__doc__

        def __get__(self, piece: Any, owner: type | None = None) -> Any:
            if piece is None:
                raise AttributeError(f"{self.compute.__name__} is a property of instances")
            return self.compute(piece)


def overrides(piece: Any, base: type, method: str) -> bool:
    """Whether a piece's class has a method of its own in place of its base's default."""
    return getattr(type(piece), method, None) is not getattr(base, method)


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
    streams: RoundStreams = FIRST_STREAMS  # of the round's random numbers
    # names and shapes of the tensors that w concatenates, as in `updates.shapes`
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def make_rng(self, purpose: str, client: str = "") -> Generator:
        """A generator of the round for one purpose, as `updates.make_rng`: pieces that name the
        same purpose draw the same numbers.
        """
        return self.streams.make_rng(purpose, client)


class Piece(ABC):  # noqa: B024 - its roles have the abstract methods
    """What a piece of any role may do."""

    def initial_state(self, M: int, d: int, D: int) -> Any:
        """The state before the first round, of M clients, d trained floats and D that travel.

        A piece that does not define this has no state.
        """
        return None

    def observe(self, state: Any, event: RoundEvent) -> Any:
        """The state after a committed round. Called only where the piece has a state."""
        return state

    def report_figures(self, state: Any, event: RoundEvent) -> Mapping[str, float]:
        """Named numbers for the record of a committed round, by name; `state` is the state
        after the round.
        """
        return {}

    def report_client_figures(
        self, state: Any, event: RoundEvent
    ) -> Mapping[str, Mapping[int, float]]:
        """The same for each client: name -> row -> number, of rows that had a task."""
        return {}

    def check_recipe(self, recipe: "Recipe") -> str:
        """Why the piece does not work in this recipe; "" if it does."""
        return ""

    def check_fleet(self, recipe: "Recipe", M: int, d: int, D: int) -> str:
        """Why the piece does not work for M clients, d trained floats and D that travel; "" if it
        does. Asked before the first round.
        """
        return ""

    def with_sketch_size(self, size: int) -> Self | None:
        """The same piece with a map of at most `size` floats per client; None if it has no map."""
        return None

    @default_property
    def piece(self) -> str:
        """Its short name in experiment files, if it has one: messages name the piece by it."""
        return type(self).__name__

    @default_property
    def has_state(self) -> bool:
        """Whether the piece has a state. A piece that wraps another answers for it."""
        return overrides(self, Piece, "initial_state")

    @default_property
    def observes_rounds(self) -> bool:
        """Whether the piece learns from committed rounds."""
        return overrides(self, Piece, "observe")

    @default_property
    def reads_clients(self) -> bool:
        """Whether what it does depends on what single clients sent, other than by the model.

        Noise that an aggregator adds to the model does not cover that.
        """
        return self.observes_rounds

    @default_property
    def device_agnostic(self) -> bool:
        """Whether the piece takes a round's updates on the host or on a device.

        U and `updates.sent` are on one device then, all else is on the host;
        `tensor_bytes.to_host` brings back what is small.
        """
        return False

    @default_property
    def partial(self) -> bool:
        """Whether a reply may cover only some coordinates because of this piece."""
        return False

    @default_property
    def changes_coordinates(self) -> bool:
        """Whether a client may get other coordinates in every round."""
        return False

    @default_property
    def needs_layer_chain(self) -> bool:
        """Whether the network must be a plain chain of layers."""
        return False


class Selector(Piece):
    """Which clients train this round?"""

    @abstractmethod
    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        """The rows of the chosen clients, out of `view.pool`."""

    def sampling_rate(self, P: int, M: int) -> float | None:
        """The chance with which each of M clients is drawn, independently of all others (Poisson
        sampling); None: they are chosen in another way.
        """
        return None

    @default_property
    def reads_clients(self) -> bool:
        """Whether the choice depends on what single clients sent, or on their data."""
        return True

    @default_property
    def compares_updates(self) -> bool:
        """Whether it looks at single updates, which a recipe of sums does not have."""
        return self.observes_rounds

    @default_property
    def root_client(self) -> int | None:
        """The row of a client that is chosen in every round; None: there is none."""
        return None


class LocalTrainer(Piece):
    """How much does each client train, and how? Sets work, part, update and deadline of the tasks;
    what is sent along goes into `tensors`.
    """

    @abstractmethod
    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        """The tasks, changed with `dataclasses.replace`."""

    @default_property
    def links(self) -> Sequence[Any]:
        """Links that go before those of the update: a proximal term, a control variate."""
        return ()

    @default_property
    def frozen_blocks(self) -> int:
        """How many of the network's first blocks are frozen."""
        return 0

    @default_property
    def reported_classes(self) -> int:
        """Of how many labels clients report their shares; 0: they report none."""
        return 0


class SubModel(Piece):
    """Which coordinates does each client hold? Sets the share of units of its part."""

    @abstractmethod
    def assign(self, tasks: list[Task], view: RoundView) -> list[Task]:
        """The tasks, changed with `dataclasses.replace`."""


class Compressor(Piece):
    """What travels to the server? `layout` is the (name, size) list of the tensors that u
    concatenates.

    `rng` starts alike on both sides, so what is drawn from it need not travel.
    """

    @abstractmethod
    def encode(
        self,
        u: Tensor,
        layout: Sequence[tuple[str, int]],
        rng: Generator,
        client_state: Mapping[str, Tensor],
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        """The payload for u (d,), and what the client keeps for its next task."""

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        """The tasks with the compressor that each client uses: this one, or a variant of it that
        differs in the values of fields. Called for the recipe's compressor, not for inner ones.
        """
        return tasks

    @abstractmethod
    def decode(self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator) -> Tensor:
        """(d,) u again; MalformedPayload where the payload is not what `encode` makes."""

    @default_property
    def encodes_batches(self) -> bool:
        """Whether there is an `encode_batch`, for updates on a GPU. Such a code keeps no state."""
        return False

    def encode_batch(
        self, updates: Tensor, layout: Sequence[tuple[str, int]], rngs: Sequence[Generator]
    ) -> tuple[list[Payload], Tensor]:
        """Each row of updates (K, d) by its own generator: the payloads on the host, and (K, d)
        what they decode to, on the updates' device.
        """
        raise NotImplementedError(f"{type(self).__name__} encodes one update at a time")

    def estimate_bytes(self, layout: Sequence[tuple[str, int]], rng: Generator) -> int | None:
        """The size of the payload, known before there is one: exactly, or the most where that is
        near. None: it is not known.

        `rng` starts as in `encode`: draws that decide how much travels can be made here too.
        """
        return None

    def coverage_mask(self, layout: Sequence[tuple[str, int]], rng: Generator) -> Tensor | None:
        """(d,) bool: the coordinates that count in the mean; None: all of them."""
        return None

    @default_property
    def is_dense(self) -> bool:
        """Whether the payload is u itself, in one buffer "u": nothing is drawn or left out."""
        return False

    @default_property
    def knows_bytes(self) -> bool:
        """Whether the size of a payload is known before there is one."""
        return self.is_dense or overrides(self, Compressor, "estimate_bytes")

    @default_property
    def rate(self) -> float | None:
        """The share that is left out, if trainers may set it by client with `replace`."""
        return None

    def count_coded_floats(self, layout: Sequence[tuple[str, int]]) -> int:
        """Floats that the client works on to encode u: modelled FLOPs."""
        return 0 if self.is_dense else sum(size for _, size in layout)

    @default_property
    def instruction_bytes(self) -> int:
        """Bytes by which `assign` tells a client its variant: booked as framing."""
        return 0

    @default_property
    def symbol_bits(self) -> Mapping[str, int]:
        """Buffers that are packed symbols: how many bits each symbol has, by the buffer's name."""
        return {}

    @default_property
    def keeps_state(self) -> bool:
        """Whether it may keep something with the client from round to round."""
        return False

    @default_property
    def scaled(self) -> bool:
        """Whether it multiplies what it sends, so that its mean over draws is right and one draw
        is not.
        """
        return False


class Downlink(Piece):
    """What does the server send to a client? Its state is, for instance, the model that each
    client holds; tables over clients change only for clients that had a task in the round.
    """

    @abstractmethod
    def encode_models(
        self, state: Any, w: Tensor, requests: "Sequence[DownloadRequest]"
    ) -> "tuple[list[EncodedModel], Any]":
        """The downloads of a round in the order of the requests, and the memory after them."""

    @default_property
    def is_dense(self) -> bool:
        """Whether every client is sent w itself."""
        return False

    def count_models(self, P: int) -> int:
        """Models that a round's downloads hold in memory, besides w and the tables."""
        return 1

    def plan_download(self, state: Any, k: int) -> Download | None:
        """How client k would get the model now: costs are estimated by it. None: dense, and
        `encode_models` is not asked.
        """
        return Download("full")

    def acknowledge(self, state: Any, sent: PendingTask) -> Any:
        """The memory once a client's reply shows that it decoded the model it was sent."""
        return state

    def forget(self, state: Any, k: int) -> Any:
        """The memory once client k reported that it no longer holds its model."""
        return state

    def get_inquiry_model(
        self, state: Any, w: Tensor, request: "DownloadRequest"
    ) -> tuple[Tensor, int | None]:
        """The model of which a client reports its loss, and the bytes of its download; None:
        dense.
        """
        return w, None


class Aggregator(Piece):
    """What do replies become? The model that they point to, from w."""

    @abstractmethod
    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        """(D,) the target of the server's step."""

    def downweights(self, state: Any) -> Sequence[float]:
        """The share of its weight that each reply of the last observed round has left; (): all."""
        return ()

    @default_property
    def accepts_empty_rounds(self) -> bool:
        """Whether a round without replies may be committed (`recipe.minimum` = 0)."""
        return False

    @default_property
    def rate(self) -> float | None:
        """The rate of a plain mean of updates; None: it is another rule."""
        return None

    @default_property
    def blockwise(self) -> bool:
        """Whether it goes through coordinates block by block and makes no copy of the updates."""
        return False

    @default_property
    def model_groups(self) -> int:
        """How many global models it keeps apart."""
        return 1

    @default_property
    def needs_adapters(self) -> bool:
        """Whether the network must have LoRA adapters."""
        return False


class ServerStep(Piece):
    """How does the server go there? From w towards the aggregator's target."""

    @abstractmethod
    def step(self, w: Tensor, target: Tensor, updates: Updates, state: Any) -> tuple[Tensor, Any]:
        """(D,) the next model, and the step's state."""

    @default_property
    def reads_clients(self) -> bool:
        """Whether the step looks at single replies, and not only at the target."""
        return True


class Pace(Piece):
    """When is a round over?"""

    @abstractmethod
    def cohort_size(self, P: int, busy: int) -> int:
        """How many clients are asked while `busy` are under way."""

    @abstractmethod
    def max_replies(self, P: int) -> int | None:
        """Only so many replies, the fastest, count; None: all."""

    def with_deadline(self, task: Task) -> Task:
        """The task with what the pace tells its client: a deadline."""
        return task

    def choose_start_time(self, now: float, forecast: Sequence[float]) -> float:
        """When the next round begins, given the carbon intensity of the `forecast_hours`."""
        return now

    @default_property
    def forecast_hours(self) -> int:
        """How many hours of carbon intensity `choose_start_time` needs; 0: it is not asked."""
        return 0

    @default_property
    def buffer_size(self) -> int | None:
        """Replies that end a round while other tasks go on; None: tasks end with their round.

        `initial_state` of a pace with a buffer returns an `AsyncState`.
        """
        return None

    @default_property
    def max_age(self) -> int | None:
        """Replies that are more rounds old than this are dropped; for a pace with a buffer."""
        return None


@dataclass(frozen=True)
class StopCourse:
    """What a stop rule compares over a run: one value and its limit for every look."""

    name: str  # what the value is called in a program's output: "gain", "headway"
    limit_name: str
    title: str  # what the value is, for people
    unit: str
    rounds: tuple[int, ...]
    values: tuple[float, ...]
    limits: tuple[float, ...]


class StopRule(Piece):
    """Enough? A pure function of the record so far, so that it can be replayed."""

    @abstractmethod
    def __call__(self, history: Sequence[RoundRecord]) -> str:
        """Why the run stops after the last round of `history`; "" if it goes on."""

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        """Why the next round, at these estimated costs, is not started; "" if it is."""
        return ""

    def explain(self, history: Sequence[RoundRecord]) -> str:
        """What the rule sees after the last round, in sentences; "" if there is nothing to say.

        Reports and `flrce why` show it, whether the rule ended the run or not.
        """
        reason = self(history) if history else ""
        return f"The stop rule ({self.piece}) says: {reason}." if reason else ""

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        """The first round in which the rule can say stop.

        `sweep` is the number of rounds in which every client has a turn; None where clients do not
        report on the models that they are sent.
        """
        return 1

    def trace(self, history: Sequence[RoundRecord]) -> StopCourse | None:
        """What the rule compared in every round that it looked at, for a chart; None: no chart."""
        return None

    def list_rules(self) -> tuple["StopRule", ...]:
        """The single rules that this one is made of."""
        return (self,)

    @default_property
    def limits(self) -> Mapping[str, float]:
        """Cost -> the most that may be spent of it, where the rule is a budget."""
        return {}

    @default_property
    def psi(self) -> float | None:
        """The limit of conflicting peers, where the rule counts them: shown beside the counts."""
        return None

    @default_property
    def required_fields(self) -> tuple[str, ...]:
        """What it reads in a record besides rounds and metrics: "conflicts", "joules", "seconds".

        Places that do not know them refuse the rule.
        """
        return ()

    @default_property
    def reads_evaluations(self) -> bool:
        """Whether it reads evaluations of the final model: then clients are billed for them.

        Reports of the model that a client was sent to train (`holdouts`) are not meant: they cost
        only their forward passes. A rule that reads no evaluation sets this to False.
        """
        return any(rule is self or rule.reads_evaluations for rule in self.list_rules())

    @default_property
    def reads_reports(self) -> bool:
        """Whether it reads clients' reports on the model they were sent, and evaluations in a
        recipe without `holdouts`.
        """
        return any(rule is not self and rule.reads_reports for rule in self.list_rules())

    @default_property
    def checks_costs(self) -> bool:
        """Whether it looks at the costs of the next round before that starts."""
        return overrides(self, StopRule, "check_next_round")


class ServerAverage(Piece):
    """Which model does the run return?"""

    @abstractmethod
    def model(self, state: Any, w: Tensor) -> Tensor:
        """(D,) the final model if the run ended now."""

    def get_headway(self, state: Any) -> float | None:
        """The cosine between the last observed round's step and the way of the rounds before."""
        return None

    @default_property
    def measures_headway(self) -> bool:
        """Whether rounds have a headway."""
        return overrides(self, ServerAverage, "get_headway")

    @default_property
    def is_last_model(self) -> bool:
        """Whether the final model is w itself, so that no other is kept."""
        return False


ROLE_CLASSES: dict[str, type[Piece]] = {
    "selector": Selector,
    "trainer": LocalTrainer,
    "submodel": SubModel,
    "compressor": Compressor,
    "downlink": Downlink,
    "aggregator": Aggregator,
    "server": ServerStep,
    "pace": Pace,
    "stop": StopRule,
    "average": ServerAverage,
}
ROLES = tuple(ROLE_CLASSES)


def explain_wrong_role(role: str, piece: Any) -> str:
    """Why an object, or a class, is no piece of this role; "" if it is."""
    base, kind = ROLE_CLASSES[role], piece if isinstance(piece, type) else type(piece)
    if not issubclass(kind, base):
        return f"class {kind.__name__} must subclass flrce.{base.__name__}; see docs/extending.md"
    missing = ", ".join(sorted(kind.__abstractmethods__))
    return f"class {kind.__name__} must define {missing}; see docs/extending.md" if missing else ""
