"""The same Engine over Flower's Grid: its simulation engine, its deployments, or a LocalGrid. Costs
are measured.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from flrce.core.downlink import EncodedModel, HeldPart
from flrce.core.engine import Engine
from flrce.core.forecast import estimate_payload_bytes, estimate_upload_bytes
from flrce.core.pending import split_due_tasks
from flrce.core.pieces import MalformedPayload, NoCompression
from flrce.core.tensor_bytes import (
    MAX_POOLED_TABLE_BYTES,
    allocate_tensor,
    count_value_bytes,
    limit_payload_bytes,
)
from flrce.core.types import (
    ClientCost,
    ClientStates,
    Evaluation,
    PendingTask,
    Portion,
    PrimaryMetric,
    Reply,
    RoundRecord,
    RoundReplies,
    Task,
)
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate, count_record_bytes, to_array_record
from flrce.flower.device_records import LOST_BASE_ERROR, HeldModelTracker, MeasuredCosts
from flrce.flower.evaluation import Evaluator
from flrce.flower.messages import (
    InquiryTracker,
    MessageQueue,
    OneTimeBuffers,
    SentTask,
    TaskTracker,
    explain_failure,
    log_round_start,
)
from flrce.flower.metrics import (
    LOSS_KEYS,
    PERCENT_SCALE,
    ClientReports,
    compute_class_metrics,
    explain_implausible_metric,
    find_accuracy_scale,
    find_metric,
    get_reply_metrics,
    read_valid_metrics,
)
from flrce.flower.nodes import LOSS_QUERY, NODE_UNAVAILABLE_CODE, ConnectedClient, NodeRegistry
from flrce.flower.options import FlowerOptions, ModelledCosts, resolve_config
from flrce.flower.wire import read_reply, write_plain_config, write_task
from flrce.training.client import ClientRunner

log = logging.getLogger("flwr")
TaskLayout = tuple[Tensor | None, Sequence[tuple[str, int]]]
MAX_FETCH_BYTES = 2**27  # bytes of replies fetched together
# seconds that a node without an answer, or with another's name, is waited for
NODE_WAIT_SECONDS = 60.0
DISCONNECTED_ERROR = "no longer connected when its task was to be sent again; the task is dropped"


class FlowerEngine(Engine):
    """Clients behind a Grid. `runner`, where the server knows the network, lets recipes use
    sub-models and freezing.

    Tasks go out as messages, and replies are taken as they come. Under a buffered pace a task may
    stay under way for many rounds; its client is asked for nothing else meanwhile, and is given up
    after the run's `timeout`.
    """

    judges_once = True  # every model that is judged is sent to all judges

    def __init__(
        self,
        grid: Grid,
        template: ArrayTemplate,
        options: FlowerOptions,
        runner: ClientRunner | None = None,
        costs: ModelledCosts | None = None,
        host: Any = None,
    ) -> None:
        self.grid, self.template, self.options = grid, template, options
        self.runner, self.costs = runner, costs
        self.nodes = NodeRegistry(
            grid, options.ask, NODE_WAIT_SECONDS, costs.includes_client if costs else None
        )
        self.reports = ClientReports(options)
        self.task_tracker = TaskTracker(
            MessageQueue(grid, MAX_FETCH_BYTES // max(template.nbytes, 1)), options.timeout
        )
        self.inquiries = InquiryTracker(grid, options.timeout, "loss")
        self.measured = MeasuredCosts(template, runner, options.profile)
        self.held = HeldModelTracker(template, options.arrays_key)
        self.evaluator = Evaluator(grid, template, options, self._list_idle_clients, host)
        self.trainable, self.size = template.layout.trainable, template.layout.size
        self.shapes = tuple((slot.name, slot.shape) for slot in template.layout.slots)
        self.cap = limit_payload_bytes(self.size, len(template.names))  # as at the gate
        self.train_config = options.train_config
        self.blocks = runner.blocks if runner else 1
        self.online: dict[str, ConnectedClient] = {}
        self.unsent: list[Reply] = []  # of tasks that could not be sent
        self.places: dict[str, Tensor] = {}  # client -> where its dense update is written to
        self.begun = 0.0  # when the round's tasks were sent
        self._sent: tuple[Tensor, ArrayRecord] | None = None

    def clients(self, t: int = 1) -> Sequence[str]:
        """Who is connected; nobody, where those are fewer than may train."""
        self.online = self.nodes.wait_for_clients(self.options.available, self.options.wait)
        if len(self.online) < self.options.least_train:
            least = self.options.least_train
            log.warning(
                "%d nodes are connected, and min_train_nodes is %d: nobody trains",
                len(self.online),
                least,
            )
            self.online = {}
        return list(self.online)

    def count_samples(self, client: str) -> int:
        """As the client says, or said before its node, or this server, was started anew; 0:
        unknown.
        """
        reported = self.online[client].n if client in self.online else 0
        return reported or self.reports.samples.get(client, 0)

    def annotate_tasks(self, tasks: Sequence[Task]) -> Mapping[str, Any]:
        """Which node each client is, for the ledger; nodes of a simulated fleet say nothing."""
        if self.costs is not None or not tasks:
            return {}
        return {"nodes": {task.client: self.online[task.client].node for task in tasks}}

    def adapt_task(self, task: Task) -> Task:
        """A task as its client can do it: one that does not know our tasks sends back its whole
        model.
        """
        client = self.online[task.client]
        task = self.held.adapt_download(task, client)
        task = task if client.compresses else replace(task, compressor=NoCompression())
        return task if client.parts else replace(task, part=Portion())

    def get_download_kind(self, model: EncodedModel) -> str:
        """As it is billed: where costs are measured, what has no payload travels whole."""
        if self.costs is None and model.payload is None:
            return "full"
        return super().get_download_kind(model)

    def get_task_layout(self, task: Task) -> TaskLayout:
        if task.part.is_whole:
            return None, self.template.names
        if self.runner is None:
            raise BadInput(
                "this recipe uses sub-models or freezing, so the server must know the network: pass"
                " model="
            )
        part = self.runner.get_part(task)
        return part.coordinates, part.names

    def get_held_part(self, task: Task) -> HeldPart:
        if task.part.is_whole or self.runner is None:
            return HeldPart(None, tuple(self.template.names), self.trainable)
        return self.runner.get_held_part(task)

    def estimate(self, task: Task) -> ClientCost:
        """What a task will cost: its reply's bytes, and the client's pace so far; 0 seconds:
        nobody's is known.
        """
        if self.costs:
            return self.costs.estimate(task)
        names = self.get_task_layout(task)[1]
        up = estimate_upload_bytes(task, names, self.trainable)
        if task.part.is_whole and estimate_payload_bytes(task, names) is None:
            # the whole model in its own types
            up += self.model_bytes - count_value_bytes(self.size)
        return self.measured.estimate(task, self.count_samples(task.client), up)

    def begin_round(self, now: float) -> None:
        if self.costs:
            self.costs.now = now

    def estimate_round(self, tasks: Sequence[Task]) -> Sequence[ClientCost]:
        return self.costs.estimate_round(tasks) if self.costs else super().estimate_round(tasks)

    def estimate_inquiry(self, client: str, down: int) -> ClientCost:
        """What asking a client for its loss costs."""
        return (
            self.costs.estimate_inquiry(client, down)
            if self.costs
            else self.measured.add_joules(ClientCost(bytes_down=down))
        )

    def estimate_evaluation(self, t: int) -> Sequence[tuple[str, ClientCost]]:
        """What clients spend to evaluate the final model; not known where clocks measure costs."""
        due = self.evaluator.is_due(t, last=False)
        return self.costs.estimate_evaluation() if self.costs and due else ()

    def train(
        self, pending: Sequence[PendingTask], client_states: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        """Send the tasks and wait for the replies; with `keep`, for no more good ones than that."""
        self.send(pending, client_states)
        return self.collect(pending, keep, open_ended=False).replies

    def send(self, pending: Sequence[PendingTask], client_states: ClientStates) -> None:
        """Send what is not under way yet. Whatever clients carry from task to task lies with
        them.
        """
        self.begun = time.monotonic()
        under_way = self.task_tracker.index_messages()
        new = [one for one in pending if (one.task.client, one.task.t) not in under_way]
        here = [one for one in new if one.task.client in self.online]
        gone = [one.task for one in new if one.task.client not in self.online]
        for one in here:
            self.get_task_layout(one.task)  # refuses what cannot be done before anything is sent
        if pending:
            log_round_start(pending, here)
        messages = [self.build_message(one) for one in here]
        failed = self.task_tracker.send(
            messages, lambda at: self.make_sent_task(messages[at], here[at].task, here[at].w)
        )
        self.unsent = [
            *(Reply(task.client, task.t, error=DISCONNECTED_ERROR) for task in gone),
            *failed,
        ]

    def make_sent_task(self, message: Message, task: Task, w: Tensor) -> SentTask:
        return SentTask(
            task, w, self.online[task.client], self.measured.compute_sending_cost(message, task)
        )

    def collect(
        self, pending: Sequence[PendingTask], size: int | None, open_ended: bool
    ) -> RoundReplies:
        """Replies as they come: `size` good ones, or those of everybody who has not been too long.

        Where costs are modelled, the model says who is fast: the first ones by it are waited for,
        or all.
        """
        if self.costs is not None:
            pending = split_due_tasks(pending, size)[0] if open_ended and size else pending
            size = None
        self.reports.metrics = {}
        tasks = [one.task for one in pending]
        table = None if open_ended else self._allocate_update_table(tasks)
        collected, late = self.task_tracker.collect(tasks, size, open_ended, self.parse_reply)
        replies = self.validate_reply_metrics(collected)
        self.places = {}
        if self.costs is not None:
            came = {reply.client: reply for reply in replies}
            sent = [one for one in pending if one.task.client in came]
            replies = self.costs.book_costs(sent, [came[one.task.client] for one in sent])
        measured = open_ended and self.costs is None
        return RoundReplies(
            [*self.unsent, *replies, *late],
            time.monotonic() - self.begun if measured else None,
            table,
        )

    def _allocate_update_table(self, tasks: Sequence[Task]) -> Tensor:
        """(tasks, D) the round's table, with a row for every dense update in the order of k."""
        table = allocate_tensor(
            len(tasks), self.size, dtype=self.template.dtype, most=MAX_POOLED_TABLE_BYTES
        )
        dense = {task.client for task in tasks if task.part.is_whole and task.compressor.is_dense}
        ordered = [task.client for task in sorted(tasks, key=lambda task: task.k)]
        self.places = {
            client: row for client, row in zip(ordered, table, strict=True) if client in dense
        }
        return table

    def validate_reply_metrics(self, replies: Sequence[Reply]) -> list[Reply]:
        """The round's replies; refused where an accuracy is beyond what the others' can be."""
        accuracy_scale = find_accuracy_scale(list(self.reports.metrics.values()))
        validated = []
        for reply in replies:
            own = self.reports.get_client_metrics(reply.client)
            odd = "" if reply.error else explain_implausible_metric(own, accuracy_scale)
            if odd:
                validated.append(replace(reply, payload=None, error=f"malformed: {odd}"))
            else:
                validated.append(self.evaluator.add_reported_metric(reply, own, accuracy_scale))
        return validated

    @property
    def model_bytes(self) -> int:
        return self.template.nbytes

    @property
    def primary_metric(self) -> PrimaryMetric:
        return self.evaluator.primary_metric

    def build_message(self, pending: PendingTask) -> Message:
        """The model and one client's task. Whoever holds the whole model shares one copy of it."""
        w, task = pending.w, pending.task
        client, content = self.online[task.client], dict[str, Any]()
        download = self.held.add_download(content, pending, client)
        if not content:
            held = self.measured.get_sent_coordinates(task)
            content[self.options.arrays_key] = (
                self.get_model_arrays(w)
                if held is None
                else to_array_record({"held": w[held].float()})
            )
        content[self.options.config_key] = ConfigRecord(
            {
                **resolve_config(self.train_config, task.t),
                "server-round": task.t,
                **write_plain_config(task),
                **write_task(task),
                **download,
            }
        )
        if task.tensors:
            content["tensors"] = to_array_record(task.tensors)
        return Message(RecordDict(content), client.node, MessageType.TRAIN, group_id=str(task.t))

    def parse_reply(self, sent: SentTask, reply: Message, seconds: float) -> Reply:
        """One answer as a Reply, with what it really cost; whatever is wrong with it is its
        client's failure.
        """
        task, client = sent.task, sent.client
        spent = replace(sent.down, compute_seconds=seconds)
        if reply.has_error():
            if reply.error.code == NODE_UNAVAILABLE_CODE:
                self.nodes.mark_unavailable(client.node)
            return Reply(task.client, task.t, error=explain_failure(reply), spent=spent)
        if self.held.is_lost(reply, client):
            return Reply(task.client, task.t, error=LOST_BASE_ERROR, spent=spent, lost_base=True)
        try:
            place, key = self.places.pop(task.client, None), self.options.weight_key
            parsed = read_reply(reply.content, task, self.template, sent.w, self.cap, key, place)
        except MalformedPayload as problem:
            up = sum(count_record_bytes(arrays) for arrays in reply.content.array_records.values())
            spent = replace(spent, bytes_up=up)
            return Reply(task.client, task.t, error=f"malformed: {problem}", spent=spent)
        self.reports.record_metrics(client, get_reply_metrics(reply))
        odd = explain_implausible_metric(
            self.reports.get_client_metrics(client.name), PERCENT_SCALE
        )
        if odd:
            parsed = replace(parsed, payload=None, error=f"malformed: {odd}")
        elif parsed.payload and task.compressor.is_dense:
            buffers = OneTimeBuffers(parsed.payload.buffers)
            parsed = replace(parsed, payload=replace(parsed.payload, buffers=buffers))
        return self._measure_reply(sent, parsed, seconds)

    def _measure_reply(self, sent: SentTask, reply: Reply, seconds: float) -> Reply:
        """The reply with what it cost by the clocks here and by the client's own; both are
        remembered.
        """
        client, reported = sent.client, reply.spent.compute_seconds
        compute = min(reported, seconds) if reported else seconds
        spent = replace(
            reply.spent,
            bytes_down=sent.down.bytes_down,
            framing=reply.spent.framing + sent.down.framing,
            compute_seconds=compute,
            transfer_seconds=seconds - compute,
        )
        self.measured.record_durations(sent.task, client.n, compute, seconds - compute)
        n = self.reports.accept_sample_count(client, reply.n)
        if n:
            self.nodes.record_sample_count(client, n)
        return replace(reply, spent=self.measured.add_joules(spent))

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, client_states: ClientStates | None = None
    ) -> Evaluation | None:
        """The clients' own judgement of w, and the server's where it has samples."""
        return (
            self.evaluator.evaluate_model(self.get_model_arrays(w), t)
            if self.evaluator.is_due(t, last)
            else None
        )

    def break_down_metric(self, t: int, roster: Sequence[str]) -> dict[str, Any] | None:
        """The primary metric of round t's model for each client that told it, and for each class
        where they were asked for that; None where nobody did.
        """
        if self.evaluator.last != t:
            return None
        nodes = {name: client.node for name, client in self.online.items()}
        values = [self.evaluator.each.get(nodes.get(name, 0)) for name in roster]
        if all(value is None for value in values):
            return None
        by_class = compute_class_metrics(self.evaluator.by_class) if self.evaluator.by_class else {}
        return {"metric": self.evaluator.primary_metric.metric, "clients": values, **by_class}

    def losses(self, models: Sequence[Tensor], clients: Sequence[str]) -> Tensor:
        """Mean loss of w on each client's training samples; of one that cannot tell, as it last
        reported.

        Of one that never did, twice the largest of the others': whoever is unknown is to get a
        turn.
        """
        content = RecordDict(
            {
                self.options.arrays_key: self.get_model_arrays(models[0]),
                self.options.config_key: ConfigRecord({}),
            }
        )
        able = {self.online[client].node: client for client in clients if self.online[client].parts}
        messages = [Message(content, node, LOSS_QUERY) for node in able]
        losses = {client: loss for client, loss in self.reports.losses.items() if client in clients}
        for reply in self.inquiries.ask_nodes(messages)[1]:
            loss = find_metric(read_valid_metrics(reply), LOSS_KEYS)
            if loss is not None:
                losses[able[reply.metadata.src_node_id]] = loss
        unknown = 2 * max(losses.values(), default=0.0)
        return torch.tensor(
            [losses.get(client, unknown) for client in clients], dtype=torch.float64
        )

    def get_model_arrays(self, w: Tensor) -> ArrayRecord:
        """w as the user's record, made once for as long as w is the model."""
        if self._sent is None or self._sent[0] is not w:
            self._sent = None  # before there are two
            self._sent = (w, self.template.unpack(w))
        return self._sent[1]

    def battery_levels(self, clients: Sequence[str]) -> Tensor | None:
        """(clients,) batteries as last reported, the others' mean where one did not say; None:
        nobody did.
        """
        return self.reports.battery_levels(clients)

    def collect_round_metrics(self, record: RoundRecord) -> dict[str, MetricRecord]:
        """What clients and server report of a round that is done: training, the clients' judgement,
        the server's.
        """
        evaluator = self.evaluator
        sources = {
            "train": self.reports.aggregate_training_metrics(record),
            "evaluate": evaluator.by_clients,
            "server": evaluator.by_server,
        }
        self.reports.summed = None
        evaluator.clear_metrics()
        return {
            name: metrics
            for name, metrics in sources.items()
            if metrics is not None and len(metrics)
        }

    def made_model(self, initial: Tensor, w: Tensor, history: Sequence[RoundRecord]) -> bool:
        """Whether any round of the run so far made a model."""
        return any(record.outcome == "committed" for record in history)

    def begin_external_round(self, config: Mapping[str, Any]) -> None:
        """A round begins that somebody else sends and collects, with this config."""
        self.train_config, self.reports.metrics = dict(config), {}

    def _list_idle_clients(self) -> list[ConnectedClient]:
        """Who may judge a model: a client that trains would keep everybody waiting."""
        busy = self.task_tracker.list_busy_clients() if self.costs is None else set()
        return [client for name, client in self.online.items() if name not in busy]
