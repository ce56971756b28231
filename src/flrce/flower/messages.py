"""Messages over a grid, their answers as they come, and the tasks under way; nobody waits longer
than it wants to.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from flrce.core.types import ClientCost, PendingTask, Reply, Task
from flrce.errors import format_one_line
from flrce.flower.arrays import count_record_bytes
from flrce.flower.nodes import MAX_FETCHED_ANSWERS, ConnectedClient
from flrce.flower.options import explain_legacy_client

POLL_DELAY_RATIO = 0.02  # share of the time waited so far by which an answer may be noticed late
MAX_POLL_SECONDS = 1.0  # seconds between two looks for answers, at most
MAX_LARGE_ANSWERS = 8  # and where it is so large that they are cleared away at once
# the message that it answers, the reply, seconds since that was sent
TimedReply = tuple[str, Message, float]
MAX_MISSES = 3  # times in a row without an answer in time, after which a node is not asked again
MAX_OVERDUE_MESSAGES = 1000  # messages without an answer that are remembered
TOO_SLOW_ERROR = "slower than the replies that were waited for"
log = logging.getLogger("flwr")


class MessageQueue:
    """Messages that were sent and not yet answered.

    At most `batch` answers are fetched at once: large models would not fit into memory many times
    over. Whoever reads one should let go of it before asking for the next.
    """

    def __init__(self, grid: Grid, batch: int = MAX_FETCHED_ANSWERS) -> None:
        self.grid, self.batch = grid, max(1, min(batch, MAX_FETCHED_ANSWERS))
        self.sent: dict[str, float] = {}  # message -> when it was sent
        self.fetched: list[Message] = []  # fetched, and nobody has read them yet

    def send(self, messages: Sequence[Message]) -> list[str]:
        """The messages' ids; "" for one that could not be sent."""
        now = time.monotonic()
        ids = [key or "" for key in self.grid.push_messages(messages)] if messages else []
        self.sent |= {key: now for key in ids if key}
        return ids

    def forget_message(self, key: str) -> None:
        """Ask no more for this answer."""
        self.sent.pop(key, None)

    def iter_answers(
        self, wanted: Collection[str], until: float, along: Collection[str] = ()
    ) -> Iterator[TimedReply]:
        """What comes, until all that is `wanted` is here or the clock says so; what comes `along`
        is not waited for.

        An answer counts only if it is to a message of this queue. Whoever breaks off loses none of
        them.
        """
        begun = time.monotonic()
        missing, others = set(wanted) & self.sent.keys(), set(along) & self.sent.keys()
        while missing and (self.fetched or time.monotonic() < until):
            looked, before = time.monotonic(), len(missing)
            ids = {reply.metadata.reply_to_message_id for reply in self.fetched}
            # the oldest first
            under_way = [key for key in self.sent if key in missing | others and key not in ids]
            for keys in _split_batches(under_way, self.batch) or [[]]:
                self.fetched += self.grid.pull_messages(keys) if keys else []
                large = bool(self.fetched) and self.batch <= MAX_LARGE_ANSWERS
                while self.fetched:
                    reply = self.fetched.pop(0)
                    key = reply.metadata.reply_to_message_id
                    sent = self.sent.pop(key, None)
                    if sent is not None:
                        missing.discard(key)
                        others.discard(key)
                        yield key, reply, time.monotonic() - sent
                    del reply
                if large:
                    # Flower's records refer to one another in circles, and these are large and
                    # young
                    gc.collect(1)
            if len(missing) == before:
                now = time.monotonic()
                pause = max(
                    min(POLL_DELAY_RATIO * (now - begun), MAX_POLL_SECONDS, until - now), 0.001
                )
                # some grids have waited long enough themselves
                time.sleep(max(looked + pause - now, 0))


def _split_batches(keys: Sequence[str], count: int) -> list[Sequence[str]]:
    """So many at a time."""
    return [keys[first : first + count] for first in range(0, len(keys), count)]


