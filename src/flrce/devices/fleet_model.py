"""A fleet as it lives by the run's clock: who is there, who goes while it works, what it spends and
emits by then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.types import ClientCost
from flrce.devices import carbon
from flrce.devices.availability import (
    DAY,
    AvailabilityModel,
    BoolArray,
    ChargingAwareModel,
    DiurnalAvailability,
    FleetClients,
    FloatArray,
    JointAvailability,
    find_departure_times,
    make_fleet_clients,
)
from flrce.devices.battery import BatteryState, PhoneBattery, with_battery_levels
from flrce.devices.carbon import CarbonGrid
from flrce.devices.costs import DeviceProfile

MAX_WAIT_SECONDS = 7 * DAY  # how long a server waits for clients
BATTERY_CHECK_SECONDS = 900.0  # seconds after which it looks again for batteries that have charged
ClientWork = tuple[str, float, ClientCost]  # a client, when it began, what it spends


@dataclass(frozen=True, eq=False)
class FleetDynamics:
    """The clients of a run, by the second. Nothing here changes: what does, the batteries, is in
    `BatteryState`.
    """

    seed: int
    crowd: FleetClients
    row: Mapping[str, int]  # client -> its row in the crowd
    presence: AvailabilityModel
    devices: Mapping[str, DeviceProfile]
    battery: PhoneBattery | None = None
    charger: AvailabilityModel | None = None
    has: BoolArray | None = None  # (M,) who has a battery; None: all
    grid: CarbonGrid | None = None

    def initial_state(self) -> BatteryState | None:
        """What the batteries remember before the first round."""
        return None if self.battery is None else self.battery.initial_state(len(self.crowd))

    def list_reachable_clients(self, now: float, charge: BatteryState | None = None) -> list[str]:
        """Who can be reached, and does not refuse."""
        return [
            self.crowd.names[row]
            for row in np.flatnonzero(self._reachable_mask(now, charge)).tolist()
        ]

    def find_time_with_clients(
        self, now: float, need: int, charge: BatteryState | None = None
    ) -> float:
        """When at least `need` can be reached, from now on; now, where that takes longer than a
        server waits.
        """
        at = now
        while at <= now + MAX_WAIT_SECONDS:
            if int(self._reachable_mask(at, charge).sum()) >= need:
                return at
            # nobody comes or goes before
            change = float(self.presence.find_next_change(self.seed, self.crowd, at).min())
            at = change if charge is None else min(change, at + BATTERY_CHECK_SECONDS)
        return now

    def compute_battery_levels(
        self, charge: BatteryState | None, rows: NDArray[np.int64], at: FloatArray
    ) -> FloatArray:
        """(rows,) what batteries hold at `at`; 1 for clients on mains."""
        found = np.ones(len(rows))
        if charge is None or self.battery is None or self.charger is None:
            return found
        mine = np.arange(len(rows)) if self.has is None else np.flatnonzero(self.has[rows])
        some, level, since = rows[mine], charge.level.numpy(), charge.since.numpy()
        crowd = self.crowd.take_rows(some)
        found[mine] = self.battery.compute_levels(
            self.seed, crowd, level[some], since[some], at[mine], self.charger
        )
        return found

    def simulate_work(
        self, works: Sequence[ClientWork], charge: BatteryState | None = None
    ) -> list[tuple[ClientCost, str]]:
        """What each client really spends on its work, and why it does not finish; "" if it does."""
        rows, at = (
            self.get_indices([client for client, _, _ in works]),
            np.array([began for _, began, _ in works]),
        )
        lasts = np.array([spent.seconds for _, _, spent in works])
        some = self.crowd.take_rows(rows)
        gone = find_departure_times(self.presence, self.seed, some, at, lasts) - at
        flat = np.full(len(works), np.inf)
        if self.battery is not None and self.charger is not None and charge is not None:
            joules = np.array([spent.joules for _, _, spent in works])
            plugged = self.charger.is_available(self.seed, some, at)
            level = self.compute_battery_levels(charge, rows, at)
            mains = np.zeros(len(rows), bool) if self.has is None else ~self.has[rows]
            flat = np.where(
                mains, np.inf, self.battery.seconds_until_empty(level, joules, lasts, plugged)
            )
        found: list[tuple[ClientCost, str]] = []
        for (client, _, cost), left, empty in zip(works, gone.tolist(), flat.tolist(), strict=True):
            if min(left, empty) >= cost.seconds:
                found.append((cost, ""))
                continue
            why = "left" if left <= empty else "left with a flat battery"
            part = self.devices[client].truncate_cost(cost, min(left, empty))
            found.append((part, f"{why} after {min(left, empty):.3g} s of {cost.seconds:.3g}"))
        return found

    def drain_batteries(self, works: Sequence[ClientWork], charge: BatteryState) -> BatteryState:
        """The batteries after this work."""
        if self.battery is None or not works:
            return charge
        rows = self.get_indices([client for client, _, _ in works])
        end = np.array([began + spent.seconds for _, began, spent in works])
        level = self.compute_battery_levels(charge, rows, end)
        drawn = np.array([spent.joules for _, _, spent in works]) / self.battery.joules
        since = np.maximum(end, charge.since.numpy()[rows])
        return with_battery_levels(charge, rows.tolist(), np.clip(level - drawn, 0.0, 1.0), since)

    def compute_emissions(self, works: Sequence[ClientWork]) -> list[float]:
        """What each client's work emits; 0 where no carbon intensity is known."""
        if self.grid is None or not works:
            return [0.0] * len(works)
        rows, at = (
            self.get_indices([client for client, _, _ in works]),
            np.array([began for _, began, _ in works]),
        )
        seconds = np.array([spent.seconds for _, _, spent in works])
        joules = np.array([spent.joules for _, _, spent in works])
        return [float(value) for value in self.grid.compute_emissions(rows, at, seconds, joules)]

    def report_battery_levels(
        self, clients: Sequence[str], now: float, charge: BatteryState | None
    ) -> Tensor:
        """(clients,) levels of batteries now, as phones report them."""
        rows = self.get_indices(clients)
        return torch.from_numpy(self.compute_battery_levels(charge, rows, np.full(len(rows), now)))

    def get_carbon_intensity(self, clients: Sequence[str], now: float) -> Tensor:
        """(clients,) g/kWh now."""
        rows = self.get_indices(clients)
        assert self.grid is not None
        return torch.from_numpy(
            self.grid.mean_intensity(rows, np.full(len(rows), now), np.zeros(len(rows)))
        )

    def get_indices(self, clients: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self.row[client] for client in clients], np.int64)

    def _reachable_mask(self, now: float, charge: BatteryState | None) -> BoolArray:
        there = self.presence.is_available(self.seed, self.crowd, now)
        if charge is None or self.battery is None:
            return there
        rows = np.flatnonzero(there)
        levels = self.compute_battery_levels(charge, rows, np.full(len(rows), now))
        there = there.copy()
        there[rows[levels < self.battery.floor]] = False
        return there


