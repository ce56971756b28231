"""P clients at random, without replacement (FedAvg)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.random import Generator

from flrce.core.roles import RoundView, Selector
from flrce.core.types import Selection


@dataclass(frozen=True)
class UniformSelector(Selector):
    """Everyone reachable is as likely as everyone else."""

    reads_clients: ClassVar[bool] = False

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        picked = rng.permutation(len(view.pool))[: view.P]
        return Selection(tuple(view.pool[i] for i in picked))