def explain_failure(message: Message) -> str:
    """A failed reply's reason in one line."""
    lines = (message.error.reason or "").strip().splitlines()
    reason = format_one_line(lines[-1], 200) if lines else "no reason given"
    return f"failed (code {message.error.code}): {explain_legacy_client(reason) or reason}"


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

    def __init__(self, queue: MessageQueue, timeout: float) -> None:
        self.queue, self.timeout = queue, timeout
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
        for at, key in enumerate(self.queue.send(messages)):
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
        replies, late = self._gather_replies(keys, size, open_ended, read)
        if not open_ended:
            replies |= {
                i: self._give_up_task(
                    key, self._format_timeout() if size is None else TOO_SLOW_ERROR
                )
                for key, i in keys.items()
                if i not in replies
            }
        return [replies[i] for i in sorted(replies)], late

    def _gather_replies(
        self, keys: Mapping[str, int], size: int | None, open_ended: bool, read: ReplyParser
    ) -> tuple[dict[int, Reply], list[Reply]]:
        """(position -> reply to these messages; what came of earlier rounds). Whoever takes too
        long is given up.
        """
        replies: dict[int, Reply] = {}
        late: list[Reply] = []
        good = 0
        while (missing := [key for key in keys if key in self.tasks]) and (
            size is None or good < size
        ):
            until = min(self.queue.sent[key] for key in missing) + self.timeout
            for key, reply, seconds in self.queue.iter_answers(missing, until, self.overdue):
                if key in self.overdue:
                    late += self._book_late_reply(key, reply)
                else:
                    replies[keys[key]] = read(self.tasks.pop(key), reply, seconds)
                    good += not replies[keys[key]].error
                del reply  # it may be large, and the next one is on its way
                if size is not None and good >= size and (open_ended or not self.queue.fetched):
                    break
            else:
                over = time.monotonic() - self.timeout
                silent = [
                    key for key in missing if key in self.tasks and self.queue.sent[key] <= over
                ]
                replies |= {
                    keys[key]: self._give_up_task(key, self._format_timeout()) for key in silent
                }
        return replies, late

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
            self.queue.forget_message(old)
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


class InquiryTracker:
    """One kind of question. A node that does not answer in time is not asked again until it has
    answered.

    After MAX_MISSES such questions in a row it is not asked again in this run.
    """

    def __init__(self, grid: Grid, timeout: float, subject: str) -> None:
        self.grid, self.timeout, self.subject = grid, timeout, subject
        self.queue = MessageQueue(grid)
        self.open: dict[str, int] = {}  # message whose answer did not come in time -> its node
        # node -> questions in a row that it did not answer in time
        self.misses: Counter[int] = Counter()

    def select_askable(self, messages: Sequence[Message]) -> list[Message]:
        """The messages but for those to nodes that still owe an answer, or that were given up."""
        for reply in self.grid.pull_messages(list(self.open)) if self.open else []:
            self.open.pop(reply.metadata.reply_to_message_id, None)
        silent = {
            *self.open.values(),
            *(node for node, count in self.misses.items() if count >= MAX_MISSES),
        }
        return [message for message in messages if message.metadata.dst_node_id not in silent]

    def ask_nodes(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """(the messages that were sent, the answers that came in time), both in this order."""
        askable = self.select_askable(messages)
        ids = self.queue.send(askable)
        until = time.monotonic() + self.timeout
        answers = {key: reply for key, reply, _ in self.queue.iter_answers(set(ids), until)}
        for key, message in zip(ids, askable, strict=True):
            if key in answers:
                self.misses.pop(message.metadata.dst_node_id, None)
            elif key:
                self._note_miss(key, message.metadata.dst_node_id)
        return askable, [answers[key] for key in ids if key in answers]

    def _note_miss(self, key: str, node: int) -> None:
        self.queue.forget_message(key)
        self.open[key] = node
        self.misses[node] += 1
        until = (
            "again in this run"
            if self.misses[node] >= MAX_MISSES
            else "again until it has answered"
        )
        log.warning(
            "node %d: no %s within %g s, %d in a row; it is not asked %s",
            node,
            self.subject,
            self.timeout,
            self.misses[node],
            until,
        )
