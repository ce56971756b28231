"""A model before its judges: the clients with their hold-outs, the server where it has samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flrce.core.payloads import is_finite_number
from flrce.core.types import ClientEvaluation, Evaluation, PrimaryMetric, Reply
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.messages import InquiryTracker
from flrce.flower.metrics import (
    ACCURACY_KEYS,
    BY_CLASS_REQUEST_KEY,
    LOSS_KEYS,
    ClassTotals,
    aggregate_metrics,
    average_by_metric,
    explain_implausible_metric,
    find_accuracy_scale,
    find_limits,
    find_metric,
    get_reply_metrics,
    read_valid_metrics,
    sum_class_totals,
)
from flrce.flower.nodes import ConnectedClient
from flrce.flower.options import FlowerOptions, resolve_config
from flrce.rng import make_stream
from flrce.training.metrics import is_poolable

MetricsAndEvaluation = tuple[MetricRecord | None, Evaluation | None]


class Evaluator:
    """Judges one model a round, once. `free` are the clients that may be asked.

    `host` is a strategy with a configure_evaluate and an aggregate_evaluate of its own, to be used
    instead.
    """

    def __init__(
        self,
        grid: Grid,
        template: ArrayTemplate,
        options: FlowerOptions,
        free: Callable[[], list[ConnectedClient]],
        host: Any = None,
    ) -> None:
        self.grid, self.template, self.options = grid, template, options
        self.free, self.host = free, host or self
        self.inquiries = InquiryTracker(grid, options.timeout, "evaluation")
        self.asking = False  # at this moment
        self.last = 0  # round whose model was judged last
        self.by_clients: MetricRecord | None = None
        self.by_server: MetricRecord | None = None
        # node -> its own figure of the primary metric, of the model judged last
        self.each: dict[int, float] = {}
        self.sent_bytes = 0  # of models to judges, since they were booked last
        self.by_class: ClassTotals | None = None  # likewise, over the judges that told it

    def is_due(self, t: int, last: bool) -> bool:
        """Whether a model is to be judged in round t; once, whatever is made of it."""
        return t != self.last and (last or t % self.options.eval_every == 0)

    def evaluate_model(self, arrays: ArrayRecord, t: int) -> Evaluation | None:
        """What the clients think of a model, or else the server."""
        self.last = t
        judge = self.options.evaluate_fn
        self.by_server = judge(t, arrays) if judge else None
        self.asking = True
        try:
            self.by_clients, seen = self.query_clients(arrays, t)
        finally:
            self.asking = False
        if seen:
            return seen
        figures: Mapping[str, Any] = self.by_server or {}
        scale = find_accuracy_scale([figures])
        accuracy = find_metric(figures, ACCURACY_KEYS, scale)
        if accuracy is None:
            return None
        return Evaluation(
            accuracy / scale, accuracy / scale, find_metric(figures, LOSS_KEYS) or 0.0
        )

    def ask_judges(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """(the messages that were sent, the answers); models that travel are counted."""
        sent, answers = self.inquiries.ask_nodes(messages)
        self.sent_bytes += self.template.nbytes * len(sent)
        return sent, answers

    def take_sent_bytes(self) -> int:
        """Bytes of the models that judges were sent since this was asked last."""
        count, self.sent_bytes = self.sent_bytes, 0
        return count

    def clear_metrics(self) -> None:
        """The metrics of a round that is done."""
        self.by_clients = self.by_server = None

    @property
    def primary_metric(self) -> PrimaryMetric:
        """The primary metric; accuracy where nobody says otherwise."""
        head = self.options.metrics[0] if self.options.metrics else None
        if head is None:
            return PrimaryMetric()
        return PrimaryMetric(head.name, head.better == "lower", *find_limits(head))

    def add_reported_metric(self, reply: Reply, figures: Mapping[str, Any], most: float) -> Reply:
        """A client that knows nothing of our tasks may report the primary metric of its own
        accord.
        """
        if reply.error or reply.judged is not None:
            return reply
        value, n = self._find_primary_metric(figures, most), figures.get("held-examples", reply.n)
        if value is None or type(n) is not int:
            return reply
        return replace(reply, judged=ClientEvaluation(value, n))

    def _find_primary_metric(self, figures: Mapping[str, Any], most: float) -> float | None:
        """The primary metric among these; accuracy from 0 to 1, whatever its scale there."""
        name = self.primary_metric.metric
        if name != "accuracy":
            return find_metric(figures, (name,), most)
        accuracy = find_metric(figures, ACCURACY_KEYS, most)
        return None if accuracy is None else accuracy / most

    def configure_evaluate(
        self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The model for each judge."""
        config["server-round"] = t
        content = RecordDict({self.options.arrays_key: arrays, self.options.config_key: config})
        return [
            Message(content, judge.node, MessageType.EVALUATE, group_id=str(t))
            for judge in self._draw_clients(t)
        ]

    def aggregate_evaluate(self, t: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The judges' metrics as one; those without samples, or out of their range, have no say."""
        key, replies = self.options.weight_key, list(replies)
        scale = find_accuracy_scale(list(map(get_reply_metrics, replies)))
        figures = [f for reply in replies if (f := read_valid_metrics(reply, scale, key))]
        return aggregate_metrics(figures, key, self.options.evaluate_sum, scale)

    def query_clients(self, arrays: ArrayRecord, t: int) -> MetricsAndEvaluation:
        """The clients' metrics, weighted by samples, and accuracy per client and per sample where
        they report it.
        """
        config = ConfigRecord(self.build_config(t))
        messages = list(self.host.configure_evaluate(t, arrays, config, self.grid))
        messages, replies = self.ask_judges(messages)
        mean = self.host.aggregate_evaluate(t, replies)
        scale, key = (
            find_accuracy_scale(list(map(get_reply_metrics, replies))),
            self.options.weight_key,
        )
        usable = [reply for reply in replies if _is_usable(get_reply_metrics(reply), key, scale)]
        self._store_client_metrics(usable, scale)
        figures, down = list(map(get_reply_metrics, usable)), self.template.nbytes * len(messages)
        if mean is None:
            return None, None
        loss = find_metric(mean, LOSS_KEYS) or 0.0
        if self.options.metrics:
            return mean, self._build_evaluation(figures, loss, down)
        accuracies = [
            value for f in figures if (value := find_metric(f, ACCURACY_KEYS, scale)) is not None
        ]
        if not accuracies:
            return mean, None
        overall = find_metric(mean, ACCURACY_KEYS, scale) or 0.0
        by_client = sum(value / scale for value in accuracies) / len(accuracies)
        return mean, Evaluation(by_client, overall / scale, loss, down)

    def build_config(self, t: int) -> dict[str, Any]:
        """What judges are told besides the model."""
        return {
            **resolve_config(self.options.evaluate_config, t),
            **({BY_CLASS_REQUEST_KEY: True} if self.options.by_class else {}),
        }

    def _store_client_metrics(self, replies: Sequence[Message], most: float) -> None:
        """What is kept of the judges' answers besides their means: each one's primary metric, and
        figures by class.
        """
        values = {
            reply.metadata.src_node_id: self._find_primary_metric(get_reply_metrics(reply), most)
            for reply in replies
        }
        self.each = {node: value for node, value in values.items() if value is not None}
        asked = replies if self.options.by_class else []
        samples = [get_reply_metrics(reply)[self.options.weight_key] for reply in asked]
        self.by_class = sum_class_totals(asked, samples, self.primary_metric)

    def _draw_clients(self, t: int) -> list[ConnectedClient]:
        """This round's judges."""
        share, everyone = self.options.fraction_evaluate, self.free()
        count = (
            min(max(int(share * len(everyone)), self.options.least_evaluate), len(everyone))
            if share
            else 0
        )
        picked = make_stream(self.options.seed, "evaluate", t).permutation(len(everyone))[:count]
        return [everyone[i] for i in sorted(picked)]

    def _build_evaluation(
        self, figures: Sequence[Mapping[str, Any]], loss: float, down: int
    ) -> Evaluation | None:
        """All metrics of the objective. Over all samples only means are known: nobody sends what
        the others would need.
        """
        metrics, head = self.options.metrics, self.options.metrics[0]
        alike, by_samples = average_by_metric(metrics, figures, self.options.weight_key)
        if head.name not in alike:
            return None
        pooled = {m.name: by_samples[m.name] for m in metrics if m.name in alike and is_poolable(m)}
        return Evaluation(
            alike[head.name],
            by_samples[head.name],
            loss,
            down,
            head.name,
            head.better == "lower",
            alike,
            pooled,
        )


def _is_usable(figures: Mapping[str, Any], key: str, most: float) -> bool:
    """Whether a judge's metrics are all within their ranges, and say how many samples it has."""
    return (
        not explain_implausible_metric(figures, most)
        and is_finite_number(figures.get(key))
        and figures[key] > 0
    )
