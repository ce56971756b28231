"""The same Engine over Flower's Grid: its simulation engine, its deployments, or a LocalGrid. Costs are measured."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from flrce.errors import BadInput
from flrce.flower.arrays import Template, record, weight
from flrce.flower.figures import (
    ACCURACY,
    LOSSES,
    PERCENT,
    by_metric,
    first,
    metrics_of,
    reported,
    scale,
    strange,
    summed,
)
from flrce.flower.nodes import GONE, LOSS, MANY, Client, Nodes, exchange, why
from flrce.flower.options import Config, Costs, Judge, Options
from flrce.flower.wire import read_reply, write_task
from flrce.local.client import Runner
from flrce.local.metrics import Metric
from flrce.local.updates import Prox
from flrce.pieces import Dense, Malformed
from flrce.rng import stream
from flrce.round.gate import GROWTH, MOST_SAMPLES
from flrce.round.payloads import PER_BYTE, WATTS, number
from flrce.types import Evaluation, Judged, Payload, Portion, Reply, Spent, Task, Yardstick

log = logging.getLogger("flwr")
Holdings = tuple[Tensor | None, Sequence[tuple[str, int]]]
AT_ONCE = 2**27  # bytes of replies fetched together
PEAK = 10  # times a profile's active watts: no device draws more for as long as a task takes
PATIENCE = 60.0  # seconds that a node without an answer, or with another's name, is waited for
OVERDUE = 1000  # messages without an answer that are remembered


class Once(dict[str, Tensor]):
    """Buffers that are gone once they are taken: a reply is decoded once, and P large models are a lot of memory."""

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name)


class FlowerEngine:
    """Clients behind a Grid. `runner`, where the server knows the network, lets recipes use sub-models and freezing."""

    judges_once = True  # every model that is judged is sent to all judges

    def __init__(
        self, grid: Grid, template: Template, options: Options, runner: Runner | None = None,
        train_config: Config | None = None, evaluate_config: Config | None = None,
        judge: Judge | None = None, costs: Costs | None = None,
    ) -> None:  # fmt: skip
        self.grid, self.template, self.options, self.runner = grid, template, options, runner
        self.nodes = Nodes(grid, options.ask, PATIENCE)
        self.trainable, self.size = template.layout.trainable, template.layout.size
        self.cap = 8 * self.size + 64 * len(template.names) + 4096  # bytes that any payload may have, as at the gate
        self.train_config, self.evaluate_config = train_config or {}, evaluate_config or {}
        self.judge, self.costs = judge, costs
        self.blocks = runner.blocks if runner else 1
        self.online: dict[str, Client] = {}
        self.pace: dict[str, tuple[float, float]] = {}  # client -> last seconds of computing an epoch, of transfer
        self.overdue: dict[str, Task] = {}  # message of an earlier round that nobody has answered -> its task
        self.meanwhile: Callable[[], None] = lambda: None  # done once while the clients of a round train
        self.metrics: dict[str, MetricRecord] = {}  # client -> the metrics of its last reply
        self.judged: tuple[MetricRecord | None, MetricRecord | None] = (None, None)  # by the clients, by the server
        self.summed: MetricRecord | None = None  # the round's training metrics, where somebody else made one of them
        self.asking = False  # judges, at this moment
        self.host: Any = None  # a strategy whose own configure_evaluate and aggregate_evaluate are to be used
        self.evaluated = 0  # last round whose model was judged
        self.w: Tensor | None = None  # the model of the round that begins
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
        return self.online[client].n if client in self.online else 0

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
        """What a task will cost: a dense reply's bytes, and the client's pace so far; 0 seconds: nobody's is known."""
        if self.costs:
            return self.costs.estimate(task)
        up = self.template.nbytes if task.part.whole else 4 * sum(size for _, size in self.holdings(task)[1])
        up += 4 * sum(task.update.sends(self.trainable).values()) if task.update is not None else 0
        down = self._down(task)[1] + sum(4 * x.numel() for x in task.tensors.values())
        epoch = -(-self.samples(task.client) // max(task.work.batch, 1))  # batches
        compute, transfer = self._pace(task.client)
        epochs = self._epochs(task)
        return self._joules(Spent(
            down, up, batches=round(epochs * epoch), compute_seconds=compute * epochs * task.part.rate,
            transfer_seconds=transfer,
        ))  # fmt: skip

    def _pace(self, client: str) -> tuple[float, float]:
        """A client's seconds of computing an epoch, and of transfer: as last measured, or else the others' median."""
        if client in self.pace or not self.pace:
            return self.pace.get(client, (0.0, 0.0))
        compute, transfer = zip(*self.pace.values(), strict=True)
        return median(compute), median(transfer)

    def _epochs(self, task: Task) -> float:
        """The epochs of a task, from its steps where it counts those."""
        n = self.samples(task.client)
        return (
            max(task.work.epochs, 1)
            if not task.work.steps or not n
            else task.work.steps / -(-n // max(task.work.batch, 1))
        )

    def inquiry(self, client: str, down: int) -> Spent:
        """What asking a client for its loss costs."""
        return self.costs.inquiry(client, down) if self.costs else self._joules(Spent(bytes_down=down))

    def train(
        self, w: Tensor, tasks: Sequence[Task], carry: Mapping[str, Mapping[str, Tensor]], keep: int | None = None
    ) -> Sequence[Reply]:
        """Send the tasks and read the replies; with `keep`, wait for no more good ones than that.

        Where costs are modelled, the model says who is fast, so that all are waited for.
        """
        keep = None if self.costs else keep
        for task in tasks:
            self.holdings(task)  # refuses what cannot be done before anything is sent
        messages = [self.message(w, task) for task in tasks]
        self.metrics = {}
        late: list[Reply] = []
        down: list[Spent] = []

        def while_they_train() -> None:
            down.extend(map(self.sending, messages, tasks))
            self.meanwhile()

        replies = exchange(
            self.grid, messages, self.options.timeout,
            lambda at, reply, seconds: self.read(w, tasks[at], down[at], reply, seconds),
            lambda found: keep is not None and sum(not reply.error for reply in found) >= keep,
            min(max(1, AT_ONCE // max(self.template.nbytes, 1)), MANY), while_they_train,
            {key: partial(self._too_late, key, late) for key in self.overdue},
        )  # fmt: skip
        found = [
            replies.get(at) or self._missed(messages[at], task, down[at], keep is None) for at, task in enumerate(tasks)
        ]
        found = self.in_scale(found)
        found = [self.costs.booked(task, r) for task, r in zip(tasks, found, strict=True)] if self.costs else found
        return [*found, *late]

    def in_scale(self, replies: Sequence[Reply]) -> list[Reply]:
        """The round's replies; refused where an accuracy is beyond what the others' can be."""
        most, key = scale(list(self.metrics.values())), self.options.weight_key
        found = []
        for reply in replies:
            own = {name: x for name, x in self.metrics.get(reply.client, {}).items() if name != key}
            odd = "" if reply.error else strange(own, most)
            found.append(
                replace(reply, payload=None, error=f"malformed: {odd}") if odd else self._judged(reply, own, most)
            )
        return found

    @property
    def yardstick(self) -> Yardstick:
        head = self.options.judges[0] if self.options.judges else None
        if head is None:
            return Yardstick()
        low, high = (head.low, head.high) if isinstance(head, Metric) else (-math.inf, math.inf)
        return Yardstick(head.name, head.better == "lower", low, high)

    def _judged(self, reply: Reply, figures: Mapping[str, Any], most: float) -> Reply:
        """A client that knows nothing of our tasks may report the headline metric of its own accord."""
        if reply.error or reply.judged is not None:
            return reply
        scale = self.yardstick
        plain = scale.metric == "accuracy"
        value = first(figures, (scale.metric, *(ACCURACY if plain else ())), most)
        n = figures.get("held-examples", reply.n)
        if value is None or type(n) is not int:
            return reply
        return replace(reply, judged=Judged(value / most if plain else value, n))

    def _missed(self, message: Message, task: Task, down: Spent, waited: bool) -> Reply:
        """A client that has not answered yet; should it do so in a later round, that is booked as waste."""
        if message.metadata.message_id:  # it was sent at all
            self.overdue = dict([*self.overdue.items(), (message.metadata.message_id, task)][-OVERDUE:])
        late = (
            f"no reply within {self.options.timeout:g} s" if waited else "slower than the replies that were waited for"
        )
        return Reply(task.client, task.t, error=late, spent=down)

    def _too_late(self, key: str, late: list[Reply], reply: Message) -> None:
        """An answer to an earlier round: what it carried is booked, and never looked at."""
        task = self.overdue.pop(key)
        if not reply.has_error():
            up = sum(weight(arrays) for arrays in reply.content.array_records.values())
            late.append(Reply(task.client, task.t, error="late", spent=Spent(bytes_up=up)))

    def message(self, w: Tensor, task: Task) -> Message:
        """The model and one client's task. Whoever holds the whole model shares one copy of it."""
        held = self._down(task)[0]
        content = RecordDict({
            self.options.arrays_key: self.arrays(w) if held is None else record({"held": w[held].float()}),
            self.options.config_key: ConfigRecord({
                **configured(self.train_config, task.t), "server-round": task.t, **_for_plain(task), **write_task(task),
            }),
        })  # fmt: skip
        if task.tensors:
            content["tensors"] = record(task.tensors)
        return Message(content, self.online[task.client].node, MessageType.TRAIN, group_id=str(task.t))

    def read(self, w: Tensor, task: Task, down: Spent, reply: Message, seconds: float) -> Reply:
        """One answer as a Reply, with what it really cost; whatever is wrong with it is its client's failure."""
        if reply.has_error():
            if reply.error.code == GONE:
                self.nodes.lost(self.online[task.client].node)
            return Reply(task.client, task.t, error=why(reply), spent=replace(down, compute_seconds=seconds))
        try:
            found = read_reply(reply.content, task, self.template, w, self.cap, self.options.weight_key)
        except Malformed as problem:
            up = sum(weight(arrays) for arrays in reply.content.array_records.values())
            spent = replace(down, bytes_up=up, compute_seconds=seconds)
            return Reply(task.client, task.t, error=f"malformed: {problem}", spent=spent)
        metrics = next(iter(reply.content.metric_records.values()))
        own = {key: value for key, value in metrics.items() if key != self.options.weight_key}  # that is the gate's
        odd = strange(own, PERCENT)
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
        self.metrics[task.client] = metrics
        if 0 <= compute <= seconds:
            self.pace[task.client] = (compute / (self._epochs(task) * task.part.rate), seconds - compute)
        if type(found.n) is int and 0 < found.n <= MOST_SAMPLES:
            before = self.online[task.client].n
            self.nodes.heard(self.online[task.client], min(found.n, GROWTH * before) if before else found.n)
        return replace(found, spent=self._joules(spent))

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, carry: Mapping[str, Mapping[str, Tensor]] = {}
    ) -> Evaluation | None:
        """The clients' own judgement of w, and the server's where it has samples."""
        if (t % self.options.eval_every and not last) or t == self.evaluated:  # once, whatever is made of it
            return None
        self.evaluated = t
        arrays = self.arrays(w)
        by_server = self.judge(t, arrays) if self.judge else None
        self.asking = True
        try:
            by_clients, seen = self._ask_judges(arrays, t)
        finally:
            self.asking = False
        self.judged = (by_clients, by_server)
        if seen:
            return seen
        most = scale([by_server or {}])
        accuracy = first(by_server or {}, ACCURACY, most)
        if accuracy is None:
            return None
        return Evaluation(accuracy / most, accuracy / most, first(by_server or {}, LOSSES) or 0.0)

    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor:
        """Mean loss of w on each client's training samples; of one that cannot tell, as it last reported."""
        content = RecordDict({self.options.arrays_key: self.arrays(w), self.options.config_key: ConfigRecord({})})
        asked = [client for client in clients if self.online[client].parts]
        messages = [Message(content, self.online[client].node, LOSS) for client in asked]
        answers = exchange(self.grid, messages, self.options.timeout, lambda at, reply, _: reported(reply))
        found = {asked[at]: first(figures, LOSSES) for at, figures in answers.items()}
        last = {client: first(self.metrics.get(client, {}), ("train_loss", *LOSSES)) for client in clients}
        return torch.tensor([found.get(c) or last[c] or 0.0 for c in clients], dtype=torch.float64)

    def arrays(self, w: Tensor) -> ArrayRecord:
        """w as the user's record, made once for as long as w is the model."""
        if self._sent is None or self._sent[0] is not w:
            self._sent = None  # before there are two
            self._sent = (w, self.template.unpack(w))
        return self._sent[1]

    def _down(self, task: Task) -> tuple[Tensor | None, int]:
        """(coordinates a client receives, None for all; their bytes)."""
        if task.part.rate == 1 or self.runner is None:
            return None, self.template.nbytes
        held = self.runner.part(task).held
        return held, self.template.nbytes if held is None else 4 * len(held)

    def sending(self, message: Message, task: Task) -> Spent:
        """What sending this message cost."""
        extra = sum(4 * x.numel() for x in task.tensors.values())
        down = self._down(task)[1] + extra
        arrays = sum(weight(arrays) for arrays in message.content.array_records.values())
        scalars = sum(len(config.deflate()) for config in message.content.config_records.values())
        return Spent(bytes_down=down, framing=max(arrays - down, 0) + scalars)

    def _joules(self, spent: Spent) -> Spent:
        profile = self.options.profile
        if spent.measured:
            watts = WATTS if profile is None else PEAK * profile.active_watts
            radio = PER_BYTE * (spent.bytes_up + spent.bytes_down)
            return replace(spent, joules=min(spent.joules, watts * spent.seconds + radio))
        if profile is None:
            return spent
        radio = profile.up_joules * spent.bytes_up + profile.down_joules * spent.bytes_down
        joules = profile.active_watts * spent.compute_seconds + radio
        return replace(spent, joules=joules, idle_watts=profile.idle_watts)

    def _judges(self, t: int) -> list[Client]:
        share, everyone = self.options.fraction_evaluate, list(self.online.values())
        count = min(max(int(share * len(everyone)), self.options.least_evaluate), len(everyone)) if share else 0
        picked = stream(self.options.seed, "evaluate", t).permutation(len(everyone))[:count]
        return [everyone[i] for i in sorted(picked)]

    def configure_evaluate(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """The model for each judge."""
        config["server-round"] = t
        content = RecordDict({self.options.arrays_key: arrays, self.options.config_key: config})
        return [Message(content, judge.node, MessageType.EVALUATE, group_id=str(t)) for judge in self._judges(t)]

    def aggregate_evaluate(self, t: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The judges' metrics as one; those without samples, or out of their range, have no say."""
        key, replies = self.options.weight_key, list(replies)
        most = scale(list(map(metrics_of, replies)))
        figures = [f for reply in replies if number((f := reported(reply, most)).get(key)) and f[key] > 0]
        return summed(figures, key, self.options.evaluate_sum, most)

    def _ask_judges(self, arrays: ArrayRecord, t: int) -> tuple[MetricRecord | None, Evaluation | None]:
        """Their metrics, weighted by samples, and accuracy per client and per sample where they report it."""
        config, host = configured(self.evaluate_config, t), self.host or self
        messages = list(host.configure_evaluate(t, arrays, ConfigRecord(dict(config)), self.grid))
        answers = exchange(self.grid, messages, self.options.timeout, lambda at, reply, _: reply)
        replies = [answers[at] for at in sorted(answers)]
        mean = host.aggregate_evaluate(t, replies)
        figures, key = list(map(metrics_of, replies)), self.options.weight_key
        most = scale(figures)
        sane = [f for f in figures if not strange(f, most) and number(f.get(key)) and f[key] > 0]
        if self.options.judges and mean is not None:
            return mean, self._by_objective(sane, first(mean, LOSSES) or 0.0, len(messages))
        accuracies = [value / most for f in sane if (value := first(f, ACCURACY, most)) is not None]
        if mean is None or not accuracies:
            return mean, None
        down = self.template.nbytes * len(messages)
        overall, loss = first(mean, ACCURACY, most), first(mean, LOSSES)
        return mean, Evaluation(sum(accuracies) / len(accuracies), (overall or 0.0) / most, loss or 0.0, down)

    def _by_objective(self, figures: Sequence[Mapping[str, Any]], loss: float, asked: int) -> Evaluation | None:
        """The headline and all other metrics of the objective. Over all samples only means are known: nobody sends
        what the others would need."""
        judges = self.options.judges
        alike, by_samples = by_metric(judges, figures, self.options.weight_key)
        head = judges[0]
        if head.name not in alike:
            return None
        pooled = {j.name: by_samples[j.name] for j in judges if j.name in alike and isinstance(j, Metric) and j.mean}
        return Evaluation(
            alike[head.name], by_samples[head.name], loss, self.template.nbytes * asked, head.name,
            head.better == "lower", alike, pooled,
        )  # fmt: skip


def configured(config: Config, t: int) -> Mapping[str, Any]:
    """What clients are told in round t."""
    return config(t) if callable(config) else config


def _for_plain(task: Task) -> dict[str, Any]:
    """What clients that know Flower's strategies and not our tasks look for."""
    pull = next((link.mu for link in task.update.links if isinstance(link, Prox)), 0.0) if task.update else 0.0
    return {"proximal-mu": pull} if pull else {}