def build_fleet_dynamics(
    seed: int,
    clients: tuple[str, ...],
    devices: Mapping[str, DeviceProfile],
    models: Sequence[AvailabilityModel],
    battery: PhoneBattery | None = None,
    grid: CarbonGrid | None = None,
) -> FleetDynamics:
    """A fleet: there while every model says so, with batteries and electricity of their regions."""
    zones = None if grid is None else [carbon.get_utc_offset(name) for name in grid.regions]
    ahead = None
    if grid is not None and zones and None not in zones:
        ahead = np.array(zones, np.float64)[grid.of]
    everyone = models[0] if len(models) == 1 else JointAvailability(tuple(models))
    chargers = [
        model.get_charging_model() for model in models if isinstance(model, ChargingAwareModel)
    ]
    charger = None
    if battery is not None:
        known = [each for each in chargers if each is not None]
        charger = battery.charging or (known[0] if known else DiurnalAvailability(needs="charging"))
    has = None
    if battery is not None and battery.on:
        has = np.array([devices[client].name in battery.on for client in clients], bool)
    start = 0.0 if grid is None else grid.start % DAY
    row = {client: k for k, client in enumerate(clients)}
    return FleetDynamics(
        seed,
        make_fleet_clients(clients, ahead, start),
        row,
        everyone,
        devices,
        battery,
        charger,
        has,
        grid,
    )
