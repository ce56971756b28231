"""Flower's Grid inside one process: a few threads run a ClientApp for any number of nodes. No Ray,
no ports.
"""

import ast
import copy
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from flrce.errors import BadInput
from flrce.flower import SUPPORTED_VERSIONS

try:  # not Flower's public interface: without them no Message can be made outside of a run
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as why:
    raise BadInput(
        f"LocalGrid needs parts of Flower that are private to it, as of {SUPPORTED_VERSIONS}"
        f" ({why}); FLrce, Guarded and the clients do without: run them on Flower's own engines, or"
        " install such a Flower"
    ) from why

SERVER_NODE_ID = 1  # Flower's own id for the server's side
RAISED, GONE = 2, 5  # Flower's error codes: the ClientApp raised; the node is unavailable
# seconds that a pull waits for a first reply, which spares its caller a busy loop
PULL_WAIT_SECONDS = 0.05

ClientFunction = Callable[[Message, Context], Message]


def set_task_identity() -> None:
    """Give this process the identity without which Flower makes no Message outside of a run."""
    TaskIdentity.task_id = TaskIdentity.run_id = 1
    TaskIdentity.node_id = SERVER_NODE_ID


def serialize_calls(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` for one thread at a time."""
    turn = threading.RLock()

    @functools.wraps(f)
    def call_locked(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return f(*args, **kwargs)

    return call_locked


if sys.version_info < (
    3,
    11,
    8,
):  # two threads that parse may raise SystemError, and every np.load parses a header
    ast.parse = serialize_calls(ast.parse)  # https://github.com/python/cpython/issues/106905


class LocalGrid(Grid):
    """Nodes 1000, 1001, ... each with its own node_config and a Context that outlives a message.

    `nodes` is a number (their partition-ids are 0, 1, ...) or one node_config each. A node may be
    added or dropped while a run goes on, which is how tests restart one.
    """

    def __init__(
        self,
        app: ClientFunction,
        nodes: int | Sequence[Mapping[str, Any]],
        run_config: Mapping[str, Any] | None = None,
        threads: int = 2,
    ) -> None:
        set_task_identity()
        self.app, self.pool, self.lock = app, ThreadPoolExecutor(threads), threading.Lock()
        self.run_config = dict(run_config or {})
        self._run = Run.create_empty(TaskIdentity.run_id)
        self.contexts: dict[int, Context] = {}
        self.futures: dict[str, Future[Message]] = {}
        self.sent = self.added = 0  # messages and nodes so far
        count = nodes if isinstance(nodes, int) else len(nodes)
        plain = [{"partition-id": i, "num-partitions": count} for i in range(count)]
        for config in plain if isinstance(nodes, int) else nodes:
            self.add_node(config)

    def add_node(self, node_config: Mapping[str, Any], node_id: int | None = None) -> int:
        """Connect a node; returns its id."""
        node = node_id if node_id is not None else 1000 + self.added
        self.added += 1
        self.contexts[node] = Context(
            TaskIdentity.run_id, node, dict(node_config), RecordDict(), self.run_config
        )
        return node

    def drop_node(self, node_id: int) -> None:
        """Disconnect a node; what it is asked from now on fails."""
        del self.contexts[node_id]

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            # as Flower's own grids fill it in
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            with self.lock:
                self.sent += 1
                self.futures[ids[-1]] = self.pool.submit(self._handle_message, message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have come, each once; waits a moment for the first."""
        with self.lock:
            asked = {key: self.futures[key] for key in message_ids if key in self.futures}
            wait(asked.values(), PULL_WAIT_SECONDS, FIRST_COMPLETED)
            done = [key for key, future in asked.items() if future.done()]
            return [self.futures.pop(key).result() for key in done]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        waited = [self.futures[key] for key in ids]
        wait(waited, timeout)
        return list(self.pull_messages(ids))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def _handle_message(self, message: Message) -> Message:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return Message(Error(GONE, "Node Unavailable"), reply_to=message)
        try:
            received = _copy_message(message)
            reply = self.app(received, context)
            if reply.metadata.reply_to_message_id == message.metadata.message_id:
                return reply
            # some of Flower's mods answer their own reply
            held = reply.error if reply.has_error() else reply.content
            return Message(held, reply_to=message)
        except Exception:
            return Message(Error(RAISED, traceback.format_exc(limit=-3)), reply_to=message)


def _copy_message(message: Message) -> Message:
    """A message with records of its own, as one that has travelled: what a client takes out is gone
    for it alone.

    The arrays in them are shared, as they may be large.
    """
    received = copy.copy(message)
    if message.has_content():
        content = ((name, type(record)(dict(record))) for name, record in message.content.items())  # type: ignore[arg-type]
        received.content = RecordDict(dict(content))
    return received
