"""One client in every round, whatever the rest: the server's own sample (aggregators/rooted.py)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from numpy.random import Generator

from flrce.bounds import Whole
from flrce.pieces import Selector, View
from flrce.selectors import nested
from flrce.selectors.uniform import Uniform
from flrce.types import Event, Selection


@dataclass(frozen=True)
class Rooted:
    """The client in row `root`, and P - 1 others as the `inner` selector chooses."""

    piece: ClassVar[str] = "rooted"
    inner: Selector = field(default=Uniform(), metadata={"piece": True})
    root: Whole = 0

    @property
    def anywhere(self) -> bool:
        return nested.anywhere(self.inner)

    def init(self, M: int, d: int, D: int) -> Any:
        return nested.init(self.inner, M, d, D)

    def select(self, memory: Any, view: View, rng: Generator) -> Selection:
        if self.root not in view.pool:
            return self.inner.select(memory, view, rng)
        others = tuple(k for k in view.pool if k != self.root)
        if not others or view.P == 1:
            return Selection((self.root,))
        chosen = self.inner.select(memory, replace(view, pool=others, P=view.P - 1), rng)
        keep = None if chosen.keep is None else chosen.keep + 1  # the root's reply, and as many others as before
        return replace(chosen, k=(self.root, *chosen.k), keep=keep)

    def observe(self, memory: Any, event: Event) -> Any:
        return nested.observe(self.inner, memory, event)
