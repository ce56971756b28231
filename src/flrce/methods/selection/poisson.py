"""Poisson sampling: each client by a coin of its own, as amplification of privacy wants it."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.random import Generator

from flrce.core.roles import RoundView, Selector
from flrce.core.types import Selection


@dataclass(frozen=True)
class PoissonSelector(Selector):
    """Everyone reachable with chance P / M, independently of all others: P clients on average, and
    sometimes nobody.
    """

    piece: ClassVar[str] = "poisson"
    reads_clients: ClassVar[bool] = False

    def sampling_rate(self, P: int, M: int) -> float | None:
        return min(1.0, P / M) if M else None

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        rate = self.sampling_rate(view.P, len(view.n)) or 0.0
        draws = rng.random(len(view.pool))
        drawn = tuple(k for k, draw in zip(view.pool, draws, strict=True) if draw < rate)
        return Selection(drawn, why={"rate": rate})
