"""FLrce's early stop (Algorithm 3): enough once the chosen clients pull against one another."""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.types import Record

SHADOWS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0)  # the paper's grid, for P = 10


@dataclass(frozen=True)
class Conflicts:
    """Stop in an exploit round in which a client has psi conflicting peers on average.

    Needs at least two replies. `r` of the last `n` exploit rounds must agree and `after` rounds must have passed;
    the paper's rule is r = n = 1, after = 0.
    """

    psi: float
    r: int = 1
    n: int = 1
    after: int = 0

    def __call__(self, history: Sequence[Record]) -> str:
        last = history[-1]
        if not last.exploit or last.outcome != "committed" or last.t <= self.after or last.conflicts < self.psi:
            return ""
        exploits = [h for h in history if h.exploit and h.outcome == "committed" and h.t > self.after][-self.n :]
        over = sum(h.conflicts >= self.psi for h in exploits)
        if over < self.r:
            return ""
        return f"conflicts {last.conflicts:g} >= psi {self.psi:g}" + (f" in {over} of {self.n}" if self.n > 1 else "")


def shadows(history: Sequence[Record], P: int) -> tuple[float, ...]:
    """Every threshold of the paper's grid (scaled to P) whose plain rule would have stopped the run by now."""
    fired = [h.conflicts for h in history if h.exploit and h.outcome == "committed"]
    return tuple(psi * P / 10 for psi in SHADOWS if fired and max(fired) >= psi * P / 10)
