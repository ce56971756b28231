"""What the server does with what the replies came to: goes there, or takes a step of its own in
that direction.

An aggregator says where the replies point (`target`); the server's step goes from w towards it and
may remember. So a median composes with Adam. Delta = target - w is what Reddi et al. (2021) call
the pseudo-gradient, up to its sign. Statistics of BatchNorm are no gradients: they go to the target
whatever the step.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flrce.core.bounds import LearningRate, NonNegativeFloat, PositiveFloat
from flrce.core.roles import ServerStep
from flrce.core.types import Updates

DecayRate = Annotated[float, Ge(0), Lt(1)]  # of a running mean


@dataclass(frozen=True)
class MomentState:
    """Running means over rounds, (d,) each; `v` is empty where only one is kept."""

    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class ServerMomentum(ServerStep):
    """FedAvgM (Hsu et al. 2019): m = beta m + delta; w + rate m."""

    beta: DecayRate = 0.9
    rate: LearningRate = 1.0
    device_agnostic: ClassVar[bool] = True
    reads_clients: ClassVar[bool] = False

    def initial_state(self, M: int, d: int, D: int) -> MomentState:
        return MomentState(torch.zeros(d), torch.zeros(0))

    def step(
        self, w: Tensor, target: Tensor, updates: Updates, state: MomentState
    ) -> tuple[Tensor, MomentState]:
        m = self.beta * state.m + _compute_target_delta(w, target, updates)
        return _apply_server_step(w, target, updates, self.rate * m), MomentState(m, state.v)


class AdaptiveStep(ServerStep):
    """What the three steps of Reddi et al. (2021, algorithm 2) share: m = beta1 m + (1 - beta1)
    delta; w + rate m / (sqrt(v) + tau). No bias correction, and v starts at tau^2, as there.
    """

    rate: float
    beta1: float
    tau: float
    device_agnostic: ClassVar[bool] = True
    reads_clients: ClassVar[bool] = False

    @abstractmethod
    def move_second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """(d,) the next v, from delta^2."""

    def initial_state(self, M: int, d: int, D: int) -> MomentState:
        return MomentState(torch.zeros(d), torch.full((d,), self.tau**2))

    def step(
        self, w: Tensor, target: Tensor, updates: Updates, state: MomentState
    ) -> tuple[Tensor, MomentState]:
        delta = _compute_target_delta(w, target, updates)
        v = self.move_second_moment(state.v, delta.square())
        m = self.beta1 * state.m + (1 - self.beta1) * delta
        moved = _apply_server_step(w, target, updates, self.rate * m / (v.sqrt() + self.tau))
        return moved, MomentState(m, v)


@dataclass(frozen=True)
class ServerAdam(AdaptiveStep):
    """FedAdam: v = beta2 v + (1 - beta2) delta^2."""

    rate: LearningRate = 0.01
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    tau: PositiveFloat = 1e-3

    def move_second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class ServerYogi(AdaptiveStep):
    """FedYogi: as Adam, with v - (1 - beta2) delta^2 sign(v - delta^2)."""

    rate: LearningRate = 0.01
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    tau: PositiveFloat = 1e-3

    def move_second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class ServerAdagrad(AdaptiveStep):
    """FedAdagrad: v + delta^2; beta1 is 0 unless given, as in that paper."""

    rate: LearningRate = 0.01
    beta1: DecayRate = 0.0
    tau: PositiveFloat = 1e-3

    def move_second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedExPStep(ServerStep):
    """FedExP (Jhunjhunwala et al. 2023): w + eta delta, eta = max(1, sum |u_k|^2 / (2 P (|delta|^2
    + eps))).
    """

    eps: NonNegativeFloat = 1e-3
    device_agnostic: ClassVar[bool] = True

    def step(self, w: Tensor, target: Tensor, updates: Updates, state: Any) -> tuple[Tensor, Any]:
        delta = _compute_target_delta(w, target, updates)
        squares = torch.linalg.vector_norm(updates.u, dim=1, dtype=torch.float64).square().sum()
        eta = max(
            1.0, float(squares / (2 * len(updates) * (delta.double().square().sum() + self.eps)))
        )
        return _apply_server_step(w, target, updates, eta * delta), state


def _compute_target_delta(w: Tensor, target: Tensor, updates: Updates) -> Tensor:
    """(d,) where the replies point to, as float32."""
    d = updates.trainable
    return (target[:d].double() - w[:d].double()).float()


def _apply_server_step(w: Tensor, target: Tensor, updates: Updates, step: Tensor) -> Tensor:
    """w with its trained coordinates moved by `step`; the statistics are the target's."""
    d = updates.trainable
    return torch.cat([w[:d] + step.to(w.dtype), target[d:]])
