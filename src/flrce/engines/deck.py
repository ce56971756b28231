"""Many runs on one device: each seed or recipe takes a seat, and the clients of all of them train as one stack.

A seat's run goes on by itself, in a thread of its own, until it needs clients trained or a model judged. When every
seat waits, the last to come does the work of all. The order within a stack is that of the seats, so the same runs
together give the same bits each time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.engines.pool import Dead
from flrce.engines.workers import Numbers, Order
from flrce.errors import BadInput
from flrce.local.client import Index, Job, Runner
from flrce.local.stacked.stack import Stack
from flrce.local.trainer import Trained
from flrce.local.updates import Chain, Simple, simple
from flrce.models.part import Part
from flrce.types import Reply

Kind = tuple[Any, ...]  # what lanes of one stack share: rate, first trained block, proximal term, chain of links
log = logging.getLogger("flrce")


@dataclass(eq=False)
class Request:
    """What one seat waits for: jobs trained, or a model judged."""

    jobs: Sequence[Job] = ()
    judged: tuple[Tensor, Index] | None = None
    answer: Any = None


class Deck:
    """One network and one pool of samples on one device, shared by the seats of several runs."""

    def __init__(self, runner: Runner, device: str, memory: int | None = None) -> None:
        self.device, self.memory = device, memory
        self.runner = runner.on(device)
        self.stacks: dict[float | int, Stack | str] = {}  # or why there is none
        self.turn = Condition()
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
        groups: dict[Kind, list[tuple[Request, int]]] = {}
        for request in requests:
            for i, job in enumerate(request.jobs):
                groups.setdefault(_kind(job), []).append((request, i))
        for kind in sorted(groups, key=repr):
            self._stack(kind, groups[kind])

    def _stack(self, kind: Kind, members: Sequence[tuple[Request, int]]) -> None:
        """Train the jobs of one kind together and put the results where they belong."""
        jobs = [request.jobs[i] for request, i in members]
        stack = self.stack(jobs[0].part)
        assert isinstance(stack, Stack)
        starts = {job.start.data_ptr(): job.start for job in jobs}  # a run's clients share one: sent once
        lanes = [list(starts).index(job.start.data_ptr()) for job in jobs]
        few = [_few(job) for job in jobs]
        w, losses, squares = stack.train(
            torch.stack(list(starts.values())).to(self.device)[lanes],
            [job.order for job in jobs],
            [job.sizes for job in jobs],
            lr=_rates(jobs, kind[3]),
            mu=torch.tensor([each.mu for each in few]),
            first=kind[1],
            squared=few[0].squared,
            update=kind[3],
            local=jobs[0].local,
        )
        for (request, i), *trained in zip(members, w.cpu(), losses, squares, strict=True):
            request.answer[i] = Trained(*trained)

    def _judge(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        judged = [request.judged for request in requests if request.judged is not None]
        index = np.zeros((len(judged), max(len(each) for _, each in judged)), np.int64)  # padded with sample 0
        for row, (_, each) in zip(index, judged, strict=True):
            row[: len(each)] = each
        stack = self.stack(self.runner.all)
        assert isinstance(stack, Stack)
        found = stack.evaluate(torch.stack([w for w, _ in judged]), index)
        for lane, (request, (_, own)) in enumerate(zip(requests, judged, strict=True)):
            request.answer = {name: each[lane, : len(own)].double().numpy() for name, each in found.items()}

    def stack(self, part: Part) -> Stack | str:
        """Where parts of this shape are trained together, or why they cannot be."""
        rate, runner = part.key[0], self.runner
        if rate not in self.stacks:
            try:
                self.stacks[rate] = Stack(
                    part.net, runner.shape, runner.x, runner.y, runner.scale, runner.shift, self.device, self.memory,
                    runner.objective,
                )  # fmt: skip
            except BadInput as why:
                self.stacks[rate] = str(why)
        return self.stacks[rate]

    def apart(self, job: Job) -> str:
        """Why this job is trained by itself instead of in a stack; "" if it need not be."""
        if self.runner.layout.kept:
            return "some parameters stay with the client"
        if job.task.augment:
            return "batches are augmented"
        if isinstance(simple(job.update, job.local), str):
            for link in job.update.links:
                if not getattr(link, "lanes", False):
                    return f"the update has {type(link).__name__}"
        stack = self.stack(job.part)
        return stack if isinstance(stack, str) else ""


class Decks:
    """The decks of one device: a deck for each network and pool of samples that its runs have in common."""

    def __init__(self, device: str) -> None:
        self.device, self.decks = device, {}  # type: tuple[str, dict[Any, Deck]]

    def hire(self, runner: Runner) -> "Seat":
        """A seat at the deck of this network and these samples."""
        fixed = tuple(
            p.data_ptr() for p in runner.net.parameters() if not p.requires_grad
        )  # a base of its own, or none
        key = (id(runner.x), runner.shape, repr(runner.layout), repr(runner.net), repr(runner.objective), fixed)
        if key not in self.decks:
            total = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 4 << 30
            self.decks[key] = Deck(runner, self.device, memory=total // 4)
        return Seat(self.decks[key], runner)


class Seat:
    """One run's hands at a deck."""

    def __init__(self, deck: Deck, runner: Runner) -> None:
        self.deck, self.runner, self.name = deck, runner, deck.device
        self.number = deck.seat()
        self.said: set[str] = set()

    def train(self, w: Tensor, orders: Sequence[Order]) -> list[Reply | Dead]:
        """The clients' replies. What a stack cannot do is trained by torch on the same device, one client at a time."""
        jobs = [self.runner.job(w, task, index, carry) for task, index, carry in orders]
        stacked = [i for i, job in enumerate(jobs) if len(job.sizes) and not self._apart(job)]
        answers = self.deck.ask(self.number, Request([jobs[i] for i in stacked]))
        trained: dict[int, Trained] = dict(zip(stacked, answers, strict=True))
        return [
            self.runner.reply(job, trained[i], carry) if i in trained else self.deck.runner.finish(job, carry)
            for i, (job, (_, _, carry)) in enumerate(zip(jobs, orders, strict=True))
        ]

    def judge(self, w: Tensor, index: Index, own: Tensor | None = None) -> Numbers:
        if isinstance(self.deck.stack(self.runner.all), str) or self.runner.layout.kept or own is not None:
            found = self.deck.runner.evaluate(w, index, own)
            return {name: each.cpu().double().numpy() for name, each in found.items()}
        answer: Numbers = self.deck.ask(self.number, Request(judged=(w, index)))
        return answer

    def close(self) -> None:
        self.deck.leave(self.number)

    def _apart(self, job: Job) -> str:
        """Why this job is trained by itself; the first of each reason is told."""
        why = self.deck.apart(job)
        if why and why not in self.said:
            self.said.add(why)
            log.warning("clients train one after another on %s: %s", self.deck.device, why)
        return why


def _rates(jobs: Sequence[Job], update: Chain | None) -> Tensor | list[NDArray[np.float32]]:
    """One rate for each job, or where links may change it within a round, one for each step of each."""
    if update is None:
        return torch.tensor([_few(job).lr for job in jobs])
    return [np.array([job.update.rate(s, job.local) for s in range(len(job.sizes))], np.float32) for job in jobs]


def _few(job: Job) -> Simple:
    found = simple(job.update, job.local)
    return found if isinstance(found, Simple) else Simple(job.update.lr)


def _kind(job: Job) -> Kind:
    few = simple(job.update, job.local)
    rate, first = job.part.key[0], job.task.part.first
    if isinstance(few, Simple):
        return (rate, first, (few.mu > 0, few.squared), None)
    return (rate, first, (False, True), job.update)
