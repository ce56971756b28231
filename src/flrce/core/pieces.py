"""The do-nothing answers to the questions of a method, and Recipe, which holds one answer to each.

The questions, and what pieces may do, are the base classes of roles.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import LearningRate, find_problem
from flrce.core.downlink import DENSE_DOWNLOAD
from flrce.core.piece_checks import explain_forgotten_state, explain_renamed_method, has_links
from flrce.core.roles import (
    ROLES,
    Aggregator,
    Compressor,
    Downlink,
    LocalTrainer,
    Pace,
    RoundView,
    Selector,
    ServerAverage,
    ServerStep,
    StopRule,
    SubModel,
    explain_wrong_role,
)
from flrce.core.state_values import validate_state
from flrce.core.types import LocalWork, Payload, RoundEvent, RoundRecord, Selection, Task, Updates
from flrce.errors import BadInput
from flrce_client.errors import MalformedPayload as MalformedPayload


@dataclass(frozen=True)
class FullModel(SubModel):
    """Every client holds the whole model."""

    def assign(self, tasks: list[Task], view: RoundView) -> list[Task]:
        return tasks


@dataclass(frozen=True)
class NoCompression(Compressor):
    """Every coordinate travels as float32; those of a float64 model as they are."""

    is_dense: ClassVar[bool] = True

    def encode(
        self,
        u: Tensor,
        layout: Sequence[tuple[str, int]],
        rng: Generator,
        client_state: Mapping[str, Tensor],
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return Payload({"u": u if u.dtype == torch.float64 else u.float()}), client_state

    def decode(
        self, payload: Payload, layout: Sequence[tuple[str, int]], rng: Generator | None = None
    ) -> Tensor:
        return get_buffer(
            payload, "u", (torch.float32, torch.float64), sum(size for _, size in layout)
        )


@dataclass(frozen=True)
class NeverStop(StopRule):
    """Only T ends the run."""

    reads_evaluations: ClassVar[bool] = False

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return ""


@dataclass(frozen=True)
class ServerSGD(ServerStep):
    """The server goes `rate` of the way to where the replies point: 1, all of it."""

    rate: LearningRate = 1.0
    device_agnostic: ClassVar[bool] = True
    reads_clients: ClassVar[bool] = False

    def step(self, w: Tensor, target: Tensor, updates: Updates, state: Any) -> tuple[Tensor, Any]:
        if self.rate == 1:
            return target, state
        d = updates.trainable  # statistics of BatchNorm are no gradients
        return torch.cat([torch.lerp(w[:d], target[:d], self.rate), target[d:]]), state


@dataclass(frozen=True)
class SynchronousPace(Pace):
    """Everyone who was asked is waited for."""

    def cohort_size(self, P: int, busy: int) -> int:
        return P

    def max_replies(self, P: int) -> int | None:
        return None


@dataclass(frozen=True)
class LastModel(ServerAverage):
    """The last model is the final model."""

    is_last_model: ClassVar[bool] = True

    def model(self, state: Any, w: Tensor) -> Tensor:
        return w


def get_buffer(
    payload: Payload, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: int
) -> Tensor:
    """One buffer of a payload, checked; Malformed says what is wrong with it."""
    buffer, dtypes = payload.buffers.get(name), dtype if isinstance(dtype, tuple) else (dtype,)
    if buffer is None:
        raise MalformedPayload(
            f"no buffer {name!r}; got"
            f" {', '.join(map(repr, sorted(payload.buffers)))[:80] or 'none'}"
        )
    if buffer.dtype not in dtypes:
        raise MalformedPayload(f"buffer {name!r} is {buffer.dtype}, not {dtypes[0]}")
    if tuple(buffer.shape) != (size,):
        raise MalformedPayload(f"buffer {name!r} has shape {tuple(buffer.shape)}, not ({size},)")
    return buffer


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
    # patterns of parameters that stay with their client, "norms" or "head"
    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # patterns of parameters that neither train nor travel
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
            *(("augment", transform) for transform in self.augment),
        )
        for role, piece in self.iter_pieces():
            why = explain_renamed_method(piece) or explain_wrong_role(role, piece)
            if why:
                raise BadInput(f"recipe.{role}: {why}")
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
            why = explain_renamed_method(piece) or piece.check_recipe(self)
            if why:
                raise BadInput(why)
        for role, piece in self.iter_pieces():
            if why := explain_forgotten_state(piece):
                raise BadInput(f"recipe.{role}: {why}")
        if self.minimum < 1 and not self.aggregator.accepts_empty_rounds:
            raise BadInput(
                f"recipe.minimum = {self.minimum}: {type(self.aggregator).__name__} needs a reply;"
                " use 1 or more"
            )
        if self.sums and (self.partial_pieces or self.selector.compares_updates):
            raise BadInput(
                "sums only: no piece may look at single updates; drop recipe.selector and"
                " recipe.submodel"
            )

    @cached_property  # asked for by every task under way
    def chain(self) -> Any:
        """How clients' gradients become steps: the update, with what the trainer puts before it."""
        update = self.update
        for link in reversed(self.trainer.links):
            update = update.prepend_link(link)
        return update

    @property
    def model_groups(self) -> int:
        """Of how many global models the network consists."""
        links = () if self.update is None else self.chain.links
        return max((link.model_groups for link in links), default=1)

    @property
    def partial_pieces(self) -> str:
        """The pieces that let a reply cover only some coordinates, or "" where each covers all."""
        pieces = [piece for _, piece in self.iter_pieces() if piece.partial]
        return " and ".join(type(piece).__name__ for piece in pieces)

    def explain_parts(self, claim: str, remedy: str = "drop one", personal: bool = False) -> str:
        """Why a piece that needs whole updates does not work here; "" where clients hold and send
        whole models. `personal`: parameters that stay with a client are a problem too.
        """
        parts = self.partial_pieces or ("model.personal" if personal and self.personal else "")
        return f"{claim}, but {parts} leaves clients with parts; {remedy}" if parts else ""

    @property
    def pays_for_evaluations(self) -> bool:
        """Whether the stop rule reads evaluations of the final model, so that they are billed."""
        stop = self.stop
        return stop.reads_evaluations or (stop.reads_reports and not self.holdouts)

    def iter_pieces(self) -> Iterator[tuple[str, Any]]:
        for role in ROLES:
            yield role, getattr(self, role)

    def check_fleet(self, M: int, d: int, D: int) -> None:
        """BadInput if a piece does not work for so many clients and floats."""
        for _, piece in self.iter_pieces():
            why = piece.check_fleet(self, M, d, D)
            if why:
                raise BadInput(why)

    def initial_state(self, M: int, d: int, D: int) -> dict[str, Any]:
        """What the pieces remember before the first round; d floats are trained, D travel."""
        server_state = {
            role: piece.initial_state(M, d, D)
            for role, piece in self.iter_pieces()
            if piece.has_state
        }
        for role, state in server_state.items():
            validate_state(role, getattr(self, role), state, M)
        return server_state

    def observe(self, server_state: Mapping[str, Any], event: RoundEvent) -> dict[str, Any]:
        """Every piece's state after a committed round."""
        after: dict[str, Any] = {}
        for role, piece in self.iter_pieces():
            if role in server_state:
                after[role] = piece.observe(server_state[role], event)
                if after[role] is None and server_state[role] is not None:
                    raise BadInput(
                        f"{type(piece).__name__}.observe returned None; return the state"
                    )
                validate_state(role, piece, after[role], event.M)
        return after

    def build_tasks(
        self, selection: Selection, server_state: Mapping[str, Any], view: RoundView
    ) -> list[Task]:
        """What each chosen client is told."""
        tasks = [view.draft(k) for k in selection.k]
        tasks = _validate_tasks(self.submodel, self.submodel.assign(tasks, view))
        tasks = [replace(task, compressor=self.compressor, judge=self.holdouts) for task in tasks]
        tasks = _validate_tasks(
            self.compressor, self.compressor.assign(tasks, server_state.get("compressor"), view)
        )
        tasks = _validate_tasks(
            self.trainer, self.trainer.assign(tasks, server_state.get("trainer"), view)
        )
        return [self.pace.with_deadline(task) for task in tasks]


def _validate_tasks(piece: Any, tasks: Any) -> list[Task]:
    """What a trainer or a sub-model made of the tasks, if that is what it is."""
    name = type(piece).__name__
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, Task) for task in tasks):
        returned = (
            f"a {type(tasks).__name__}"
            if not isinstance(tasks, list | tuple)
            else "something else than tasks"
        )
        raise BadInput(f"{name}.assign returned {returned}; return the list of tasks")
    for task in tasks:
        for key, value in task.tensors.items():
            if not isinstance(value, Tensor):
                raise BadInput(
                    f"{name}.assign: tensors[{key!r:.60}] is a {type(value).__name__}; send a"
                    " tensor"
                )
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
