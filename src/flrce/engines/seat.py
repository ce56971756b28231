"""A run's place at a deck: it asks for its clients' work there, and trains by itself what no stack can do."""

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

from flrce import crossing
from flrce.engines.deck import Deck, Request
from flrce.engines.pool import Dead
from flrce.engines.workers import Numbers, Order
from flrce.errors import brief
from flrce.local.client import Index, Job, Runner
from flrce.local.precision import Precision
from flrce.local.trainer import Trained
from flrce.models.flat import Fixed
from flrce.round.near import HOME, Placing
from flrce.round.payloads import fingerprint
from flrce.types import Laid, Payload, Reply

USUAL = frozenset(vars(nn.Module()))  # what every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
log = logging.getLogger("flrce")


class Decks:
    """The decks of one device: a deck for each network and pool of samples that its runs have in common."""

    def __init__(self, device: str, beside: int = 1, single: bool = False) -> None:
        self.device, self.decks = device, {}  # type: tuple[str, dict[Any, Deck]]
        self.beside = beside  # processes that share the device's memory
        self.single = single  # whether one run has all of it

    @property
    def memory(self) -> int:
        """Bytes of the device's memory for this process."""
        total = torch.cuda.get_device_properties(0).total_memory if self.device == "cuda" else 4 << 30
        return total // self.beside

    def hire(self, runner: Runner, precision: Precision = "float32", placing: Placing = HOME) -> "Seat":
        """A seat at the deck of this network and these samples."""
        fixed = tuple(_sign(p) for p in runner.net.parameters() if not p.requires_grad)
        key = (
            id(runner.x),
            runner.shape,
            repr(runner.layout),
            repr(runner.net),
            beyond(runner.net, {slot.name for slot in runner.layout.local.slots}),
            repr(runner.objective),
            fixed,
            precision,
        )
        if key not in self.decks:
            self.decks[key] = Deck(runner, self.device, memory=self.memory // 4, precision=precision)
        return Seat(self.decks[key], runner, placing)


def _sign(p: Tensor) -> int | str:
    """What tells fixed parameters apart: where they lie for those that came from a file, else their values."""
    return p.data_ptr() if isinstance(p, Fixed) else fingerprint(p)


def beyond(net: nn.Module, own: Collection[str]) -> str:
    """What tells networks with the same layers apart: classes, attributes, hooks, and buffers that are no client's own.

    Such as nn.TransformerEncoderLayer(norm_first=True), or a factor in code: a network's printed form shows neither.
    """
    found = hashlib.sha256()
    for path, part in net.named_modules():
        noted = {name: x for name, x in vars(part).items() if name not in USUAL and not _weights(x)}
        hooks = [hook for kind in HOOKS for hook in getattr(part, kind).values()]
        buffers = [b for name, b in part.named_buffers(path, recurse=False) if name not in own]
        held, form = pytree.tree_flatten((type(part), sorted(noted.items()), hooks, buffers))
        found.update(str(form).encode())  # keys of dicts are no leaves
        for what in held:
            found.update(_bytes(what))
    return found.hexdigest()


def _weights(x: Any) -> bool:
    """Whether an attribute holds parameters, as those of recurrent layers do."""
    return any(isinstance(each, nn.Parameter | ref) for each in pytree.tree_leaves(x))


def _bytes(x: Any) -> bytes:
    if isinstance(x, Tensor):  # by what it holds: torch pickles where it lies as well
        held = x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{x.dtype} {tuple(x.shape)}".encode() + held
    try:
        return pickle.dumps(x)
    except Exception:  # lambdas, locks: many kinds; each is itself alone
        return str(id(x)).encode()


class Twins:
    """The latest models as they lie on the device, so that one that is there is not sent again."""

    def __init__(self, device: str) -> None:
        self.device, self.kept = device, []  # type: tuple[str, list[tuple[ref[Tensor], Tensor]]]

    def find(self, w: Tensor) -> Tensor:
        """w on the device."""
        there = next((twin for known, twin in self.kept if known() is w), None)
        if there is None:
            there = crossing.there(w, self.device)
        self.hold(w, there)
        return there

    def hold(self, w: Tensor, there: Tensor) -> None:
        """That w is `there`: two are remembered, while someone on the host holds on to them."""
        others = [(known, twin) for known, twin in self.kept if known() is not None and known() is not w]
        self.kept = [*others[-1:], (ref(w), there)]


class Seat:
    """The workers of one run, at a deck."""

    def __init__(self, deck: Deck, runner: Runner, placing: Placing = HOME) -> None:
        self.deck, self.runner, self.name = deck, runner, deck.device
        self.placing, self.twins = placing, Twins(deck.device)
        self.number = deck.seat()
        self.said: set[str] = set()

    @property
    def near(self) -> bool:
        return self.placing.near

    @property
    def turn(self) -> AbstractContextManager[Any]:
        return self.deck.alone

    def hold(self, w: Tensor, there: Tensor) -> None:
        self.twins.hold(w, there)

    def train(self, w: Tensor, orders: Sequence[Order]) -> Sequence[Reply | Dead]:
        """The clients' replies. What a stack cannot do is trained by torch on the same device, one client at a time."""
        if self.placing.lean and all(task.part.whole for task, _, _ in orders):
            try:
                return self._laid(w, orders)
            except RuntimeError as why:  # no memory for all of them; whatever else it is will be raised again
                log.warning("from here on updates come to the host one by one: %s", brief(why, 160))
                self.placing, self.twins = HOME, Twins(self.deck.device)
        return self._trained(w, orders, [None] * len(orders))

    def _laid(self, w: Tensor, orders: Sequence[Order]) -> Laid:
        """The same, of which all updates lie in one table, ordered by k: on the device, or brought home at once."""
        with self.turn:
            there = self.twins.find(w)
            table = self._table(there, len(orders))
        order = sorted(range(len(orders)), key=lambda i: orders[i][0].k)
        rows = {i: row for row, i in enumerate(order)}
        replies = self._trained(there, orders, [table[rows[i]] for i in range(len(orders))])
        if self.placing.near:
            return Laid(replies, table, there)
        with self.turn:
            table = crossing.home(table)
        found = [
            replace(reply, payload=Payload({"u": table[rows[i]]})) if reply.payload else reply
            for i, reply in enumerate(replies)
        ]
        return Laid(found, table)

    def _table(self, w: Tensor, rows: int) -> Tensor:
        return w.new_empty(rows, len(w))

    def _trained(self, w: Tensor, orders: Sequence[Order], into: Sequence[Tensor | None]) -> list[Reply]:
        jobs = [self.runner.job(w, task, index, carry) for task, index, carry in orders]
        stacked = [i for i, job in enumerate(jobs) if len(job.sizes) and not self._apart(job)]
        answers = self.deck.ask(self.number, Request([jobs[i] for i in stacked], [orders[i][2] for i in stacked]))
        trained: dict[int, Trained] = dict(zip(stacked, answers, strict=True))
        return [
            self.runner.reply(job, trained[i], carry, into[i])
            if i in trained
            else self.deck.finish(job, carry, into[i])
            for i, (job, (_, _, carry)) in enumerate(zip(jobs, orders, strict=True))
        ]

    def judge(self, w: Tensor, index: Index, own: Tensor | None = None) -> Numbers:
        if self.placing.lean:
            with self.turn:
                w = self.twins.find(w)
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
