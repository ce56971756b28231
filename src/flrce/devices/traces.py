"""Sessions from a file: plain csv, or the forms of two public traces.

- csv with the columns client, from, to (seconds);
- FedScale's `client_behave_trace`, a pickle of {client: {"active": [...], "inactive": [...],
  "finish_time": ...}};
- FLASH's json, {client: {"messages": "2020-01-31 23:39:14\\tbattery_charged_on\\n..."}}: a phone's
  events, from which
  it is known when it was charging, on Wi-Fi, and its screen dark or locked.
"""

import csv
import json
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flrce.core.bounds import NonEmptyText
from flrce.core.files import (
    open_regular,
    parse_csv,
    read_limited,
    read_text_limited,
    validate_memory,
)
from flrce.devices.availability import DAY, AvailabilityModel, BoolArray, FleetClients, FloatArray
from flrce.errors import BadInput, format_one_line
from flrce.formats.plain_pickle import load_plain_pickle
from flrce.rng import draw_uniforms

MAX_TRACE_BYTES = 2**30  # bytes of a trace file
SESSION_BYTES = 128  # of memory that a session takes
REMEDY = "give a csv file with the columns client,from,to, FedScale's pickle or FLASH's json"
READ_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError),
    *(OverflowError, MemoryError, csv.Error, pickle.PickleError),
)
IntervalList = list[tuple[float, float]]
FLASH_EVENTS = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("2g", "3g", "4g", "5g", "unknown"), ("wifi", False)),
    "screen_off": ("dark", True),
    "screen_on": ("dark", False),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
}


@dataclass(frozen=True, eq=False)
class SessionTable:
    """Sessions of many clients, sorted, one client's after the other's."""

    row: Mapping[str, int]
    period: FloatArray  # (C,) seconds after which a client's sessions come again
    first: NDArray[np.int64]  # (C + 1,) where each client's sessions begin
    starts: FloatArray
    ends: FloatArray


@dataclass(frozen=True)
class TraceAvailability(AvailabilityModel):
    """Sessions from a file; they come again when the trace is over, unless `repeat` is false.

    A client takes the sessions under its own name, or, where the file does not have it, those of
    one drawn by the seed. FLASH's phones are there while they are idle and what `needs` says; the
    others' files hold sessions only.
    """

    path: NonEmptyText
    repeat: bool = True
    needs: Literal["both", "charging", "wifi"] = "both"

    @property
    def absence(self) -> str:
        return "outside its sessions"

    def __post_init__(self) -> None:
        load_sessions(self.path, self.needs)

    def get_charging_model(self) -> "TraceAvailability | None":
        """When phones are plugged in; None: the file does not say."""
        return replace(self, needs="charging") if _detect_format(self.path) == "flash" else None

    def is_available(self, seed: int, crowd: FleetClients, at: ArrayLike) -> BoolArray:
        table, now, at_hand = self._locate_sessions(seed, crowd, at)
        inside = at_hand >= table.first[self._match_session_rows(seed, crowd, table)]
        return inside & (now < table.ends[np.maximum(at_hand, 0)]) & (len(table.ends) > 0)

    def find_next_change(self, seed: int, crowd: FleetClients, at: ArrayLike) -> FloatArray:
        table, now, at_hand = self._locate_sessions(seed, crowd, at)
        rows = self._match_session_rows(seed, crowd, table)
        here = self.is_available(seed, crowd, at)
        base = np.broadcast_to(np.asarray(at, np.float64), len(crowd)) - now
        following = at_hand + 1
        again = table.period[rows] if self.repeat else np.full(len(crowd), math.inf)
        later = np.append(table.starts, math.inf)
        coming = np.where(
            following < table.first[rows + 1],
            later[np.minimum(following, len(table.starts))],
            again,
        )
        return base + np.where(here, np.append(table.ends, 0.0)[at_hand], coming)

    def _match_session_rows(
        self, seed: int, crowd: FleetClients, found: SessionTable
    ) -> NDArray[np.int64]:
        """Whose sessions each client takes."""
        drawn = (draw_uniforms(seed, "trace", crowd.ids) * len(found.period)).astype(np.int64)
        pairs = zip(crowd.names, drawn.tolist(), strict=True)
        return np.array([found.row.get(name, row) for name, row in pairs], int)

    def _locate_sessions(
        self, seed: int, crowd: FleetClients, at: ArrayLike
    ) -> tuple[SessionTable, FloatArray, NDArray[np.int64]]:
        """Sessions, each client's second within its trace, and its last session begun by then."""
        table = load_sessions(self.path, self.needs)
        rows = self._match_session_rows(seed, crowd, table)
        now = np.broadcast_to(np.asarray(at, np.float64), len(crowd))
        now = np.mod(now, table.period[rows]) if self.repeat else now
        step = float(table.period.max(initial=0.0)) * 2 + 1
        flat = table.starts + step * np.repeat(np.arange(len(table.period)), np.diff(table.first))
        last = np.searchsorted(flat, np.minimum(now, step - 1) + step * rows, side="right") - 1
        return table, now, last


