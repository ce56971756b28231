"""FedDyn (Acar et al. 2021), the client's half; servers/dynamic.py is the server's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flrce.bounds import Positive
from flrce.local.counted import Counted, kept, seen, settled, told
from flrce.local.link import Local
from flrce.pieces import Recipe, View
from flrce.types import Event, Task

WAY = "feddyn.way"  # with a client: the sum of its updates so far, which is minus its dual variable over alpha
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Dual:
    """g + alpha (w - w_start + the sum of the client's updates so far): the paper's g - grad_k + alpha (w - w_start).

    grad_k starts at 0 and loses alpha (w_k - w_start) with every round, so that sum is all there is to keep.
    """

    alpha: Positive = 0.1
    lanes: ClassVar[bool] = True

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        way = settled(WAY, local.task, carry, w)
        return {"way": way, "start": w.clone(), "t": torch.tensor([local.task.t])}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g.add(w - state["start"] + state["way"], alpha=self.alpha), state

    def end(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        way = state["way"]
        return kept(WAY, way, way + w - state["start"], state["t"]), {}


@dataclass(frozen=True)
class Dynamic:
    """Everyone trains on its dynamically regularised objective."""

    alpha: Positive = 0.1

    @property
    def links(self) -> tuple[Dual, ...]:
        return (Dual(self.alpha),)

    def objection(self, recipe: Recipe) -> str:
        parts = recipe.partial or ("kept" if recipe.kept else "")
        if parts:
            return f"FedDyn's regulariser is of whole models, but {parts} leaves clients with parts; drop one"
        return ""

    def init(self, M: int, d: int, D: int) -> Counted:
        return Counted(torch.zeros(M, dtype=torch.long))

    def assign(self, tasks: list[Task], memory: Counted, view: View) -> list[Task]:
        return [told(task, memory.last) for task in tasks]

    def observe(self, memory: Counted, event: Event) -> Counted:
        return Counted(seen(memory.last, event))
