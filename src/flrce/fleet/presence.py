"""Who is there at a second of the run's clock: pure functions of (seed, client, time), so that a resumed run meets the
same clients.

A model answers two questions for many clients at once: `here`, whether each can be reached, and `until`, up to when
that surely holds. One of one's own is a class with these two methods, named in `fleet.presence`.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import ArrayLike, NDArray

from flrce.bounds import Amount, Part, Positive, Share
from flrce.rng import ids, uniforms

HOUR, DAY = 3600.0, 86400.0
LOOK = 64  # slots looked ahead
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Crowd:
    """Clients in order: names, numbers to draw with, and where their clocks stand."""

    names: tuple[str, ...]
    ids: NDArray[np.uint64]
    ahead: Floats | None = None  # (M,) hours ahead of UTC; None: a model draws them
    midnight: float = 0.0  # seconds since midnight UTC when the run begins

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: NDArray[np.int64]) -> "Crowd":
        names = tuple(self.names[row] for row in rows.tolist())
        return Crowd(names, self.ids[rows], None if self.ahead is None else self.ahead[rows], self.midnight)


def crowd(names: tuple[str, ...], ahead: Floats | None = None, midnight: float = 0.0) -> Crowd:
    return Crowd(names, ids(names), ahead, midnight)


@runtime_checkable
class Presence(Protocol):
    """Whether each client is there at second `at` (one for all, or one for each), and until when that holds."""

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools: ...
    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats: ...


@runtime_checkable
class Charges(Protocol):
    """A model that knows when clients are plugged in: another model, or None where its figures do not say."""

    def charger(self) -> Presence | None: ...


@dataclass(frozen=True)
class Always:
    """Everyone is there."""

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools:
        return np.ones(len(crowd), bool)

    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats:
        return np.full(len(crowd), np.inf)


@dataclass(frozen=True)
class Chance:
    """Bernoulli: in every slot of so many seconds each client is there with probability `share`."""

    share: Part = 0.5
    slot: Positive = HOUR

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools:
        return self._in(seed, crowd, np.floor(_each(crowd, at) / self.slot))

    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats:
        slot = np.floor(_each(crowd, at) / self.slot)
        here, until, same = self._in(seed, crowd, slot), slot + 1, np.ones(len(crowd), bool)
        for _ in range(LOOK):
            same &= self._in(seed, crowd, until) == here
            if not same.any():
                break
            until = until + same
        return until * self.slot

    def _in(self, seed: int, crowd: Crowd, slot: Floats) -> Bools:
        return uniforms(seed, "chance", crowd.ids, slot) < self.share


@dataclass(frozen=True)
class Diurnal:
    """By local time: a phone that is plugged in at night and on Wi-Fi at home, as production fleets want it.

    Bonawitz et al. 2019 ask for idle, charging, unmetered devices, and saw four times as many by night as by day in a
    fleet of one country. Ferreira et al. 2011 (4,035 phones) is the study of charging habits; hours and shares here are
    assumed, of its kind, and fields. A client has hours of its own (normal, `spread`), and moves them a little every
    day; it is plugged in on a share `night` of nights for `charges` hours, and on a share `day` of days for `briefly`
    hours from any hour on. At home, from `home` for `stays` hours, a share `wifi` of the clients has Wi-Fi. Clocks are
    ahead of UTC by one of `zones` hours, unless the fleet's regions say.
    """

    needs: Literal["both", "charging", "wifi"] = "both"
    plugged: Annotated[float, Ge(0), Le(24)] = 22.5
    charges: Annotated[float, Gt(0), Le(24)] = 7.5
    spread: Annotated[float, Ge(0), Le(12)] = 1.5
    night: Share = 0.8
    day: Share = 0.3
    briefly: Annotated[float, Ge(0), Le(12)] = 1.5
    home: Annotated[float, Ge(0), Le(24)] = 18.0
    stays: Annotated[float, Gt(0), Le(24)] = 14.0
    wifi: Share = 0.9
    zones: tuple[Annotated[float, Ge(-12), Le(14)], ...] = (0.0,)

    def charger(self) -> "Diurnal":
        """When clients are plugged in."""
        return replace(self, needs="charging")

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools:
        local = self._local(seed, crowd, _each(crowd, at))
        return self._there(local, self._windows(seed, crowd, np.floor(local / DAY)))

    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats:
        at = _each(crowd, at)
        local = self._local(seed, crowd, at)
        today = np.floor(local / DAY)
        windows = self._windows(seed, crowd, today)
        now = self._there(local, windows)
        end = (today + 2) * DAY  # beyond it other windows count
        edges = np.sort(np.concatenate([part for starts, ends in windows for part in (starts, ends)]), 0)
        found, open_ = end.copy(), np.ones(len(crowd), bool)
        for edge in edges:
            turns = open_ & (edge > local) & (edge < end) & (self._there(edge, windows) != now)
            found[turns] = edge[turns]
            open_ &= ~turns
        return at + (found - local)

    def _local(self, seed: int, crowd: Crowd, at: Floats) -> Floats:
        """Seconds of local time, from a midnight on that lies before the run."""
        if crowd.ahead is not None:
            ahead = crowd.ahead
        else:
            picked = (uniforms(seed, "zone", crowd.ids) * len(self.zones)).astype(int)
            ahead = np.array(self.zones, np.float64)[picked]
        return at + crowd.midnight + (ahead + 24) * HOUR

    def _windows(self, seed: int, crowd: Crowd, today: Floats) -> list[tuple[Floats, Floats]]:
        """Plugged in by night, by day, and at home on Wi-Fi: (days, clients) starts and ends, around today."""
        days = today + np.arange(-2, 3)[:, None]  # (5, M)
        u = lambda what: np.stack([uniforms(seed, what, crowd.ids, d) for d in days])  # noqa: E731
        own = self.spread * _normal(seed, "plugs", crowd)
        start = days * DAY + (self.plugged + own + 0.5 * (u("plugs-day") - 0.5)) * HOUR
        length = np.where(u("night") < self.night, self.charges * HOUR, 0.0)
        brief = days * DAY + 24 * HOUR * u("day-at")
        briefly = np.where(u("day") < self.day, self.briefly * HOUR, 0.0)
        home = days * DAY + (self.home + self.spread * _normal(seed, "home", crowd)) * HOUR
        stays = np.where(uniforms(seed, "wifi", crowd.ids) < self.wifi, self.stays * HOUR, 0.0)
        return [(start, start + length), (brief, brief + briefly), (home, home + stays)]

    def _there(self, at: Floats, windows: list[tuple[Floats, Floats]]) -> Bools:
        night, day, home = (np.any((starts <= at) & (at < ends), axis=0) for starts, ends in windows)
        plugged = np.logical_or(night, day)
        if self.needs == "both":
            plugged = plugged & home
            return np.asarray(plugged)
        return plugged if self.needs == "charging" else np.asarray(home)


@dataclass(frozen=True)
class Churn:
    """Clients join, leave and return: means of exponential times, in seconds.

    A client joins after `joins`, stays for `stays`, then leaves: for `away`, or, unless it `returns`, for good.
    """

    joins: Amount = 0.0
    stays: Positive = 8 * HOUR
    away: Positive = 16 * HOUR
    returns: Share = 0.9

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools:
        return self._walk(seed, crowd, _each(crowd, at))[0]

    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats:
        return self._walk(seed, crowd, _each(crowd, at))[1]

    def _walk(self, seed: int, crowd: Crowd, at: Floats) -> tuple[Bools, Floats]:
        """(whether each is there, when that changes): turn by turn from the beginning."""
        edge = self.joins * _waits(seed, crowd, 0)
        here, turn = np.zeros(len(crowd), bool), 0
        while (late := edge <= at).any():
            turn += 1
            comes = bool(turn % 2)
            here = np.where(late, comes, here)
            after = edge + (self.stays if comes else self.away) * _waits(seed, crowd, turn)
            if not comes:  # it has just left
                after = np.where(uniforms(seed, "returns", crowd.ids, turn) < self.returns, after, np.inf)
            edge = np.where(late, after, edge)
        return here, edge


@dataclass(frozen=True)
class Every:
    """There only while all of several models say so."""

    models: tuple[Presence, ...]

    def here(self, seed: int, crowd: Crowd, at: ArrayLike) -> Bools:
        found: Bools = np.logical_and.reduce([model.here(seed, crowd, at) for model in self.models])
        return found

    def until(self, seed: int, crowd: Crowd, at: ArrayLike) -> Floats:
        here = np.stack([model.here(seed, crowd, at) for model in self.models])
        until = np.stack([model.until(seed, crowd, at) for model in self.models])
        gone = np.where(here, -np.inf, until).max(0)  # absent at least until the last of those absent may come
        found: Floats = np.where(here.all(0), until.min(0), gone)
        return found


def leaves(model: Presence, seed: int, crowd: Crowd, at: ArrayLike, seconds: ArrayLike) -> Floats:
    """When each client, there at `at`, goes within so many seconds from then on; infinite where it stays."""
    begin = _each(crowd, at)
    end, gone = begin + _each(crowd, seconds), np.where(model.here(seed, crowd, begin), np.inf, begin)
    rows = np.flatnonzero(np.isinf(gone))
    now = begin[rows]
    while len(rows):
        some = crowd.take(rows)
        now = model.until(seed, some, now)
        inside = now < end[rows]
        left = inside & ~model.here(seed, some, np.where(inside, now, 0.0))
        gone[rows[left]] = now[left]
        rows, now = rows[inside & ~left], now[inside & ~left]
    return gone


def _each(crowd: Crowd, at: ArrayLike) -> Floats:
    return np.broadcast_to(np.asarray(at, np.float64), len(crowd))


def _normal(seed: int, purpose: str, crowd: Crowd) -> Floats:
    """Box and Muller's normal number of each client, within three deviations."""
    radius = np.sqrt(-2 * np.log1p(-uniforms(seed, purpose, crowd.ids)))
    found: Floats = np.clip(radius * np.cos(2 * np.pi * uniforms(seed, purpose, crowd.ids, 1)), -3, 3)
    return found


def _waits(seed: int, crowd: Crowd, turn: int) -> Floats:
    """Exponential times of mean 1."""
    drawn: Floats = -np.log1p(-uniforms(seed, "churn", crowd.ids, turn))
    return drawn
