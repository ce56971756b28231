"""An engine without training: for tests of pieces, and of all that happens around clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flrce.payload_bytes import count_value_bytes
from flrce.types import Carry, Evaluation, Reply, Spent, Task


class Pretend:
    """Clients that do what a subclass says; it has `clients(t)`, and `reply(task, w)` or a `train` of its own."""

    trainable: int = 1
    blocks: int = 1
    judges_once: bool = False

    def clients(self, t: int) -> Sequence[str]:
        raise NotImplementedError

    def reply(self, task: Task, w: Tensor) -> Reply:
        raise NotImplementedError

    def samples(self, client: str) -> int:
        return 10

    def estimate(self, task: Task) -> Spent:
        size = count_value_bytes(self.trainable)
        return Spent(size, size, compute_seconds=1.0)

    def accept(self, task: Task) -> Task:
        return task

    def inquiry(self, client: str, down: int) -> Spent:
        return Spent(bytes_down=down)

    def losses(self, w: Tensor, clients: Sequence[str]) -> Tensor:
        return torch.ones(len(clients), dtype=torch.float64)

    def holdings(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        return None, (("w", self.trainable),)

    def train(self, w: Tensor, tasks: Sequence[Task], carry: Carry, keep: int | None = None) -> Sequence[Reply]:
        return [self.reply(task, w) for task in tasks]

    def evaluate(self, w: Tensor, t: int, last: bool = False, carry: Carry | None = None) -> Evaluation | None:
        return None
