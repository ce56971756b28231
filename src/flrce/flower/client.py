"""The client's side on Flower: a ClientApp that does any recipe's tasks, from its samples and
network to the reply.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.core.payloads import fingerprint_model
from flrce.core.pieces import NoCompression
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import ClientEvaluation, LocalWork, Payload, Reply, Task
from flrce.devices.energy import measure_cost
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate, read_tensors
from flrce.flower.metrics import BY_CLASS_RECORD, BY_CLASS_REQUEST_KEY, count_by_class
from flrce.flower.wire import KEY_PREFIX, SAMPLES_KEY, read_task, write_reply
from flrce.methods.own_pieces import register_installed_pieces
from flrce.models.flat import make_layout, pack_model
from flrce.rng import make_stream
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner, find_personal_state
from flrce.training.cpu import explain_no_kernel
from flrce.training.objectives import Classification, Objective
from flrce.training.update_chain import SGD, UpdateChain
from flrce_client import flower as client_side
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

IndexArray = NDArray[np.int64]

__all__ = ["Local", "client_app", "compress_with_torch", "get_client_name", "introduce"]


@dataclass(frozen=True, eq=False)
class Local:
    """What a client trains with: a network, a pool of samples x (n, ...) and labels y, and which of
    them are its own.

    `train` and `held` index the pool (by default all of it is trained on and none held back); a
    sample reaches the network as x * scale + shift. `name` is the client's stable name; by default
    what `get_client_name` finds.
    """

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Any = None  # positions, as an array from here on: (n,) int64
    held: Any = None
    scale: float = 1.0
    shift: float = 0.0
    name: str | None = None
    objective: Objective = Classification()
    kept: tuple[str, ...] = ()  # patterns of parameters that stay with this client
    # "auto" trains with fused kernels where the network and the machine have them
    kernel: str = "torch"

    def __post_init__(self) -> None:
        for name in ("train", "held"):  # a range, a list or a tensor will do
            index = getattr(self, name)
            if index is not None:
                object.__setattr__(self, name, to_index_array(name, index))

    @property
    def train_index(self) -> IndexArray:
        return np.arange(len(self.y)) if self.train is None else self.train


def to_index_array(name: str, index: Any) -> IndexArray:
    """Positions of samples as an array; a mask of booleans becomes the positions that are True."""
    values = np.asarray(index)
    if values.dtype == bool:
        values = np.flatnonzero(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise BadInput(
            f"Local({name}=...) holds {values.dtype} of shape {values.shape}; use positions of"
            " samples, such as range(100) or an array of integers"
        )
    return values.astype(np.int64, copy=False)


class TracingLock:
    """torch.fx patches every network's call while it traces one: in one process, it has to have it
    to itself.
    """

    def __init__(self) -> None:
        self.change, self.working = threading.Condition(), 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray hands copies of an app to its processes: each has its own turns
        return (TracingLock, ())

    @contextmanager
    def hold_shared(self) -> Iterator[None]:
        with self.change:
            self.working += 1
        try:
            yield
        finally:
            with self.change:
                self.working -= 1
                self.change.notify_all()

    @contextmanager
    def hold_exclusive(self) -> Iterator[None]:
        with self.change:  # held while it lasts, so nobody starts
            self.change.wait_for(lambda: not self.working)
            yield


class RunnerCache:
    """A Runner per thread and pool of samples: its network is bound to one client's work at a
    time.
    """

    def __init__(self, tracing: TracingLock, most: int = 4) -> None:
        self.by_thread, self.tracing, self.most = threading.local(), tracing, most

    def __reduce__(self) -> tuple[Any, ...]:
        return RunnerCache, (self.tracing, self.most)

    def __call__(self, local: Local) -> ClientRunner:
        kept: dict[int, tuple[Tensor, ClientRunner]] = self.by_thread.__dict__.setdefault(
            "kept", {}
        )
        if id(local.x) not in kept:
            net, shape = copy.deepcopy(local.net), tuple(local.x.shape[1:])
            with self.tracing.hold_exclusive():
                native = local.kernel != "torch" and not explain_no_kernel(net, shape)
            samples = Samples(local.x, local.y, local.scale, local.shift)
            runner = ClientRunner(net, shape, samples, native, local.objective, local.kept)
            runner.compiled = local.kernel != "torch"
            kept[id(local.x)] = (local.x, runner)
            for old in list(kept)[: -self.most]:
                del kept[old]
        return kept[id(local.x)][1]


def has_exact_model(message: Message) -> bool:
    """Whether what was sent is the server's w, all of it and unrounded."""
    arrays = client_side.get_model_arrays(message)
    return set(arrays) != {"held"} and not {array.dtype for array in arrays.values()} & {
        "float16",
        "float64",
    }


def read_message(
    message: Message, context: Context, runner: ClientRunner, tracing: TracingLock
) -> tuple[Tensor, Task, ArrayTemplate | None]:
    """(w, the task, the template of a reply to a strategy that is not ours)."""
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    arrays = client_side.get_model_arrays(message)
    if KEY_PREFIX + "t" not in config:
        template = ArrayTemplate.from_arrays(arrays, runner.layout)
        return template.pack(arrays), _build_plain_task(config, context), template
    cap = count_value_bytes(runner.layout.size, torch.float64) + 2**16
    extra = message.content.array_records.get("tensors", ArrayRecord())
    task = read_task(config, read_tensors(extra, cap))
    if set(arrays) != {"held"}:
        return ArrayTemplate.from_arrays(arrays, runner.layout).pack(arrays), task, None
    with tracing.hold_exclusive():
        held = runner.get_part(task).held
    w = torch.zeros(runner.layout.size)
    w[held if held is not None else slice(None)] = read_tensors(arrays, cap)["held"]
    return w, task, None


