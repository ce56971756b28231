"""What a selector knew when it chose: the scores H before a round, and the number drawn against
phi.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import RoundRecord
from flrce.rng import make_stream
from flrce.storage.read import RecordedRun


@dataclass(frozen=True)
class RelationshipScores:
    """H of every client before a round, and the ranks it gives them (ties: the lowest row)."""

    H: NDArray[np.float64]

    @cached_property
    def rank(self) -> dict[int, int]:
        return {int(k): r + 1 for r, k in enumerate(np.argsort(-self.H, kind="stable"))}

    def describe_client(self, k: int) -> str:
        """How much client k agrees with the others, and its place among them."""
        return f"{self.H[k]:+.2f}, rank {self.rank[k]} of {len(self.H)}"


def compute_scores_before(run: RecordedRun, t: int) -> RelationshipScores | None:
    """H as the selector saw it at the start of round t."""
    if not run.relations:
        return None
    H = np.zeros(len(run.roster))
    for relation in run.relations:
        if relation.t < t:
            H[list(relation.k)] = relation.H
    return RelationshipScores(H)


def recover_selection_draw(run: RecordedRun, h: RoundRecord) -> float | None:
    """The number drawn against phi: randomness is a function of seed and round, so it can be drawn
    again.
    """
    phi = h.why.get("phi")
    if phi is None:
        return None
    index = next(i for i, other in enumerate(run.rounds) if other is h)
    tries = sum(other.t == h.t and other.outcome == "abandoned" for other in run.rounds[:index])
    drawn = float(h.why.get("draw", make_stream(run.seed, f"select{tries or ''}", h.t).random()))
    return drawn if (drawn < phi) != h.exploit else None
