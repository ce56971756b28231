"""What a round will cost, before it is begun: budgets are asked with this."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from flrce.core.cost_table import find_slowest
from flrce.core.engine import Engine
from flrce.core.fleet_state import estimate_carbon
from flrce.core.payload_bytes import LOSS_BYTES, count_bytes
from flrce.core.pieces import Recipe
from flrce.core.types import ClientCost, State, Task
from flrce.core.upload_estimates import expect_uploads


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
    """Refused where the recipe's budget does not pay for these tasks and for asking these clients
    for their losses, with so many bytes of download each.

    With `some`, only P of the tasks will be run, and it is not known which: then the dearest must
    be affordable.
    """
    if not recipe.stop.checks_costs:
        return
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
