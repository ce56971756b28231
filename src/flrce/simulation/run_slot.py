"""The slot of one run at a GPU scheduler: it submits the run's tasks, and trains by itself what no
client batch supports.
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

from flrce.core import tensor_bytes
from flrce.core.downlink import split_batches
from flrce.core.payloads import fingerprint_model, make_encoding_stream
from flrce.core.roles import Compressor
from flrce.core.types import Payload, RepliesWithTable, Reply
from flrce.errors import format_one_line
from flrce.models.flat import FrozenParameter
from flrce.simulation.gpu_scheduler import (
    EvaluationJob,
    GpuRequest,
    GpuScheduler,
    move_scores_to_host,
)
from flrce.simulation.update_placement import HOST_PLACEMENT, UpdatePlacement
from flrce.simulation.workers import SampleScores, TaskInputs, WorkerFailure, Workers
from flrce.training.client import ClientRunner, IndexArray, PreparedTask
from flrce.training.precision import Precision
from flrce.training.trainer import TrainingResult

STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))  # what every module has
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
log = logging.getLogger("flrce")


class DeviceSchedulers:
    """The schedulers of one device: one for each network and pool of samples that runs share."""

    def __init__(self, device: str, beside: int = 1, single: bool = False) -> None:
        self.device = device
        self.schedulers: dict[Any, GpuScheduler] = {}
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
        """A slot at the scheduler of this network and these samples."""
        fixed = tuple(
            _fingerprint_parameter(p) for p in runner.net.parameters() if not p.requires_grad
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
        if key not in self.schedulers:
            self.schedulers[key] = GpuScheduler(
                runner, self.device, memory=self.memory_bytes // 4, precision=precision
            )
        return RunSlot(self.schedulers[key], runner, placing)


def _fingerprint_parameter(p: Tensor) -> int | str:
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
    digest = hashlib.sha256()
    for path, part in net.named_modules():
        attributes = {
            name: x
            for name, x in vars(part).items()
            if name not in STANDARD_ATTRIBUTES and not _has_parameters(x)
        }
        hooks = [hook for kind in HOOK_ATTRIBUTES for hook in getattr(part, kind).values()]
        buffers = [b for name, b in part.named_buffers(path, recurse=False) if name not in own]
        values, form = pytree.tree_flatten((type(part), sorted(attributes.items()), hooks, buffers))
        digest.update(str(form).encode())  # keys of dicts are no leaves
        for value in values:
            digest.update(_serialize_attribute(value))
    return digest.hexdigest()


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
    """Copies of the latest models on the device, so that none is sent twice."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pairs: list[tuple[ref[Tensor], Tensor]] = []  # (model on the host, its copy)

    def get_copy(self, w: Tensor) -> Tensor:
        """w on the device."""
        copy = next((copy for model, copy in self.pairs if model() is w), None)
        if copy is None:
            copy = tensor_bytes.to_device(w, self.device)
        self.remember_copy(w, copy)
        return copy

    def remember_copy(self, w: Tensor, copy: Tensor) -> None:
        """Remember the copy of w; two are remembered, while the host holds their models."""
        others = [pair for pair in self.pairs if pair[0]() is not None and pair[0]() is not w]
        self.pairs = [*others[-1:], (ref(w), copy)]


