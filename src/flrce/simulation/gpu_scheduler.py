"""Many runs on one device: each run has a slot, and the clients of all of them form client batches.

A run continues in a thread of its own until it needs clients trained or a model evaluated. When
every slot waits, the last to come does the work of all. The order of lanes is that of the slots, so
that the same runs together give the same bits each time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.types import Reply
from flrce.errors import BadInput, is_out_of_memory
from flrce.models.part import ModelPart
from flrce.simulation.workers import SampleScores
from flrce.training.client import LINK_STATE_PREFIX, ClientRunner, IndexArray, PreparedTask
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.lanes import ClientBatchResult
from flrce.training.precision import Precision
from flrce.training.trainer import TorchTrainer, TrainingResult, derive_layer_seed
from flrce.training.update_chain import PlainSGD, UpdateChain, match_plain_sgd

# One thread at a time: work that another thread gives a GPU would spoil the step that is being
# recorded, and while torch.fx traces a network, it takes modules that another thread calls for the
# network's own.
DEVICE_LOCK = RLock()
log = logging.getLogger("flrce")

ClientState = Mapping[str, Tensor]
EvaluationJob = tuple[Tensor, IndexArray]  # a model and samples


class BatchingKey(NamedTuple):
    """What the lanes of one client batch have in common."""

    rate: float | int  # share of the network that trains, of a sub-model
    first: int  # first block that trains
    proximal: tuple[bool, bool]  # whether there is a proximal term, and whether it is squared
    update: UpdateChain | None  # the chain of links; None for plain SGD


@dataclass(eq=False)
class GpuRequest:
    """What one slot waits for: tasks trained, or models evaluated."""

    tasks: Sequence[PreparedTask] = ()
    client_states: Sequence[ClientState] = ()  # what the client of each task keeps
    evaluations: Sequence[EvaluationJob] = ()
    answer: Any = None


@dataclass(frozen=True)
class ClientBatch:
    """Tasks with one batching key, trained together: one lane for each."""

    trainer: ClientBatchTrainer
    key: BatchingKey
    tasks: Sequence[PreparedTask]
    client_states: Sequence[ClientState]

    @property
    def lanes(self) -> int:
        return len(self.tasks)

    def stack_start_models(self, device: str) -> Tensor:
        """(lanes, d) on the device; clients of one run share their start, which is sent once."""
        starts = {task.start.data_ptr(): task.start for task in self.tasks}
        sent = torch.stack([tensor_bytes.to_device(w, device) for w in starts.values()])
        if len(starts) == 1:
            return sent.expand(self.lanes, -1)
        return sent[[list(starts).index(task.start.data_ptr()) for task in self.tasks]]

    def train(self, device: str) -> ClientBatchResult:
        plain = [sgd_hyperparameters(task) for task in self.tasks]
        return self.trainer.train(
            self.stack_start_models(device),
            [task.order for task in self.tasks],
            [task.sizes for task in self.tasks],
            lr=collect_learning_rates(self.tasks, self.key.update),
            mu=torch.tensor([sgd.mu for sgd in plain]),
            first=self.key.first,
            squared=plain[0].squared,
            update=self.key.update,
            locals=[task.local for task in self.tasks],
            carries=[extract_link_state(state) for state in self.client_states],
            seeds=[derive_layer_seed(task.task) for task in self.tasks],
        )


class GpuScheduler:
    """One network and one pool of samples on one device, shared by the slots of several runs."""

    def __init__(
        self,
        runner: ClientRunner,
        device: str,
        memory: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.device, self.memory, self.precision = device, memory, precision
        runner.precision = precision
        self.runner = runner.to_device(device)
        self.trainers: dict[float | int, ClientBatchTrainer | str] = {}  # or why there is none
        self.turn = Condition()
        self.device_lock = DEVICE_LOCK
        self.slots: set[int] = set()
        self.waiting: dict[int, GpuRequest] = {}

    def add_slot(self) -> int:
        """Add a slot; all slots are added before the first run starts."""
        with self.turn:
            self.slots.add(max(self.slots, default=-1) + 1)
            return max(self.slots)

    def release_slot(self, slot: int) -> None:
        with self.turn:
            self.slots.discard(slot)
            if not self.slots:
                self.trainers.clear()  # frees their memory for the next run at once
            self._serve_if_all_wait()

    def submit_request(self, slot: int, request: GpuRequest) -> Any:
        """The answer to a request, once every other slot waits too."""
        with self.turn:
            self.waiting[slot] = request
            self._serve_if_all_wait()
            self.turn.wait_for(lambda: slot not in self.waiting)
        if isinstance(request.answer, BaseException):
            raise request.answer
        return request.answer

    def _serve_if_all_wait(self) -> None:
        if not self.waiting or set(self.waiting) != self.slots:
            return
        requests = [self.waiting[slot] for slot in sorted(self.waiting)]
        try:
            with self.device_lock:
                self._train_requests(requests)
                self._evaluate_requests(requests)
        except BaseException as why:  # each run ends with it, as it would by itself
            for request in requests:
                request.answer = why
        self.waiting.clear()
        self.turn.notify_all()

    def _train_requests(self, requests: Sequence[GpuRequest]) -> None:
        for request in requests:
            request.answer = [None] * max(len(request.tasks), len(request.evaluations))
        groups: dict[BatchingKey, list[tuple[GpuRequest, int]]] = {}
        for request in requests:
            for i, task in enumerate(request.tasks):
                groups.setdefault(batching_key(task), []).append((request, i))
        for key in sorted(groups, key=repr):
            members = groups[key]
            tasks = [request.tasks[i] for request, i in members]
            states = [r.client_states[i] if r.client_states else {} for r, i in members]
            trainer = self.get_batch_trainer(tasks[0].part)
            assert isinstance(trainer, ClientBatchTrainer)
            batch = ClientBatch(trainer, key, tasks, states)
            for (request, i), result in zip(members, self._train_batch(batch), strict=True):
                request.answer[i] = result

    def _train_batch(self, batch: ClientBatch) -> list[TrainingResult]:
        """The tasks' results; one after another where memory is short."""
        result = self._retry_with_less_memory(batch.trainer, partial(batch.train, self.device))
        if result is None:
            return list(map(self._train_one_client, batch.tasks, batch.client_states))
        on_device = batch.tasks[0].start.device.type == torch.device(self.device).type
        w = result.w if on_device else tensor_bytes.to_host(result.w)
        lanes = zip(w, result.losses, result.squares, result.ends, strict=True)
        return [TrainingResult(own, loss, square, *end) for own, loss, square, end in lanes]

    def _retry_with_less_memory(self, trainer: ClientBatchTrainer, call: Callable[[], Any]) -> Any:
        """The result of the call, with fewer lanes at once where memory is short; None where not
        even one fits.
        """
        while True:
            try:
                return call()
            except RuntimeError as why:
                if not is_out_of_memory(why):
                    raise
                if not trainer.halve_memory():
                    return None
                log.warning(
                    "the GPU's memory is short: continuing with %.1f GB for a client batch",
                    trainer.memory / 1e9,
                )

    def _train_one_client(self, task: PreparedTask, state: ClientState) -> TrainingResult:
        """One task by the torch trainer on this device."""
        runner = self.runner
        trainer = runner.get_trainer(task.part, fused=False)
        assert isinstance(trainer, TorchTrainer)
        with runner.lock:
            return trainer.train(
                task.start,
                replace(task.batches, samples=runner.samples),
                task.update,
                task.local,
                extract_link_state(state),
                task.task.augment,
            )

    def _evaluate_requests(self, requests: Sequence[GpuRequest]) -> None:
        """All models that are asked for, those with about as many samples at once."""
        groups: dict[int, list[tuple[GpuRequest, int]]] = {}
        for request in requests:
            for i, (_, index) in enumerate(request.evaluations):
                groups.setdefault(len(index).bit_length(), []).append((request, i))
        for _, members in sorted(groups.items()):
            scores = self._evaluate_models([request.evaluations[i] for request, i in members])
            for (request, i), found in zip(members, scores, strict=True):
                request.answer[i] = found

    def _evaluate_models(self, jobs: Sequence[EvaluationJob]) -> list[SampleScores]:
        """Scores of each job; one after another where memory is short."""
        index = np.zeros((len(jobs), max(len(own) for _, own in jobs)), np.int64)
        for row, (_, own) in zip(index, jobs, strict=True):
            row[: len(own)] = own  # the rest is sample 0
        trainer = self.get_batch_trainer(self.runner.all)
        assert isinstance(trainer, ClientBatchTrainer)
        models = [w for w, _ in jobs]
        scores = self._retry_with_less_memory(trainer, partial(trainer.evaluate, models, index))
        if scores is None:
            return [move_scores_to_host(self.runner.evaluate(w, own)) for w, own in jobs]
        host = move_scores_to_host(scores)
        return [
            {name: x[lane, : len(own)] for name, x in host.items()}
            for lane, (_, own) in enumerate(jobs)
        ]

    def get_batch_trainer(self, part: ModelPart) -> ClientBatchTrainer | str:
        """The trainer for parts of this shape, or why they cannot be trained together."""
        rate, runner = part.key[0], self.runner
        with self.device_lock:
            if rate not in self.trainers:
                try:
                    self.trainers[rate] = ClientBatchTrainer(
                        part.net,
                        runner.shape,
                        runner.x,
                        runner.y,
                        runner.scale,
                        runner.shift,
                        self.device,
                        self.memory,
                        runner.objective,
                        runner.layout.local_layout if part.held is None else None,
                        self.precision,
                    )
                except BadInput as why:
                    self.trainers[rate] = str(why)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    self.trainers[rate] = "the GPU's memory is short"
            return self.trainers[rate]

    def train_and_reply(
        self, task: PreparedTask, state: ClientState, into: Tensor | None = None
    ) -> Reply:
        """One task by itself, and what its client sends."""
        with self.device_lock:
            here = replace(task.batches, samples=self.runner.samples)
            return self.runner.train_and_reply(replace(task, batches=here), state, into)

    def explain_unbatched(self, task: PreparedTask) -> str:
        """Why this task is trained by itself and not in a client batch; "" if it need not be."""
        if task.task.augment:
            return "batches are augmented"
        if isinstance(match_plain_sgd(task.update, task.local), str):
            for link in task.update.links:
                if (
                    link.may_end_early
                    or not link.supports_client_batches
                    or (task.task.part.first and (link.ends_rounds or link.estimates_gradient))
                ):
                    return f"the update has {type(link).__name__}"
        trainer = self.get_batch_trainer(task.part)
        return trainer if isinstance(trainer, str) else ""


