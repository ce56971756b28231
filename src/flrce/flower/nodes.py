"""Who is out there: Flower's node ids <-> the names that clients keep over restarts; and talking with a time limit."""

import gc
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flrce.flower.wire import PREFIX, name_of
from flrce.pieces import Malformed
from flrce.round.gate import MOST_SAMPLES
from flrce.round.payloads import brief

HELLO = "query.flrce"  # a client that knows us answers with its name and number of samples
LOSS = "query.flrce_loss"  # the mean loss of a model on its training samples
RAISED = 2  # Flower's error code of a ClientApp that raised: here, one that knows no such query
LATE = 0.02  # share of the time a reply took by which it may be noticed late
SLOWEST = 1.0  # seconds between two looks for replies, at most
MANY = 1000  # replies fetched together where their size is no matter
FEW = 8  # and where it is so large that they are cleared away at once
T = TypeVar("T")
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Client:
    """A node as it introduced itself."""

    name: str
    node: int
    n: int = 0  # training samples, 0 where unknown
    compresses: bool = False  # encodes its reply as its task says
    parts: bool = False  # trains sub-models and frozen networks


def exchange(
    grid: Grid, messages: Sequence[Message], timeout: float, read: Callable[[int, Message, float], T],
    enough: Callable[[list[T]], bool] = lambda _: False, batch: int = MANY,
    meanwhile: Callable[[], None] = lambda: None, overdue: Mapping[str, Callable[[Message], None]] = {},
) -> dict[int, T]:  # fmt: skip
    """Send, then read each reply as it comes (position, message, seconds), until all, `enough` or the time limit.

    A reply counts only if it answers a message of this exchange. It is let go as soon as it is read, and at most
    `batch` are fetched at once: large models would not fit into memory many times over. Answers to `overdue` messages
    of earlier exchanges are fetched along, though nobody waits for them. `meanwhile` is done once all is sent.
    """
    start = time.monotonic()
    ids = list(grid.push_messages(messages))
    meanwhile()
    waiting, strays = {key: at for at, key in enumerate(ids) if key}, dict(overdue)
    results: dict[int, T] = {}
    while waiting and time.monotonic() - start < timeout:
        before, asked, began = len(waiting), [*waiting, *strays], time.monotonic()
        for first in range(0, len(asked), batch):
            replies = list(grid.pull_messages(asked[first : first + batch]))
            large = bool(replies) and batch <= FEW
            while replies:
                reply = replies.pop()
                key = reply.metadata.reply_to_message_id
                at = waiting.pop(key, None)
                if at is not None:
                    results[at] = read(at, reply, time.monotonic() - start)
                elif key in strays:
                    strays.pop(key)(reply)
                del reply
            if large:
                gc.collect()  # Flower's records refer to one another in circles, and these are large
        if enough(list(results.values())):
            break
        if waiting and len(waiting) == before:
            now = time.monotonic()
            pause = max(min(LATE * (now - start), SLOWEST, start + timeout - now), 0.001)
            time.sleep(max(began + pause - now, 0))  # some grids have waited long enough themselves
    return results


def why(message: Message) -> str:
    """A failed reply's reason in one line."""
    lines = (message.error.reason or "").strip().splitlines()
    return f"failed (code {message.error.code}): {brief(lines[-1], 200) if lines else 'no reason given'}"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


class Nodes:
    """The nodes of a grid under their stable names. `ask` them, or (False) go by node id, as fits signed-in nodes."""

    def __init__(self, grid: Grid, ask: bool = True, patience: float = 60.0) -> None:
        self.grid, self.ask, self.patience = grid, ask, patience
        self.known: dict[int, Client] = {}

    def connected(self) -> dict[str, Client]:
        """Name -> client of every node that is connected now and has introduced itself, in natural order."""
        online = set(self.grid.get_node_ids())
        self._introduce(sorted(online - set(self.known)))
        found: dict[str, Client] = {}
        for node, client in self.known.items():  # of two nodes with one name the later is the restarted one
            if node in online:
                found[client.name] = client
        return {name: found[name] for name in sorted(found, key=natural)}

    def wait(self, least: int, seconds: float) -> dict[str, Client]:
        """As soon as `least` clients are connected, or whoever is when the time is up."""
        end, told = time.monotonic() + seconds, 0.0
        while len(found := self.connected()) < least and time.monotonic() < end:
            if time.monotonic() > told:
                log.info("Waiting for nodes: %d of %d, %.0f s left", len(found), least, end - time.monotonic())
                told = time.monotonic() + 10
            time.sleep(min(0.5, max(end - time.monotonic(), 0)))
        return found

    def heard(self, client: Client, n: int) -> None:
        """Remember how many samples a client says it has."""
        self.known[client.node] = replace(client, n=n)

    def _introduce(self, nodes: Iterable[int]) -> None:
        nodes = list(nodes)
        if not self.ask:
            self.known |= {node: Client(f"node-{node}", node) for node in nodes}
            return
        if not nodes:
            return
        messages = [Message(RecordDict({"config": ConfigRecord({})}), node, HELLO) for node in nodes]
        answers = exchange(self.grid, messages, self.patience, lambda at, reply, _: _hello(nodes[at], reply))
        for client in answers.values():
            if client is not None:
                self.known.pop(client.node, None)
                self.known[client.node] = client


def _hello(node: int, reply: Message) -> Client | None:
    """Who answered; None: nobody yet, ask again."""
    if reply.has_error():
        return Client(f"node-{node}", node) if reply.error.code == RAISED else None
    config = reply.content.config_records.get("hello", ConfigRecord())
    n = config.get(PREFIX + "n", 0)
    try:
        name = name_of(config.get(PREFIX + "client"))
    except Malformed as problem:
        log.warning("node %d: %s; it goes by its node id", node, problem)
        name = f"node-{node}"
    skills = {skill: config.get(PREFIX + skill) is True for skill in ("compresses", "parts")}
    return Client(name, node, n if type(n) is int and 0 < n <= MOST_SAMPLES else 0, **skills)