@lru_cache(maxsize=16)
def load_sessions(path: str, needs: str = "both") -> SessionTable:
    """The sessions in a file."""
    try:
        readers = {"csv": _read_csv, "fedscale": _read_fedscale, "flash": _read_flash}
        raw, lasts = readers[_detect_format(path)](Path(path), needs)
    except BadInput:
        raise
    except READ_ERRORS as why:
        raise BadInput(
            f"trace {path!r} cannot be read: {format_one_line(why, 120)}; {REMEDY}"
        ) from why
    if not raw:
        raise BadInput(f"trace {path!r} holds no clients; {REMEDY}")
    merged = {name: _merge_intervals(parts) for name, parts in raw.items()}
    flat = [pair for parts in merged.values() for pair in parts]
    first = np.cumsum([0, *(len(parts) for parts in merged.values())])
    table = np.array(flat, np.float64).reshape(-1, 2)
    period = np.array([lasts[name] for name in merged], np.float64)
    rows = {name: i for i, name in enumerate(merged)}
    return SessionTable(rows, period, first, table[:, 0], table[:, 1])


def _merge_intervals(parts: IntervalList) -> IntervalList:
    """Sorted, with what overlaps or touches as one."""
    merged: IntervalList = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def _detect_format(path: str) -> str:
    with open_regular(path, REMEDY, MAX_TRACE_BYTES, f"trace {path!r}") as file:
        head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith((b"\x80", b"(dp")):
        return "fedscale"
    return "flash" if head.startswith(b"{") else "csv"


def _read_csv(path: Path, needs: str) -> tuple[dict[str, IntervalList], dict[str, float]]:
    sessions: dict[str, IntervalList] = {}
    rows = parse_csv(read_text_limited(path, MAX_TRACE_BYTES, REMEDY, where=f"trace {str(path)!r}"))
    if [cell.strip().lower() for cell in next(rows, (1, []))[1]] != ["client", "from", "to"]:
        raise ValueError("it has no columns client, from, to")
    for number, row in rows:
        sessions.setdefault(row[0].strip(), []).append(_parse_interval(row[1:], f"line {number}"))
    last = max((end for parts in sessions.values() for _, end in parts), default=0.0)
    return sessions, dict.fromkeys(sessions, last)


def _parse_interval(cells: Iterable[Any], where: str) -> tuple[float, float]:
    try:
        start, end = (float(cell) for cell in cells)
    except ValueError:
        raise ValueError(f"{where} is no pair of seconds") from None
    if not 0 <= start <= end < math.inf:
        raise ValueError(f"{where} goes from {start:g} to {end:g}")
    return start, end


def _read_fedscale(path: Path, needs: str) -> tuple[dict[str, IntervalList], dict[str, float]]:
    """Its simulator has a client active from active[i] to inactive[i], modulo finish_time."""
    sessions: dict[str, IntervalList] = {}
    lasts: dict[str, float] = {}
    raw = read_limited(path, MAX_TRACE_BYTES, REMEDY, expansion=4, where=f"trace {str(path)!r}")
    table = load_plain_pickle(raw)
    # one list may be named by many clients
    count = sum(len(trace["active"]) for trace in table.values())
    validate_memory(count * SESSION_BYTES, f"trace {str(path)!r}", "give fewer clients")
    for client, trace in table.items():
        pairs = zip(trace["active"], trace["inactive"], strict=True)
        sessions[str(client)] = [_parse_interval(pair, f"client {client}") for pair in pairs]
        lasts[str(client)] = float(trace["finish_time"])
        if not 0 < lasts[str(client)] < math.inf:
            raise ValueError(f"client {client}: finish_time is {lasts[str(client)]:g}")
    return sessions, lasts


def _read_flash(path: Path, needs: str) -> tuple[dict[str, IntervalList], dict[str, float]]:
    """Second 0 is the midnight before the first event; an untold state counts as off."""
    raw = read_limited(path, MAX_TRACE_BYTES, REMEDY, expansion=4, where=f"trace {str(path)!r}")
    table = json.loads(raw.decode("utf-8", "replace"))
    events = {
        str(client): _parse_flash_events(phone["messages"]) for client, phone in table.items()
    }
    first = min(
        (phone_events[0][0] for phone_events in events.values() if phone_events),
        default=datetime(2020, 1, 1),
    )
    zero = first.replace(hour=0, minute=0, second=0)
    last = max(
        (
            (phone_events[-1][0] - zero).total_seconds()
            for phone_events in events.values()
            if phone_events
        ),
        default=0.0,
    )
    # whole days: noon stays noon when it comes again
    period = math.ceil(max(last, 1.0) / DAY) * DAY
    return {
        name: _find_ready_intervals(phone_events, zero, needs)
        for name, phone_events in events.items()
    }, dict.fromkeys(events, period)


def _parse_flash_events(messages: str) -> list[tuple[datetime, str]]:
    events = []
    for line in re.split("[\r\n]+", messages.replace("\0", "")):
        when, _, name = line.strip().partition("\t")
        event = name.strip().lower()
        if event in FLASH_EVENTS:
            events.append((datetime.strptime(when.strip(), "%Y-%m-%d %H:%M:%S"), event))
    return sorted(events, key=lambda event: event[0])


def _find_ready_intervals(
    told: list[tuple[datetime, str]], zero: datetime, needs: str
) -> IntervalList:
    state, intervals, since = dict.fromkeys(("charging", "wifi", "dark", "locked"), False), [], None
    for when, event in told:
        name, value = FLASH_EVENTS[event]
        state[name] = value
        second = (when - zero).total_seconds()
        ready = _is_ready(state, needs)
        if ready and since is None:
            since = second
        elif not ready and since is not None:
            intervals.append((since, second))
            since = None
    return intervals


def _is_ready(state: Mapping[str, bool], needs: str) -> bool:
    if needs == "charging":
        return state["charging"]
    idle = state["dark"] or state["locked"]
    return idle and state["wifi"] and (needs == "wifi" or state["charging"])
