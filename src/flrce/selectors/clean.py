"""Clients whose electricity is clean now, as FedZero (Wiesner et al., e-Energy 2024) takes those with excess energy."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.random import Generator

from flrce.bounds import Part
from flrce.pieces import View
from flrce.selectors import nested
from flrce.selectors.uniform import Uniform
from flrce.types import Event, Selection


@dataclass(frozen=True)
class Cleanest:
    """The `selector` chooses among the `share` of the reachable clients with the least carbon intensity, at least P.

    Where nobody knows the intensities (`fleet.carbon`), everyone may.
    """

    share: Part = 0.5
    selector: Any = field(default=Uniform(), metadata={"piece": True})

    @property
    def anywhere(self) -> bool:
        return nested.anywhere(self.selector)

    def init(self, M: int, d: int, D: int) -> Any:
        return nested.init(self.selector, M, d, D)

    def observe(self, memory: Any, event: Event) -> Any:
        return nested.observe(self.selector, memory, event)

    def select(self, memory: Any, view: View, rng: Generator) -> Selection:
        if view.intensity is None or not view.pool:
            return self._inner(memory, view, rng)
        grams = view.intensity(view.pool)
        count = min(max(view.P, math.ceil(self.share * len(view.pool))), len(view.pool))
        cleanest = sorted(grams.argsort(stable=True)[:count].tolist())
        chosen = self._inner(memory, replace(view, pool=tuple(view.pool[i] for i in cleanest)), rng)
        return replace(chosen, why={**chosen.why, "dirtiest_g_per_kwh": float(grams[cleanest].max())})

    def _inner(self, memory: Any, view: View, rng: Generator) -> Selection:
        found: Selection = self.selector.select(memory, view, rng)
        return found
