"""What flows through a round: Selection -> Task -> Reply -> Updates -> RoundRecord, and the State
between rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import BatchSize, EpochCount, PositiveInt
from flrce.core.record import RoundRecord as RoundRecord  # it flows on from here
from flrce.core.tensor_bytes import count_bytes
from flrce.rng import FIRST_STREAMS, RoundStreams

# client -> tensors that it keeps from task to task
ClientStates = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Selection:
    """C_t: rows of the chosen clients, and whether the round exploits what is known."""

    k: tuple[int, ...]
    exploit: bool = False
    keep: int | None = None  # with over-commitment: only this many replies, the fastest, count
    # figures behind the choice, for the ledger
    why: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains."""

    epochs: EpochCount = 5
    batch: BatchSize = 128
    # stop after so many batches, or go on past `epochs` up to them
    steps: PositiveInt | None = None


@dataclass(frozen=True)
class Portion:
    """Which coordinates a client holds, trains and sends back."""

    rate: float = 1.0  # share of hidden units in the client's sub-model
    ordered: bool = False  # the first units (HeteroFL) instead of random ones (Federated Dropout)
    first: int = 0  # first trained block; those before it are frozen and not sent

    @property
    def is_whole(self) -> bool:
        return self.rate == 1 and not self.first


@dataclass(frozen=True)
class Download:
    """How a client gets its model, where it is not sent as it is."""

    kind: str  # "full": the whole model; "first": a difference to the initial model;
    # "difference": one to the model that the client holds
    code: Any = None  # the compressor of the trained floats; None: they travel as they are
    framing: int = 0  # bytes of seeds and hashes, both directions
    missed: int = 0  # bytes of earlier differences that are sent along
    nbytes: int | None = None  # of what travels, once it is encoded
    version: int = 0  # number of the model, where the downlink counts them
    coded: bool = False  # whether the client decodes it; known once it is encoded, and kept then


@dataclass(frozen=True)
class Task:
    """All that a client is told besides the model; numbers and names only, so it serialises."""

    client: str
    k: int  # the client's row in the server's maps
    t: int
    seed: int
    work: LocalWork = LocalWork()
    part: Portion = Portion()
    augment: tuple[Any, ...] = ()  # transforms of each batch (training/augment.py)
    update: Any = None  # how a gradient becomes a step: a chain of links (training/update_chain.py)
    compressor: Any = None
    deadline: float = float("inf")  # seconds; a later reply is refused
    rounds: int = 0  # T, for schedules over the whole run; 0: not known
    # judge the model on what it holds back, before it trains, and send the figure along
    judge: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # further tensors sent along
    download: Download | None = None  # how it gets the model; None: dense


@dataclass(frozen=True, eq=False)
class PendingTask:
    """A task under way: the model that its client starts from, and when it was sent and will be
    back (seconds of the run).
    """

    task: Task
    w: Tensor  # (D,) as the client decodes it
    sent: float = 0.0
    due: float = 0.0
    payload: "Payload | None" = None  # what travels in place of w


@dataclass(frozen=True)
class Payload:
    """Encoded buffers as they travel; `nbytes` is what they really weigh."""

    buffers: Mapping[str, Tensor]
    # largest magnitude of an update, where the server found it while it unpacked a whole model
    largest: float | None = None
    # (d,) what it decodes to, where the simulator has made it with the payload
    decoded: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return count_bytes(self.buffers)


@dataclass(frozen=True)
class ClientCost:
    """What one client's part of a round cost; modelled unless `measured`."""

    bytes_down: int = 0
    bytes_up: int = 0
    framing: int = 0  # scalars, seeds and headers, both directions
    flops: float = 0.0
    batches: int = 0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    joules: float = 0.0
    idle_watts: float = 0.0  # drawn while waiting for the round to end
    measured: bool = False
    grams: float = 0.0  # of CO2, where the fleet's electricity is known
    # the joules may be 1 + error times as many, or that many times fewer; 0: nobody says
    error: float = 0.0
    # name in COSTS -> amount; and the joules by what they rest on (energy_basis.py)
    other: Mapping[str, float] = field(default_factory=dict)
    overhead_seconds: float = 0.0  # of compute_seconds: what a batch costs whatever its size
    idle_assumed: bool = False  # whether idle_watts is an assumption

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.transfer_seconds


@dataclass(frozen=True)
class ClientEvaluation:
    """What a client made of the model it was sent, on the samples it holds back: the primary metric
    metric.
    """

    value: float
    n: int


@dataclass(frozen=True)
class PrimaryMetric:
    """The primary metric: its name, which way it points and what values it can have."""

    metric: str = "accuracy"
    lower: bool = False
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Reply:
    """One client's answer, not yet checked; `error` says why there is none."""

    client: str
    t: int
    payload: Payload | None = None
    n: int = 0  # training samples
    loss: float = 0.0  # mean over the first epoch
    loss_square: float = 0.0  # mean squared per-sample loss, smoothed over the first epoch (Oort)
    spent: ClientCost = ClientCost()
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # further tensors sent back, by name
    # stays with the client; a simulator keeps it for it
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int | None = None  # batches that it trained on, where it stopped before all of them
    error: str = ""
    base: str = ""  # fingerprint of the model that the client was sent; "" if not given
    lost_base: bool = False  # the client does not hold the model that its download refers to
    judged: ClientEvaluation | None = None  # where its task asked for it and it holds samples back

    @property
    def carry(self) -> Mapping[str, Tensor]:
        """The old name of `client_state`."""
        return self.client_state


