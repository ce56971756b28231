"""A fleet by the run's clock: who can be reached, who leaves, costs and emissions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    DiurnalAvailability,
    FleetClients,
    FloatArray,
    JointAvailability,
    find_departure_times,
    list_models,
    make_fleet_clients,
    to_availability_model,
)
from flrce.devices.battery import BatteryState, PhoneBattery, with_battery_levels
from flrce.devices.carbon import CarbonGrid
from flrce.devices.costs import DeviceProfile

MAX_WAIT_SECONDS = 7 * DAY  # how long a server waits for clients
BATTERY_CHECK_SECONDS = 900.0  # seconds after which it looks again for batteries that have charged
MIN_CHANGING_SHARE = 0.05  # of the clients that come or go in a run: fewer are worth a warning
LOW_BATTERY = "battery below its floor"  # why a client refuses
ClientWork = tuple[str, float, ClientCost]  # a client, when it began, what it spends


@dataclass(frozen=True, eq=False)
class FleetDynamics:
    """The clients of a run, by the second. It is constant; batteries are in `BatteryState`."""

    seed: int
    crowd: FleetClients
    row: Mapping[str, int]  # client -> its row in the crowd
    availability: AvailabilityModel
    devices: Mapping[str, DeviceProfile]
    battery: PhoneBattery | None = None
    charger: AvailabilityModel | None = None
    has: BoolArray | None = None  # (M,) who has a battery; None: all
    grid: CarbonGrid | None = None
    interval: float = 0.0  # seconds from a round's start to the next one's, at least

    def initial_state(self) -> BatteryState | None:
        """What the batteries remember before the first round."""
        return None if self.battery is None else self.battery.initial_state(len(self.crowd))

    def find_reachable_clients(
        self, now: float, charge: BatteryState | None = None, t: int = 0
    ) -> tuple[list[str], dict[str, int]]:
        """Clients that can be reached in round t, and counts of the others by first reason."""
        reachable, counts = self._check_reachable(now, charge, t)
        return [self.crowd.names[row] for row in np.flatnonzero(reachable).tolist()], counts

    def find_time_with_clients(
        self, now: float, need: int, charge: BatteryState | None = None, t: int = 0
    ) -> float:
        """When at least `need` can be reached; `now` if that takes longer than a server waits."""
        at = now
        while at <= now + MAX_WAIT_SECONDS:
            if int(self._check_reachable(at, charge, t)[0].sum()) >= need:
                return at
            # nobody comes or goes before
            change = float(self.availability.find_next_change(self.seed, self.crowd, at).min())
            at = change if charge is None else min(change, at + BATTERY_CHECK_SECONDS)
        return now

    def describe_short_clock(self, seconds: float, need: int) -> str:
        """A warning if nearly nobody comes or goes in a run of so many seconds; else ""."""
        changes = self.availability.find_next_change(self.seed, self.crowd, 0.0)
        here = self.availability.is_available(self.seed, self.crowd, 0.0)
        changing = int((changes < seconds).sum())
        if np.isinf(changes).all() or here.sum() < need:
            return ""
        if changing >= max(1.0, MIN_CHANGING_SHARE * len(self.crowd)):
            return ""
        return (
            f"the run's modelled clock ends after about {seconds:.3g} s, and {changing} of"
            f" {len(self.crowd)} clients come or go by then (the first after"
            f" {changes.min() / 3600:.2g} h): all rounds meet the same clients; set fleet.interval,"
            " the seconds from one round's start to the next one's, such as 3600"
        )

    def compute_battery_levels(
        self, charge: BatteryState | None, rows: NDArray[np.int64], at: FloatArray
    ) -> FloatArray:
        """(rows,) what batteries hold at `at`; 1 for clients on mains."""
        levels = np.ones(len(rows))
        if charge is None or self.battery is None or self.charger is None:
            return levels
        mine = np.arange(len(rows)) if self.has is None else np.flatnonzero(self.has[rows])
        with_battery, level, since = rows[mine], charge.level.numpy(), charge.since.numpy()
        crowd = self.crowd.take_rows(with_battery)
        levels[mine] = self.battery.compute_levels(
            self.seed, crowd, level[with_battery], since[with_battery], at[mine], self.charger
        )
        return levels

    def simulate_work(
        self, works: Sequence[ClientWork], charge: BatteryState | None = None
    ) -> list[tuple[ClientCost, str]]:
        """What each client really spends on its work, and why it does not finish; "" if it does."""
        rows = self.get_indices([client for client, _, _ in works])
        at = np.array([began for _, began, _ in works])
        lasts = np.array([spent.seconds for _, _, spent in works])
        clients = self.crowd.take_rows(rows)
        gone = find_departure_times(self.availability, self.seed, clients, at, lasts) - at
        flat = np.full(len(works), np.inf)
        if self.battery is not None and self.charger is not None and charge is not None:
            joules = np.array([spent.joules for _, _, spent in works])
            plugged = self.charger.is_available(self.seed, clients, at)
            level = self.compute_battery_levels(charge, rows, at)
            mains = np.zeros(len(rows), bool) if self.has is None else ~self.has[rows]
            flat = np.where(
                mains, np.inf, self.battery.seconds_until_empty(level, joules, lasts, plugged)
            )
        outcomes: list[tuple[ClientCost, str]] = []
        for (client, _, cost), left, empty in zip(works, gone.tolist(), flat.tolist(), strict=True):
            if min(left, empty) >= cost.seconds:
                outcomes.append((cost, ""))
                continue
            why = "left" if left <= empty else "left with a flat battery"
            part = self.devices[client].truncate_cost(cost, min(left, empty))
            outcomes.append((part, f"{why} after {min(left, empty):.3g} s of {cost.seconds:.3g}"))
        return outcomes

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
        rows = self.get_indices([client for client, _, _ in works])
        at = np.array([began for _, began, _ in works])
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

    def _check_reachable(
        self, now: float, charge: BatteryState | None, t: int
    ) -> tuple[BoolArray, dict[str, int]]:
        """(M,) whether each can be reached, and how many cannot be for each reason."""
        crowd = replace(self.crowd, round=t)
        reachable, counts = np.ones(len(crowd), bool), dict[str, int]()
        for model in list_models(self.availability):
            remaining = reachable & model.is_available(self.seed, crowd, now)
            if lost := int(reachable.sum() - remaining.sum()):
                counts[model.absence] = counts.get(model.absence, 0) + lost
            reachable = remaining
        if charge is None or self.battery is None:
            return reachable, counts
        rows = np.flatnonzero(reachable)
        levels = self.compute_battery_levels(charge, rows, np.full(len(rows), now))
        low = rows[levels < self.battery.floor]
        reachable[low] = False
        return reachable, {**counts, LOW_BATTERY: len(low)} if len(low) else counts


def build_fleet_dynamics(
    seed: int,
    clients: tuple[str, ...],
    devices: Mapping[str, DeviceProfile],
    models: Sequence[Any],
    battery: PhoneBattery | None = None,
    grid: CarbonGrid | None = None,
    interval: float = 0.0,
) -> FleetDynamics:
    """A fleet: available while every model says so, with batteries and regional electricity."""
    zones = None if grid is None else [carbon.get_utc_offset(name) for name in grid.regions]
    ahead = None
    if grid is not None and zones and None not in zones:
        ahead = np.array(zones, np.float64)[grid.of]
    availability_models = tuple(map(to_availability_model, models))
    everyone = (
        availability_models[0]
        if len(availability_models) == 1
        else JointAvailability(availability_models)
    )
    charger = None if battery is None else choose_charging_model(battery, availability_models)
    has = None
    if battery is not None and battery.on:
        has = np.array([devices[client].name in battery.on for client in clients], bool)
    start = 0.0 if grid is None else grid.start % DAY
    row = {client: k for k, client in enumerate(clients)}
    crowd = make_fleet_clients(clients, ahead, start)
    parts = (battery, charger, has, grid, interval)
    return FleetDynamics(seed, crowd, row, everyone, devices, *parts)


def choose_charging_model(
    battery: PhoneBattery, models: Sequence[AvailabilityModel]
) -> AvailabilityModel:
    """The battery's own model of charging, or the first that knows, or by night."""
    if battery.charging is not None:
        return to_availability_model(battery.charging)
    charging = (model.get_charging_model() for model in models)
    return next(
        (model for model in charging if model is not None), DiurnalAvailability(needs="charging")
    )
