"""A fleet as it lives by the run's clock: who is there, who goes while it works, and what it had spent by then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flrce.fleet.costs import Profile
from flrce.fleet.presence import DAY, Crowd, Presence, leaves
from flrce.types import Spent

PATIENCE = 7 * DAY  # how long a server waits for clients


@dataclass(frozen=True, eq=False)
class Life:
    """The clients of a run, by the second. Nothing here changes: all of it follows from seed, client and time."""

    seed: int
    crowd: Crowd
    row: Mapping[str, int]  # client -> its row in the crowd
    presence: Presence
    devices: Mapping[str, Profile]

    def here(self, now: float) -> list[str]:
        """Who can be reached."""
        rows = np.flatnonzero(self.presence.here(self.seed, self.crowd, now))
        return [self.crowd.names[row] for row in rows.tolist()]

    def enough(self, now: float, need: int) -> float:
        """When at least `need` can be reached, from now on; now, where that takes longer than a server waits."""
        at = now
        while at <= now + PATIENCE:
            here = self.presence.here(self.seed, self.crowd, at)
            if int(here.sum()) >= need:
                return at
            at = float(self.presence.until(self.seed, self.crowd, at).min())  # nobody comes or goes before
        return now

    def works(self, clients: Sequence[str], sent: Sequence[float], spent: Sequence[Spent]) -> list[tuple[Spent, str]]:
        """What each client really spends on work that begins at `sent`, and why it does not finish; "" if it does."""
        some, at = self.crowd.take(self._rows(clients)), np.array(sent, np.float64)
        gone = leaves(self.presence, self.seed, some, at, np.array([each.seconds for each in spent]))
        found: list[tuple[Spent, str]] = []
        for client, cost, left in zip(clients, spent, (gone - at).tolist(), strict=True):
            if left >= cost.seconds:
                found.append((cost, ""))
            else:
                found.append((self.devices[client].until(cost, left), f"left after {left:.3g} s of {cost.seconds:.3g}"))
        return found

    def _rows(self, clients: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self.row[client] for client in clients], np.int64)
