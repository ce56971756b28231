"""What a client makes of a message: the model, its task, and what it kept of earlier rounds."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from flrce.flower.arrays import Template, record, tensors
from flrce.flower.local import Tracing, name_for
from flrce.flower.wire import PREFIX, SAMPLES, read_task
from flrce.local.client import Runner
from flrce.local.updates import SGD, Chain
from flrce.pieces import Dense
from flrce.types import Payload, Reply, Task, Work

CARRY = "flrce-carry-"  # record in Context.state: what a compressor keeps, by round


def arrays_of(message: Message) -> ArrayRecord:
    found = message.content.array_records
    return found["arrays"] if "arrays" in found else next(iter(found.values()))


def exact(message: Message) -> bool:
    """Whether what was sent is the server's w, all of it and unrounded."""
    arrays = arrays_of(message)
    return set(arrays) != {"held"} and not {array.dtype for array in arrays.values()} & {"float16", "float64"}


def received(
    message: Message, context: Context, runner: Runner, tracing: Tracing
) -> tuple[Tensor, Task, Template | None]:
    """(w, the task, the template of a reply to a strategy that is not ours)."""
    config = next(iter(message.content.config_records.values()), ConfigRecord())
    arrays = arrays_of(message)
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


def plain_reply(template: Template, w: Tensor, reply: Reply) -> RecordDict:
    payload = reply.payload or Payload({})
    metrics = MetricRecord({SAMPLES: reply.n, "train_loss": reply.loss})
    return RecordDict({"arrays": template.unpack(w + payload.buffers["u"]), "metrics": metrics})


def carried(context: Context, t: int | None = None) -> dict[str, Tensor]:
    """What this client kept before round t, or last: a round that is run again starts from the same."""
    rounds = [int(key.removeprefix(CARRY)) for key in context.state if key.startswith(CARRY)]
    before = [r for r in rounds if t is None or r < t]
    if not before:
        return {}
    kept = context.state[f"{CARRY}{max(before)}"]
    assert isinstance(kept, ArrayRecord)
    return tensors(kept, 2**40)


def carry_on(context: Context, t: int, carry: Mapping[str, Tensor]) -> None:
    if not carry:
        return
    context.state[f"{CARRY}{t}"] = record(carry)
    rounds = sorted((int(key.removeprefix(CARRY)) for key in context.state if key.startswith(CARRY)), reverse=True)
    for old in rounds[3:]:  # the server may die with one round sent and the one before not yet committed
        del context.state[f"{CARRY}{old}"]
