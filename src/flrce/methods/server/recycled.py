"""Repeat the last update of coordinates that nobody sent: the server's half of FedLUAR."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flrce.core.pieces import Recipe, ServerSGD
from flrce.core.roles import ServerStep
from flrce.core.types import RoundEvent, Updates
from flrce.errors import BadInput


@dataclass(frozen=True)
class RecycledUpdateState:
    """The last step of each coordinate, and the state of the inner step."""

    last: Tensor  # (D,)
    inner: Any = None


@dataclass(frozen=True)
class RecycledUpdate(ServerStep):
    """FedLUAR (Kim, Kang & Lee 2025): a coordinate that no reply of the round covers makes its last
    step again; the others go as `inner` says.
    """

    inner: ServerStep = field(default=ServerSGD(), metadata={"piece": True})

    def __post_init__(self) -> None:
        if not isinstance(self.inner, ServerStep) or isinstance(self.inner, RecycledUpdate):
            raise BadInput(f"inner = {self.inner!r}: must be another server step")

    def check_recipe(self, recipe: Recipe) -> str:
        return self.inner.check_recipe(recipe)

    def initial_state(self, M: int, d: int, D: int) -> RecycledUpdateState:
        return RecycledUpdateState(torch.zeros(D), self.inner.initial_state(M, d, D))

    def observe(self, state: RecycledUpdateState, event: RoundEvent) -> RecycledUpdateState:
        return RecycledUpdateState(state.last, self.inner.observe(state.inner, event))

    def step(
        self, w: Tensor, target: Tensor, updates: Updates, state: RecycledUpdateState
    ) -> tuple[Tensor, RecycledUpdateState]:
        stepped, inner = self.inner.step(w, target, updates, state.inner)
        if updates.covered is None:
            return stepped, RecycledUpdateState(stepped - w, inner)
        sent, last = updates.covered.any(0), state.last.to(w.dtype)
        last = torch.where(sent, stepped - w, last)
        return torch.where(sent, stepped, w + last), RecycledUpdateState(last, inner)
