"""FedCOMGATE's gradient correction, the server's half of it; drift.py is the client's."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.bounds import Rate
from flrce.local.drift import MEAN, ROUND, Correction
from flrce.pieces import Recipe, View
from flrce.traits import Buffers, Rated
from flrce.types import Event, Task


@dataclass(frozen=True)
class Means:
    """The mean of what each round sent, for the clients that have yet to hear it."""

    last: Tensor = field(metadata={"rows": "trained"})  # (M,) round of a client's last reply that counted; 0: none
    # round -> mean q (d,), while some `last` points to it
    means: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


@dataclass(frozen=True)
class Corrected:
    """Training along g - delta_k (FedCOMGATE, Haddadpour et al. 2021).

    mean q = (w - w') / (rate * lr) follows from successive models; `rate` is the aggregator's. It is sent with the next
    task, d floats more on the way down.
    """

    lr: Rate = 0.1
    rate: Rate = 1.0

    @property
    def links(self) -> tuple[Correction, ...]:
        return (Correction(),)

    def objection(self, recipe: Recipe) -> str:
        parts = recipe.partial or ("model.kept" if recipe.kept else "")
        if parts:
            return f"the gradient correction needs whole models, but {parts} lets clients send parts; drop one"
        if isinstance(recipe.pace, Buffers):
            return ("FedCOMGATE's correction is a client's step less the mean of the others' from the same model; with "
                    "a buffered pace they start from different ones: use another pace")  # fmt: skip
        if not isinstance(recipe.aggregator, Rated):
            other = type(recipe.aggregator).__name__
            return f'the gradient correction needs a plain mean of updates, {other} is none; set aggregator = "mean"'
        if recipe.aggregator.rate != self.rate:
            return f"trainer.rate = {self.rate} must be the aggregator's rate; set both alike"
        if recipe.update is not None and recipe.update.lr != self.lr:
            return f"trainer.lr = {self.lr} must be the clients' rate {recipe.update.lr}; set both alike"
        return ""

    def init(self, M: int, d: int, D: int) -> Means:
        return Means(torch.zeros(M, dtype=torch.long))

    def assign(self, tasks: list[Task], memory: Means, view: View) -> list[Task]:
        return [replace(task, tensors={**task.tensors, **self._told(task.k, memory)}) for task in tasks]

    def observe(self, memory: Means, event: Event) -> Means:
        updates = event.updates
        last = memory.last.clone()
        last[updates.k] = event.t
        mean = (event.w - event.w_next)[: updates.trainable] / (self.rate * self.lr)
        used = set(last.tolist())
        return Means(last, {t: q for t, q in {**memory.means, event.t: mean}.items() if t in used})

    def _told(self, k: int, memory: Means) -> dict[str, Tensor]:
        t = int(memory.last[k]) if k < len(memory.last) else 0
        told = {ROUND: torch.tensor([t])}
        return {**told, MEAN: memory.means[t]} if t else told
