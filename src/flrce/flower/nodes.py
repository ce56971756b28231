"""Who is out there: Flower's node ids <-> the names that clients keep over restarts."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flrce.core.gate import MAX_SAMPLES_PER_CLIENT
from flrce.core.pieces import MalformedPayload
from flrce_client.wire import HELLO_QUERY, KEY_PREFIX, validate_client_name

LOSS_QUERY = "query.flrce_loss"  # the mean loss of a model on its training samples
NODE_UNAVAILABLE_CODE = 5  # Flower's error code of a node that is unavailable
NEWCOMER_WAIT_SECONDS = 2.0  # seconds without an answer after which newcomers are not waited for
# and times the longest wait for an answer so far, which may be long where each starts a process
MAX_WAIT_RATIO = 3
MAX_FETCHED_ANSWERS = 1000  # answers fetched together where their size is no matter
SCOUT_NODES = 2  # nodes that are asked before all others whether they know the question
UNKNOWN_QUERY_MESSAGE = "No query function registered"  # what Flower says of an app that does not
RESERVED_NAME_PATTERN = re.compile(r"node-\d+")  # what nodes without a name are called
SKILLS = ("compresses", "parts", "differences")
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class ConnectedClient:
    """A node as it introduced itself."""

    name: str
    node: int
    n: int = 0  # training samples, 0 where unknown
    compresses: bool = False  # encodes its reply as its task says
    parts: bool = False  # trains sub-models and frozen networks
    differences: bool = False  # decodes downloads, and holds models that these refer to
    initial: str = ""  # hash of the initial model that it made itself; "": it made none


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts 2 before 10."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


class NodeNames:
    """Which node goes by which name.

    A name belongs to the node that has it for as long as that one is connected. Another that uses
    it is held back, as it may be the same client restarted, and after `patience` seconds goes by
    its node id.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.holder: dict[str, int] = {}  # name -> node
        # nodes that Flower called unavailable, though it may still list them
        self.gone: set[int] = set()
        self.twins: dict[int, float] = {}  # node that uses another's name -> since when

    def resolve_name(self, client: ConnectedClient, online: set[int]) -> str:
        """The name that a connected client goes by now; "" while it is held back."""
        node, name = client.node, client.name
        holder = self.holder.get(name, node)
        if holder == node or holder not in online or holder in self.gone:
            self.holder[name] = node
            self.twins.pop(node, None)
            return name
        if node not in self.twins:
            log.warning(
                "node %d calls itself %r, as connected node %d does: give each its own client-id or"
                " partition-id; it waits, in case that one was restarted",
                node,
                name,
                holder,
            )
        since = self.twins.setdefault(node, time.monotonic())
        if time.monotonic() - since < self.patience:
            return ""
        log.warning(
            "nodes %d and %d both call themselves %r: the second goes by its node id",
            holder,
            node,
            name,
        )
        return format_node_name(node)


