"""What a client makes of a message: the model, its task, and what it kept of earlier rounds."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from flrce.core.payload_bytes import count_value_bytes
from flrce.core.pieces import NoCompression
from flrce.core.types import LocalWork, Payload, Reply, Task
from flrce.flower.arrays import ArrayTemplate, read_tensors
from flrce.flower.local_training import TracingLock
from flrce.flower.wire import KEY_PREFIX, SAMPLES_KEY, read_task
from flrce.training.client import ClientRunner
from flrce.training.update_chain import SGD, UpdateChain
from flrce_client import flower as client_side


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
