"""Many runs on one device: each seed or recipe takes a seat, and the clients of all of them train as one stack.

A seat's run goes on by itself, in a thread of its own, until it needs clients trained or a model judged. When every
seat waits, the last to come does the work of all. The order within a stack is that of the seats, so the same runs
together give the same bits each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.engines.hands import Order
from flrce.engines.pool import Dead
from flrce.local.client import Index, Lesson, Workshop
from flrce.local.stacked.stack import Stack
from flrce.models.part import Part
from flrce.types import Reply

Trained = tuple[Tensor, Tensor, Tensor]  # w', losses, squared losses
Kind = tuple[float | int, int, bool, bool]  # rate, first trained block, with proximal term, its norm squared


@dataclass(eq=False)
class Request:
    """What one seat waits for: lessons trained (w', losses and squared losses of each), or a model judged."""

    lessons: Sequence[Lesson] = ()
    judged: tuple[Tensor, Index] | None = None
    answer: Any = None


class Deck:
    """One network and one pool of samples on one device, shared by the seats of several runs."""

    def __init__(self, shop: Workshop, device: str, memory: int | None = None) -> None:
        self.shop, self.device, self.memory = shop, device, memory
        self.x, self.y = shop.x.to(device), shop.y.to(device)
        self.stacks: dict[float | int, Stack] = {}
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
            request.answer = [None] * len(request.lessons)
        groups: dict[Kind, list[tuple[Request, int]]] = {}
        for request in requests:
            for i, lesson in enumerate(request.lessons):
                groups.setdefault(_kind(lesson), []).append((request, i))
        for kind in sorted(groups):
            self._stack(kind, groups[kind])

    def _stack(self, kind: Kind, members: Sequence[tuple[Request, int]]) -> None:
        """Train the lessons of one kind together and put the results where they belong."""
        lessons = [request.lessons[i] for request, i in members]
        stack = self._stack_of(lessons[0].part)
        starts = {lesson.start.data_ptr(): lesson.start for lesson in lessons}  # a run's clients share one: sent once
        lanes = [list(starts).index(lesson.start.data_ptr()) for lesson in lessons]
        w, losses, squares = stack.train(
            torch.stack(list(starts.values())).to(self.device)[lanes],
            [lesson.order for lesson in lessons],
            [lesson.sizes for lesson in lessons],
            lr=torch.tensor([lesson.task.lr for lesson in lessons]),
            mu=torch.tensor([lesson.task.mu for lesson in lessons]),
            first=kind[1],
            squared=kind[3],
        )
        for (request, i), *trained in zip(members, w.cpu(), losses, squares, strict=True):
            request.answer[i] = tuple(trained)

    def _judge(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        judged = [request.judged for request in requests if request.judged is not None]
        index = np.zeros((len(judged), max(len(each) for _, each in judged)), np.int64)  # padded with sample 0
        for row, (_, each) in zip(index, judged, strict=True):
            row[: len(each)] = each
        stack = self._stack_of(self.shop.all)
        correct, loss = stack.evaluate(torch.stack([w for w, _ in judged]), index)
        for request, right, each, (_, own) in zip(requests, correct, loss, judged, strict=True):
            request.answer = (right[: len(own)].double().numpy(), each[: len(own)].double().numpy())

    def _stack_of(self, part: Part) -> Stack:
        """Where parts of this shape are trained."""
        rate, shop = part.key[0], self.shop
        if rate not in self.stacks:
            self.stacks[rate] = Stack(
                part.net, shop.shape, self.x, self.y, shop.scale, shop.shift, self.device, self.memory
            )
        return self.stacks[rate]


class Decks:
    """The decks of one device: a deck for each network and pool of samples that its runs have in common."""

    def __init__(self, device: str) -> None:
        self.device, self.decks = device, {}  # type: tuple[str, dict[Any, Deck]]

    def hire(self, shop: Workshop) -> "Seat":
        """A seat at the deck of this network and these samples."""
        key = (id(shop.x), shop.shape, tuple((s.name, s.shape) for s in shop.layout.slots), repr(shop.net))
        if key not in self.decks:
            total = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 4 << 30
            self.decks[key] = Deck(shop, self.device, memory=total // 4)
        return Seat(self.decks[key], shop)


class Seat:
    """One run's hands at a deck."""

    def __init__(self, deck: Deck, shop: Workshop) -> None:
        self.deck, self.shop, self.name = deck, shop, deck.device
        self.number = deck.seat()

    def train(self, w: Tensor, orders: Sequence[Order]) -> list[Reply | Dead]:
        """The clients' replies. What only torch's bench knows (a correction of every step) is trained here."""
        lessons = [self.shop.lesson(w, task, index, carry) for task, index, carry in orders]
        stacked = [i for i, lesson in enumerate(lessons) if len(lesson.sizes) and lesson.delta is None]
        answers = self.deck.ask(self.number, Request([lessons[i] for i in stacked]))
        trained: dict[int, Trained] = dict(zip(stacked, answers, strict=True))
        return [
            self.shop.reply(lesson, *trained[i], carry=carry) if i in trained else self.shop.finish(lesson, carry)
            for i, (lesson, (_, _, carry)) in enumerate(zip(lessons, orders, strict=True))
        ]

    def judge(self, w: Tensor, index: Index) -> tuple[Index, Index]:
        answer: tuple[Index, Index] = self.deck.ask(self.number, Request(judged=(w, index)))
        return answer

    def close(self) -> None:
        self.deck.leave(self.number)


def _kind(lesson: Lesson) -> Kind:
    task = lesson.task
    return (lesson.part.key[0], task.first, task.mu > 0, task.squared or not task.mu)
