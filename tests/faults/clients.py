"""An engine without training whose clients misbehave on order: what is tested is everything around
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.core.payloads import make_encoding_stream
from flrce.core.types import ClientCost, Evaluation, Payload, PendingTask, Reply, Task
from flrce.rng import make_stream
from stub_engine import StubEngine

Change = Callable[[Reply, Task], object]
SIZES = (("layer.weight", 24), ("layer.bias", 6))


@dataclass
class Fleet(StubEngine):
    """M clients whose updates pull w towards a target of their own; `change` turns a reply into
    whatever arrives.
    """

    M: int = 12
    change: Change = lambda reply, task: reply
    shuffle: int = 0  # another order of replies for every value but 0
    extra: Callable[[Sequence[Task]], list[Reply]] = lambda tasks: []
    trainable: int = sum(size for _, size in SIZES)
    blocks: int = 2
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("layer.weight", (6, 4)),
        ("layer.bias", (6,)),
    )
    seconds: Mapping[str, float] = field(default_factory=dict)

    def clients(self, t: int) -> list[str]:
        return [f"c{k}" for k in range(self.M)]

    def count_samples(self, client: str) -> int:
        return 20 + int(client[1:])

    def estimate(self, task: Task) -> ClientCost:
        return ClientCost(
            120,
            120,
            compute_seconds=self.seconds.get(task.client, 1.0),
            transfer_seconds=0.1,
            joules=1.0,
        )

    def get_task_layout(self, task: Task) -> tuple[Tensor | None, tuple[tuple[str, int], ...]]:
        """The whole model; a sub-model holds the first rows of the weight, a frozen one only the
        bias.
        """
        if task.part.first:
            return torch.arange(24, 30), SIZES[1:]
        if task.part.rate < 1:
            count = max(1, int(task.part.rate * 24))
            return torch.cat([torch.arange(count), torch.arange(24, 30)]), (
                ("layer.weight", count),
                SIZES[1],
            )
        return None, SIZES

    def honest(self, w: Tensor, task: Task, client_state: Mapping[str, Tensor]) -> Reply:
        target = torch.from_numpy(
            make_stream(0, "target", 0, task.client).normal(1.0, 0.5, len(w))
        ).float()
        noise = torch.from_numpy(
            make_stream(task.seed, "train", task.t, task.client).normal(0, 0.05, len(w))
        ).float()
        held, names = self.get_task_layout(task)
        u = 0.2 * (target - w) + noise
        u = u if held is None else u[held]
        payload, kept = task.compressor.encode(u, names, make_encoding_stream(task), client_state)
        n = self.count_samples(task.client)
        sends = {} if task.update is None else task.update.list_extra_sizes(self.trainable)
        extras = {name: torch.zeros(size) for name, size in sends.items()}
        return Reply(
            task.client,
            task.t,
            payload,
            n,
            loss=float(u.norm()),
            loss_square=float(u.norm() ** 2),
            spent=replace(self.estimate(task), bytes_up=payload.nbytes),
            client_state=kept,
            extras=extras,
        )

    def train(
        self,
        pending: Sequence[PendingTask],
        client_state: Mapping[str, Mapping[str, Tensor]],
        keep: int | None = None,
    ) -> list[Reply]:
        tasks = [one.task for one in pending]
        replies = [
            self.change(
                self.honest(one.w, one.task, client_state.get(one.task.client, {})), one.task
            )
            for one in pending
        ]
        replies = [reply for reply in replies if reply is not None] + self.extra(tasks)
        if self.shuffle:
            replies = [
                replies[i] for i in make_stream(self.shuffle, "order").permutation(len(replies))
            ]
        return replies  # type: ignore[return-value]

    def evaluate(
        self, w: Tensor, t: int, last: bool = False, client_state: object = None
    ) -> Evaluation:
        error = float((w - 1).norm())
        return Evaluation(1 / (1 + error), 1 / (1 + error), error, 4 * len(w))


def spoil(reply: Reply, edit: Callable[[Tensor], Tensor]) -> Reply:
    """The reply with every buffer edited."""
    assert reply.payload is not None
    return replace(
        reply, payload=Payload({name: edit(b.clone()) for name, b in reply.payload.buffers.items()})
    )
