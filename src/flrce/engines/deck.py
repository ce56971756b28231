"""Many runs on one device: each seed or recipe takes a seat, and the clients of all of them train as one stack.

A seat's run goes on by itself, in a thread of its own, until it needs clients trained or a model judged. When every
seat waits, the last to come does the work of all. The order within a stack is that of the seats, so the same runs
together give the same bits each time.
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

from flrce import crossing
from flrce.engines.choices import LOOP, Choices, Kind, fastest, shape_of, timed, told
from flrce.engines.sorts import Sort, few, links_of, rates_of, sort_of
from flrce.errors import BadInput
from flrce.local.client import Index, Job, Runner
from flrce.local.link import Ends, Estimates, Stackable
from flrce.local.precision import Precision
from flrce.local.stacked.lanes import Stacked, level
from flrce.local.stacked.stack import Stack
from flrce.local.stacked.ways import Way
from flrce.local.trainer import Trained, Trainer, layer_seed
from flrce.local.updates import simple
from flrce.models.part import Part
from flrce.types import Reply

STEPS = 4  # of each job when ways are measured
SOME = 16  # jobs that are enough to measure one after another by
# One thread at a time: what another asks of a GPU meanwhile would spoil the step that is being recorded, and while
# torch.fx takes a network apart, the modules that another thread calls are taken for its own.
TURN = RLock()
log = logging.getLogger("flrce")


@dataclass(eq=False)
class Request:
    """What one seat waits for: jobs trained, or a model judged."""

    jobs: Sequence[Job] = ()
    carries: Sequence[Mapping[str, Tensor]] = ()  # what each job's client keeps
    judged: tuple[Tensor, Index] | None = None
    answer: Any = None


class Deck:
    """One network and one pool of samples on one device, shared by the seats of several runs."""

    def __init__(
        self, runner: Runner, device: str, memory: int | None = None, precision: Precision = "float32"
    ) -> None:
        self.device, self.memory, self.precision = device, memory, precision
        runner.precision = precision
        self.choices = Choices()
        self.ways: dict[str, str] = {}  # those that were gone so far
        self.runner = runner.on(device)
        self.stacks: dict[float | int, Stack | str] = {}  # or why there is none
        self.turn = Condition()
        self.alone = TURN
        self.seats: set[int] = set()
        self.waiting: dict[int, Request] = {}

    def seat(self) -> int:
        """Take a seat; all of them are taken before the first run starts."""
        with self.turn:
            self.seats.add(max(self.seats, default=-1) + 1)
            return max(self.seats)

    def leave(self, seat: int) -> None:
        with self.turn:
            self.seats.discard(seat)
            if not self.seats:
                self.stacks.clear()  # their memory is the next run's, not the garbage collector's to find
            self._serve_if_all_wait()

    def ask(self, seat: int, request: Request) -> Any:
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
                self._train(requests)
                self._judge([request for request in requests if request.judged is not None])
        except BaseException as why:  # each run ends with it, as it would alone
            for request in requests:
                request.answer = why
        self.waiting.clear()
        self.turn.notify_all()

    def _train(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.answer = [None] * len(request.jobs)
        groups: dict[Sort, list[tuple[Request, int]]] = {}
        for request in requests:
            for i, job in enumerate(request.jobs):
                groups.setdefault(sort_of(job), []).append((request, i))
        for kind in sorted(groups, key=repr):
            self._stack(kind, groups[kind])

    def _stack(self, kind: Sort, members: Sequence[tuple[Request, int]]) -> None:
        """Train the jobs of one kind together and put the results where they belong."""
        jobs = [request.jobs[i] for request, i in members]
        carries = [request.carries[i] if request.carries else {} for request, i in members]
        stack = self.stack(jobs[0].part)
        assert isinstance(stack, Stack)
        found = self._fitted(stack, partial(self._together, stack, kind, jobs, carries))
        if found is None:
            for (request, i), job, carry in zip(members, jobs, carries, strict=True):
                request.answer[i] = self._alone(job, carry)
            return
        w = found.w if jobs[0].start.device.type == torch.device(self.device).type else crossing.home(found.w)
        for lane, (request, i) in enumerate(members):
            kept, sent = found.ends[lane]
            request.answer[i] = Trained(w[lane], found.losses[lane], found.squares[lane], kept, sent)

    def _together(
        self, stack: Stack, kind: Sort, jobs: Sequence[Job], carries: Sequence[Mapping[str, Tensor]]
    ) -> Stacked | None:
        """The jobs in the way that is fastest for them; None where that is one after another."""
        starts = {job.start.data_ptr(): job.start for job in jobs}  # a run's clients share one: sent once
        lanes = [list(starts).index(job.start.data_ptr()) for job in jobs]
        sent = torch.stack([crossing.there(start, self.device) for start in starts.values()])
        w = sent.expand(len(jobs), -1) if len(starts) == 1 else sent[lanes]
        way = self._way(stack, kind, jobs, carries, w)
        return None if way == LOOP else self._lanes(stack, kind, jobs, carries, w, Way.of(way))

    def _fitted(self, stack: Stack, call: Callable[[], Any]) -> Any:
        """What the call gives, with fewer lanes at once where memory is short; None where not even one fits."""
        while True:
            try:
                return call()
            except torch.OutOfMemoryError:
                if not stack.halve():
                    return None
                log.warning("the GPU's memory is short: going on with %.1f GB for a stack", stack.memory / 1e9)

    def _lanes(
        self, stack: Stack, kind: Sort, jobs: Sequence[Job], carries: Sequence[Mapping[str, Tensor]], w: Tensor,
        way: Way, most: int | None = None,
    ) -> Stacked:  # fmt: skip
        """Jobs as lanes; at most so many steps of each."""
        simply = [few(job) for job in jobs]
        sizes = [job.sizes[:most] for job in jobs]
        return stack.train(
            w, [job.order[: size.sum()] for job, size in zip(jobs, sizes, strict=True)], sizes,
            lr=rates_of(jobs, kind[3]), mu=torch.tensor([each.mu for each in simply]), first=kind[1],
            squared=simply[0].squared, update=kind[3], locals=[job.local for job in jobs],
            carries=[links_of(carry) for carry in carries], seeds=[layer_seed(job.task) for job in jobs], way=way,
        )  # fmt: skip

    def _alone(self, job: Job, carry: Mapping[str, Tensor], most: int | None = None) -> Trained:
        """One job by torch's trainer on this device."""
        runner, sizes = self.runner, job.sizes[:most]
        trainer = runner.trainer(job.part, fused=False)
        assert isinstance(trainer, Trainer)
        samples = (runner.x, runner.y, runner.scale, runner.shift, job.order[: sizes.sum()], sizes)
        with runner.lock:
            return trainer.train(job.start, *samples, job.update, job.local, links_of(carry), job.task.augment)

    def _way(
        self, stack: Stack, kind: Sort, jobs: Sequence[Job], carries: Sequence[Mapping[str, Tensor]], w: Tensor
    ) -> str:
        """The way that these jobs go: settled, known from before, or measured now."""
        if stack.settled is not None:
            return str(stack.settled)
        batch = -(-max(int(job.sizes.max()) for job in jobs) // 16) * 16
        names = [type(link).__name__ for link in kind[3].links] if kind[3] else []
        sort = Kind(shape_of(stack.module), level(len(jobs), 1 << 20), batch, self.precision, f"{kind[:3]} {names}")
        key = sort.key(self.device)
        way = self.choices.find(key)
        if way not in (None, LOOP) and not stack.goes(Way.of(str(way))):  # its code is not what it was
            self.choices.drop(key)
            way = None
        if way is None:
            way, found = fastest(self._tries(stack, kind, jobs, carries, w))
            log.warning("%s", told(way, found, len(jobs), type(stack.module).__name__))
            way = self.choices.keep(key, way)
            stack.forget(way)
        self.ways[key] = way
        return way

    def _tries(
        self, stack: Stack, kind: Sort, jobs: Sequence[Job], carries: Sequence[Mapping[str, Tensor]], w: Tensor
    ) -> list[tuple[str, Callable[[], float]]]:
        """Each way with a call that says how long a few steps of all jobs take."""

        def way(name: Way) -> float:
            n = min(len(jobs), SOME) if name.kind == "single" else len(jobs)
            call = partial(self._lanes, stack, kind, jobs[:n], carries[:n], w[:n], name, STEPS)
            call()  # records
            return timed(call, self.device) * len(jobs) / n

        def loop() -> float:
            call = partial(self._alone, jobs[0], carries[0], STEPS)
            call()
            return timed(call, self.device) * len(jobs)

        return [(str(name), partial(way, name)) for name in stack.worth(len(jobs))] + [(LOOP, loop)]

    def _judge(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        judged = [request.judged for request in requests if request.judged is not None]
        index = np.zeros((len(judged), max(len(each) for _, each in judged)), np.int64)  # padded with sample 0
        for row, (_, each) in zip(index, judged, strict=True):
            row[: len(each)] = each
        stack = self.stack(self.runner.all)
        assert isinstance(stack, Stack)
        found = self._fitted(stack, partial(stack.evaluate, torch.stack([w for w, _ in judged]), index))
        if found is None:
            for request, (w, own) in zip(requests, judged, strict=True):
                alone = self.runner.evaluate(w, own)
                request.answer = {name: each.cpu().double().numpy() for name, each in alone.items()}
            return
        for lane, (request, (_, own)) in enumerate(zip(requests, judged, strict=True)):
            request.answer = {name: each[lane, : len(own)].cpu().double().numpy() for name, each in found.items()}

    def stack(self, part: Part) -> Stack | str:
        """Where parts of this shape are trained together, or why they cannot be."""
        rate, runner = part.key[0], self.runner
        with self.alone:
            if rate not in self.stacks:
                try:
                    self.stacks[rate] = Stack(
                        part.net, runner.shape, runner.x, runner.y, runner.scale, runner.shift, self.device,
                        self.memory, runner.objective, runner.layout.local if part.held is None else None,
                        self.precision,
                    )  # fmt: skip
                except BadInput as why:
                    self.stacks[rate] = str(why)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    self.stacks[rate] = "the GPU's memory is short"
            return self.stacks[rate]

    def finish(self, job: Job, carry: Mapping[str, Tensor], into: Tensor | None = None) -> Reply:
        """One job by itself, and what its client sends."""
        with self.alone:
            return self.runner.finish(job, carry, into)

    def apart(self, job: Job) -> str:
        """Why this job is trained by itself instead of in a stack; "" if it need not be."""
        if job.task.augment:
            return "batches are augmented"
        if isinstance(simple(job.update, job.local), str):
            for link in job.update.links:
                stackable = isinstance(link, Stackable) and link.lanes
                if not stackable or (job.task.part.first and isinstance(link, Ends | Estimates)):
                    return f"the update has {type(link).__name__}"
        stack = self.stack(job.part)
        return stack if isinstance(stack, str) else ""
