"""Clients that tell how their labels are shared out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import Task
from flrce.errors import BadInput
from flrce.training.links import Batch, ClientContext, Link, Tensors

LABEL_SHARES_KEY = "labels"  # in a reply: (classes,) shares of the samples that were trained on


@dataclass(frozen=True)
class LabelCensus(Link):
    """Tells the server a client's shares of labels, `classes` floats a reply; gradients go through
    as they are.
    """

    classes: PositiveInt = 10

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        return {LABEL_SHARES_KEY: torch.zeros(self.classes)}

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        y = batch.y.flatten().cpu()
        if y.is_floating_point() or int(y.max()) >= self.classes or int(y.min()) < 0:
            raise BadInput(
                f"recipe.classes = {self.classes}, but targets go up to {y.max():g}: say how many"
                " labels there are"
            )
        return g, {
            LABEL_SHARES_KEY: state[LABEL_SHARES_KEY]
            + torch.bincount(y.long(), minlength=self.classes)
        }

    def list_extra_sizes(self, d: int) -> Mapping[str, int]:
        return {LABEL_SHARES_KEY: self.classes}

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        counts = state[LABEL_SHARES_KEY]
        return {}, {LABEL_SHARES_KEY: counts / counts.sum().clamp(min=1.0)}


@dataclass(frozen=True)
class LabelReportingTraining(LocalTrainer):
    """A trainer that changes nothing but asks for the shares of labels."""

    classes: PositiveInt = 10

    @property
    def reported_classes(self) -> int:
        return self.classes

    @property
    def links(self) -> Sequence[LabelCensus]:
        return (LabelCensus(self.classes),)

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        return tasks
