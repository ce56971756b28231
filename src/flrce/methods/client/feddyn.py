"""FedDyn (Acar et al. 2021), the client's half; methods/server/feddyn.py is the server's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.bounds import PositiveFloat
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.methods.client.step_counts import (
    CountedRoundsState,
    add_counted_round,
    pack_client_vector,
    resolve_client_vector,
    update_counted_rounds,
)
from flrce.training.links import ClientContext, Link, Tensors

# with a client: the sum of its updates so far, which is minus its dual variable over alpha
UPDATE_SUM_KEY = "feddyn.way"


@dataclass(frozen=True)
class DynamicRegularizer(Link):
    """g + alpha (w - w_start + the sum of the client's updates so far): the paper's g - grad_k +
    alpha (w - w_start).

    grad_k starts at 0 and loses alpha (w_k - w_start) with every round, so that sum is all there is
    to keep.
    """

    alpha: PositiveFloat = 0.1
    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        way = resolve_client_vector(UPDATE_SUM_KEY, local.task, client_state, w)
        return {"way": way, "start": w.clone(), "t": torch.tensor([local.task.t])}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g.add(w - state["start"] + state["way"], alpha=self.alpha), state

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        way = state["way"]
        return pack_client_vector(UPDATE_SUM_KEY, way, way + w - state["start"], state["t"]), {}


@dataclass(frozen=True)
class DynamicTraining(LocalTrainer):
    """Everyone trains on its dynamically regularised objective."""

    alpha: PositiveFloat = 0.1

    @property
    def links(self) -> tuple[DynamicRegularizer, ...]:
        return (DynamicRegularizer(self.alpha),)

    def check_recipe(self, recipe: Recipe) -> str:
        return recipe.explain_parts("FedDyn's regulariser is of whole models", personal=True)

    def initial_state(self, M: int, d: int, D: int) -> CountedRoundsState:
        return CountedRoundsState(torch.zeros(M, dtype=torch.long))

    def assign(self, tasks: list[Task], state: CountedRoundsState, view: RoundView) -> list[Task]:
        return [add_counted_round(task, state.last) for task in tasks]

    def observe(self, state: CountedRoundsState, event: RoundEvent) -> CountedRoundsState:
        return CountedRoundsState(update_counted_rounds(state.last, event))
