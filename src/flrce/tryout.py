"""A small round on a device and the same on the host, before a large one relies on it.

Pieces say themselves that they take updates wherever they lie; whether they do is tried once, as a run begins.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from flrce import crossing, loop
from flrce.engines.pretend import Pretend
from flrce.errors import brief
from flrce.pieces import Recipe
from flrce.rng import stream
from flrce.types import Carry, Laid, Payload, Reply, State, Task

D, TRAINED = 6000, 5990  # floats: more than the usual sketch keeps
ROUNDS, SPARE = 2, 3  # of clients, so many more than are asked
CLOSE = 1e-4  # of the model's length; wrong sums are further away


class Small(Pretend):
    """Clients with made-up updates, which lie on a device where one is named."""

    trainable = TRAINED
    turn = nullcontext()

    def __init__(self, many: int, device: str = "") -> None:
        self.many, self.device, self.near = many, device, bool(device)

    def clients(self, t: int) -> Sequence[str]:
        return [f"c{i}" for i in range(self.many)]

    def holdings(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        return None, (("w", TRAINED), ("running_var", D - TRAINED))

    def reply(self, task: Task, w: Tensor) -> Reply:
        rng = stream(0, "tryout", task.t, task.client)
        u = 0.1 * torch.from_numpy(rng.normal(size=D)).float().abs() + 0.01 * task.k
        return Reply(task.client, task.t, Payload({"u": u}), n=10 + task.k, loss=1.0, loss_square=1.0)

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Carry, keep: int | None = None) -> Sequence[Reply]:
        replies = [self.reply(task, w) for task in tasks]
        if not self.device:
            return replies
        there = crossing.there(w, self.device)
        order = sorted(range(len(tasks)), key=lambda i: tasks[i].k)
        table = there.new_empty(len(tasks), D)
        for row, i in zip(table, order, strict=True):
            payload = replies[i].payload
            assert payload is not None
            row.copy_(payload.buffers["u"])
            replies[i] = Reply(
                replies[i].client, replies[i].t, Payload({"u": row}), n=replies[i].n, loss=1.0, loss_square=1.0
            )
        return Laid(replies, table, there)

    def hold(self, w: Tensor, there: Tensor) -> None:
        """Nothing is kept."""


def misfit(recipe: Recipe, device: str) -> str:
    """Why this recipe's rounds do not go on the device after all; "" where they come to what they do on the host."""
    expected = _last(recipe, "")
    try:
        found = _last(recipe, device)
    except Exception as why:  # a piece, perhaps a user's, that does not do what it says
        return f"tried on a small model: {type(why).__name__}: {brief(why, 120)}"
    away = float((found.w.double() - expected.w.double()).norm() / expected.w.double().norm())
    same = [h.chosen for h in found.history] == [h.chosen for h in expected.history]
    if not (away < CLOSE and same):  # a NaN is not near either
        return f"tried on a small model: {away:.1g} of its length away from what the host makes of it"
    return ""


def _last(recipe: Recipe, device: str) -> State:
    engine, w = Small(recipe.P + SPARE, device), torch.ones(D)
    done = list(loop.rounds(recipe, engine, loop.initial(recipe, engine, w), ROUNDS, seed=0))
    return done[-1].state