def move_scores_to_host(scores: Mapping[str, Tensor]) -> SampleScores:
    return {name: score.cpu().double().numpy() for name, score in scores.items()}


def batching_key(task: PreparedTask) -> BatchingKey:
    """Tasks with equal keys may be lanes of one client batch."""
    plain = match_plain_sgd(task.update, task.local)
    rate, first = task.part.key[0], task.task.part.first
    if isinstance(plain, PlainSGD):
        return BatchingKey(rate, first, (plain.mu > 0, plain.squared), None)
    return BatchingKey(rate, first, (False, True), task.update)


def extract_link_state(client_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that links keep, of all that a client keeps."""
    return {
        name.removeprefix(LINK_STATE_PREFIX): value
        for name, value in client_state.items()
        if name.startswith(LINK_STATE_PREFIX)
    }


def collect_learning_rates(
    tasks: Sequence[PreparedTask], update: UpdateChain | None
) -> Tensor | list[NDArray[np.float32]]:
    """One rate for each task, or for each of its steps where links may change it within a round."""
    if update is None:
        return torch.tensor([sgd_hyperparameters(task).lr for task in tasks])
    return [
        np.array(
            [task.update.compute_step_rate(s, task.local) for s in range(len(task.sizes))],
            np.float32,
        )
        for task in tasks
    ]


def sgd_hyperparameters(task: PreparedTask) -> PlainSGD:
    """The hyperparameters of plain SGD, as far as an update has them."""
    plain = match_plain_sgd(task.update, task.local)
    return plain if isinstance(plain, PlainSGD) else PlainSGD(task.update.lr)