class RunSlot(Workers):
    """The workers of one run that shares a GPU."""

    def __init__(
        self,
        scheduler: GpuScheduler,
        runner: ClientRunner,
        placing: UpdatePlacement = HOST_PLACEMENT,
    ) -> None:
        self.scheduler, self.runner, self.name = scheduler, runner, scheduler.device
        self.placing, self.copies = placing, DeviceCopies(scheduler.device)
        self.number = scheduler.add_slot()
        self.logged_reasons: set[str] = set()

    @property
    def code_device(self) -> torch.device:
        return torch.device(self.scheduler.device)

    @property
    def updates_on_device(self) -> bool:
        return self.placing.on_device

    @property
    def device_lock(self) -> AbstractContextManager[Any]:
        return self.scheduler.device_lock

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:
        self.copies.remember_copy(w, there)

    def train(self, orders: Sequence[TaskInputs]) -> Sequence[Reply | WorkerFailure]:
        """The clients' replies. The torch trainer does what no client batch supports, one client at
        a time on the same device.
        """
        one_model = len({id(w) for w, *_ in orders}) == 1
        if self.placing.in_table and one_model and all(order[1].part.is_whole for order in orders):
            try:
                return self._train_into_table(orders)
            except RuntimeError as why:  # no memory for the table; other reasons are raised again
                log.warning(
                    "from here on updates come to the host one by one: %s",
                    format_one_line(why, 160),
                )
                self.placing, self.copies = HOST_PLACEMENT, DeviceCopies(self.scheduler.device)
        return self._train_clients(orders, [None] * len(orders))

    def _train_into_table(self, orders: Sequence[TaskInputs]) -> RepliesWithTable:
        """The same with all updates in one table, ordered by k: on the device, or moved to the host
        at once.
        """
        with self.device_lock:
            there = self.copies.get_copy(orders[0][0])
            table = self._allocate_table(there, len(orders))
        order = sorted(range(len(orders)), key=lambda i: orders[i][1].k)
        rows = {i: row for row, i in enumerate(order)}
        on_device = [(there, task, index, client_state) for _, task, index, client_state in orders]
        replies = self._train_clients(on_device, [table[rows[i]] for i in range(len(orders))])
        if self.placing.on_device:
            return RepliesWithTable(replies, table, there)
        with self.device_lock:
            table = tensor_bytes.to_host(table)
        moved = [
            replace(reply, payload=Payload({"u": table[rows[i]]})) if reply.payload else reply
            for i, reply in enumerate(replies)
        ]
        return RepliesWithTable(moved, table)

    def _allocate_table(self, w: Tensor, rows: int) -> Tensor:
        return w.new_empty(rows, len(w))

    def _train_clients(
        self, orders: Sequence[TaskInputs], into: Sequence[Tensor | None]
    ) -> list[Reply]:
        tasks = [self.runner.prepare_task(*order) for order in orders]
        batched = [
            i
            for i, task in enumerate(tasks)
            if len(task.sizes) and not self._explain_unbatched(task)
        ]
        results = self.scheduler.submit_request(
            self.number, GpuRequest([tasks[i] for i in batched], [orders[i][3] for i in batched])
        )
        trained: dict[int, TrainingResult] = dict(zip(batched, results, strict=True))
        payloads = self._encode_updates(tasks, trained)
        return [
            self.runner.build_reply(task, trained[i], state, into[i], payloads.get(i))
            if i in trained
            else self.scheduler.train_and_reply(task, state, into[i])
            for i, (task, (_, _, _, state)) in enumerate(zip(tasks, orders, strict=True))
        ]

    def _encode_updates(
        self, tasks: Sequence[PreparedTask], trained: Mapping[int, TrainingResult]
    ) -> dict[int, Payload]:
        """Payloads of the updates whose code encodes many at once, by the places of their tasks."""
        groups: dict[tuple[Compressor, object], list[int]] = {}
        for i in () if self.runner.layout.personal else trained:
            code = tasks[i].task.compressor
            if code.encodes_batches and tasks[i].part.sent is None:
                groups.setdefault((code, tasks[i].part.key), []).append(i)
        payloads: dict[int, Payload] = {}
        for (code, _), members in groups.items():
            part = tasks[members[0]].part
            for batch in split_batches(members, len(tasks[members[0]].start)):
                updates = torch.stack([trained[i].w - tasks[i].start for i in batch])
                rngs = [make_encoding_stream(tasks[i].task) for i in batch]
                with self.device_lock:
                    on_device = tensor_bytes.to_device(updates, self.scheduler.device)
                    encoded, decoded = code.encode_batch(on_device, part.names, rngs)
                    decoded = tensor_bytes.to_host(decoded)
                for i, payload, u in zip(batch, encoded, decoded, strict=True):
                    payloads[i] = replace(payload, decoded=u)
        return payloads

    def score_samples(
        self, w: Tensor, index: IndexArray, own: Tensor | None = None
    ) -> SampleScores:
        if own is None:
            return self.score_models([(w, index)])[0]
        with self.device_lock:
            return move_scores_to_host(self.scheduler.runner.evaluate(w, index, own))

    def score_models(self, jobs: Sequence[EvaluationJob]) -> list[SampleScores]:
        if not jobs:
            return []
        if self.placing.in_table:
            with self.device_lock:
                jobs = [(self.copies.get_copy(w), index) for w, index in jobs]
        trainer = self.scheduler.get_batch_trainer(self.runner.all)
        if isinstance(trainer, str) or self.runner.layout.personal:
            with self.device_lock:
                return [move_scores_to_host(self.scheduler.runner.evaluate(*job)) for job in jobs]
        scores: list[SampleScores] = self.scheduler.submit_request(
            self.number, GpuRequest(evaluations=jobs)
        )
        return scores

    def close(self) -> None:
        self.scheduler.release_slot(self.number)

    def _explain_unbatched(self, task: PreparedTask) -> str:
        """Why this task is trained by itself; each reason is logged once."""
        reason = self.scheduler.explain_unbatched(task)
        if reason and reason not in self.logged_reasons:
            self.logged_reasons.add(reason)
            log.warning("clients train one after another on %s: %s", self.name, reason)
        return reason
