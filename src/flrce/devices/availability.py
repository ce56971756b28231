"""Which clients can be reached at a second of the run's clock, by (seed, client, time).

A model answers two questions for many clients at once: `is_available`, whether each can be reached,
and `find_next_change`, up to when that surely holds. A user's model is a class with these two
methods, named in `fleet.availability`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import ArrayLike, NDArray

from flrce.core.bounds import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveProportion,
    Proportion,
)
from flrce.rng import draw_uniforms, hash_names, make_stream

HOUR, DAY = 3600.0, 86400.0
MAX_LOOKAHEAD_SLOTS = 64  # slots looked ahead
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class FleetClients:
    """Clients in order: names, numbers to draw with, and where their clocks stand."""

    names: tuple[str, ...]
    ids: NDArray[np.uint64]
    ahead: FloatArray | None = None  # (M,) hours ahead of UTC; None: a model draws them
    midnight: float = 0.0  # seconds since midnight UTC when the run begins
    round: int = 0  # the round that is planned; 0: none

    def __len__(self) -> int:
        return len(self.names)

    def take_rows(self, rows: NDArray[np.int64]) -> "FleetClients":
        names = tuple(self.names[row] for row in rows.tolist())
        ahead = None if self.ahead is None else self.ahead[rows]
        return FleetClients(names, self.ids[rows], ahead, self.midnight, self.round)


def make_fleet_clients(
    names: tuple[str, ...], ahead: FloatArray | None = None, midnight: float = 0.0
) -> FleetClients:
    return FleetClients(names, hash_names(names), ahead, midnight)


class AvailabilityModel(ABC):
    """Whether each client can be reached at second `at` (one, or one each), and until when."""

    @property
    def absence(self) -> str:
        """Why a client cannot be reached, in a few words."""
        return "away"

    @abstractmethod
    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        """(clients,) whether each can be reached."""

    @abstractmethod
    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        """(clients,) seconds up to which that surely holds."""

    def get_charging_model(self) -> "AvailabilityModel | None":
        """When clients are plugged in; None: the model does not know."""
        return None


@dataclass(frozen=True)
class AlwaysAvailable(AvailabilityModel):
    """Everyone is there."""

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        return np.ones(len(crowd), bool)

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        return np.full(len(crowd), np.inf)


@dataclass(frozen=True)
class BernoulliAvailability(AvailabilityModel):
    """Bernoulli: in every slot of so many seconds each client is there with probability `share`."""

    share: PositiveProportion = 0.5
    slot: PositiveFloat = HOUR

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        return self._is_available_in_slot(
            seed, crowd, np.floor(_broadcast_times(crowd, at) / self.slot)
        )

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        slot = np.floor(_broadcast_times(crowd, at) / self.slot)
        here = self._is_available_in_slot(seed, crowd, slot)
        until = slot + 1
        same = np.ones(len(crowd), bool)
        for _ in range(MAX_LOOKAHEAD_SLOTS):
            same &= self._is_available_in_slot(seed, crowd, until) == here
            if not same.any():
                break
            until = until + same
        return until * self.slot

    def _is_available_in_slot(self, seed: int, crowd: FleetClients, slot: FloatArray) -> BoolArray:
        return draw_uniforms(seed, "chance", crowd.ids, slot) < self.share


@dataclass(frozen=True)
class DiurnalAvailability(AvailabilityModel):
    """By local time: a phone that is plugged in at night and on Wi-Fi at home.

    Bonawitz et al. 2019 ask for idle, charging, unmetered devices, and saw four times as many by
    night as by day in a fleet of one country. Ferreira et al. 2011 (4,035 phones) is the study of
    charging habits; hours and shares here are assumed, of its kind, and fields. A client has hours
    of its own (normal, `spread`), and moves them a little every day; it is plugged in on a share
    `night` of nights for `charges` hours, and on a share `day` of days for `briefly` hours from any
    hour on. At home, from `home` for `stays` hours, a share `wifi` of the clients has Wi-Fi. Clocks
    are ahead of UTC by one of `zones` hours, unless the fleet's regions say.
    """

    needs: Literal["both", "charging", "wifi"] = "both"
    plugged: Annotated[float, Ge(0), Le(24)] = 22.5
    charges: Annotated[float, Gt(0), Le(24)] = 7.5
    spread: Annotated[float, Ge(0), Le(12)] = 1.5
    night: Proportion = 0.8
    day: Proportion = 0.3
    briefly: Annotated[float, Ge(0), Le(12)] = 1.5
    home: Annotated[float, Ge(0), Le(24)] = 18.0
    stays: Annotated[float, Gt(0), Le(24)] = 14.0
    wifi: Proportion = 0.9
    zones: tuple[Annotated[float, Ge(-12), Le(14)], ...] = (0.0,)

    @property
    def absence(self) -> str:
        reasons = {"charging": "not charging", "wifi": "no Wi-Fi", "both": "not charging on Wi-Fi"}
        return reasons[self.needs]

    def get_charging_model(self) -> "DiurnalAvailability":
        """When clients are plugged in."""
        return replace(self, needs="charging")

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        local = self._to_local_time(seed, crowd, _broadcast_times(crowd, at))
        windows = self._draw_windows(seed, crowd, np.floor(local / DAY))
        return self._is_within_windows(local, windows)

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        at = _broadcast_times(crowd, at)
        local = self._to_local_time(seed, crowd, at)
        today = np.floor(local / DAY)
        windows = self._draw_windows(seed, crowd, today)
        now = self._is_within_windows(local, windows)
        end = (today + 2) * DAY  # beyond it other windows count
        edges = np.concatenate([part for starts, ends in windows for part in (starts, ends)])
        until, unchanged = end.copy(), np.ones(len(crowd), bool)
        for edge in np.sort(edges, 0):
            changes = self._is_within_windows(edge, windows) != now
            turns = unchanged & (edge > local) & (edge < end) & changes
            until[turns] = edge[turns]
            unchanged &= ~turns
        return at + (until - local)

    def _to_local_time(self, seed: int, crowd: FleetClients, at: FloatArray) -> FloatArray:
        """Seconds of local time, from a midnight on that lies before the run."""
        if crowd.ahead is not None:
            ahead = crowd.ahead
        else:
            picked = (draw_uniforms(seed, "zone", crowd.ids) * len(self.zones)).astype(int)
            ahead = np.array(self.zones, np.float64)[picked]
        return at + crowd.midnight + (ahead + 24) * HOUR

    def _draw_windows(
        self, seed: int, crowd: FleetClients, today: FloatArray
    ) -> list[tuple[FloatArray, FloatArray]]:
        """(days, clients) starts and ends around today: plugged in by night, by day, on Wi-Fi."""
        days = today + np.arange(-2, 3)[:, None]  # (5, M)
        u = lambda what: np.stack([draw_uniforms(seed, what, crowd.ids, d) for d in days])  # noqa: E731
        own = self.spread * _draw_normals(seed, "plugs", crowd)
        start = days * DAY + (self.plugged + own + 0.5 * (u("plugs-day") - 0.5)) * HOUR
        length = np.where(u("night") < self.night, self.charges * HOUR, 0.0)
        brief = days * DAY + 24 * HOUR * u("day-at")
        briefly = np.where(u("day") < self.day, self.briefly * HOUR, 0.0)
        home = days * DAY + (self.home + self.spread * _draw_normals(seed, "home", crowd)) * HOUR
        stays = np.where(draw_uniforms(seed, "wifi", crowd.ids) < self.wifi, self.stays * HOUR, 0.0)
        return [(start, start + length), (brief, brief + briefly), (home, home + stays)]

    def _is_within_windows(
        self, at: FloatArray, windows: list[tuple[FloatArray, FloatArray]]
    ) -> BoolArray:
        night, day, home = (
            np.any((starts <= at) & (at < ends), axis=0) for starts, ends in windows
        )
        plugged = night | day
        needed = {"both": plugged & home, "charging": plugged, "wifi": home}
        return np.asarray(needed[self.needs])


@dataclass(frozen=True)
class ChurnAvailability(AvailabilityModel):
    """Clients join, leave and return: means of exponential times, in seconds.

    A client joins after `joins`, stays for `stays`, then leaves: for `away`, or, unless it
    `returns`, for good.
    """

    joins: NonNegativeFloat = 0.0
    stays: PositiveFloat = 8 * HOUR
    away: PositiveFloat = 16 * HOUR
    returns: Proportion = 0.9

    @property
    def absence(self) -> str:
        return "not joined, or left"

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        return self._simulate_sessions(seed, crowd, _broadcast_times(crowd, at))[0]

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        return self._simulate_sessions(seed, crowd, _broadcast_times(crowd, at))[1]

    def _simulate_sessions(
        self, seed: int, crowd: FleetClients, at: FloatArray
    ) -> tuple[BoolArray, FloatArray]:
        """(whether each is there, when that changes): turn by turn from the beginning."""
        edge = self.joins * _draw_waiting_times(seed, crowd, 0)
        here, turn = np.zeros(len(crowd), bool), 0
        while (late := edge <= at).any():
            turn += 1
            comes = bool(turn % 2)
            here = np.where(late, comes, here)
            mean = self.stays if comes else self.away
            after = edge + mean * _draw_waiting_times(seed, crowd, turn)
            if not comes:  # it has just left
                back = draw_uniforms(seed, "returns", crowd.ids, turn) < self.returns
                after = np.where(back, after, np.inf)
            edge = np.where(late, after, edge)
        return here, edge


@dataclass(frozen=True)
class JointAvailability(AvailabilityModel):
    """There only while all of several models say so."""

    models: tuple[AvailabilityModel, ...]

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        here: BoolArray = np.logical_and.reduce(
            [model.is_available(seed, crowd, at) for model in self.models]
        )
        return here

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        here = np.stack([model.is_available(seed, crowd, at) for model in self.models])
        until = np.stack([model.find_next_change(seed, crowd, at) for model in self.models])
        # absent at least until the last of those absent may come
        gone = np.where(here, -np.inf, until).max(0)
        changes_at: FloatArray = np.where(here.all(0), until.min(0), gone)
        return changes_at


@dataclass(frozen=True)
class GivenAvailability(AvailabilityModel):
    """A user's object with `is_available` and `find_next_change`."""

    model: Any

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        return np.asarray(self.model.is_available(seed, crowd, at), bool)

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        return np.asarray(self.model.find_next_change(seed, crowd, at), np.float64)


