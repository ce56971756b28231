"""What a round will cost, before it is begun: bytes of replies, and the costs that budgets are
asked with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from flrce.core.cost_table import find_slowest
from flrce.core.engine import Engine, estimate_carbon
from flrce.core.payloads import make_encoding_stream
from flrce.core.pieces import Recipe
from flrce.core.tensor_bytes import LOSS_BYTES, count_bytes, count_value_bytes
from flrce.core.types import ClientCost, RoundRecord, State, Task
from flrce.errors import BadInput
from flrce.rng import make_stream


class RoundRefused(Exception):
    """A round that may not be started: str(self) says why."""


def check_budget(
    recipe: Recipe,
    engine: Engine,
    state: State,
    tasks: Sequence[Task],
    asked: Sequence[tuple[str, int]],
    some: bool = False,
) -> None:
    """Refused where a budget of the recipe (`stop.checks_costs`) does not pay for these tasks and
    for asking these clients for their losses, with so many bytes of download each.

    With `some`, only P of the tasks will be run, and it is not known which: then the dearest must
    be affordable.
    """
    expected = engine.estimate_round(expect_uploads(engine, state, tasks))
    estimates = estimate_carbon(engine, state, tasks, expected)
    read = engine.estimate_evaluation(state.t + 1) if recipe.pays_for_evaluations else ()
    evaluations = [spent for _, spent in read]
    if some:
        inquiries = bound_inquiry_costs(engine, asked, recipe.P)
        costs = combine_estimates(bound_task_costs(estimates, recipe.P), inquiries, evaluations)
    else:
        questions = estimate_inquiries(engine, asked, {task.client for task in tasks})
        costs = combine_estimates(estimates, [spent for _, spent in questions], evaluations)
    why = recipe.stop.check_next_round(state.history, costs)
    if why:
        raise RoundRefused(why)


def count_model_bytes(engine: Engine, w: Tensor) -> int:
    """Bytes of w as this engine sends it."""
    return count_bytes(w) if engine.model_bytes is None else engine.model_bytes


def estimate_inquiries(
    engine: Engine, asked: Sequence[tuple[str, int]], chosen: set[str]
) -> list[tuple[str, ClientCost]]:
    """Asking clients for their loss: a download and 4 bytes back, unless one trains and gets the
    model anyway.
    """
    return [
        (client, _estimate_inquiry(engine, client, 0 if client in chosen else down))
        for client, down in asked
    ]


def bound_inquiry_costs(
    engine: Engine, asked: Sequence[tuple[str, int]], P: int
) -> list[ClientCost]:
    """The same before it is known which P of them train: then those whose downloads cost least."""
    both = [
        (_estimate_inquiry(engine, client, down), _estimate_inquiry(engine, client, 0))
        for client, down in asked
    ]
    both.sort(key=lambda pair: pair[0].joules - pair[1].joules)
    return [spared for _, spared in both[:P]] + [full for full, _ in both[P:]]


def _estimate_inquiry(engine: Engine, client: str, down: int) -> ClientCost:
    spent = engine.estimate_inquiry(client, down)
    return replace(spent, framing=LOSS_BYTES) if down else spent


def combine_estimates(
    tasks: Sequence[ClientCost], asked: Sequence[ClientCost], evaluations: Sequence[ClientCost] = ()
) -> list[ClientCost]:
    """A round's estimates, client by client: being asked for a loss comes before training,
    evaluating the model after it, and nobody idles in either.
    """
    beside = find_slowest(asked) + find_slowest(evaluations)
    waits = [replace(spent, transfer_seconds=spent.transfer_seconds + beside) for spent in tasks]
    return [*waits, *(replace(spent, idle_watts=0.0) for spent in (*asked, *evaluations))]


def bound_task_costs(estimates: Sequence[ClientCost], P: int) -> list[ClientCost]:
    """What the dearest P of these clients could cost at most, where it is not known which P will
    train.
    """
    if not estimates:
        return []
    down = sorted((spent.bytes_down for spent in estimates), reverse=True)
    up = sorted((spent.bytes_up for spent in estimates), reverse=True)
    joules = sorted((spent.joules for spent in estimates), reverse=True)
    soonest = sorted(spent.seconds for spent in estimates)
    # the round lasts as long as the slowest, and whoever is done soon idles longest
    seconds = [soonest[-1], *soonest]
    watts = max(spent.idle_watts for spent in estimates)
    other = {
        name: sorted((spent.other.get(name, 0.0) for spent in estimates), reverse=True)
        for name in dict.fromkeys(name for spent in estimates for name in spent.other)
    }
    return [
        ClientCost(
            down[i],
            up[i],
            joules=joules[i],
            compute_seconds=seconds[i],
            idle_watts=watts,
            other={name: amounts[i] for name, amounts in other.items()},
        )
        for i in range(min(P, len(estimates)))
    ]


TensorLayout = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class ExpectedSize:
    """In a task's compressor's place: replies weigh this share of dense ones."""

    share: float
    is_dense: ClassVar[bool] = False
    instruction_bytes: ClassVar[int] = 0

    def estimate_bytes(self, layout: TensorLayout, rng: Any) -> int:
        return round(self.share * _dense_bytes(layout))

    def count_coded_floats(self, layout: TensorLayout) -> int:
        return sum(size for _, size in layout)


def estimate_upload_bytes(
    task: Task, layout: TensorLayout, trainable: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of a task's reply: its update as its compressor sends it, dense where that is unknown,
    and its extras.
    """
    payload_bytes = estimate_payload_bytes(task, layout)
    return (
        _dense_bytes(layout, dtype) if payload_bytes is None else payload_bytes
    ) + _extras_bytes(task, trainable)


