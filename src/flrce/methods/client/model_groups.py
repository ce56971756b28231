"""Which of several global models a client trains: the one with the lowest loss (IFCA), or the one
that the server names.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.errors import BadInput
from flrce.models.model_groups import GROUP_TENSOR, find_group_columns
from flrce.training.links import ClientContext, Link, Tensors


@dataclass(frozen=True)
class GroupLink(Link):
    """Trains one of `groups` models, freezes the others, and sends its number as "group"."""

    groups: PositiveInt = 2

    @abstractmethod
    def choose_group(self, local: ClientContext, group: Tensor) -> int:
        """The number of the client's model; `group` is the network's own, and may be written."""

    @property
    def model_groups(self) -> int:
        return self.groups

    def check_recipe(self, recipe: Any) -> str:
        if recipe.sums:
            return "model groups: the server must know each client's group; drop recipe.sums"
        return ""

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        assert local.whole is not None
        layout = local.layout.local_layout
        group = layout.view_tensors(local.whole)[GROUP_TENSOR]
        chosen = self.choose_group(local, group)
        group.fill_(chosen)
        slots = [(s.name, s.size) for s in layout.slots if s.trainable]
        others = torch.ones(len(w), dtype=torch.bool, device=w.device)
        others[find_group_columns(slots, self.groups)[chosen].to(w.device)] = False
        return {"others": others, "group": w.new_full((1,), chosen)}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g.masked_fill(state["others"], 0), state

    def frozen_coordinates(self, state: Tensors) -> Tensor:
        """(d,) the models of the other groups."""
        return state["others"]

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return {}, {"group": state["group"]}

    def list_extra_sizes(self, d: int) -> Mapping[str, int]:
        return {"group": 1}


@dataclass(frozen=True)
class LowestLossGroup(GroupLink):
    """IFCA (Ghosh et al. 2020): the client compares the losses of all models on its training
    samples, and trains the one with the lowest; of several, the first.
    """

    @property
    def evaluations(self) -> int:
        """One pass over the samples for each model."""
        return self.groups

    def choose_group(self, local: ClientContext, group: Tensor) -> int:
        assert local.mean_loss is not None
        losses = []
        for j in range(self.groups):
            group.fill_(j)
            losses.append(local.mean_loss())
        return min(range(self.groups), key=lambda j: _order_loss(losses[j]))


@dataclass(frozen=True)
class GivenGroup(GroupLink):
    """The model whose number is the task's tensor "group": the server decides."""

    def choose_group(self, local: ClientContext, group: Tensor) -> int:
        chosen = local.task.tensors.get("group")
        if chosen is None or chosen.numel() != 1 or not 0 <= int(chosen) < self.groups:
            raise BadInput(
                f'given-group: the task\'s tensor "group" must be a number below {self.groups};'
                " let a trainer send it"
            )
        return int(chosen)


def _order_loss(loss: float) -> float:
    """A loss that is no number is the worst."""
    return math.inf if math.isnan(loss) else loss