@dataclass(frozen=True)
class RoundAvailability(AvailabilityModel):
    """A callable of (seed, client, round). A client that leaves during its work still answers."""

    model: Any

    @property
    def absence(self) -> str:
        return "not in this round"

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        if crowd.round < 1:
            return np.ones(len(crowd), bool)
        return np.array([bool(self.model(seed, name, crowd.round)) for name in crowd.names], bool)

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        return np.full(len(crowd), np.inf)


@dataclass(frozen=True)
class RandomRoundAvailability:
    """Version 0.1: everyone is available in a `share` of the rounds, at random."""

    share: PositiveProportion = 0.5

    def __call__(self, seed: int, client: str, t: int) -> bool:
        return bool(make_stream(seed, "available", t, client).random() < self.share)


@dataclass(frozen=True)
class DailyRoundAvailability:
    """Version 0.1: available for the first `awake` of `day` rounds, from an hour of its own."""

    day: PositiveInt = 24
    awake: PositiveInt = 8

    def __call__(self, seed: int, client: str, t: int) -> bool:
        rises = int(make_stream(seed, "rises", 0, client).integers(self.day))
        return (t - 1 - rises) % self.day < self.awake


def to_availability_model(piece: Any) -> AvailabilityModel:
    """A model of ours as it is, a user's object or callable within a model."""
    if isinstance(piece, AvailabilityModel):
        return piece
    return GivenAvailability(piece) if goes_by_seconds(piece) else RoundAvailability(piece)


