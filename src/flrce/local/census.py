"""Clients that tell how their labels are shared out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.bounds import Count
from flrce.errors import BadInput
from flrce.local.link import Batch, Local, Tensors
from flrce.pieces import View
from flrce.types import Task

SHARES = "labels"  # in a reply: (classes,) shares of the samples that were trained on


@dataclass(frozen=True)
class Census:
    """Tells the server a client's shares of labels, `classes` floats a reply; gradients go through as they are."""

    classes: Count = 10

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        return {SHARES: torch.zeros(self.classes)}

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        y = batch.y.flatten().cpu()
        if y.is_floating_point() or int(y.max()) >= self.classes or int(y.min()) < 0:
            raise BadInput(
                f"recipe.classes = {self.classes}, but targets go up to {y.max():g}: say how many labels there are"
            )
        return g, {SHARES: state[SHARES] + torch.bincount(y.long(), minlength=self.classes)}

    def sends(self, d: int) -> Mapping[str, int]:
        return {SHARES: self.classes}

    def end(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        counts = state[SHARES]
        return {}, {SHARES: counts / counts.sum().clamp(min=1.0)}


@dataclass(frozen=True)
class Counting:
    """A trainer that changes nothing but asks for the shares of labels."""

    classes: Count = 10

    @property
    def links(self) -> Sequence[Census]:
        return (Census(self.classes),)

    def assign(self, tasks: list[Task], memory: Any, view: View) -> list[Task]:
        return tasks
