"""The client's side on Flower: a ClientApp that does any recipe's tasks, or two lines for one that exists already."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flrce.fleet.supply import reported
from flrce.flower import classes
from flrce.flower.arrays import Template
from flrce.flower.local import Local, Runners, Tracing, measured, name_for
from flrce.flower.nodes import HELLO
from flrce.flower.received import arrays_of, carried, carry_on, exact, plain_reply, received
from flrce.flower.wire import PREFIX, SAMPLES, read_task, write_reply
from flrce.local.client import Runner, own_of
from flrce.rng import stream
from flrce.round.payloads import fingerprint
from flrce.types import Judged, Reply, Task

__all__ = ["Local", "client_app", "compressing", "introduce", "name_for"]


def client_app(load: Callable[[Context], Local]) -> ClientApp:
    """A ClientApp that does whatever task it is sent: epochs, proximal term, sub-models, freezing, any compressor."""
    app = ClientApp()
    tracing = Tracing()
    runners = Runners(tracing)

    def train(message: Message, context: Context) -> Message:
        local = load(context)
        runner = runners(local)
        w, task, template = received(message, context, runner, tracing)
        traces = bool(task.part.first) or (task.part.rate < 1 and task.part.rate not in runner.slices)
        with tracing.alone() if traces else tracing.together():
            reply, cost = measured(lambda: judged_and_trained(runner, local, w, task, carried(context, task.t)))
        if reply.error:
            raise ValueError(reply.error)
        carry_on(context, task.t, reply.carry)
        if template is not None:
            return Message(plain_reply(template, w, reply), reply_to=message)
        reply = replace(reply, base=fingerprint(w) if exact(message) else "")
        return Message(write_reply(reply, cost.seconds, cost.joules, reported()), reply_to=message)

    def judge(message: Message, context: Context, held: bool) -> Message:
        local = load(context)
        runner, index = runners(local), (local.held if held else local.own)
        if index is None or not len(index):
            return Message(RecordDict({"metrics": MetricRecord({SAMPLES: 0})}), reply_to=message)
        arrays = arrays_of(message)
        with tracing.together():
            w = Template.of(arrays, runner.layout).pack(arrays).float()
            found = runner.evaluate(w, index, own_of(carried(context)))
        numbers = {name: each.double().numpy() for name, each in found.items()}
        metrics: dict[str, Any] = {SAMPLES: len(index), "loss": float(numbers["loss"].mean())}
        for judge in runner.objective.judges:
            value = float(judge.value(numbers[judge.name]))
            metrics |= {judge.name: value} if math.isfinite(value) else {}
        answer = RecordDict({"metrics": MetricRecord(metrics)})
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        told = classes.counted(runner, numbers, local.y[index]) if held and config.get(classes.ASKED) is True else None
        if told is not None:
            answer[classes.TOLD] = told
        return Message(answer, reply_to=message)

    app.train()(train)
    app.evaluate()(lambda message, context: judge(message, context, held=True))
    app.query("flrce_loss")(lambda message, context: judge(message, context, held=False))

    def who(context: Context) -> tuple[str, int]:
        local = load(context)
        return local.name or name_for(context), len(local.own)

    return introduce(app, who, compresses=True, parts=True)


def judged_and_trained(runner: Runner, local: Local, w: Tensor, task: Task, carry: dict[str, Tensor]) -> Reply:
    """The reply. A client that holds the whole model judges it before it trains, where its task asks for that."""
    judged, held = None, local.held
    if task.judge and held is not None and len(held) and task.part.rate == 1:
        head = runner.objective.judges[0]
        numbers = runner.evaluate(w.float(), held, own_of(carry))[head.name]
        value = float(head.value(numbers.double().numpy()))
        judged = Judged(value, len(held)) if math.isfinite(value) else None
    return replace(runner.train(w.float(), task, local.own, carry), judged=judged)


def introduce(
    app: ClientApp,
    who: Callable[[Context], tuple[str, int]] | None = None,
    compresses: bool | None = None,
    parts: bool = False,
) -> ClientApp:
    """Let an app tell its stable name, its samples (0: unknown) and its skills.

    Whether it `compresses` is what the app-wide mod below adds by itself; say so where the mod is on `train` alone.
    """

    def hello(message: Message, context: Context) -> Message:
        name, n = who(context) if who else (name_for(context), 0)
        entries: dict[str, Any] = {"client": name, "n": n, "parts": parts}
        entries |= {} if compresses is None else {"compresses": compresses}
        return Message(
            RecordDict({"hello": ConfigRecord({PREFIX + key: value for key, value in entries.items()})}),
            reply_to=message,
        )

    app.query("flrce")(hello)
    return app


def compressing(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A Flower mod: the app's own training, in any framework, then the reply encoded as its task says."""
    if message.metadata.message_type == HELLO:
        return _compresses(call_next(message, context))
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    if message.metadata.message_type != "train" or PREFIX + "t" not in config:
        return call_next(message, context)
    before, task = arrays_of(message), read_task(config, {})
    reply, cost = measured(lambda: call_next(message, context))
    if reply.has_error() or len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
        return reply
    template = Template.of(before)
    w = template.pack(before)
    u = template.pack(next(iter(reply.content.array_records.values())), minus=w)
    rng = stream(task.seed, "encode", task.t, task.client)
    payload, carry = task.compressor.encode(u, template.names, rng, carried(context, task.t))
    carry_on(context, task.t, carry)
    metrics = dict(next(iter(reply.content.metric_records.values())))
    counted = SAMPLES in metrics  # the server names it where it is missing
    n, loss = metrics.pop(SAMPLES, 0), metrics.get("train_loss", metrics.get("loss", 0.0))
    base = fingerprint(w) if exact(message) else ""
    answer = Reply(task.client, task.t, payload, n=n, loss=loss, base=base)  # type: ignore[arg-type]
    content = write_reply(answer, cost.seconds, cost.joules, {**reported(), **metrics})
    if not counted:
        del content.metric_records["metrics"][SAMPLES]
    return Message(content, reply_to=message)


def _compresses(hello: Message) -> Message:
    """An app's introduction, with what the mod adds to its skills."""
    told = ConfigRecord() if hello.has_error() else hello.content.config_records.get("hello", ConfigRecord())
    if PREFIX + "client" in told and PREFIX + "compresses" not in told:
        told[PREFIX + "compresses"] = True
    return hello