def estimate_payload_bytes(task: Task, layout: TensorLayout) -> int | None:
    """Bytes of the encoded update as its compressor knows them; None: it does not."""
    compressor = task.compressor
    if compressor is None or compressor.is_dense:
        return None
    size: Any = compressor.estimate_bytes(layout, make_encoding_stream(task))
    if size is not None and (type(size) is bool or not isinstance(size, Integral) or int(size) < 0):
        name = type(compressor).__name__
        raise BadInput(
            f"{name}.estimate_bytes returned {size!r:.60}; return a whole number of bytes, or None"
        )
    return None if size is None else int(size)


def expect_uploads(engine: Engine, state: State, tasks: Sequence[Task]) -> list[Task]:
    """Tasks whose upload an engine can estimate: compressors that do not know their bytes stand for
    what they sent.
    """
    unknown = [task for task in tasks if not _is_known(engine, task)]
    if not unknown:
        return list(tasks)
    share = _learned_share(state, unknown[0], engine.trainable)
    if share is None:
        share = _probed_share(unknown[0], engine.get_task_layout(unknown[0])[1])
    if share is None:
        return list(tasks)
    stand_in, replaced = ExpectedSize(share), {id(task) for task in unknown}
    return [replace(task, compressor=stand_in) if id(task) in replaced else task for task in tasks]


def _is_known(engine: Engine, task: Task) -> bool:
    if task.compressor is None or task.compressor.is_dense:
        return True
    return estimate_payload_bytes(task, engine.get_task_layout(task)[1]) is not None


def _learned_share(state: State, task: Task, trainable: int) -> float | None:
    """Bytes of the last committed round's replies against those of dense ones; None before there is
    one.
    """
    last: RoundRecord | None = next(
        (h for h in reversed(state.history) if h.outcome == "committed" and h.replied), None
    )
    if last is None:
        return None
    payloads = last.costs.bytes_up / len(last.replied) - _extras_bytes(task, trainable)
    return max(payloads, 0.0) / max(count_value_bytes(len(state.w)), 1)


def _probed_share(task: Task, layout: TensorLayout) -> float | None:
    """The same of an update of random numbers; None where the compressor cannot encode one."""
    size = sum(count for _, count in layout)
    u: Tensor = torch.from_numpy(
        make_stream(task.seed, "probe", task.t).standard_normal(size)
    ).float()
    try:
        payload, _ = task.compressor.encode(u, layout, make_encoding_stream(task), {})
        return float(payload.nbytes) / max(_dense_bytes(layout), 1)
    except (
        Exception
    ):  # a user's compressor that needs more than a first update: its upload counts as dense
        return None


def _dense_bytes(layout: TensorLayout, dtype: torch.dtype = torch.float32) -> int:
    return count_value_bytes(sum(size for _, size in layout), dtype)


def _extras_bytes(task: Task, trainable: int) -> int:
    """What the links of a task send beside its update, as float32."""
    sizes: dict[str, int] = (
        task.update.list_extra_sizes(trainable) if task.update is not None else {}
    )
    return count_value_bytes(sum(sizes.values()))
