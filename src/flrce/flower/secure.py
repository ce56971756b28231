"""The preset `private` under Flower's SecAgg+: the server sees the clients' sum, and no client's
own model.

SecAgg+ is a workflow of Flower's older interface. Here it does one thing, a round's sum; choosing,
stopping and keeping are ours. How well a model does travels in the sum as well: two numbers beside
the model.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.server import LegacyContext, SimpleClientManager
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from torch import Tensor

from flrce.core.types import (
    ClientCost,
    ClientEvaluation,
    Payload,
    PendingTask,
    Reply,
    RoundReplies,
    Task,
)
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate, count_record_bytes
from flrce.flower.client import Local, MessageHandler, evaluate_and_train
from flrce.flower.engine import FlowerEngine
from flrce.flower.messages import explain_failure
from flrce.flower.options import resolve_config
from flrce.flower.strategy import FLrce
from flrce.flower.wire import KEY_PREFIX, read_task, write_task
from flrce_client.flower import introduce

ARRAY_NAMES_KEY = KEY_PREFIX + "names"  # of the arrays, which the older interface leaves out
# arrays beside the model: the metric where there is one, and whether there is
METRIC_ARRAY_COUNT = 2
DROPPED_OUT_ERROR = "dropped out of the secure aggregation"


class Masked(FLrce):
    """FLrce's preset `private` over SecAgg+. `workflow` is Flower's, with its shares, threshold,
    range and weights.

    `per_round` clients train, or `fraction_train` of those connected. Clients have Flower's
    `secaggplus_mod`: those of `masked_app`, or any of the older interface. Nobody is asked to
    evaluate: each would tell its own figure.
    """

    def __init__(
        self,
        workflow: SecAggPlusWorkflow,
        *fedavg: Any,
        per_round: int | None = None,
        epochs: int = 1,
        batch: int = 32,
        lr: float = 0.01,
        **settings: Any,
    ) -> None:
        self.refuse_unknown(settings)
        if len(fedavg) < 2:
            settings.setdefault("fraction_evaluate", 0.0)
        settings |= {"epochs": epochs, "batch": batch, "lr": lr}
        super().__init__(*fedavg, per_round=per_round, preset="private", **settings)
        self.workflow = workflow

    def build_engine(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        return MaskedEngine(self.workflow, *args, **kwargs)


class MaskedEngine(FlowerEngine):
    """A round is one secure aggregation: every reply that counts is the mean of all."""

    def __init__(self, workflow: SecAggPlusWorkflow, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.workflow = workflow
        odd = next((slot.name for slot in self.template.layout.slots if not slot.shape), "")
        odd = next(iter(self.template.fixed), odd)
        if odd:
            raise BadInput(
                f"SecAgg+ sums floats of one dimension or more, and array {odd!r} is not; leave"
                " it out"
            )

    def build_message(self, pending: PendingTask) -> Message:
        raise BadInput(
            "Masked sends nothing but what SecAgg+ does: use start, without a configure_train of"
            " your own"
        )

    def send(self, pending: Sequence[PendingTask], client_states: Any) -> None:
        """The tasks go out with the second of the protocol's four messages, in `collect`."""
        self.unsent, self.begun = [], time.monotonic()

    def collect(
        self, pending: Sequence[PendingTask], size: int | None, open_ended: bool
    ) -> RoundReplies:
        tasks = {self.online[one.task.client].node: one.task for one in pending}
        if not tasks:
            return RoundReplies()
        began, grid = time.monotonic(), _ByteCountingGrid(self.grid)
        counted = self._aggregate_securely(tasks, pending[0].w, grid)
        seconds, u, figure = time.monotonic() - began, None, None
        if counted:
            mean = next(iter(counted.values())).parameters.tensors
            u, figure = self._read_mean_update(mean, pending[0].w)
        replies = []
        for node, task in tasks.items():
            spent = ClientCost(
                bytes_up=grid.up[node], bytes_down=grid.down[node], compute_seconds=seconds
            )
            failure = grid.failures.get(node)
            error = f"{DROPPED_OUT_ERROR}: {failure}" if failure else DROPPED_OUT_ERROR
            reply = Reply(task.client, task.t, error=error, spent=self.measured.add_joules(spent))
            if node in counted and u is not None:
                n = counted[node].num_examples
                evaluation = None if figure is None else ClientEvaluation(figure, n)
                reply = replace(reply, error="", payload=Payload({"u": u}), n=n, judged=evaluation)
            replies.append(reply)
        return RoundReplies(replies)

    def _aggregate_securely(
        self, tasks: Mapping[int, Task], w: Tensor, grid: "_ByteCountingGrid"
    ) -> dict[int, FitRes]:
        """Node -> its result, of those that are in the sum; each holds the mean of all."""
        run = _SingleRoundStrategy(
            {node: self._build_fit_instructions(task) for node, task in tasks.items()}
        )
        context = LegacyContext(
            Context(0, 0, {}, RecordDict(), {}),
            strategy=run,  # type: ignore[arg-type]
            client_manager=SimpleClientManager(),
        )
        t = next(iter(tasks.values())).t
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: t})
        context.state.array_records[MAIN_PARAMS_RECORD] = self.get_model_arrays(w)
        self.workflow(grid, context)  # type: ignore[arg-type]
        return {proxy.node_id: result for proxy, result in run.results}

    def _build_fit_instructions(self, task: Task) -> FitIns:
        config = {
            **resolve_config(self.train_config, task.t),
            "server-round": task.t,
            **write_task(task),
        }
        scalars = {
            key: value
            for key, value in config.items()
            if isinstance(value, bool | int | float | str | bytes)
        }
        scalars[ARRAY_NAMES_KEY] = "\n".join(self.template.dtypes)
        return FitIns(ndarrays_to_parameters([]), scalars)

    def _read_mean_update(self, tensors: Sequence[bytes], w: Any) -> tuple[Any, float | None]:
        """(the mean update, the mean metric) from the mean of what clients sent."""
        means = list(map(bytes_to_ndarray, tensors))
        named = dict(zip(self.template.dtypes, means, strict=False))
        record = ArrayRecord(
            {name: Array(x.astype(self.template.dtypes[name])) for name, x in named.items()}
        )
        figures = means[len(named) :]
        value, known = (
            (float(x.reshape(-1)[0]) for x in figures)
            if len(figures) == METRIC_ARRAY_COUNT
            else (0.0, 0.0)
        )
        return self.template.pack(record, minus=w), value / known if known > 1e-3 else None


