"""Tasks that were sent to clients, until their replies come or they are given up."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from torch import Tensor

from flrce.flower.arrays import weight
from flrce.flower.nodes import Client
from flrce.flower.post import Post
from flrce.types import Flight, Reply, Spent, Task

OVERDUE = 1000  # messages without an answer that are remembered
SLOWER = "slower than the replies that were waited for"
log = logging.getLogger("flwr")


class Once(dict[str, Tensor]):
    """Buffers that are gone once they are taken: a reply is decoded once, and P large models are a lot of memory."""

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name)


@dataclass(frozen=True, eq=False)
class Sent:
    """A task under way."""

    task: Task
    w: Tensor  # the model that its client was sent
    client: Client
    down: Spent  # what sending it cost


Read = Callable[[Sent, Message, float], Reply]  # a task, its answer, seconds that it took


class UnderWay:
    """Each task by the message that brought it; nobody is waited for longer than `timeout` seconds."""

    def __init__(self, post: Post, timeout: float) -> None:
        self.post, self.timeout = post, timeout
        self.tasks: dict[str, Sent] = {}  # message -> its task
        self.overdue: dict[str, Task] = {}  # message whose answer is no longer waited for -> its task

    def names(self) -> dict[tuple[str, int], str]:
        """(client, round) of every task under way -> its message."""
        return {(sent.task.client, sent.task.t): key for key, sent in self.tasks.items()}

    def clients(self) -> set[str]:
        """Who is at work."""
        return {sent.task.client for sent in self.tasks.values()}

    def send(self, messages: Sequence[Message], describe: Callable[[int], Sent]) -> list[Reply]:
        """Send these; replies to those that could not be sent. They are described once all are out."""
        failed = []
        for at, key in enumerate(self.post.send(messages)):
            sent = describe(at)
            if key:
                self.tasks[key] = sent
            else:
                task = sent.task
                failed.append(Reply(task.client, task.t, error="its message could not be sent", spent=sent.down))
        return failed

    def collect(
        self, tasks: Sequence[Task], size: int | None, open_ended: bool, read: Read
    ) -> tuple[list[Reply], list[Reply]]:
        """(replies to these tasks, in their order; what came of earlier rounds).

        `size` good ones are waited for, or all. Those without an answer by then stay under way where the round is
        `open_ended`, and have failed where it is not.
        """
        place = {(task.client, task.t): i for i, task in enumerate(tasks)}
        keys = {key: place[name] for name, key in self.names().items() if name in place}
        found, late = self._gathered(keys, size, open_ended, read)
        if not open_ended:
            found |= {i: self._given_up(key, self._limit() if size is None else SLOWER)
                      for key, i in keys.items() if i not in found}  # fmt: skip
        return [found[i] for i in sorted(found)], late

    def _gathered(
        self, keys: Mapping[str, int], size: int | None, open_ended: bool, read: Read
    ) -> tuple[dict[int, Reply], list[Reply]]:
        """(position -> reply to these messages; what came of earlier rounds). Whoever takes too long is given up."""
        found: dict[int, Reply] = {}
        late: list[Reply] = []
        good = 0
        while (missing := [key for key in keys if key in self.tasks]) and (size is None or good < size):
            until = min(self.post.sent[key] for key in missing) + self.timeout
            for key, reply, seconds in self.post.answers(missing, until, self.overdue):
                if key in self.overdue:
                    late += self._too_late(key, reply)
                else:
                    found[keys[key]] = read(self.tasks.pop(key), reply, seconds)
                    good += not found[keys[key]].error
                del reply  # it may be large, and the next one is on its way
                if size is not None and good >= size and (open_ended or not self.post.here):
                    break
            else:
                over = time.monotonic() - self.timeout
                silent = [key for key in missing if key in self.tasks and self.post.sent[key] <= over]
                found |= {keys[key]: self._given_up(key, self._limit()) for key in silent}
        return found, late

    def _limit(self) -> str:
        return f"no reply within {self.timeout:g} s"

    def _given_up(self, key: str, why: str) -> Reply:
        """A client that has not answered; should it do so in a later round, that is booked as waste."""
        sent = self.tasks.pop(key)
        self.overdue[key] = sent.task
        for old in list(self.overdue)[:-OVERDUE]:
            del self.overdue[old]
            self.post.forget(old)
        return Reply(sent.task.client, sent.task.t, error=why, spent=sent.down)

    def _too_late(self, key: str, reply: Message) -> list[Reply]:
        """An answer to an earlier round: what it carried is booked, and never looked at."""
        task = self.overdue.pop(key)
        if reply.has_error():
            return []
        up = sum(weight(arrays) for arrays in reply.content.array_records.values())
        return [Reply(task.client, task.t, error="late", spent=Spent(bytes_up=up))]


def announce(flights: Sequence[Flight], new: Sequence[Flight]) -> None:
    """One line in the log: whom a round asks, and how many are still at work on an earlier one's tasks."""
    t = max(flight.task.t for flight in flights)
    names = ", ".join(flight.task.client for flight in new[:12]) + (" ..." if len(new) > 12 else "")
    busy = f"; {len(flights) - len(new)} under way" if len(flights) > len(new) else ""
    log.info("[ROUND %d/%d] %d clients: %s%s", t, flights[0].task.rounds, len(new), names, busy)
