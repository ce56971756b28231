"""A small round on a device and the same on the host, before a large one relies on it.

Pieces say themselves that they take updates wherever they lie; whether they do is tried once, as a
run begins.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from flrce.core import device_transfer, loop
from flrce.core.pieces import Recipe
from flrce.core.types import (
    ClientStates,
    Payload,
    PendingTask,
    RepliesWithTable,
    Reply,
    State,
    Task,
)
from flrce.errors import format_one_line
from flrce.rng import make_stream
from flrce.simulation.stub_engine import StubEngine

D, TRAINED = 6000, 5990  # floats: more than the usual sketch keeps
ROUNDS, SPARE = 2, 3  # of clients, so many more than are asked
RELATIVE_TOLERANCE = 1e-4  # of the model's length; wrong sums are further away


class SmallFleet(StubEngine):
    """Clients with made-up updates, which lie on a device where one is named."""

    trainable = TRAINED
    device_lock = nullcontext()

    def __init__(self, many: int, device: str = "") -> None:
        self.many, self.device, self.updates_on_device = many, device, bool(device)

    def clients(self, t: int) -> Sequence[str]:
        return [f"c{i}" for i in range(self.many)]

    def get_task_layout(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        return None, (("w", TRAINED), ("running_var", D - TRAINED))

    def reply(self, task: Task, w: Tensor) -> Reply:
        rng = make_stream(0, "tryout", task.t, task.client)
        u = 0.1 * torch.from_numpy(rng.normal(size=D)).float().abs() + 0.01 * task.k
        return Reply(
            task.client, task.t, Payload({"u": u}), n=10 + task.k, loss=1.0, loss_square=1.0
        )

    def train(
        self, pending: Sequence[PendingTask], carry: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        tasks = [one.task for one in pending]
        replies = [self.reply(one.task, one.w) for one in pending]
        if not self.device:
            return replies
        there = device_transfer.to_device(pending[0].w, self.device)
        order = sorted(range(len(tasks)), key=lambda i: tasks[i].k)
        table = there.new_empty(len(tasks), D)
        for row, i in zip(table, order, strict=True):
            payload = replies[i].payload
            assert payload is not None
            row.copy_(payload.buffers["u"])
            replies[i] = Reply(
                replies[i].client,
                replies[i].t,
                Payload({"u": row}),
                n=replies[i].n,
                loss=1.0,
                loss_square=1.0,
            )
        return RepliesWithTable(replies, table, there)

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:
        """Nothing is kept."""


def find_device_mismatch(recipe: Recipe, device: str) -> str:
    """Why this recipe's rounds do not go on the device after all; "" where they come to what they
    do on the host.
    """
    expected = _final_model(recipe, "")
    try:
        found = _final_model(recipe, device)
    except Exception as why:  # a piece, perhaps a user's, that does not do what it says
        return f"tried on a small model: {type(why).__name__}: {format_one_line(why, 120)}"
    away = float((found.w.double() - expected.w.double()).norm() / expected.w.double().norm())
    same = [h.chosen for h in found.history] == [h.chosen for h in expected.history]
    if not (away < RELATIVE_TOLERANCE and same):  # a NaN is not near either
        return (
            f"tried on a small model: {away:.1g} of its length away from what the host makes of it"
        )
    return ""


def _final_model(recipe: Recipe, device: str) -> State:
    engine, w = SmallFleet(recipe.P + SPARE, device), torch.ones(D)
    done = list(
        loop.rounds(recipe, engine, loop.make_initial_state(recipe, engine, w), ROUNDS, seed=0)
    )
    return done[-1].state
