"""A run's place at a deck: it asks for its clients' work there, and trains by itself what no stack can do."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flrce.engines.deck import Deck, Request
from flrce.engines.pool import Dead
from flrce.engines.workers import Numbers, Order
from flrce.local.client import Index, Job, Runner
from flrce.local.precision import Precision
from flrce.local.trainer import Trained
from flrce.models.flat import Fixed
from flrce.round.payloads import fingerprint
from flrce.types import Reply

log = logging.getLogger("flrce")


class Decks:
    """The decks of one device: a deck for each network and pool of samples that its runs have in common."""

    def __init__(self, device: str, beside: int = 1) -> None:
        self.device, self.decks = device, {}  # type: tuple[str, dict[Any, Deck]]
        self.beside = beside  # processes that share the device's memory

    def hire(self, runner: Runner, precision: Precision = "float32") -> "Seat":
        """A seat at the deck of this network and these samples."""
        fixed = tuple(_sign(p) for p in runner.net.parameters() if not p.requires_grad)
        key = (
            id(runner.x),
            runner.shape,
            repr(runner.layout),
            repr(runner.net),
            repr(runner.objective),
            fixed,
            precision,
        )
        if key not in self.decks:
            total = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 4 << 30
            self.decks[key] = Deck(runner, self.device, memory=total // 4 // self.beside, precision=precision)
        return Seat(self.decks[key], runner)


def _sign(p: Tensor) -> int | str:
    """What tells fixed parameters apart: where they lie for those that came from a file, else their values."""
    return p.data_ptr() if isinstance(p, Fixed) else fingerprint(p)


class Seat:
    """The workers of one run, at a deck."""

    def __init__(self, deck: Deck, runner: Runner) -> None:
        self.deck, self.runner, self.name = deck, runner, deck.device
        self.number = deck.seat()
        self.said: set[str] = set()

    def train(self, w: Tensor, orders: Sequence[Order]) -> list[Reply | Dead]:
        """The clients' replies. What a stack cannot do is trained by torch on the same device, one client at a time."""
        jobs = [self.runner.job(w, task, index, carry) for task, index, carry in orders]
        stacked = [i for i, job in enumerate(jobs) if len(job.sizes) and not self._apart(job)]
        answers = self.deck.ask(self.number, Request([jobs[i] for i in stacked], [orders[i][2] for i in stacked]))
        trained: dict[int, Trained] = dict(zip(stacked, answers, strict=True))
        return [
            self.runner.reply(job, trained[i], carry) if i in trained else self.deck.finish(job, carry)
            for i, (job, (_, _, carry)) in enumerate(zip(jobs, orders, strict=True))
        ]

    def judge(self, w: Tensor, index: Index, own: Tensor | None = None) -> Numbers:
        if isinstance(self.deck.stack(self.runner.all), str) or self.runner.layout.kept or own is not None:
            with self.deck.alone:
                found = self.deck.runner.evaluate(w, index, own)
                return {name: each.cpu().double().numpy() for name, each in found.items()}
        answer: Numbers = self.deck.ask(self.number, Request(judged=(w, index)))
        return answer

    @property
    def ways(self) -> dict[str, str]:
        """The ways that this deck's jobs went; a run keeps them, and brings them along when it is resumed."""
        return self.deck.ways

    def adopt(self, ways: Mapping[str, Any]) -> None:
        self.deck.choices.adopt(ways)

    def close(self) -> None:
        self.deck.leave(self.number)

    def _apart(self, job: Job) -> str:
        """Why this job is trained by itself; the first of each reason is told."""
        why = self.deck.apart(job)
        if why and why not in self.said:
            self.said.add(why)
            log.warning("clients train one after another on %s: %s", self.deck.device, why)
        return why
