"""FLrce's early stop (Algorithm 3): enough once the chosen clients pull against one another."""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.bounds import Count, Positive, Whole
from flrce.types import Record

SHADOWS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0)  # the paper's grid, for P = 10


@dataclass(frozen=True)
class Conflicts:
    """Stop in an exploit round in which a client has psi conflicting peers on average.

    Needs at least two replies. `r` of the last `n` exploit rounds must agree and `after` rounds must have passed;
    the paper's rule is r = n = 1, after = 0. With `trusted`, clients that were flagged have no vote, so a few that
    push against everybody else cannot end the run. With `confirmed`, r of the last n rounds of clients drawn at
    random must agree as well: whoever captured the selection is a minority there.
    """

    psi: Positive
    r: Count = 1
    n: Count = 1
    after: Whole = 0
    trusted: bool = False
    confirmed: bool = False

    def __post_init__(self) -> None:
        if not (self.psi > 0 and 1 <= self.r <= self.n and self.after >= 0):
            raise ValueError(f"psi must be above 0, 1 <= r <= n and after >= 0, got {self}")

    def count(self, record: Record) -> float:
        """Conflicting peers per client in a round."""
        return record.votes if self.trusted else record.conflicts

    def __call__(self, history: Sequence[Record]) -> str:
        last = history[-1]
        if not last.exploit or last.outcome != "committed" or last.t <= self.after or self.count(last) < self.psi:
            return ""
        over = self._over(history, exploit=True)
        if over < self.r:
            return ""
        if self.confirmed and self._over(history, exploit=False) < self.r:
            return ""
        return f"conflicts {self.count(last):g} >= psi {self.psi:g}" + (f" in {over} of {self.n}" if self.n > 1 else "")

    def _over(self, history: Sequence[Record], exploit: bool) -> int:
        """How many of the last n rounds that exploit, or that do not, had as many conflicts as psi."""
        some = [h for h in history if bool(h.exploit) == exploit and h.outcome == "committed" and h.t > self.after]
        return sum(self.count(h) >= self.psi for h in some[-self.n :])


def shadows(history: Sequence[Record], record: Record, P: int) -> tuple[float, ...]:
    """Every threshold of the paper's grid (scaled to P) whose plain rule would have stopped the run by this round.

    The last committed record of the `history` before it has those that would have before, so that no other is read.
    """
    before = next((h.shadow for h in reversed(history) if h.outcome == "committed"), ())
    now = tuple(psi * P / 10 for psi in SHADOWS if record.exploit and record.conflicts >= psi * P / 10)
    return max(before, now, key=len)  # both begin at the grid's least
