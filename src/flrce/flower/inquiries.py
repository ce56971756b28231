"""Questions to nodes (an evaluation, a loss): a node that hangs costs one timeout, not one in every
round.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flrce.flower.client_metrics import find_metric, read_valid_metrics
from flrce.flower.messages import MessageQueue

MAX_MISSES = 3  # times in a row without an answer in time, after which a node is not asked again
log = logging.getLogger("flwr")


class InquiryTracker:
    """One kind of question. A node that does not answer in time is not asked again until it has
    answered.

    After MAX_MISSES such questions in a row it is not asked again in this run.
    """

    def __init__(self, grid: Grid, timeout: float, subject: str) -> None:
        self.grid, self.timeout, self.subject = grid, timeout, subject
        self.post = MessageQueue(grid)
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

    def ask_nodes(self, messages: Sequence[Message]) -> dict[int, Message]:
        """Position -> answer, of those that answer in time."""
        ids = self.post.send(messages)
        at = {key: i for i, key in enumerate(ids) if key}
        found = {
            at[key]: reply
            for key, reply, _ in self.post.iter_answers(at, time.monotonic() + self.timeout)
        }
        for key, i in at.items():
            node = messages[i].metadata.dst_node_id
            if i in found:
                self.misses.pop(node, None)
            else:
                self._note_miss(key, node)
        return dict(sorted(found.items()))

    def ask_metric(
        self, content: RecordDict, clients: Mapping[int, str], kind: str, metrics: Sequence[str]
    ) -> dict[str, float]:
        """Client -> the first of these metrics in its answer, of the `clients` (by node) that
        answer with one.
        """
        messages = self.select_askable([Message(content, node, kind) for node in clients])
        values = {
            at: find_metric(read_valid_metrics(reply), metrics)
            for at, reply in self.ask_nodes(messages).items()
        }
        return {
            clients[messages[at].metadata.dst_node_id]: value
            for at, value in values.items()
            if value is not None
        }

    def _note_miss(self, key: str, node: int) -> None:
        self.post.forget_message(key)
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
