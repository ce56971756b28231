"""A run's place at a deck: it asks for its clients' work there, and trains by itself what no stack
can do.
"""

import hashlib
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flrce.core import device_transfer
from flrce.core.payloads import fingerprint_model
from flrce.core.types import Payload, RepliesWithTable, Reply
from flrce.core.update_placement import HOST_PLACEMENT, UpdatePlacement
from flrce.errors import format_one_line
from flrce.models.flat import FrozenParameter
from flrce.simulation.gpu_scheduler import GpuRequest, GpuScheduler
from flrce.simulation.worker_pool import WorkerFailure
from flrce.simulation.workers import SampleScores, TaskInputs
from flrce.training.client import ClientRunner, IndexArray, PreparedTask
from flrce.training.precision import Precision
from flrce.training.trainer import TrainingResult

STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))  # what every module has
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
log = logging.getLogger("flrce")


class DeviceSchedulers:
    """The decks of one device: a deck for each network and pool of samples that its runs have in
    common.
    """

    def __init__(self, device: str, beside: int = 1, single: bool = False) -> None:
        self.device, self.decks = device, {}  # type: tuple[str, dict[Any, GpuScheduler]]
        self.beside = beside  # processes that share the device's memory
        self.single = single  # whether one run has all of it

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device's memory for this process."""
        total = (
            torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 4 << 30
        )
        return total // self.beside

    def open_slot(
        self,
        runner: ClientRunner,
        precision: Precision = "float32",
        placing: UpdatePlacement = HOST_PLACEMENT,
    ) -> "RunSlot":
        """A seat at the deck of this network and these samples."""
        fixed = tuple(
            _identify_parameter(p) for p in runner.net.parameters() if not p.requires_grad
        )
        key = (
            id(runner.x),
            runner.shape,
            repr(runner.layout),
            repr(runner.net),
            fingerprint_network(
                runner.net, {slot.name for slot in runner.layout.local_layout.slots}
            ),
            repr(runner.objective),
            fixed,
            precision,
        )
        if key not in self.decks:
            self.decks[key] = GpuScheduler(
                runner, self.device, memory=self.memory_bytes // 4, precision=precision
            )
        return RunSlot(self.decks[key], runner, placing)


def _identify_parameter(p: Tensor) -> int | str:
    """What tells fixed parameters apart: where they lie for those that came from a file, else their
    values.
    """
    return p.data_ptr() if isinstance(p, FrozenParameter) else fingerprint_model(p)


def fingerprint_network(net: nn.Module, own: Collection[str]) -> str:
    """What tells networks with the same layers apart: classes, attributes, hooks, and buffers that
    are no client's own.

    Such as nn.TransformerEncoderLayer(norm_first=True), or a factor in code: a network's printed
    form shows neither.
    """
    found = hashlib.sha256()
    for path, part in net.named_modules():
        noted = {
            name: x
            for name, x in vars(part).items()
            if name not in STANDARD_ATTRIBUTES and not _has_parameters(x)
        }
        hooks = [hook for kind in HOOK_ATTRIBUTES for hook in getattr(part, kind).values()]
        buffers = [b for name, b in part.named_buffers(path, recurse=False) if name not in own]
        held, form = pytree.tree_flatten((type(part), sorted(noted.items()), hooks, buffers))
        found.update(str(form).encode())  # keys of dicts are no leaves
        for what in held:
            found.update(_serialize_attribute(what))
    return found.hexdigest()


def _has_parameters(x: Any) -> bool:
    """Whether an attribute holds parameters, as those of recurrent layers do."""
    return any(isinstance(each, nn.Parameter | ref) for each in pytree.tree_leaves(x))


def _serialize_attribute(x: Any) -> bytes:
    if isinstance(x, Tensor):  # by what it holds: torch pickles where it lies as well
        held = x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{x.dtype} {tuple(x.shape)}".encode() + held
    try:
        return pickle.dumps(x)
    except Exception:  # lambdas, locks: many kinds; each is itself alone
        return str(id(x)).encode()


class DeviceCopies:
    """The latest models as they lie on the device, so that one that is there is not sent again."""

    def __init__(self, device: str) -> None:
        self.device, self.kept = device, []  # type: tuple[str, list[tuple[ref[Tensor], Tensor]]]

    def get_copy(self, w: Tensor) -> Tensor:
        """w on the device."""
        there = next((twin for known, twin in self.kept if known() is w), None)
        if there is None:
            there = device_transfer.to_device(w, self.device)
        self.remember_copy(w, there)
        return there

    def remember_copy(self, w: Tensor, there: Tensor) -> None:
        """That w is `there`: two are remembered, while someone on the host holds on to them."""
        others = [
            (known, twin) for known, twin in self.kept if known() is not None and known() is not w
        ]
        self.kept = [*others[-1:], (ref(w), there)]


