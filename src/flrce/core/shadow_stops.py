"""Where the paper's stop (Algorithm 3) would have ended a run, for every threshold of its grid."""

from collections.abc import Sequence

from flrce.core.types import RoundRecord

SHADOW_THRESHOLDS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0)  # the paper's grid, for P = 10


def find_shadow_stops(
    history: Sequence[RoundRecord], record: RoundRecord, P: int
) -> tuple[float, ...]:
    """Every threshold of the paper's grid (scaled to P) whose plain rule would have stopped the run
    by this round.

    The last committed record of the `history` before it has those that would have before, so that
    no other is read.
    """
    before = next((h.diagnostics.shadow for h in reversed(history) if h.outcome == "committed"), ())
    now = tuple(
        psi * P / 10
        for psi in SHADOW_THRESHOLDS
        if record.exploit and record.diagnostics.conflicts >= psi * P / 10
    )
    return max(before, now, key=len)  # both begin at the grid's least
