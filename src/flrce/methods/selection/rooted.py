"""One client is in every round: the server's own sample (aggregation/root_trust.py)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from numpy.random import Generator

from flrce.core.bounds import NonNegativeInt
from flrce.core.roles import RoundView, Selector
from flrce.core.types import RoundEvent, Selection
from flrce.methods.selection import nested
from flrce.methods.selection.uniform import UniformSelector


@dataclass(frozen=True)
class RootClientSampling(Selector):
    """The client in row `root`, and P - 1 others as the `inner` selector chooses."""

    piece: ClassVar[str] = "rooted"
    inner: Selector = field(default=UniformSelector(), metadata={"piece": True})
    root: NonNegativeInt = 0

    @property
    def root_client(self) -> int:
        return self.root

    @property
    def device_agnostic(self) -> bool:
        return nested.is_inner_device_agnostic(self.inner)

    def initial_state(self, M: int, d: int, D: int) -> Any:
        return nested.init_inner_state(self.inner, M, d, D)

    def select(self, state: Any, view: RoundView, rng: Generator) -> Selection:
        if self.root not in view.pool:
            return self.inner.select(state, view, rng)
        others = tuple(k for k in view.pool if k != self.root)
        if not others or view.P == 1:
            return Selection((self.root,))
        chosen = self.inner.select(state, replace(view, pool=others, P=view.P - 1), rng)
        # the root's reply, and as many others as before
        keep = None if chosen.keep is None else chosen.keep + 1
        return replace(chosen, k=(self.root, *chosen.k), keep=keep)

    def observe(self, state: Any, event: RoundEvent) -> Any:
        return self.inner.observe(state, event)
