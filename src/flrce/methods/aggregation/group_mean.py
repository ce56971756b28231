"""IFCA on the server: each global model becomes the mean of its clients' updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import RoundEvent, Updates
from flrce.models.model_groups import find_group_columns


@dataclass(frozen=True)
class GroupMean(Aggregator):
    """For each of `groups` models the mean of the updates of the clients that trained it, weighted
    by samples. A model that nobody trained stays as it is.
    """

    groups: PositiveInt = 2

    @property
    def model_groups(self) -> int:
        return self.groups

    def check_recipe(self, recipe: Recipe) -> str:
        sent = {} if recipe.update is None else recipe.chain.list_extra_sizes(1)
        return (
            ""
            if "group" in sent
            else 'no link sends "group", the model that a client trained; add "lowest-loss-group"'
        )

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor:
        sizes = [(name, prod(shape)) for name, shape in updates.shapes]
        chosen, target = updates.extras["group"][:, 0], w.clone()
        for j, columns in enumerate(find_group_columns(sizes, self.groups)):
            rows = (chosen == j).nonzero()[:, 0]
            if len(rows):
                p = updates.n[rows] / updates.n[rows].sum()
                mean = p @ updates.U[rows][:, columns].double()
                target[columns] = (w[columns].double() + mean).to(w.dtype)
        return target

    def report_figures(self, memory: Any, event: RoundEvent) -> Mapping[str, float]:
        chosen = event.updates.extras["group"][:, 0]
        return {f"group-{j}": float((chosen == j).sum()) for j in range(self.groups)}

    def report_client_figures(
        self, memory: Any, event: RoundEvent
    ) -> Mapping[str, Mapping[int, float]]:
        chosen = event.updates.extras["group"][:, 0].tolist()
        return {"group": dict(zip(event.updates.k.tolist(), chosen, strict=True))}
