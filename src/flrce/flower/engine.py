"""The same Engine over Flower's Grid: its simulation engine, its deployments, or a LocalGrid. Costs are measured."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from flrce.errors import BadInput
from flrce.flower import classes
from flrce.flower.arrays import Template, record, weight
from flrce.flower.claims import Claims
from flrce.flower.figures import LOSSES, PERCENT, scale, strange
from flrce.flower.inquiries import Inquiries
from flrce.flower.judging import Panel
from flrce.flower.measured import Measured
from flrce.flower.nodes import GONE, LOSS, Client, Nodes
from flrce.flower.options import Config, Costs, Judge, Options, configured
from flrce.flower.post import Post, why
from flrce.flower.under_way import Once, Sent, UnderWay, announce
from flrce.flower.wire import for_plain, read_reply, write_task
from flrce.local.client import Runner
from flrce.payload_bytes import count_value_bytes
from flrce.pieces import Dense, Malformed
from flrce.room import TABLE, room
from flrce.round.pace import due
from flrce.round.uploads import estimate_payload_bytes, estimate_upload_bytes
from flrce.types import Arrivals, Carry, Evaluation, Flight, Payload, Portion, Record, Reply, Spent, Task, Yardstick

log = logging.getLogger("flwr")
Holdings = tuple[Tensor | None, Sequence[tuple[str, int]]]
AT_ONCE = 2**27  # bytes of replies fetched together
PATIENCE = 60.0  # seconds that a node without an answer, or with another's name, is waited for
GONE_BEFORE = "no longer connected when its task was to be sent again; the task is dropped"


class FlowerEngine:
    """Clients behind a Grid. `runner`, where the server knows the network, lets recipes use sub-models and freezing.

    Tasks go out as messages, and replies are taken as they come. Under a buffered pace a task may stay under way for
    many rounds; its client is asked for nothing else meanwhile, and is given up after the run's `timeout`.
    """

    judges_once = True  # every model that is judged is sent to all judges

    def __init__(
        self, grid: Grid, template: Template, options: Options, runner: Runner | None = None,
        train_config: Config | None = None, evaluate_config: Config | None = None,
        judge: Judge | None = None, costs: Costs | None = None, host: Any = None,
    ) -> None:  # fmt: skip
        self.grid, self.template, self.options, self.runner, self.costs = grid, template, options, runner, costs
        self.nodes = Nodes(grid, options.ask, PATIENCE, costs.includes if costs else None)
        self.claims = Claims(options)
        self.under_way = UnderWay(Post(grid, AT_ONCE // max(template.nbytes, 1)), options.timeout)
        self.inquiries = Inquiries(grid, options.timeout, "loss")
        self.measured = Measured(template, runner, options.profile)
        self.panel = Panel(grid, template, options, evaluate_config or {}, judge, self._free, host)
        self.trainable, self.size = template.layout.trainable, template.layout.size
        self.shapes = tuple((slot.name, slot.shape) for slot in template.layout.slots)
        self.cap = 8 * self.size + 64 * len(template.names) + 4096  # bytes that any payload may have, as at the gate
        self.train_config = train_config or {}
        self.blocks = runner.blocks if runner else 1
        self.online: dict[str, Client] = {}
        self.unsent: list[Reply] = []  # of tasks that could not be sent
        self.places: dict[str, Tensor] = {}  # client -> where its dense update is written to
        self.begun = 0.0  # when the round's tasks were sent
        self._sent: tuple[Tensor, ArrayRecord] | None = None

    def clients(self, t: int = 1) -> Sequence[str]:
        """Who is connected; nobody, where those are fewer than may train."""
        self.online = self.nodes.wait(self.options.available, self.options.wait)
        if len(self.online) < self.options.least_train:
            least = self.options.least_train
            log.warning("%d nodes are connected, and min_train_nodes is %d: nobody trains", len(self.online), least)
            self.online = {}
        return list(self.online)

    def samples(self, client: str) -> int:
        """As the client says, or said before its node, or this server, was started anew; 0: unknown."""
        known = self.online[client].n if client in self.online else 0
        return known or self.claims.samples.get(client, 0)

    def notes(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        """Which node each client is, for the ledger; nodes of a simulated fleet say nothing."""
        if self.costs is not None or not tasks:
            return {}
        return {"nodes": {task.client: self.online[task.client].node for task in tasks}}

    def accept(self, task: Task) -> Task:
        """A task as its client can do it: one that does not know our tasks sends back its whole model."""
        client = self.online[task.client]
        task = task if client.compresses else replace(task, compressor=Dense())
        return task if client.parts else replace(task, part=Portion())

    def holdings(self, task: Task) -> Holdings:
        if task.part.whole:
            return None, self.template.names
        if self.runner is None:
            raise BadInput("this recipe uses sub-models or freezing, so the server must know the network: pass model=")
        part = self.runner.part(task)
        return part.coordinates, part.names

    def estimate(self, task: Task) -> Spent:
        """What a task will cost: its reply's bytes, and the client's pace so far; 0 seconds: nobody's is known."""
        if self.costs:
            return self.costs.estimate(task)
        names = self.holdings(task)[1]
        up = estimate_upload_bytes(task, names, self.trainable)
        if task.part.whole and estimate_payload_bytes(task, names) is None:
            up += self.model_bytes - count_value_bytes(self.size)  # the whole model in its own types
        return self.measured.estimate(task, self.samples(task.client), up)

    def inquiry(self, client: str, down: int) -> Spent:
        """What asking a client for its loss costs."""
        return self.costs.inquiry(client, down) if self.costs else self.measured.joules(Spent(bytes_down=down))

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Carry, keep: int | None = None) -> Sequence[Reply]:
        """Send the tasks and wait for the replies; with `keep`, for no more good ones than that."""
        flights = [Flight(task, w) for task in tasks]
        self.send(flights, carry)
        return self.collect(flights, keep, open_ended=False).replies

    def send(self, flights: Sequence[Flight], carry: Carry) -> None:
        """Send what is not under way yet. Whatever clients carry from task to task lies with them."""
        self.begun = time.monotonic()
        known = self.under_way.names()
        new = [flight for flight in flights if (flight.task.client, flight.task.t) not in known]
        here = [flight for flight in new if flight.task.client in self.online]
        gone = [flight.task for flight in new if flight.task.client not in self.online]
        for flight in here:
            self.holdings(flight.task)  # refuses what cannot be done before anything is sent
        if flights:
            announce(flights, here)
        messages = [self.message(flight.w, flight.task) for flight in here]
        failed = self.under_way.send(messages, lambda at: self.sent(messages[at], here[at].task, here[at].w))
        self.unsent = [*(Reply(task.client, task.t, error=GONE_BEFORE) for task in gone), *failed]

    def sent(self, message: Message, task: Task, w: Tensor) -> Sent:
        return Sent(task, w, self.online[task.client], self.measured.sending(message, task))

    def collect(self, flights: Sequence[Flight], size: int | None, open_ended: bool) -> Arrivals:
        """Replies as they come: `size` good ones, or those of everybody who has not been too long.

        Where costs are modelled, the model says who is fast: the first ones by it are waited for, or all.
        """
        if self.costs is not None:
            flights = due(flights, size)[0] if open_ended and size else flights
            size = None
        self.claims.metrics = {}
        tasks = [flight.task for flight in flights]
        table = None if open_ended else self._laid_out(tasks)
        found, late = self.under_way.collect(tasks, size, open_ended, self.read)
        replies = self.in_scale(found)
        self.places = {}
        if self.costs is not None:
            told = {task.client: task for task in tasks}
            replies = [self.costs.booked(told[reply.client], reply) for reply in replies]
        measured = open_ended and self.costs is None
        return Arrivals([*self.unsent, *replies, *late], time.monotonic() - self.begun if measured else None, table)

    def _laid_out(self, tasks: Sequence[Task]) -> Tensor:
        """(tasks, D) the round's table, with a row for every dense update in the order of k."""
        table = room(len(tasks), self.size, dtype=self.template.dtype, most=TABLE)
        dense = {task.client for task in tasks if task.part.whole and type(task.compressor) is Dense}
        ordered = [task.client for task in sorted(tasks, key=lambda task: task.k)]
        self.places = {client: row for client, row in zip(ordered, table, strict=True) if client in dense}
        return table

    def in_scale(self, replies: Sequence[Reply]) -> list[Reply]:
        """The round's replies; refused where an accuracy is beyond what the others' can be."""
        most = scale(list(self.claims.metrics.values()))
        found = []
        for reply in replies:
            own = self.claims.own(reply.client)
            odd = "" if reply.error else strange(own, most)
            if odd:
                found.append(replace(reply, payload=None, error=f"malformed: {odd}"))
            else:
                found.append(self.panel.said(reply, own, most))
        return found

    @property
    def model_bytes(self) -> int:
        return self.template.nbytes

    @property
    def yardstick(self) -> Yardstick:
        return self.panel.yardstick

    def message(self, w: Tensor, task: Task) -> Message:
        """The model and one client's task. Whoever holds the whole model shares one copy of it."""
        held = self.measured.held(task)
        content = RecordDict({
            self.options.arrays_key: self.arrays(w) if held is None else record({"held": w[held].float()}),
            self.options.config_key: ConfigRecord({
                **configured(self.train_config, task.t), "server-round": task.t, **for_plain(task), **write_task(task),
            }),
        })  # fmt: skip
        if task.tensors:
            content["tensors"] = record(task.tensors)
        return Message(content, self.online[task.client].node, MessageType.TRAIN, group_id=str(task.t))

    def read(self, sent: Sent, reply: Message, seconds: float) -> Reply:
        """One answer as a Reply, with what it really cost; whatever is wrong with it is its client's failure."""
        task, client, down = sent.task, sent.client, sent.down
        if reply.has_error():
            if reply.error.code == GONE:
                self.nodes.lost(client.node)
            return Reply(task.client, task.t, error=why(reply), spent=replace(down, compute_seconds=seconds))
        try:
            place, key = self.places.pop(task.client, None), self.options.weight_key
            found = read_reply(reply.content, task, self.template, sent.w, self.cap, key, place)
        except Malformed as problem:
            up = sum(weight(arrays) for arrays in reply.content.array_records.values())
            spent = replace(down, bytes_up=up, compute_seconds=seconds)
            return Reply(task.client, task.t, error=f"malformed: {problem}", spent=spent)
        self.claims.hear(client, next(iter(reply.content.metric_records.values())))
        odd = strange(self.claims.own(client.name), PERCENT)
        if odd:
            found = replace(found, payload=None, error=f"malformed: {odd}")
        elif found.payload and type(task.compressor) is Dense:
            found = replace(found, payload=Payload(Once(found.payload.buffers)))
        said = found.spent.compute_seconds
        compute = min(said, seconds) if said else seconds
        spent = replace(
            found.spent, bytes_down=down.bytes_down, framing=found.spent.framing + down.framing,
            compute_seconds=compute, transfer_seconds=seconds - compute,
        )  # fmt: skip
        self.measured.note(task, client.n, compute, seconds - compute)
        n = self.claims.count(client, found.n)
        if n:
            self.nodes.heard(client, n)
        return replace(found, spent=self.measured.joules(spent))

    def evaluate(self, w: Tensor, t: int, last: bool = False, carry: Carry | None = None) -> Evaluation | None:
        """The clients' own judgement of w, and the server's where it has samples."""
        return self.panel.judge(self.arrays(w), t) if self.panel.due(t, last) else None

    def breakdown(self, t: int, roster: Sequence[str]) -> dict[str, Any] | None:
        """The headline metric of round t's model for each client that told it, and for each class where they were asked
        for that; None where nobody did.
        """
        if self.panel.last != t:
            return None
        nodes = {name: client.node for name, client in self.online.items()}
        values = [self.panel.each.get(nodes.get(name, 0)) for name in roster]
        if all(value is None for value in values):
            return None
        by_class = classes.breakdown(self.panel.by_class) if self.panel.by_class else {}
        return {"metric": self.panel.yardstick.metric, "clients": values, **by_class}

    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor:
        """Mean loss of w on each client's training samples; of one that cannot tell, as it last reported.

        Of one that never did, twice the largest of the others': whoever is unknown is to get a turn.
        """
        content = RecordDict({self.options.arrays_key: self.arrays(w), self.options.config_key: ConfigRecord({})})
        able = {self.online[client].node: client for client in clients if self.online[client].parts}
        known = {client: loss for client, loss in self.claims.losses.items() if client in clients}
        known |= self.inquiries.ask_metric(content, able, LOSS, LOSSES)
        unknown = 2 * max(known.values(), default=0.0)
        return torch.tensor([known.get(client, unknown) for client in clients], dtype=torch.float64)

    def arrays(self, w: Tensor) -> ArrayRecord:
        """w as the user's record, made once for as long as w is the model."""
        if self._sent is None or self._sent[0] is not w:
            self._sent = None  # before there are two
            self._sent = (w, self.template.unpack(w))
        return self._sent[1]

    def levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) batteries as last reported, the others' mean where one did not say; None: nobody did."""
        return self.claims.levels(clients)

    def told(self, record: Record) -> dict[str, MetricRecord]:
        """What clients and server report of a round that is done: training, the clients' judgement, the server's."""
        panel = self.panel
        found = {"train": self.claims.trained(record), "evaluate": panel.by_clients, "server": panel.by_server}
        self.claims.summed = None
        panel.forget()
        return {name: metrics for name, metrics in found.items() if metrics is not None and len(metrics)}

    def made_model(self, initial: Tensor, w: Tensor, history: Sequence[Record]) -> bool:
        """Whether any round of the run so far made a model."""
        return any(record.outcome == "committed" for record in history)

    def open_half(self, config: Mapping[str, Any]) -> None:
        """A round begins that somebody else sends and collects, with this config."""
        self.train_config, self.claims.metrics = dict(config), {}

    def _free(self) -> list[Client]:
        """Who may judge a model: a client that trains would keep everybody waiting."""
        busy = self.under_way.clients() if self.costs is None else set()
        return [client for name, client in self.online.items() if name not in busy]
