"""Gradients without a backward pass: differences of losses along single coordinates (FedKSeed's
clients).

In a seed space (models/seeds.py) a coordinate is a random direction of the whole model, so this is
the two-point estimate of zeroth-order fine-tuning (MeZO, Malladi et al. 2023) at the memory of
inference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import Task
from flrce.rng import make_stream
from flrce.training.links import ClientContext, Link, Tensors

PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FiniteDifferences(Link):
    """g_s = (L(w + eps e_s) - L(w - eps e_s)) / 2 eps for `count` coordinates s, drawn anew for
    every step; else 0.
    """

    eps: PositiveFloat = 1e-3
    count: PositiveInt = 1

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        task = local.task
        rng, d = make_stream(task.seed, "probe", task.t, task.client), w.shape[-1]
        drawn = np.stack([rng.permutation(d)[: self.count] for _ in range(max(local.steps, 1))])
        return {"where": torch.from_numpy(drawn), "step": torch.tensor(0)}

    @property
    def supports_client_batches(self) -> bool:
        return True

    def estimate(
        self, losses: Callable[[], Tensor], w: Tensor, state: Tensors
    ) -> tuple[Tensor, Tensor]:
        """(each sample's loss (..., n), the gradient (..., d)); `losses` looks at w as it is, which
        is left as it was.

        By tensors alone, so that a GPU can record it: where a step looks is not known to the host.
        """
        where, step = state["where"], state["step"]  # (..., steps, count), (...)
        now = step.clamp(max=where.shape[-2] - 1)[..., None, None].expand(
            *step.shape, 1, self.count
        )
        g, seen = torch.zeros_like(w), []
        for s in where.gather(-2, now).squeeze(-2).to(w.device).split(1, -1):  # (..., 1)
            here = w.gather(-1, s)
            w.scatter_(-1, s, here + self.eps)
            above = losses()
            w.scatter_(-1, s, here - self.eps)
            below = losses()
            w.scatter_(-1, s, here)
            g.scatter_(-1, s, (above.mean(-1, True) - below.mean(-1, True)) / (2 * self.eps))
            seen.append((above + below) / 2)
        return torch.stack(seen).mean(0), g

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g, {**state, "step": state["step"] + 1}

    @property
    def forward_passes(self) -> int:
        """Forward passes of a step, in place of one forward and one backward."""
        return 2 * self.count


@dataclass(frozen=True)
class ZerothOrderTraining(LocalTrainer):
    """Everyone trains alike, on differences of losses."""

    eps: PositiveFloat = 1e-3
    count: PositiveInt = 1

    @property
    def links(self) -> tuple[FiniteDifferences, ...]:
        return (FiniteDifferences(self.eps, self.count),)

    def assign(self, tasks: list[Task], state: None, view: RoundView) -> list[Task]:
        return tasks