@dataclass
class _SingleRoundStrategy:
    """What the workflow asks of a strategy."""

    told: Mapping[int, FitIns]
    results: list[tuple[Any, FitRes]] = field(default_factory=list)

    def configure_fit(self, t: int, parameters: Any, manager: Any) -> list[tuple[Any, FitIns]]:
        return [
            (_NodeProxy(node), FitIns(parameters, fit.config)) for node, fit in self.told.items()
        ]

    def aggregate_fit(
        self, t: int, results: list[tuple[Any, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        self.results = results
        return None, {}


@dataclass(frozen=True)
class _NodeProxy:
    node_id: int


class _ByteCountingGrid:
    """A grid that counts the bytes of every node, over all four messages of the protocol."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.up, self.down = grid, Counter[int](), Counter[int]()
        self.failures: dict[int, str] = {}  # node -> why its last message failed

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent = list(messages)
        for message in sent:
            self.down[message.metadata.dst_node_id] += _count_content_bytes(message.content)
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        receivers = {m.metadata.message_id: m.metadata.dst_node_id for m in sent}
        for reply in replies:
            node = receivers.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if reply.has_error():
                self.failures[node] = explain_failure(reply)
            else:
                self.up[node] += _count_content_bytes(reply.content)
        return replies


def _count_content_bytes(content: RecordDict) -> int:
    light = (*content.config_records.values(), *content.metric_records.values())
    return sum(map(count_record_bytes, content.array_records.values())) + sum(
        len(record.deflate()) for record in light
    )


def masked_app(load: Callable[[Context], Local]) -> ClientApp:
    """A ClientApp for `Masked`: trains as told, judges the model it was sent, and shows nothing but
    what is masked.
    """
    app, handler = ClientApp(mods=[secaggplus_mod]), MessageHandler(load)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        local = load(context)
        fit = compat.recorddict_to_fitins(message.content, keep_input=True)
        task, names = read_task(fit.config, {}), str(fit.config[ARRAY_NAMES_KEY]).split("\n")
        values = map(bytes_to_ndarray, fit.parameters.tensors)
        arrays = ArrayRecord(
            {name: Array(value) for name, value in zip(names, values, strict=True)}
        )
        runner = handler.runners(local)
        with handler.tracing.hold_shared():
            template = ArrayTemplate.from_arrays(arrays, runner.layout)
            w = template.pack(arrays)
            reply = evaluate_and_train(runner, local, w, task, {})
        if reply.error or reply.payload is None:
            raise ValueError(reply.error)
        made = [array.numpy() for array in template.unpack(w + reply.payload.buffers["u"]).values()]
        judged = reply.judged
        figures = [judged.value if judged else 0.0, 1.0 if judged else 0.0]
        made += [np.array([figure], np.float32) for figure in figures]
        done = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(made), reply.n, {})
        return Message(compat.fitres_to_recorddict(done, keep_input=False), reply_to=message)

    return introduce(app, handler.identify_client)
