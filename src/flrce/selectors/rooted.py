"""One client in every round, whatever the rest: the server's own sample (aggregators/rooted.py)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from numpy.random import Generator

from flrce.bounds import Whole
from flrce.pieces import Selector, View
from flrce.selectors.uniform import Uniform
from flrce.traits import Observes, Remembers, takes
from flrce.types import Event, Selection


@dataclass(frozen=True)
class Nothing:
    """The memory of an inner selector that has none."""


@dataclass(frozen=True)
class Rooted:
    """The client in row `root`, and P - 1 others as the `inner` selector chooses."""

    piece: ClassVar[str] = "rooted"
    inner: Selector = field(default=Uniform(), metadata={"piece": True})
    root: Whole = 0

    @property
    def anywhere(self) -> bool:
        return takes(self.inner) or not isinstance(self.inner, Observes)

    def init(self, M: int, d: int, D: int) -> Any:
        return self.inner.init(M, d, D) if isinstance(self.inner, Remembers) else Nothing()

    def select(self, memory: Any, view: View, rng: Generator) -> Selection:
        others = tuple(k for k in view.pool if k != self.root)
        there = len(others) < len(view.pool)
        if not others or there >= view.P:
            return Selection(tuple(k for k in view.pool if k == self.root)[: view.P])
        chosen = self.inner.select(memory, replace(view, pool=others, P=view.P - there), rng)
        return replace(chosen, k=(self.root, *chosen.k)) if there else chosen

    def observe(self, memory: Any, event: Event) -> Any:
        return self.inner.observe(memory, event) if isinstance(self.inner, Observes) else memory
