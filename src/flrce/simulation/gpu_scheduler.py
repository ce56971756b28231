"""Many runs on one device: each seed or recipe takes a seat, and the clients of all of them train
as one stack.

A seat's run goes on by itself, in a thread of its own, until it needs clients trained or a model
judged. When every seat waits, the last to come does the work of all. The order within a stack is
that of the seats, so the same runs together give the same bits each time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core import device_transfer
from flrce.core.types import Reply
from flrce.errors import BadInput
from flrce.models.part import ModelPart
from flrce.simulation.batching_key import (
    BatchingKey,
    batching_key,
    collect_learning_rates,
    extract_link_state,
    sgd_hyperparameters,
)
from flrce.simulation.variant_choice import (
    PLAIN_LOOP,
    VariantCache,
    Workload,
    describe_choice,
    find_fastest,
    hash_network_structure,
    measure_seconds,
)
from flrce.training.client import ClientRunner, IndexArray, PreparedTask
from flrce.training.gpu.lanes import ClientBatchResult, round_up_lanes
from flrce.training.gpu.stack import ClientBatchTrainer
from flrce.training.gpu.variants import Variant
from flrce.training.links import BatchableLink, GradientEstimator, RoundEndLink
from flrce.training.precision import Precision
from flrce.training.trainer import TorchTrainer, TrainingResult, derive_layer_seed
from flrce.training.update_chain import match_plain_sgd

TIMING_STEPS = 4  # of each job when ways are measured
MAX_TIMED_JOBS = 16  # jobs that are enough to measure one after another by
# One thread at a time: what another asks of a GPU meanwhile would spoil the step that is being
# recorded, and while torch.fx takes a network apart, the modules that another thread calls are
# taken for its own.
DEVICE_LOCK = RLock()
log = logging.getLogger("flrce")


@dataclass(eq=False)
class GpuRequest:
    """What one seat waits for: jobs trained, or a model judged."""

    jobs: Sequence[PreparedTask] = ()
    carries: Sequence[Mapping[str, Tensor]] = ()  # what each job's client keeps
    judged: tuple[Tensor, IndexArray] | None = None
    answer: Any = None


class GpuScheduler:
    """One network and one pool of samples on one device, shared by the seats of several runs."""

    def __init__(
        self,
        runner: ClientRunner,
        device: str,
        memory: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.device, self.memory, self.precision = device, memory, precision
        runner.precision = precision
        self.choices = VariantCache()
        self.ways: dict[str, str] = {}  # those that were gone so far
        self.runner = runner.to_device(device)
        self.stacks: dict[float | int, ClientBatchTrainer | str] = {}  # or why there is none
        self.turn = Condition()
        self.alone = DEVICE_LOCK
        self.seats: set[int] = set()
        self.waiting: dict[int, GpuRequest] = {}

    def add_slot(self) -> int:
        """Take a seat; all of them are taken before the first run starts."""
        with self.turn:
            self.seats.add(max(self.seats, default=-1) + 1)
            return max(self.seats)

    def release_slot(self, seat: int) -> None:
        with self.turn:
            self.seats.discard(seat)
            if not self.seats:
                # their memory is the next run's, not the garbage collector's to find
                self.stacks.clear()
            self._serve_if_all_wait()

    def submit_request(self, seat: int, request: GpuRequest) -> Any:
        """The answer to a request, once everyone else waits too."""
        with self.turn:
            self.waiting[seat] = request
            self._serve_if_all_wait()
            self.turn.wait_for(lambda: seat not in self.waiting)
        if isinstance(request.answer, BaseException):
            raise request.answer
        return request.answer

    def _serve_if_all_wait(self) -> None:
        if not self.waiting or set(self.waiting) != self.seats:
            return
        requests = [self.waiting[seat] for seat in sorted(self.waiting)]
        try:
            with self.alone:
                self._train_requests(requests)
                self._evaluate_requests(
                    [request for request in requests if request.judged is not None]
                )
        except BaseException as why:  # each run ends with it, as it would alone
            for request in requests:
                request.answer = why
        self.waiting.clear()
        self.turn.notify_all()

    def _train_requests(self, requests: Sequence[GpuRequest]) -> None:
        for request in requests:
            request.answer = [None] * len(request.jobs)
        groups: dict[BatchingKey, list[tuple[GpuRequest, int]]] = {}
        for request in requests:
            for i, job in enumerate(request.jobs):
                groups.setdefault(batching_key(job), []).append((request, i))
        for kind in sorted(groups, key=repr):
            self._train_client_batch(kind, groups[kind])

    def _train_client_batch(
        self, kind: BatchingKey, members: Sequence[tuple[GpuRequest, int]]
    ) -> None:
        """Train the jobs of one kind together and put the results where they belong."""
        jobs = [request.jobs[i] for request, i in members]
        carries = [request.carries[i] if request.carries else {} for request, i in members]
        stack = self.get_batch_trainer(jobs[0].part)
        assert isinstance(stack, ClientBatchTrainer)
        found = self._retry_with_less_memory(
            stack, partial(self._train_by_fastest, stack, kind, jobs, carries)
        )
        if found is None:
            for (request, i), job, carry in zip(members, jobs, carries, strict=True):
                request.answer[i] = self._train_one_client(job, carry)
            return
        w = (
            found.w
            if jobs[0].start.device.type == torch.device(self.device).type
            else device_transfer.to_host(found.w)
        )
        for lane, (request, i) in enumerate(members):
            kept, sent = found.ends[lane]
            request.answer[i] = TrainingResult(
                w[lane], found.losses[lane], found.squares[lane], kept, sent
            )

    def _train_by_fastest(
        self,
        stack: ClientBatchTrainer,
        kind: BatchingKey,
        jobs: Sequence[PreparedTask],
        carries: Sequence[Mapping[str, Tensor]],
    ) -> ClientBatchResult | None:
        """The jobs in the way that is fastest for them; None where that is one after another."""
        starts = {
            job.start.data_ptr(): job.start for job in jobs
        }  # a run's clients share one: sent once
        lanes = [list(starts).index(job.start.data_ptr()) for job in jobs]
        sent = torch.stack(
            [device_transfer.to_device(start, self.device) for start in starts.values()]
        )
        w = sent.expand(len(jobs), -1) if len(starts) == 1 else sent[lanes]
        way = self._choose_variant(stack, kind, jobs, carries, w)
        return (
            None
            if way == PLAIN_LOOP
            else self._train_lanes(stack, kind, jobs, carries, w, Variant.from_text(way))
        )

    def _retry_with_less_memory(self, stack: ClientBatchTrainer, call: Callable[[], Any]) -> Any:
        """What the call gives, with fewer lanes at once where memory is short; None where not even
        one fits.
        """
        while True:
            try:
                return call()
            except torch.OutOfMemoryError:
                if not stack.halve_memory():
                    return None
                log.warning(
                    "the GPU's memory is short: going on with %.1f GB for a stack",
                    stack.memory / 1e9,
                )

    def _train_lanes(
        self,
        stack: ClientBatchTrainer,
        kind: BatchingKey,
        jobs: Sequence[PreparedTask],
        carries: Sequence[Mapping[str, Tensor]],
        w: Tensor,
        way: Variant,
        most: int | None = None,
    ) -> ClientBatchResult:
        """Jobs as lanes; at most so many steps of each."""
        simply = [sgd_hyperparameters(job) for job in jobs]
        sizes = [job.sizes[:most] for job in jobs]
        return stack.train(
            w,
            [job.order[: size.sum()] for job, size in zip(jobs, sizes, strict=True)],
            sizes,
            lr=collect_learning_rates(jobs, kind[3]),
            mu=torch.tensor([each.mu for each in simply]),
            first=kind[1],
            squared=simply[0].squared,
            update=kind[3],
            locals=[job.local for job in jobs],
            carries=[extract_link_state(carry) for carry in carries],
            seeds=[derive_layer_seed(job.task) for job in jobs],
            way=way,
        )

    def _train_one_client(
        self, job: PreparedTask, carry: Mapping[str, Tensor], most: int | None = None
    ) -> TrainingResult:
        """One job by torch's trainer on this device."""
        runner, sizes = self.runner, job.sizes[:most]
        trainer = runner.get_trainer(job.part, fused=False)
        assert isinstance(trainer, TorchTrainer)
        samples = (runner.x, runner.y, runner.scale, runner.shift, job.order[: sizes.sum()], sizes)
        with runner.lock:
            return trainer.train(
                job.start,
                *samples,
                job.update,
                job.local,
                extract_link_state(carry),
                job.task.augment,
            )

    def _choose_variant(
        self,
        stack: ClientBatchTrainer,
        kind: BatchingKey,
        jobs: Sequence[PreparedTask],
        carries: Sequence[Mapping[str, Tensor]],
        w: Tensor,
    ) -> str:
        """The way that these jobs go: settled, known from before, or measured now."""
        if stack.fixed_variant is not None:
            return str(stack.fixed_variant)
        batch = -(-max(int(job.sizes.max()) for job in jobs) // 16) * 16
        names = [type(link).__name__ for link in kind[3].links] if kind[3] else []
        sort = Workload(
            hash_network_structure(stack.module),
            round_up_lanes(len(jobs), 1 << 20),
            batch,
            self.precision,
            f"{kind[:3]} {names}",
        )
        key = sort.to_cache_key(self.device)
        way = self.choices.find_variant(key)
        if way not in (None, PLAIN_LOOP) and not stack.supports(
            Variant.from_text(str(way))
        ):  # its code is not what it was
            self.choices.forget_variant(key)
            way = None
        if way is None:
            way, found = find_fastest(self._list_timings(stack, kind, jobs, carries, w))
            log.warning("%s", describe_choice(way, found, len(jobs), type(stack.module).__name__))
            way = self.choices.remember_variant(key, way)
            stack.free_other_buffers(way)
        self.ways[key] = way
        return way

    def _list_timings(
        self,
        stack: ClientBatchTrainer,
        kind: BatchingKey,
        jobs: Sequence[PreparedTask],
        carries: Sequence[Mapping[str, Tensor]],
        w: Tensor,
    ) -> list[tuple[str, Callable[[], float]]]:
        """Each way with a call that says how long a few steps of all jobs take."""

        def time_variant(name: Variant) -> float:
            n = min(len(jobs), MAX_TIMED_JOBS) if name.kind == "single" else len(jobs)
            call = partial(
                self._train_lanes, stack, kind, jobs[:n], carries[:n], w[:n], name, TIMING_STEPS
            )
            call()  # records
            return measure_seconds(call, self.device) * len(jobs) / n

        def time_plain_loop() -> float:
            call = partial(self._train_one_client, jobs[0], carries[0], TIMING_STEPS)
            call()
            return measure_seconds(call, self.device) * len(jobs)

        return [
            (str(name), partial(time_variant, name)) for name in stack.variants_to_time(len(jobs))
        ] + [(PLAIN_LOOP, time_plain_loop)]

    def _evaluate_requests(self, requests: Sequence[GpuRequest]) -> None:
        if not requests:
            return
        judged = [request.judged for request in requests if request.judged is not None]
        index = np.zeros(
            (len(judged), max(len(each) for _, each in judged)), np.int64
        )  # padded with sample 0
        for row, (_, each) in zip(index, judged, strict=True):
            row[: len(each)] = each
        stack = self.get_batch_trainer(self.runner.all)
        assert isinstance(stack, ClientBatchTrainer)
        found = self._retry_with_less_memory(
            stack, partial(stack.evaluate, torch.stack([w for w, _ in judged]), index)
        )
        if found is None:
            for request, (w, own) in zip(requests, judged, strict=True):
                alone = self.runner.evaluate(w, own)
                request.answer = {name: each.cpu().double().numpy() for name, each in alone.items()}
            return
        for lane, (request, (_, own)) in enumerate(zip(requests, judged, strict=True)):
            request.answer = {
                name: each[lane, : len(own)].cpu().double().numpy() for name, each in found.items()
            }

    def get_batch_trainer(self, part: ModelPart) -> ClientBatchTrainer | str:
        """Where parts of this shape are trained together, or why they cannot be."""
        rate, runner = part.key[0], self.runner
        with self.alone:
            if rate not in self.stacks:
                try:
                    self.stacks[rate] = ClientBatchTrainer(
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
                    self.stacks[rate] = str(why)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    self.stacks[rate] = "the GPU's memory is short"
            return self.stacks[rate]

    def train_and_reply(
        self, job: PreparedTask, carry: Mapping[str, Tensor], into: Tensor | None = None
    ) -> Reply:
        """One job by itself, and what its client sends."""
        with self.alone:
            return self.runner.train_and_reply(job, carry, into)

    def explain_unbatched(self, job: PreparedTask) -> str:
        """Why this job is trained by itself instead of in a stack; "" if it need not be."""
        if job.task.augment:
            return "batches are augmented"
        if isinstance(match_plain_sgd(job.update, job.local), str):
            for link in job.update.links:
                stackable = isinstance(link, BatchableLink) and link.supports_client_batches
                if not stackable or (
                    job.task.part.first and isinstance(link, RoundEndLink | GradientEstimator)
                ):
                    return f"the update has {type(link).__name__}"
        stack = self.get_batch_trainer(job.part)
        return stack if isinstance(stack, str) else ""
