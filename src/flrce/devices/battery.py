"""Batteries: what is in them at a second of the run's clock, and who refuses for want of it.

A level is kept as of the client's last work; what it charged and drew since then follows from the
model, so that a round changes only the levels of those who worked.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.bounds import NonEmptyText, NonNegativeFloat, PositiveFloat, Proportion
from flrce.devices.availability import (
    AvailabilityModel,
    BoolArray,
    FleetClients,
    FloatArray,
    goes_by_seconds,
)
from flrce.rng import draw_uniforms

JOULES_PER_WATT_HOUR = 3600.0  # joules


@dataclass(frozen=True)
class BatteryState:
    """What batteries held (0 to 1) at some second; -1 for clients that never worked."""

    # (M,) float64; -1: never worked
    level: Tensor = field(metadata={"rows": "trained", "fill": -1.0})
    since: Tensor = field(metadata={"rows": "trained"})  # (M,) float64 seconds


@dataclass(frozen=True)
class PhoneBattery:
    """A phone's battery; the figures are assumed of a usual phone (4,000 mAh at 3.85 V).

    It begins at a level drawn between `least` and `most`; `idle_watts` is all that it does besides
    training; it charges with `charge_watts` while plugged in: as the availability model says, or
    `charging`, or else by night (`diurnal`). Below `floor` it refuses to work. `on`: only devices
    of these profiles have one; without it all have.
    """

    capacity: PositiveFloat = 15.4  # watt-hours
    floor: Proportion = 0.2
    charge_watts: NonNegativeFloat = 10.0
    idle_watts: NonNegativeFloat = 0.3
    least: Annotated[float, Ge(0), Le(1)] = 0.3
    most: Annotated[float, Ge(0), Le(1)] = 1.0
    charging: Any = field(default=None, metadata={"piece": "availability"})
    on: tuple[NonEmptyText, ...] = ()

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least = {self.least:g} is above most = {self.most:g}")
        if self.charging is not None and not goes_by_seconds(self.charging):
            raise ValueError("charging goes by rounds; give a model that goes by seconds")

    @property
    def joules(self) -> float:
        return self.capacity * JOULES_PER_WATT_HOUR

    def initial_state(self, M: int) -> BatteryState:
        return BatteryState(
            torch.full((M,), -1.0, dtype=torch.float64), torch.zeros(M, dtype=torch.float64)
        )

    def compute_levels(
        self,
        seed: int,
        crowd: FleetClients,
        level: FloatArray,
        since: FloatArray,
        at: FloatArray,
        charger: AvailabilityModel,
    ) -> FloatArray:
        """(M,) what each battery holds at second `at`, by client."""
        first = self.least + (self.most - self.least) * draw_uniforms(seed, "battery", crowd.ids)
        levels, now = np.where(level < 0, first, level), since.copy()
        rows = np.flatnonzero(now < at)
        while len(rows):
            clients = crowd.take_rows(rows)
            edge = np.minimum(charger.find_next_change(seed, clients, now[rows]), at[rows])
            watts = (
                np.where(charger.is_available(seed, clients, now[rows]), self.charge_watts, 0.0)
                - self.idle_watts
            )
            levels[rows] = np.clip(
                levels[rows] + watts * (edge - now[rows]) / self.joules, 0.0, 1.0
            )
            now[rows] = edge
            rows = rows[edge < at[rows]]
        return levels

    def seconds_until_empty(
        self, level: FloatArray, joules: FloatArray, seconds: FloatArray, plugged: BoolArray
    ) -> FloatArray:
        """(M,) after how many seconds of this work each battery is flat; infinite if it is not."""
        with np.errstate(divide="ignore", invalid="ignore"):
            watts = np.where(seconds > 0, joules / seconds, 0.0) - np.where(
                plugged, self.charge_watts, 0.0
            )
            after = np.where(watts > 0, level * self.joules / watts, np.inf)
        return np.where(after < seconds, after, np.inf)


def with_battery_levels(
    charge: BatteryState, rows: list[int], level: FloatArray, end: FloatArray
) -> BatteryState:
    """The charge after these clients' work."""
    index = torch.tensor(rows, dtype=torch.long)
    new, since = charge.level.clone(), charge.since.clone()
    new[index], since[index] = torch.from_numpy(level), torch.from_numpy(end)
    return replace(charge, level=new, since=since)