class NodeRegistry:
    """The nodes of a grid under their stable names.

    `ask` them, or (False) go by node id, as fits signed-in nodes. All nodes of a run have the same
    app: where the first to answer does not know the question, nobody else is asked it, since each
    would log an error; "each" asks everybody.

    Each node is asked once. The first ones are waited for, up to `patience` seconds; whoever comes
    later joins when it has answered. Nodes whose names are not those of a client that the run
    `includes` stay out.
    """

    def __init__(
        self,
        grid: Grid,
        ask: bool | str = True,
        patience: float = 60.0,
        includes: Callable[[str], bool] | None = None,
    ) -> None:
        self.grid, self.ask, self.patience, self.includes = grid, ask, patience, includes
        self.names = NodeNames(patience)
        self.known: dict[int, ConnectedClient] = {}  # in the order of their answers
        self.asked: dict[str, int] = {}  # message that has no answer yet -> node
        self.online: set[int] = set()  # nodes that were connected at the last look
        self.since: dict[int, float] = {}  # node -> when it was asked
        # connected nodes that stay out -> the names that they go by
        self.strangers: dict[int, str] = {}

    def get_connected_clients(self) -> dict[str, ConnectedClient]:
        """Name -> client of every node that is connected now and has introduced itself, in natural
        order.
        """
        online = self.online = set(self.grid.get_node_ids())
        self._identify_newcomers(sorted(online - set(self.known) - set(self.asked.values())))
        clients: dict[str, ConnectedClient] = {}
        for node, client in list(self.known.items()):
            name = self.names.resolve_name(client, online) if node in online else ""
            if name:
                clients[name] = self.known[node] = replace(client, name=name)
        self._exclude_strangers(clients)
        return {name: clients[name] for name in sorted(clients, key=natural_sort_key)}

    def _exclude_strangers(self, found: dict[str, ConnectedClient]) -> None:
        """Leave out nodes that go by names which are not those of the run's clients; each is logged
        once.
        """
        names = [name for name in found if self.includes is not None and not self.includes(name)]
        before, self.strangers = self.strangers, {found[name].node: name for name in names}
        for name in names:
            node = found.pop(name).node
            if before.get(node) != name:
                log.warning(
                    "node %d goes by %r, which is no client of this run: it stays out", node, name
                )

    def _count_unusable(self) -> int:
        """Connected nodes for which it is no use to wait: strangers, and those that were asked too
        long ago.
        """
        over = time.monotonic() - self.patience
        silent = self.online & set(self.asked.values())
        return len(self.strangers) + sum(self.since[node] < over for node in silent)

    def wait_for_clients(self, least: int, seconds: float) -> dict[str, ConnectedClient]:
        """As soon as `least` clients are connected, or whoever is when the time is up."""
        end, next_line = time.monotonic() + seconds, 0.0
        while (
            len(clients := self.get_connected_clients()) + self._count_unusable() < least
            and time.monotonic() < end
        ):
            if time.monotonic() > next_line:
                log.info(
                    "Waiting for nodes: %d of %d, %.0f s left",
                    len(clients),
                    least,
                    end - time.monotonic(),
                )
                next_line = time.monotonic() + 10
            time.sleep(min(0.5, max(end - time.monotonic(), 0)))
        return clients

    def record_sample_count(self, client: ConnectedClient, n: int) -> None:
        """Remember how many samples a client says it has."""
        self.known[client.node] = replace(client, n=n)
        self.names.gone.discard(client.node)

    def mark_unavailable(self, node: int) -> None:
        """Flower calls a node unavailable: its name is free for the client that is restarted under
        another id.
        """
        self.names.gone.add(node)

    def _identify_newcomers(self, nodes: Sequence[int]) -> None:
        """Ask newcomers who they are, and take what answers have come."""
        scouts = (
            nodes[:SCOUT_NODES] if self.ask is True and not self.known and not self.asked else []
        )
        if scouts:
            self._send_queries(scouts)
            self._wait_for_answers(set(scouts), one=True)
        if self.ask:
            self._send_queries(nodes[len(scouts) :])
            self._wait_for_answers(set(nodes))
        else:
            met = {*nodes, *self.asked.values()} - set(self.known)
            self.known |= {
                node: ConnectedClient(format_node_name(node), node) for node in sorted(met)
            }
            self.asked = {}

    def _send_queries(self, nodes: Sequence[int]) -> None:
        messages = [
            Message(RecordDict({"config": ConfigRecord({})}), node, HELLO_QUERY) for node in nodes
        ]
        ids = list(self.grid.push_messages(messages)) if messages else []
        self.asked |= {key: node for key, node in zip(ids, nodes, strict=True) if key}
        self.since |= dict.fromkeys(nodes, time.monotonic())

    def _wait_for_answers(self, nodes: set[int], one: bool = False) -> None:
        """Listen until these have answered, or `one` of them, or nothing comes for too long."""
        first = one or len(self.known) <= SCOUT_NODES
        longest, last = 0.0, time.monotonic()  # longest wait for an answer so far, time of the last
        self._collect_answers()
        while nodes & set(self.asked.values()) and not (one and nodes & set(self.known)):
            came, now = self._collect_answers(), time.monotonic()
            if came:
                longest, last = max(longest, now - last), now
                continue
            limit = (
                max(NEWCOMER_WAIT_SECONDS, MAX_WAIT_RATIO * longest)
                if self.known
                else self.patience
            )
            if now - last > (limit if first else NEWCOMER_WAIT_SECONDS):
                return
            time.sleep(0.02)

    def _collect_answers(self) -> int:
        """How many answers have come since the last look."""
        waiting, came, plain = list(self.asked), 0, 0
        for at in range(0, len(waiting), MAX_FETCHED_ANSWERS):
            for reply in self.grid.pull_messages(waiting[at : at + MAX_FETCHED_ANSWERS]):
                node = self.asked.pop(reply.metadata.reply_to_message_id, None)
                if node is None:
                    continue
                self.known[node] = _parse_hello(node, reply)
                came, plain = came + 1, plain + reply.has_error()
                if (
                    self.ask is True
                    and reply.has_error()
                    and UNKNOWN_QUERY_MESSAGE in (reply.error.reason or "")
                ):
                    self.ask = False
        if plain:
            log.info("Clients do not introduce themselves: they go by their node ids")
        return came


def format_node_name(node: int) -> str:
    return f"node-{node}"


def _parse_hello(node: int, reply: Message) -> ConnectedClient:
    """Who answered; whoever cannot, for whatever reason, goes by its node id."""
    if reply.has_error():
        return ConnectedClient(format_node_name(node), node)
    config = reply.content.config_records.get("hello", ConfigRecord())
    n = config.get(KEY_PREFIX + "n", 0)
    try:
        name = validate_client_name(config.get(KEY_PREFIX + "client"))
        if RESERVED_NAME_PATTERN.fullmatch(name) and name != format_node_name(node):
            raise MalformedPayload(f"client name {name!r} is another node's")
    except MalformedPayload as problem:
        log.warning("node %d: %s; it goes by its node id", node, problem)
        name = format_node_name(node)
    n = n if type(n) is int and 0 < n <= MAX_SAMPLES_PER_CLIENT else 0
    initial = config.get(KEY_PREFIX + "initial")
    skills = {skill: config.get(KEY_PREFIX + skill) is True for skill in SKILLS}
    return ConnectedClient(
        name, node, n, **skills, initial=initial if isinstance(initial, str) else ""
    )