class RunSlot:
    """The workers of one run, at a deck."""

    def __init__(
        self, deck: GpuScheduler, runner: ClientRunner, placing: UpdatePlacement = HOST_PLACEMENT
    ) -> None:
        self.deck, self.runner, self.name = deck, runner, deck.device
        self.placing, self.twins = placing, DeviceCopies(deck.device)
        self.number = deck.add_slot()
        self.said: set[str] = set()

    @property
    def updates_on_device(self) -> bool:
        return self.placing.near

    @property
    def device_lock(self) -> AbstractContextManager[Any]:
        return self.deck.alone

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:
        self.twins.remember_copy(w, there)

    def train(self, orders: Sequence[TaskInputs]) -> Sequence[Reply | WorkerFailure]:
        """The clients' replies. What a stack cannot do is trained by torch on the same device, one
        client at a time.
        """
        one_model = len({id(w) for w, *_ in orders}) == 1
        if self.placing.lean and one_model and all(order[1].part.is_whole for order in orders):
            try:
                return self._train_into_table(orders)
            except (
                RuntimeError
            ) as why:  # no memory for all of them; whatever else it is will be raised again
                log.warning(
                    "from here on updates come to the host one by one: %s",
                    format_one_line(why, 160),
                )
                self.placing, self.twins = HOST_PLACEMENT, DeviceCopies(self.deck.device)
        return self._train_clients(orders, [None] * len(orders))

    def _train_into_table(self, orders: Sequence[TaskInputs]) -> RepliesWithTable:
        """The same, of which all updates lie in one table, ordered by k: on the device, or brought
        home at once.
        """
        with self.device_lock:
            there = self.twins.get_copy(orders[0][0])
            table = self._allocate_table(there, len(orders))
        order = sorted(range(len(orders)), key=lambda i: orders[i][1].k)
        rows = {i: row for row, i in enumerate(order)}
        on_device = [(there, task, index, carry) for _, task, index, carry in orders]
        replies = self._train_clients(on_device, [table[rows[i]] for i in range(len(orders))])
        if self.placing.near:
            return RepliesWithTable(replies, table, there)
        with self.device_lock:
            table = device_transfer.to_host(table)
        found = [
            replace(reply, payload=Payload({"u": table[rows[i]]})) if reply.payload else reply
            for i, reply in enumerate(replies)
        ]
        return RepliesWithTable(found, table)

    def _allocate_table(self, w: Tensor, rows: int) -> Tensor:
        return w.new_empty(rows, len(w))

    def _train_clients(
        self, orders: Sequence[TaskInputs], into: Sequence[Tensor | None]
    ) -> list[Reply]:
        jobs = [self.runner.prepare_task(*order) for order in orders]
        stacked = [
            i for i, job in enumerate(jobs) if len(job.sizes) and not self._explain_unbatched(job)
        ]
        answers = self.deck.submit_request(
            self.number, GpuRequest([jobs[i] for i in stacked], [orders[i][3] for i in stacked])
        )
        trained: dict[int, TrainingResult] = dict(zip(stacked, answers, strict=True))
        return [
            self.runner.build_reply(job, trained[i], carry, into[i])
            if i in trained
            else self.deck.train_and_reply(job, carry, into[i])
            for i, (job, (_, _, _, carry)) in enumerate(zip(jobs, orders, strict=True))
        ]

    def score_samples(
        self, w: Tensor, index: IndexArray, own: Tensor | None = None
    ) -> SampleScores:
        if self.placing.lean:
            with self.device_lock:
                w = self.twins.get_copy(w)
        if (
            isinstance(self.deck.get_batch_trainer(self.runner.all), str)
            or self.runner.layout.kept
            or own is not None
        ):
            with self.deck.alone:
                found = self.deck.runner.evaluate(w, index, own)
                return {name: each.cpu().double().numpy() for name, each in found.items()}
        answer: SampleScores = self.deck.submit_request(self.number, GpuRequest(judged=(w, index)))
        return answer

    @property
    def variants(self) -> dict[str, str]:
        """The ways that this deck's jobs went; a run keeps them, and brings them along when it is
        resumed.
        """
        return self.deck.ways

    def adopt_variants(self, ways: Mapping[str, Any]) -> None:
        self.deck.choices.adopt_variants(ways)

    def close(self) -> None:
        self.deck.release_slot(self.number)

    def _explain_unbatched(self, job: PreparedTask) -> str:
        """Why this job is trained by itself; the first of each reason is told."""
        why = self.deck.explain_unbatched(job)
        if why and why not in self.said:
            self.said.add(why)
            log.warning("clients train one after another on %s: %s", self.deck.device, why)
        return why
