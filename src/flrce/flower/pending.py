"""Tasks that were sent to clients, until their replies come or they are given up."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from torch import Tensor

from flrce.core.types import ClientCost, PendingTask, Reply, Task
from flrce.flower.arrays import count_record_bytes
from flrce.flower.messages import MessageQueue
from flrce.flower.nodes import ConnectedClient

MAX_OVERDUE_MESSAGES = 1000  # messages without an answer that are remembered
TOO_SLOW_ERROR = "slower than the replies that were waited for"
log = logging.getLogger("flwr")


class OneTimeBuffers(dict[str, Tensor]):
    """Buffers that are gone once they are taken: a reply is decoded once, and P large models are a
    lot of memory.
    """

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name)


@dataclass(frozen=True, eq=False)
class SentTask:
    """A task under way."""

    task: Task
    w: Tensor  # the model that its client was sent
    client: ConnectedClient
    down: ClientCost  # what sending it cost


# a task, its answer, seconds that it took
ReplyParser = Callable[[SentTask, Message, float], Reply]


class TaskTracker:
    """Each task by the message that brought it; nobody is waited for longer than `timeout`
    seconds.
    """

    def __init__(self, post: MessageQueue, timeout: float) -> None:
        self.post, self.timeout = post, timeout
        self.tasks: dict[str, SentTask] = {}  # message -> its task
        # message whose answer is no longer waited for -> its task
        self.overdue: dict[str, Task] = {}

    def index_messages(self) -> dict[tuple[str, int], str]:
        """(client, round) of every task under way -> its message."""
        return {(sent.task.client, sent.task.t): key for key, sent in self.tasks.items()}

    def list_busy_clients(self) -> set[str]:
        """Who is at work."""
        return {sent.task.client for sent in self.tasks.values()}

    def send(self, messages: Sequence[Message], describe: Callable[[int], SentTask]) -> list[Reply]:
        """Send these; replies to those that could not be sent. They are described once all are
        out.
        """
        failed = []
        for at, key in enumerate(self.post.send(messages)):
            sent = describe(at)
            if key:
                self.tasks[key] = sent
            else:
                task = sent.task
                failed.append(
                    Reply(
                        task.client, task.t, error="its message could not be sent", spent=sent.down
                    )
                )
        return failed

    def collect(
        self, tasks: Sequence[Task], size: int | None, open_ended: bool, read: ReplyParser
    ) -> tuple[list[Reply], list[Reply]]:
        """(replies to these tasks, in their order; what came of earlier rounds).

        `size` good ones are waited for, or all. Those without an answer by then stay under way
        where the round is `open_ended`, and have failed where it is not.
        """
        place = {(task.client, task.t): i for i, task in enumerate(tasks)}
        keys = {key: place[name] for name, key in self.index_messages().items() if name in place}
        found, late = self._gather_replies(keys, size, open_ended, read)
        if not open_ended:
            found |= {
                i: self._give_up_task(
                    key, self._format_timeout() if size is None else TOO_SLOW_ERROR
                )
                for key, i in keys.items()
                if i not in found
            }
        return [found[i] for i in sorted(found)], late

    def _gather_replies(
        self, keys: Mapping[str, int], size: int | None, open_ended: bool, read: ReplyParser
    ) -> tuple[dict[int, Reply], list[Reply]]:
        """(position -> reply to these messages; what came of earlier rounds). Whoever takes too
        long is given up.
        """
        found: dict[int, Reply] = {}
        late: list[Reply] = []
        good = 0
        while (missing := [key for key in keys if key in self.tasks]) and (
            size is None or good < size
        ):
            until = min(self.post.sent[key] for key in missing) + self.timeout
            for key, reply, seconds in self.post.iter_answers(missing, until, self.overdue):
                if key in self.overdue:
                    late += self._book_late_reply(key, reply)
                else:
                    found[keys[key]] = read(self.tasks.pop(key), reply, seconds)
                    good += not found[keys[key]].error
                del reply  # it may be large, and the next one is on its way
                if size is not None and good >= size and (open_ended or not self.post.here):
                    break
            else:
                over = time.monotonic() - self.timeout
                silent = [
                    key for key in missing if key in self.tasks and self.post.sent[key] <= over
                ]
                found |= {
                    keys[key]: self._give_up_task(key, self._format_timeout()) for key in silent
                }
        return found, late

    def _format_timeout(self) -> str:
        return f"no reply within {self.timeout:g} s"

    def _give_up_task(self, key: str, why: str) -> Reply:
        """A client that has not answered; should it do so in a later round, that is booked as
        waste.
        """
        sent = self.tasks.pop(key)
        self.overdue[key] = sent.task
        for old in list(self.overdue)[:-MAX_OVERDUE_MESSAGES]:
            del self.overdue[old]
            self.post.forget_message(old)
        return Reply(sent.task.client, sent.task.t, error=why, spent=sent.down)

    def _book_late_reply(self, key: str, reply: Message) -> list[Reply]:
        """An answer to an earlier round: what it carried is booked, and never looked at."""
        task = self.overdue.pop(key)
        if reply.has_error():
            return []
        up = sum(count_record_bytes(arrays) for arrays in reply.content.array_records.values())
        return [Reply(task.client, task.t, error="late", spent=ClientCost(bytes_up=up))]


def log_round_start(pending: Sequence[PendingTask], new: Sequence[PendingTask]) -> None:
    """One line in the log: whom a round asks, and how many are still at work on an earlier one's
    tasks.
    """
    t = max(one.task.t for one in pending)
    names = ", ".join(one.task.client for one in new[:12]) + (" ..." if len(new) > 12 else "")
    busy = f"; {len(pending) - len(new)} under way" if len(pending) > len(new) else ""
    log.info("[ROUND %d/%d] %d clients: %s%s", t, pending[0].task.rounds, len(new), names, busy)