def _build_plain_task(config: Mapping[str, Any], context: Context) -> Task:
    """What to do under a strategy that sends no task: epochs, batch and lr of its config, else of
    the run's.
    """
    settings = {**context.run_config, **config}
    work = LocalWork(**{key: settings[key] for key in ("epochs", "batch") if key in settings})
    links: list[Any] = [SGD(float(settings.get("lr", 0.1)))]
    t = int(settings.get("server-round", 0))
    return Task(
        client_side.get_client_name(context),
        0,
        t,
        int(settings.get("seed", 0)),
        work,
        update=UpdateChain(tuple(links)),
        compressor=NoCompression(),
    )


def build_plain_reply(template: ArrayTemplate, w: Tensor, reply: Reply) -> RecordDict:
    payload = reply.payload or Payload({})
    metrics = MetricRecord({SAMPLES_KEY: reply.n, "train_loss": reply.loss})
    return RecordDict({"arrays": template.unpack(w + payload.buffers["u"]), "metrics": metrics})


def load_client_state(context: Context, t: int | None = None) -> dict[str, Tensor]:
    """What this client kept before round t, or last: a round that is run again starts from the
    same.
    """
    kept = client_side.load_client_state(context, t)
    return {name: torch.from_numpy(values.copy()) for name, values in kept.items()}


def save_client_state(context: Context, t: int, client_state: Mapping[str, Tensor]) -> None:
    arrays = {name: x.detach().cpu().contiguous().numpy() for name, x in client_state.items()}
    client_side.save_client_state(context, t, arrays)


class MessageHandler:
    """Does what messages ask of a client, with the samples and the network that `load` returns."""

    def __init__(self, load: Callable[[Context], Local]) -> None:
        self.load, self.tracing = load, TracingLock()
        self.runners = RunnerCache(self.tracing)

    def train(self, message: Message, context: Context) -> Message:
        """Any task, or the epochs, batch and rate of a strategy that sends no task."""
        if not restore_model(message, context):
            return Message(write_lost_reply(get_config(message)), reply_to=message)
        local = self.load(context)
        runner = self.runners(local)
        w, task, template = read_message(message, context, runner, self.tracing)
        traces = bool(task.part.first) or (
            task.part.rate < 1 and task.part.rate not in runner.slices
        )
        with self.tracing.hold_exclusive() if traces else self.tracing.hold_shared():
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

    def evaluate(self, message: Message, context: Context) -> Message:
        """Metrics of the model on the client's hold-out, by class where the message asks for it."""
        local = self.load(context)
        config = next(iter(message.content.config_records.values()), ConfigRecord())
        answer, numbers = self._evaluate_samples(message, context, local, local.held)
        if numbers and config.get(BY_CLASS_REQUEST_KEY) is True:
            by_class = count_by_class(self.runners(local), numbers, local.y[local.held])
            if by_class is not None:
                answer[BY_CLASS_RECORD] = by_class
        return Message(answer, reply_to=message)

    def report_loss(self, message: Message, context: Context) -> Message:
        """Metrics of the model on the samples that the client trains with."""
        local = self.load(context)
        answer, _ = self._evaluate_samples(message, context, local, local.train_index)
        return Message(answer, reply_to=message)

    def identify_client(self, context: Context) -> tuple[str, int]:
        """(name, number of training samples)."""
        local = self.load(context)
        return local.name or get_client_name(context), len(local.train_index)

    def get_initial_model(self, context: Context) -> dict[str, NDArray[Any]]:
        """The network as `load` returns it: what the server starts from, if both made it alike."""
        local = self.load(context)
        layout = make_layout(local.net, local.kept)
        tensors = layout.view_tensors(pack_model(local.net, layout))
        return {name: values.numpy() for name, values in tensors.items()}

    def _evaluate_samples(
        self, message: Message, context: Context, local: Local, index: IndexArray | None
    ) -> tuple[RecordDict, dict[str, NDArray[np.float64]]]:
        """(metrics over these samples, each metric's number of every sample)."""
        if index is None or not len(index):
            return RecordDict({"metrics": MetricRecord({SAMPLES_KEY: 0})}), {}
        runner, arrays = self.runners(local), get_model_arrays(message)
        with self.tracing.hold_shared():
            w = ArrayTemplate.from_arrays(arrays, runner.layout).pack(arrays).float()
            scores = runner.evaluate(w, index, find_personal_state(load_client_state(context)))
        numbers = {name: values.double().numpy() for name, values in scores.items()}
        metrics: dict[str, Any] = {SAMPLES_KEY: len(index), "loss": float(numbers["loss"].mean())}
        for metric in runner.objective.evaluation_metrics:
            value = float(metric.value(numbers[metric.name]))
            metrics |= {metric.name: value} if math.isfinite(value) else {}
        return RecordDict({"metrics": MetricRecord(metrics)}), numbers


def client_app(load: Callable[[Context], Local], meter: JoulesReader | None = None) -> ClientApp:
    """A ClientApp that does whatever task it is sent: epochs, proximal term, sub-models, freezing,
    any compressor. Joules are those of `meter`, a function that returns the joules so far; without
    it, of what FLRCE_METER names, or of the machine's counters.
    """
    register_installed_pieces()
    if meter is not None:
        use_meter(meter)
    app, handler = ClientApp(), MessageHandler(load)
    app.train()(handler.train)
    app.evaluate()(handler.evaluate)
    app.query("flrce_loss")(handler.report_loss)
    return introduce(
        app,
        handler.identify_client,
        compresses=True,
        parts=True,
        differences=True,
        initial=handler.get_initial_model,
    )


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
