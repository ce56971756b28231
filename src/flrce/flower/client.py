"""The client's side on Flower: a ClientApp that does any recipe's tasks, or two lines for one that exists already."""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.fleet.energy import Meter, Reading
from flrce.flower.arrays import Template, record, tensors
from flrce.flower.nodes import HELLO
from flrce.flower.wire import PREFIX, SAMPLES, read_task, write_reply
from flrce.local.client import Runner, own_of
from flrce.local.native import kernel
from flrce.local.objective import Classification, Objective
from flrce.local.updates import SGD, Chain
from flrce.pieces import Dense
from flrce.rng import stream
from flrce.round.payloads import fingerprint
from flrce.types import Judged, Payload, Reply, Task, Work

Index = NDArray[np.int64]
T = TypeVar("T")
CARRY = "flrce-carry-"  # record in Context.state: what a compressor keeps, by round


@dataclass(frozen=True, eq=False)
class Local:
    """What a client trains with: a network, a pool of samples x (n, ...) and labels y, and which of them are its own.

    `train` and `held` index the pool (by default all of it is trained on and none held back); a sample reaches the
    network as x * scale + shift. `name` is the client's stable name; by default what `name_for` finds.
    """

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Index | None = None
    held: Index | None = None
    scale: float = 1.0
    shift: float = 0.0
    name: str | None = None
    objective: Objective = Classification()
    kept: tuple[str, ...] = ()  # patterns of parameters that stay with this client
    kernel: str = "torch"  # "auto" trains with fused kernels where the network and the machine have them

    @property
    def own(self) -> Index:
        return np.arange(len(self.y)) if self.train is None else self.train


def name_for(context: Context) -> str:
    """The node's stable name: client-id or partition-id of its --node-config, else its node id."""
    config = context.node_config
    return str(config.get("client-id", config.get("partition-id", f"node-{context.node_id}")))


def client_app(load: Callable[[Context], Local]) -> ClientApp:
    """A ClientApp that does whatever task it is sent: epochs, proximal term, sub-models, freezing, any compressor."""
    app = ClientApp()
    tracing = _Tracing()
    runners = _Runners(tracing)

    def train(message: Message, context: Context) -> Message:
        local = load(context)
        runner = runners(local)
        w, task, template = _received(message, context, runner, tracing)
        traces = bool(task.part.first) or (task.part.rate < 1 and task.part.rate not in runner.slices)
        with tracing.alone() if traces else tracing.together():
            reply, cost = _measured(lambda: _judged_and_trained(runner, local, w, task, _carried(context, task.t)))
        if reply.error:
            raise ValueError(reply.error)
        _carry(context, task.t, reply.carry)
        if template is not None:
            return Message(_plain(template, w, reply), reply_to=message)
        reply = replace(reply, base=fingerprint(w) if _exact(message) else "")
        return Message(write_reply(reply, cost.seconds, cost.joules), reply_to=message)

    def judge(message: Message, context: Context, held: bool) -> Message:
        local = load(context)
        runner, index = runners(local), (local.held if held else local.own)
        if index is None or not len(index):
            return Message(RecordDict({"metrics": MetricRecord({SAMPLES: 0})}), reply_to=message)
        arrays = _arrays(message)
        with tracing.together():
            w = Template.of(arrays, runner.layout).pack(arrays).float()
            found = runner.evaluate(w, index, own_of(_carried(context)))
        numbers = {name: each.double().numpy() for name, each in found.items()}
        metrics: dict[str, Any] = {SAMPLES: len(index), "loss": float(numbers["loss"].mean())}
        for judge in runner.objective.judges:
            value = float(judge.value(numbers[judge.name]))
            metrics |= {judge.name: value} if math.isfinite(value) else {}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    app.train()(train)
    app.evaluate()(lambda message, context: judge(message, context, held=True))
    app.query("flrce_loss")(lambda message, context: judge(message, context, held=False))

    def who(context: Context) -> tuple[str, int]:
        local = load(context)
        return local.name or name_for(context), len(local.own)

    return introduce(app, who, compresses=True, parts=True)


def _judged_and_trained(runner: Runner, local: Local, w: Tensor, task: Task, carry: dict[str, Tensor]) -> Reply:
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
    before, task = _arrays(message), read_task(config, {})
    reply, cost = _measured(lambda: call_next(message, context))
    if reply.has_error() or len(reply.content.array_records) != 1 or len(reply.content.metric_records) != 1:
        return reply
    template = Template.of(before)
    w = template.pack(before)
    u = template.pack(next(iter(reply.content.array_records.values())), minus=w)
    rng = stream(task.seed, "encode", task.t, task.client)
    payload, carry = task.compressor.encode(u, template.names, rng, _carried(context, task.t))
    _carry(context, task.t, carry)
    metrics = dict(next(iter(reply.content.metric_records.values())))
    n, loss = metrics.pop(SAMPLES, 0), metrics.get("train_loss", metrics.get("loss", 0.0))
    base = fingerprint(w) if _exact(message) else ""
    answer = Reply(task.client, task.t, payload, n=n, loss=loss, base=base)  # type: ignore[arg-type]
    return Message(write_reply(answer, cost.seconds, cost.joules, metrics), reply_to=message)


