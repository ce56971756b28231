"""Clients whose electricity is clean now, as FedZero (Wiesner et al., e-Energy 2024) takes those
with excess energy.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.random import Generator

from flrce.core.bounds import PositiveProportion
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection
from flrce.methods.selection import nested
from flrce.methods.selection.uniform import UniformSelector


@dataclass(frozen=True)
class LowCarbonSelector(Selector):
    """The `selector` chooses among the `share` of the reachable clients with the least carbon
    intensity, at least P.

    Where nobody knows the intensities (`fleet.carbon`), everyone may.
    """

    share: PositiveProportion = 0.5
    selector: Any = field(default=UniformSelector(), metadata={"piece": True})

    @property
    def device_agnostic(self) -> bool:
        return nested.is_inner_device_agnostic(self.selector)

    def initial_state(self, M: int, d: int, D: int) -> Any:
        return nested.init_inner_state(self.selector, M, d, D)

    def observe(self, state: Any, event: RoundEvent) -> Any:
        return self.selector.observe(state, event)

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        if view.intensity is None or not view.pool:
            return self._select_inner(state, view, rng)
        grams = view.intensity(view.pool)
        count = min(max(view.P, math.ceil(self.share * len(view.pool))), len(view.pool))
        cleanest = sorted(grams.argsort(stable=True)[:count].tolist())
        chosen = self._select_inner(
            state, replace(view, pool=tuple(view.pool[i] for i in cleanest)), rng
        )
        return replace(
            chosen, why={**chosen.why, "dirtiest_g_per_kwh": float(grams[cleanest].max())}
        )

    def _select_inner(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        selection: Selection = self.selector.select(state, view, rng)
        return selection
