"""What the server does with what the replies came to: goes there, or takes a step of its own in that direction.

An aggregator says where the replies point (`target`); the server's step goes from w towards it and may remember. So a
median composes with Adam. Delta = target - w is what Reddi et al. (2021) call the pseudo-gradient, up to its sign.
Statistics of BatchNorm are no gradients: they go to the target whatever the step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.bounds import Amount, Positive, Rate
from flrce.types import Updates


@dataclass(frozen=True)
class Moments:
    """Running means over rounds, (d,) each; `v` is empty where only one is kept."""

    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class Momentum:
    """FedAvgM (Hsu et al. 2019): m = beta m + delta; w + rate m."""

    beta: Amount = 0.9
    rate: Rate = 1.0

    def init(self, M: int, d: int, D: int) -> Moments:
        return Moments(torch.zeros(d), torch.zeros(0))

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Moments) -> tuple[Tensor, Moments]:
        m = self.beta * memory.m + _delta(w, target, updates)
        return _moved(w, target, updates, self.rate * m), Moments(m, memory.v)


@dataclass(frozen=True)
class Adam:
    """FedAdam (Reddi et al. 2021, algorithm 2): m = beta1 m + (1 - beta1) delta, v likewise of delta^2; no bias
    correction, as there; w + rate m / (sqrt(v) + tau). v starts at tau^2, as that paper sets it.
    """

    rate: Rate = 0.01
    beta1: Amount = 0.9
    beta2: Amount = 0.99
    tau: Positive = 1e-3

    def init(self, M: int, d: int, D: int) -> Moments:
        return Moments(torch.zeros(d), torch.full((d,), self.tau**2))

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Moments) -> tuple[Tensor, Moments]:
        delta = _delta(w, target, updates)
        m = self.beta1 * memory.m + (1 - self.beta1) * delta
        v = self.second(memory.v, delta.square())
        return _moved(w, target, updates, self.rate * m / (v.sqrt() + self.tau)), Moments(m, v)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi:
    """FedYogi: as Adam, with v - (1 - beta2) delta^2 sign(v - delta^2)."""

    rate: Rate = 0.01
    beta1: Amount = 0.9
    beta2: Amount = 0.99
    tau: Positive = 1e-3

    def init(self, M: int, d: int, D: int) -> Moments:
        return Moments(torch.zeros(d), torch.full((d,), self.tau**2))

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Moments) -> tuple[Tensor, Moments]:
        delta = _delta(w, target, updates)
        m = self.beta1 * memory.m + (1 - self.beta1) * delta
        square = delta.square()
        v = memory.v - (1 - self.beta2) * square * torch.sign(memory.v - square)
        return _moved(w, target, updates, self.rate * m / (v.sqrt() + self.tau)), Moments(m, v)


@dataclass(frozen=True)
class Adagrad:
    """FedAdagrad: v + delta^2; beta1 is 0 unless given, as in that paper."""

    rate: Rate = 0.01
    beta1: Amount = 0.0
    tau: Positive = 1e-3

    def init(self, M: int, d: int, D: int) -> Moments:
        return Moments(torch.zeros(d), torch.full((d,), self.tau**2))

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Moments) -> tuple[Tensor, Moments]:
        delta = _delta(w, target, updates)
        m = self.beta1 * memory.m + (1 - self.beta1) * delta
        v = memory.v + delta.square()
        return _moved(w, target, updates, self.rate * m / (v.sqrt() + self.tau)), Moments(m, v)


@dataclass(frozen=True)
class ExP:
    """FedExP (Jhunjhunwala et al. 2023): w + eta delta, eta = max(1, sum |u_k|^2 / (2 P (|delta|^2 + eps)))."""

    eps: Amount = 1e-3

    def step(self, w: Tensor, target: Tensor, updates: Updates, memory: Any) -> tuple[Tensor, Any]:
        delta = _delta(w, target, updates)
        each = torch.linalg.vector_norm(updates.u, dim=1, dtype=torch.float64).square().sum()
        eta = max(1.0, float(each / (2 * len(updates) * (delta.double().square().sum() + self.eps))))
        return _moved(w, target, updates, eta * delta), memory


def _delta(w: Tensor, target: Tensor, updates: Updates) -> Tensor:
    """(d,) where the replies point to, as float32."""
    d = updates.trainable
    return (target[:d].double() - w[:d].double()).float()


def _moved(w: Tensor, target: Tensor, updates: Updates, step: Tensor) -> Tensor:
    """w with its trained coordinates moved by `step`; the statistics are the target's."""
    d = updates.trainable
    return torch.cat([w[:d] + step.to(w.dtype), target[d:]])