def goes_by_seconds(piece: Any) -> bool:
    """Whether a piece says who can be reached at a second, not in a round."""
    return hasattr(piece, "is_available")


def list_models(model: AvailabilityModel) -> tuple[AvailabilityModel, ...]:
    """The models that must all have a client available."""
    return model.models if isinstance(model, JointAvailability) else (model,)


def find_departure_times(
    model: AvailabilityModel, seed: int, crowd: FleetClients, at: ArrayLike, seconds: ArrayLike
) -> FloatArray:
    """When each client, available at `at`, leaves within so many seconds; infinite if it stays."""
    begin = _broadcast_times(crowd, at)
    end = begin + _broadcast_times(crowd, seconds)
    gone = np.where(model.is_available(seed, crowd, begin), np.inf, begin)
    rows = np.flatnonzero(np.isinf(gone))
    now = begin[rows]
    while len(rows):
        clients = crowd.take_rows(rows)
        now = model.find_next_change(seed, clients, now)
        inside = now < end[rows]
        left = inside & ~model.is_available(seed, clients, np.where(inside, now, 0.0))
        gone[rows[left]] = now[left]
        rows, now = rows[inside & ~left], now[inside & ~left]
    return gone


def _broadcast_times(crowd: FleetClients, at: ArrayLike) -> FloatArray:
    return np.broadcast_to(np.asarray(at, np.float64), len(crowd))


def _draw_normals(seed: int, purpose: str, crowd: FleetClients) -> FloatArray:
    """Box and Muller's normal number of each client, within three deviations."""
    radius = np.sqrt(-2 * np.log1p(-draw_uniforms(seed, purpose, crowd.ids)))
    angle = 2 * np.pi * draw_uniforms(seed, purpose, crowd.ids, 1)
    drawn: FloatArray = np.clip(radius * np.cos(angle), -3, 3)
    return drawn


def _draw_waiting_times(seed: int, crowd: FleetClients, turn: int) -> FloatArray:
    """Exponential times of mean 1."""
    drawn: FloatArray = -np.log1p(-draw_uniforms(seed, "churn", crowd.ids, turn))
    return drawn
