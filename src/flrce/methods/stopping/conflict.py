"""FLrce's early stop (Algorithm 3): enough once the chosen clients pull against one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flrce.core.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord


@dataclass(frozen=True)
class UpdateConflicts(StopRule):
    """Stop in an exploit round in which a client has psi conflicting peers on average.

    Needs at least two replies. `r` of the last `n` exploit rounds must agree and `after` rounds
    must have passed; the paper's rule is r = n = 1, after = 0. With `trusted`, clients that were
    flagged have no vote, so a few that push against everybody else cannot end the run. With
    `confirmed`, r of the last n rounds of clients drawn at random must agree as well: whoever
    captured the selection is a minority there.
    """

    psi: PositiveFloat
    r: PositiveInt = 1
    n: PositiveInt = 1
    after: NonNegativeInt = 0
    trusted: bool = False
    confirmed: bool = False
    reads_evaluations: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.r > self.n:
            raise ValueError(
                f"r = {self.r} is above n = {self.n}: r of the last n rounds must agree"
            )

    @property
    def required_fields(self) -> tuple[str, ...]:
        return ("conflicts",)

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        return max(self.after + 1, self.r)

    def get_conflicts(self, record: RoundRecord) -> float:
        """Conflicting peers per client in a round."""
        return record.diagnostics.votes if self.trusted else record.diagnostics.conflicts

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        last = history[-1]
        if (
            not last.exploit
            or last.outcome != "committed"
            or last.t <= self.after
            or self.get_conflicts(last) < self.psi
        ):
            return ""
        over = self._count_conflicting_rounds(history, exploit=True)
        if over < self.r:
            return ""
        if self.confirmed and self._count_conflicting_rounds(history, exploit=False) < self.r:
            return ""
        return f"conflicts {self.get_conflicts(last):g} >= psi {self.psi:g}" + (
            f" in {over} of {self.n}" if self.n > 1 else ""
        )

    def _count_conflicting_rounds(self, history: Sequence[RoundRecord], exploit: bool) -> int:
        """How many of the last n rounds that exploit, or that do not, had as many conflicts as
        psi.
        """
        rounds = [
            h
            for h in history
            if bool(h.exploit) == exploit and h.outcome == "committed" and h.t > self.after
        ]
        return sum(self.get_conflicts(h) >= self.psi for h in rounds[-self.n :])
