"""The client's side on Flower: a ClientApp that does any recipe's tasks, or two lines for one that
exists already.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flrce.core.payloads import fingerprint_model
from flrce.core.types import ClientEvaluation, Reply, Task
from flrce.flower import classes
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.local_training import Local, RunnerCache, TracingLock
from flrce.flower.metering import measure_cost
from flrce.flower.task_training import (
    build_plain_reply,
    has_exact_model,
    load_client_state,
    read_message,
    save_client_state,
)
from flrce.flower.wire import SAMPLES_KEY, read_task, write_reply
from flrce.methods.own_pieces import register_installed_pieces
from flrce.rng import make_stream
from flrce.training.client import ClientRunner, find_personal_state
from flrce_client.flower import (
    NextCall,
    get_client_name,
    get_config,
    get_model_arrays,
    introduce,
    restore_model,
    write_lost_reply,
)
from flrce_client.meter import JoulesReader, use_meter
from flrce_client.power_supply import get_battery_metric

__all__ = ["Local", "client_app", "compress_with_torch", "get_client_name", "introduce"]


def client_app(load: Callable[[Context], Local], meter: JoulesReader | None = None) -> ClientApp:
    """A ClientApp that does whatever task it is sent: epochs, proximal term, sub-models, freezing,
    any compressor. Joules are those of `meter`, a function that returns the joules so far; without
    it, of what FLRCE_METER names, or of the machine's counters.
    """
    register_installed_pieces()
    if meter is not None:
        use_meter(meter)
    app = ClientApp()
    tracing = TracingLock()
    runners = RunnerCache(tracing)

    def train(message: Message, context: Context) -> Message:
        if not restore_model(message, context):
            return Message(write_lost_reply(get_config(message)), reply_to=message)
        local = load(context)
        runner = runners(local)
        w, task, template = read_message(message, context, runner, tracing)
        traces = bool(task.part.first) or (
            task.part.rate < 1 and task.part.rate not in runner.slices
        )
        with tracing.hold_exclusive() if traces else tracing.hold_shared():
            reply, cost = measure_cost(
                lambda: evaluate_and_train(
                    runner, local, w, task, load_client_state(context, task.t)
                )
            )
        if reply.error:
            raise ValueError(reply.error)
        save_client_state(context, task.t, reply.client_state)
        if template is not None:
            return Message(build_plain_reply(template, w, reply), reply_to=message)
        reply = replace(reply, base=fingerprint_model(w) if has_exact_model(message) else "")
        return Message(
            write_reply(reply, cost.seconds, cost.joules, get_battery_metric()), reply_to=message
        )

    def evaluate_samples(message: Message, context: Context, held: bool) -> Message:
        local = load(context)
        runner, index = runners(local), (local.held if held else local.train_index)
        if index is None or not len(index):
            return Message(
                RecordDict({"metrics": MetricRecord({SAMPLES_KEY: 0})}), reply_to=message
            )
        arrays = get_model_arrays(message)
        with tracing.hold_shared():
            w = ArrayTemplate.from_arrays(arrays, runner.layout).pack(arrays).float()
            found = runner.evaluate(w, index, find_personal_state(load_client_state(context)))
        numbers = {name: each.double().numpy() for name, each in found.items()}
        metrics: dict[str, Any] = {SAMPLES_KEY: len(index), "loss": float(numbers["loss"].mean())}
        for evaluate_samples in runner.objective.evaluation_metrics:
            value = float(evaluate_samples.value(numbers[evaluate_samples.name]))
            metrics |= {evaluate_samples.name: value} if math.isfinite(value) else {}
        answer = RecordDict({"metrics": MetricRecord(metrics)})
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        told = (
            classes.count_by_class(runner, numbers, local.y[index])
            if held and config.get(classes.BY_CLASS_REQUEST_KEY) is True
            else None
        )
        if told is not None:
            answer[classes.BY_CLASS_RECORD] = told
        return Message(answer, reply_to=message)

    app.train()(train)
    app.evaluate()(lambda message, context: evaluate_samples(message, context, held=True))
    app.query("flrce_loss")(lambda message, context: evaluate_samples(message, context, held=False))

    def identify_client(context: Context) -> tuple[str, int]:
        local = load(context)
        return local.name or get_client_name(context), len(local.train_index)

    return introduce(app, identify_client, compresses=True, parts=True, differences=True)


def evaluate_and_train(
    runner: ClientRunner, local: Local, w: Tensor, task: Task, client_state: dict[str, Tensor]
) -> Reply:
    """The reply. A client that holds the whole model judges it before it trains, where its task
    asks for that.
    """
    judged, held = None, local.held
    if task.judge and held is not None and len(held) and task.part.rate == 1:
        head = runner.objective.evaluation_metrics[0]
        numbers = runner.evaluate(w.float(), held, find_personal_state(client_state))[head.name]
        value = float(head.value(numbers.double().numpy()))
        judged = ClientEvaluation(value, len(held)) if math.isfinite(value) else None
    return replace(runner.train(w.float(), task, local.train_index, client_state), judged=judged)


def compress_with_torch(message: Message, context: Context, call_next: NextCall) -> Message:
    """The app's own training, then the reply encoded by a compressor that only this package, or the
    user, has.
    """
    before, task = get_model_arrays(message), read_task(get_config(message), {})
    reply, cost = measure_cost(lambda: call_next(message, context))
    if (
        reply.has_error()
        or len(reply.content.array_records) != 1
        or len(reply.content.metric_records) != 1
    ):
        return reply
    template = ArrayTemplate.from_arrays(before)
    w = template.pack(before)
    u = template.pack(next(iter(reply.content.array_records.values())), minus=w)
    rng = make_stream(task.seed, "encode", task.t, task.client)
    payload, client_state = task.compressor.encode(
        u, template.names, rng, load_client_state(context, task.t)
    )
    save_client_state(context, task.t, client_state)
    metrics = dict(next(iter(reply.content.metric_records.values())))
    counted = SAMPLES_KEY in metrics  # the server names it where it is missing
    n, loss = metrics.pop(SAMPLES_KEY, 0), metrics.get("train_loss", metrics.get("loss", 0.0))
    base = fingerprint_model(w) if has_exact_model(message) else ""
    answer = Reply(task.client, task.t, payload, n=n, loss=loss, base=base)  # type: ignore[arg-type]
    content = write_reply(answer, cost.seconds, cost.joules, {**get_battery_metric(), **metrics})
    if not counted:
        del content.metric_records["metrics"][SAMPLES_KEY]
    return Message(content, reply_to=message)
