"""A fleet as it lives by the run's clock: who is there, who goes while it works, what it spends and emits by then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.fleet import carbon
from flrce.fleet.battery import Charge, Phone, worked
from flrce.fleet.carbon import Grid
from flrce.fleet.costs import Profile
from flrce.fleet.presence import DAY, Bools, Charges, Crowd, Diurnal, Every, Floats, Presence, crowd, leaves
from flrce.types import Spent

PATIENCE = 7 * DAY  # how long a server waits for clients
OFTEN = 900.0  # seconds after which it looks again for batteries that have charged
Work = tuple[str, float, Spent]  # a client, when it began, what it spends


@dataclass(frozen=True, eq=False)
class Life:
    """The clients of a run, by the second. Nothing here changes: what does, the batteries, is in `Charge`."""

    seed: int
    crowd: Crowd
    row: Mapping[str, int]  # client -> its row in the crowd
    presence: Presence
    devices: Mapping[str, Profile]
    battery: Phone | None = None
    charger: Presence | None = None
    has: Bools | None = None  # (M,) who has a battery; None: all
    grid: Grid | None = None

    def init(self) -> Charge | None:
        """What the batteries remember before the first round."""
        return None if self.battery is None else self.battery.init(len(self.crowd))

    def here(self, now: float, charge: Charge | None = None) -> list[str]:
        """Who can be reached, and does not refuse."""
        return [self.crowd.names[row] for row in np.flatnonzero(self._willing(now, charge)).tolist()]

    def enough(self, now: float, need: int, charge: Charge | None = None) -> float:
        """When at least `need` can be reached, from now on; now, where that takes longer than a server waits."""
        at = now
        while at <= now + PATIENCE:
            if int(self._willing(at, charge).sum()) >= need:
                return at
            change = float(self.presence.until(self.seed, self.crowd, at).min())  # nobody comes or goes before
            at = change if charge is None else min(change, at + OFTEN)
        return now

    def levels(self, charge: Charge | None, rows: NDArray[np.int64], at: Floats) -> Floats:
        """(rows,) what batteries hold at `at`; 1 for clients on mains."""
        found = np.ones(len(rows))
        if charge is None or self.battery is None or self.charger is None:
            return found
        mine = np.arange(len(rows)) if self.has is None else np.flatnonzero(self.has[rows])
        some, level, since = rows[mine], charge.level.numpy(), charge.since.numpy()
        crowd = self.crowd.take(some)
        found[mine] = self.battery.levels(self.seed, crowd, level[some], since[some], at[mine], self.charger)
        return found

    def works(self, works: Sequence[Work], charge: Charge | None = None) -> list[tuple[Spent, str]]:
        """What each client really spends on its work, and why it does not finish; "" if it does."""
        rows, at = self.rows([client for client, _, _ in works]), np.array([began for _, began, _ in works])
        lasts = np.array([spent.seconds for _, _, spent in works])
        some = self.crowd.take(rows)
        gone = leaves(self.presence, self.seed, some, at, lasts) - at
        flat = np.full(len(works), np.inf)
        if self.battery is not None and self.charger is not None and charge is not None:
            joules = np.array([spent.joules for _, _, spent in works])
            plugged = self.charger.here(self.seed, some, at)
            level = self.levels(charge, rows, at)
            mains = np.zeros(len(rows), bool) if self.has is None else ~self.has[rows]
            flat = np.where(mains, np.inf, self.battery.lasts(level, joules, lasts, plugged))
        found: list[tuple[Spent, str]] = []
        for (client, _, cost), left, empty in zip(works, gone.tolist(), flat.tolist(), strict=True):
            if min(left, empty) >= cost.seconds:
                found.append((cost, ""))
                continue
            why = "left" if left <= empty else "left with a flat battery"
            part = self.devices[client].until(cost, min(left, empty))
            found.append((part, f"{why} after {min(left, empty):.3g} s of {cost.seconds:.3g}"))
        return found

    def settled(self, works: Sequence[Work], charge: Charge) -> Charge:
        """The batteries after this work."""
        if self.battery is None or not works:
            return charge
        rows = self.rows([client for client, _, _ in works])
        end = np.array([began + spent.seconds for _, began, spent in works])
        level = self.levels(charge, rows, end)
        drawn = np.array([spent.joules for _, _, spent in works]) / self.battery.joules
        since = np.maximum(end, charge.since.numpy()[rows])
        return worked(charge, rows.tolist(), np.clip(level - drawn, 0.0, 1.0), since)

    def grams(self, works: Sequence[Work]) -> list[float]:
        """What each client's work emits; 0 where no carbon intensity is known."""
        if self.grid is None or not works:
            return [0.0] * len(works)
        rows, at = self.rows([client for client, _, _ in works]), np.array([began for _, began, _ in works])
        seconds = np.array([spent.seconds for _, _, spent in works])
        joules = np.array([spent.joules for _, _, spent in works])
        return [float(value) for value in self.grid.grams(rows, at, seconds, joules)]

    def held(self, clients: Sequence[str], now: float, charge: Charge | None) -> Tensor:
        """(clients,) levels of batteries now, as phones report them."""
        rows = self.rows(clients)
        return torch.from_numpy(self.levels(charge, rows, np.full(len(rows), now)))

    def intensity(self, clients: Sequence[str], now: float) -> Tensor:
        """(clients,) g/kWh now."""
        rows = self.rows(clients)
        assert self.grid is not None
        return torch.from_numpy(self.grid.intensity(rows, np.full(len(rows), now), np.zeros(len(rows))))

    def rows(self, clients: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self.row[client] for client in clients], np.int64)

    def _willing(self, now: float, charge: Charge | None) -> Bools:
        there = self.presence.here(self.seed, self.crowd, now)
        if charge is None or self.battery is None:
            return there
        rows = np.flatnonzero(there)
        levels = self.levels(charge, rows, np.full(len(rows), now))
        there = there.copy()
        there[rows[levels < self.battery.floor]] = False
        return there


def life(
    seed: int, clients: tuple[str, ...], devices: Mapping[str, Profile], models: Sequence[Presence],
    battery: Phone | None = None, grid: Grid | None = None,
) -> Life:  # fmt: skip
    """A fleet: there while every model says so, with batteries and electricity of their regions."""
    zones = None if grid is None else [carbon.ahead(name) for name in grid.regions]
    ahead = None
    if grid is not None and zones and None not in zones:
        ahead = np.array(zones, np.float64)[grid.of]
    everyone = models[0] if len(models) == 1 else Every(tuple(models))
    chargers = [model.charger() for model in models if isinstance(model, Charges)]
    charger = None
    if battery is not None:
        known = [each for each in chargers if each is not None]
        charger = battery.charging or (known[0] if known else Diurnal(needs="charging"))
    has = None
    if battery is not None and battery.on:
        has = np.array([devices[client].name in battery.on for client in clients], bool)
    start = 0.0 if grid is None else grid.start % DAY
    row = {client: k for k, client in enumerate(clients)}
    return Life(seed, crowd(clients, ahead, start), row, everyone, devices, battery, charger, has, grid)
