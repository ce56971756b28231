"""An engine without training: for tests of pieces, and of all that happens around clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flrce.core.downlink import HeldPart
from flrce.core.engine import Engine
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import ClientCost, ClientStates, Evaluation, PendingTask, Reply, Task


class StubEngine(Engine):
    """Clients that do what a subclass says; it has `clients(t)`, and `reply(task, w)` or a `train`
    of its own.
    """

    trainable: int = 1
    blocks: int = 1
    judges_once: bool = False

    def clients(self, t: int) -> Sequence[str]:
        raise NotImplementedError

    def reply(self, task: Task, w: Tensor) -> Reply:
        raise NotImplementedError

    def count_samples(self, client: str) -> int:
        return 10

    def estimate(self, task: Task) -> ClientCost:
        size = count_value_bytes(self.trainable)
        return ClientCost(size, size, compute_seconds=1.0)

    def adapt_task(self, task: Task) -> Task:
        return task

    def estimate_inquiry(self, client: str, down: int) -> ClientCost:
        return ClientCost(bytes_down=down)

    def losses(self, models: Sequence[Tensor], clients: Sequence[str]) -> Tensor:
        return torch.ones(len(clients), dtype=torch.float64)

    def get_task_layout(self, task: Task) -> tuple[Tensor | None, Sequence[tuple[str, int]]]:
        return None, (("w", self.trainable),)

    def get_held_part(self, task: Task) -> HeldPart:
        _, layout = self.get_task_layout(task)
        return HeldPart(None, tuple(layout), self.trainable)

    def train(
        self, pending: Sequence[PendingTask], client_states: ClientStates, keep: int | None = None
    ) -> Sequence[Reply]:
        return [self.reply(one.task, one.w) for one in pending]

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, client_states: ClientStates | None = None
    ) -> Evaluation | None:
        return None
