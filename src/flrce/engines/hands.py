"""Who does the simulated clients' work: fused kernels in threads, torch in processes, or one stack on a GPU.

All three do the same work on the same batches and give results in the order they were asked for, so neither their
number nor their timing shows. Kinds differ in the last bits, as torch's own backends do.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flrce.engines.pool import Dead, Processes, Threads
from flrce.errors import BadInput, Unfinished
from flrce.local.client import Index, Workshop
from flrce.local.native import kernel
from flrce.types import Reply, Task

JUDGED = 1000  # samples in one job of an evaluation
TRIES = 3  # workers that may die of one such job: unlike a client's reply, an evaluation cannot be done without
Order = tuple[Task, Index, Mapping[str, Tensor]]  # a task, the client's samples, what it keeps
log = logging.getLogger("flrce")


class Hands(Protocol):
    """What the simulator asks for."""

    name: str

    def train(self, w: Tensor, orders: Sequence[Order]) -> list[Reply | Dead]: ...
    def judge(self, w: Tensor, index: Index) -> tuple[Index, Index]: ...  # correct, loss
    def close(self) -> None: ...


class Pooled:
    """Jobs spread over a pool: worker processes that share the model's memory, or threads."""

    def __init__(self, shop: Workshop, workers: int, name: str) -> None:
        self.shop, self.name = shop, name
        self.w = torch.zeros(shop.layout.size).share_memory_()
        self.pool: Any = Threads(self._job, workers) if name == "native" else Processes(self._job, workers)

    @property
    def workers(self) -> Any:
        """The processes, for whoever wants to watch or kill them."""
        return self.pool.workers

    def train(self, w: Tensor, orders: Sequence[Order]) -> list[Reply | Dead]:
        self.w.copy_(w)
        longest = sorted(range(len(orders)), key=lambda i: -len(orders[i][1]) * orders[i][0].epochs)
        done = dict(zip(longest, self.pool.run([orders[i] for i in longest]), strict=True))
        return [done[i] for i in range(len(orders))]

    def judge(self, w: Tensor, index: Index) -> tuple[Index, Index]:
        self.w.copy_(w)
        results = self.pool.run([(chunk,) for chunk in np.split(index, range(JUDGED, len(index), JUDGED))], TRIES)
        for result in results:
            if isinstance(result, Dead):
                raise Unfinished(f"evaluation: {result}; what is committed is kept, go on with --resume")
        return (
            np.concatenate([correct.numpy() for correct, _ in results]).astype(np.float64),
            np.concatenate([loss.numpy() for _, loss in results]).astype(np.float64),
        )

    def close(self) -> None:
        self.pool.close()

    def _job(self, what: Any, index: Any = None, carry: Any = None) -> Any:
        """One job in a worker: a task with the client's samples, or samples to judge."""
        return (
            self.shop.train(self.w, what, index, carry) if isinstance(what, Task) else self.shop.evaluate(self.w, what)
        )


def hands(shop: Workshop, kind: str, workers: int) -> Pooled:
    """Fused kernels if the network has them and `kind` allows, else torch in processes; one line says why not."""
    if kind != "torch":
        found = kernel(shop.net, shop.shape)
        if not isinstance(found, str):
            shop.native = True
            return Pooled(shop, workers, "native")
        if kind == "native":
            raise BadInput(f"engine.kernel = 'native': {found}; use auto or torch")
        log.warning("no fused kernels, training with PyTorch: %s", found)
    return Pooled(shop, workers, "torch")