@dataclass(frozen=True)
class RoundReplies:
    """The replies of a round, and how long it really took; None: as long as they say, or as their
    model of costs.
    """

    replies: Sequence[Reply] = ()
    seconds: float | None = None
    # (tasks, D) in which dense updates lie already, ordered by k; the round's to use up
    table: Tensor | None = None
    sent: Tensor | None = None  # (D,) the model that was sent, where updates lie on a device


class RepliesWithTable(list[Reply]):
    """Replies of an engine whose dense updates lie in one table, and perhaps on a device, as in
    RoundReplies.
    """

    def __init__(
        self, replies: Sequence[Reply], table: Tensor | None = None, sent: Tensor | None = None
    ) -> None:
        super().__init__(replies)
        self.table, self.sent = table, sent


@dataclass(frozen=True)
class Updates:
    """The replies that passed the gate, one row each, ordered by k."""

    k: Tensor  # (P,) rows
    U: Tensor  # (P, d) u_k over everything that travels
    n: Tensor  # (P,) float64 samples
    # the first floats of a row are trained parameters, the rest BatchNorm statistics
    trainable: int
    covered: Tensor | None = None  # (P, d) bool: coordinates a client held; None: all
    loss: Tensor | None = None  # (P,)
    loss_square: Tensor | None = None  # (P,)
    seconds: Tensor | None = None  # (P,) modelled or measured duration
    spent: tuple[ClientCost, ...] = ()
    # name -> (P, size) what the links sent back
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    # (P,) rounds since the client was sent its model; None: all in this round
    age: Tensor | None = None
    # (D,) each: the model that each was sent; None: all this round's
    base: tuple[Tensor, ...] | None = None
    # names and shapes of the tensors that w concatenates
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # (D,) the model before the round, where U lies on a device; None: U is on the host
    sent: Tensor | None = None
    streams: RoundStreams = FIRST_STREAMS  # of the round's random numbers
    sampling_rate: float | None = None  # chance with which each client was drawn; None: no such
    clients: int = 0  # M: rows in the roster

    def make_rng(self, purpose: str, client: str = "") -> Generator:
        """A generator of the round for one purpose; the same one in every engine and on resume."""
        return self.streams.make_rng(purpose, client)

    def __len__(self) -> int:
        return len(self.k)

    @property
    def u(self) -> Tensor:
        """(P, trainable) the paper's vectors, in float32: they are compared, not summed."""
        return self.U[:, : self.trainable].float()


@dataclass(frozen=True)
class Evaluation:
    """A model on every client's hold-out, by the objective's metrics; the first of them is the
    primary one.
    """

    value: float  # the primary metric: mean over clients, as in the paper
    weighted: float  # over all samples
    loss: float
    nbytes: int = 0  # what sending the model to every client that judges it would cost
    metric: str = "accuracy"  # the primary metric's name
    lower: bool = False  # whether less of it is better
    metrics: Mapping[str, float] = field(default_factory=dict)  # every metric, mean over clients
    pooled: Mapping[str, float] = field(default_factory=dict)  # every metric, over all samples


@dataclass(frozen=True)
class RoundEvent:
    """What a piece may learn from a committed round."""

    t: int
    w: Tensor  # before the round: eq. 5 and 6 measure from it
    w_next: Tensor
    updates: Updates
    M: int  # rows in the roster
    # rows that were asked to train, whether or not their replies counted
    chosen: tuple[int, ...] = ()
    # of the rounds before, as the view had it when this one was planned
    history: tuple[RoundRecord, ...] = ()

    def make_rng(self, purpose: str, client: str = "") -> Generator:
        """A generator of the round for one purpose, as `updates.make_rng`."""
        return self.updates.make_rng(purpose, client)


@dataclass(frozen=True)
class State:
    """Everything that survives a round. A piece's tables may be written in place, so keep no old
    state.
    """

    t: int  # rounds committed
    w: Tensor  # (d,)
    server_state: Mapping[str, Any]  # role of a piece -> its state
    roster: tuple[str, ...] = ()  # row -> client
    client_states: ClientStates = field(default_factory=dict)
    history: tuple[RoundRecord, ...] = ()
    attempt: int = 0  # abandoned tries at the round that comes next

    @property
    def memory(self) -> Mapping[str, Any]:
        """The old name of `server_state`."""
        return self.server_state

    @property
    def carry(self) -> ClientStates:
        """The old name of `client_states`."""
        return self.client_states


@dataclass(frozen=True)
class RoundPlan:
    """Round t before it is run."""

    state: State
    t: int
    selection: Selection
    # this round's tasks, and earlier ones that are still under way
    pending: tuple[PendingTask, ...]
    # clients that were asked for their loss, and bytes that each downloaded for it
    asked: tuple[tuple[str, int], ...] = ()
    refused: str = ""  # why the round is not started
    n: Tensor | None = None  # (M,) samples as known before the round
    keep: int | None = None  # no more good replies than that count
    began: float = 0.0  # seconds of the run's clock
    streams: RoundStreams = FIRST_STREAMS  # of the round's random numbers

    @cached_property  # asked for several times a round, of all that is under way
    def tasks(self) -> tuple[Task, ...]:
        """What this round's clients are told."""
        return tuple(one.task for one in self.pending if one.task.t == self.t)


@dataclass(frozen=True)
class ClientRecord:
    """One client's part of a round in the ledger."""

    t: int
    client: str
    outcome: str  # "useful", or why it did not count
    n: int
    loss: float
    spent: ClientCost
    age: int = 0  # rounds since it was sent its model
    figures: Mapping[str, float] = field(default_factory=dict)  # what pieces report, by name


@dataclass(frozen=True)
class Round:
    """What `rounds` yields."""

    state: State
    record: RoundRecord
    clients: tuple[ClientRecord, ...]
    changed_rows: tuple[int, ...] = ()  # rows whose tables changed
    model: Tensor | None = None  # the final model if the run ended now: the server average