def _compresses(hello: Message) -> Message:
    """An app's introduction, with what the mod adds to its skills."""
    told = ConfigRecord() if hello.has_error() else hello.content.config_records.get("hello", ConfigRecord())
    if PREFIX + "client" in told and PREFIX + "compresses" not in told:
        told[PREFIX + "compresses"] = True
    return hello


_measuring = threading.Lock()


@lru_cache(maxsize=1)
def _meter() -> Meter:
    return Meter()


def _measured(work: Callable[[], T]) -> tuple[T, Reading]:
    """The work's result and cost; joules only where no other client works on this machine at the same time."""
    if not _measuring.acquire(blocking=False):
        start = time.monotonic()
        return work(), Reading(time.monotonic() - start)
    try:
        return _meter().measure(work)
    finally:
        _measuring.release()


class _Tracing:
    """torch.fx patches every network's call while it traces one: in one process, it has to have it to itself."""

    def __init__(self) -> None:
        self.change, self.working = threading.Condition(), 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _Tracing, ()  # Ray hands copies of an app to its processes: each has its own turns

    @contextmanager
    def together(self) -> Iterator[None]:
        with self.change:
            self.working += 1
        try:
            yield
        finally:
            with self.change:
                self.working -= 1
                self.change.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.change:  # held while it lasts, so nobody starts
            self.change.wait_for(lambda: not self.working)
            yield


class _Runners:
    """A Runner per thread and pool of samples: its network is bound to one client's work at a time."""

    def __init__(self, tracing: _Tracing, most: int = 4) -> None:
        self.here, self.tracing, self.most = threading.local(), tracing, most

    def __reduce__(self) -> tuple[Any, ...]:
        return _Runners, (self.tracing, self.most)

    def __call__(self, local: Local) -> Runner:
        kept: dict[int, tuple[Tensor, Runner]] = self.here.__dict__.setdefault("kept", {})
        if id(local.x) not in kept:
            net, shape = copy.deepcopy(local.net), tuple(local.x.shape[1:])
            with self.tracing.alone():
                native = local.kernel != "torch" and not isinstance(kernel(net, shape), str)
            runner = Runner(net, shape, local.x, local.y, local.scale, local.shift, native, local.objective, local.kept)
            kept[id(local.x)] = (local.x, runner)
            for old in list(kept)[: -self.most]:
                del kept[old]
        return kept[id(local.x)][1]


def _arrays(message: Message) -> ArrayRecord:
    found = message.content.array_records
    return found["arrays"] if "arrays" in found else next(iter(found.values()))


def _exact(message: Message) -> bool:
    """Whether what was sent is the server's w, all of it and unrounded."""
    arrays = _arrays(message)
    return set(arrays) != {"held"} and not {array.dtype for array in arrays.values()} & {"float16", "float64"}


def _received(
    message: Message, context: Context, runner: Runner, tracing: _Tracing
) -> tuple[Tensor, Task, Template | None]:
    """(w, the task, the template of a reply to a strategy that is not ours)."""
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    arrays = _arrays(message)
    if PREFIX + "t" not in config:
        template = Template.of(arrays, runner.layout)
        return template.pack(arrays), _task(config, context), template
    cap = 8 * runner.layout.size + 2**16
    extra = message.content.array_records.get("tensors", ArrayRecord())
    task = read_task(config, tensors(extra, cap))
    if set(arrays) != {"held"}:
        return Template.of(arrays, runner.layout).pack(arrays), task, None
    with tracing.alone():
        held = runner.part(task).held
    w = torch.zeros(runner.layout.size)
    w[held if held is not None else slice(None)] = tensors(arrays, cap)["held"]
    return w, task, None


def _task(config: Mapping[str, Any], context: Context) -> Task:
    """What to do under a strategy that sends no task: epochs, batch and lr of its config, else of the run's."""
    settings = {**context.run_config, **config}
    work = Work(**{key: settings[key] for key in ("epochs", "batch") if key in settings})
    links: list[Any] = [SGD(float(settings.get("lr", 0.1)))]
    t = int(settings.get("server-round", 0))
    return Task(
        name_for(context), 0, t, int(settings.get("seed", 0)), work, update=Chain(tuple(links)), compressor=Dense()
    )


def _plain(template: Template, w: Tensor, reply: Reply) -> RecordDict:
    payload = reply.payload or Payload({})
    metrics = MetricRecord({SAMPLES: reply.n, "train_loss": reply.loss})
    return RecordDict({"arrays": template.unpack(w + payload.buffers["u"]), "metrics": metrics})


def _carried(context: Context, t: int | None = None) -> dict[str, Tensor]:
    """What this client kept before round t, or last: a round that is run again starts from the same."""
    rounds = [int(key.removeprefix(CARRY)) for key in context.state if key.startswith(CARRY)]
    before = [r for r in rounds if t is None or r < t]
    if not before:
        return {}
    kept = context.state[f"{CARRY}{max(before)}"]
    assert isinstance(kept, ArrayRecord)
    return tensors(kept, 2**40)


def _carry(context: Context, t: int, carry: Mapping[str, Tensor]) -> None:
    if not carry:
        return
    context.state[f"{CARRY}{t}"] = record(carry)
    rounds = sorted((int(key.removeprefix(CARRY)) for key in context.state if key.startswith(CARRY)), reverse=True)
    for old in rounds[3:]:  # the server may die with one round sent and the one before not yet committed
        del context.state[f"{CARRY}{old}"]
