"""Grams of CO2 from joules: each region's carbon intensity of electricity, hour by hour.

Read are Electricity Maps' csv files (life-cycle intensity where they have it), CarbonCast's (UTC
time, carbon_intensity), others with a time and a carbon intensity in their header, and .npz files
of hourly arrays by region with REGION_start.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import parse_csv, read_text_limited
from flrce.devices.availability import HOUR, FloatArray
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.formats import npz
from flrce.rng import make_stream

JOULES_PER_KWH = 3.6e6
MAX_FILE_BYTES, MAX_FILES = 64 << 20, 10_000  # a year of hours has some 600 kB
MAX_HOURS = 200_000  # more than twenty years
REMEDY = "give a csv file with a time (UTC) and a carbon intensity, a folder of such, or an .npz"
#: hours that clocks are ahead of UTC, without summer time, by the beginning of a region's name
UTC_OFFSET_HOURS: dict[str, float] = {
    **dict.fromkeys(("GB", "PT"), 0),
    **dict.fromkeys(("DE", "ES", "NL", "PL", "SE", "FR", "IT", "DK", "NO", "AT", "BE", "CH"), 1),
    **{"FI": 2, "ZA": 2, "IN": 5.5, "JP": 9, "KR": 9, "AUS_QLD": 10, "AU-QLD": 10, "AU": 10},
    **dict.fromkeys(("BPAT", "CISO", "US-CAL", "US-NW"), -8),
    **dict.fromkeys(("ERCO", "US-TEX"), -6),
    **dict.fromkeys(("FPL", "US-FLA", "ISNE", "US-NE", "NYISO", "US-NY", "PJM", "US-MIDA"), -5),
    "BR": -3,
}
ZONE_COLUMNS = ("zone id", "zone", "region")
TIME_COLUMNS = ("datetime (utc)", "utc time", "datetime", "timestamp", "time")


@dataclass(frozen=True, eq=False)
class HourlyIntensity:
    """One region's hourly intensity, g/kWh, from `first` on (seconds since 1970, UTC)."""

    first: float
    values: FloatArray

    @property
    def end_time(self) -> float:
        return self.first + HOUR * len(self.values)


@dataclass(frozen=True, eq=False)
class CarbonGrid:
    """Where each client's electricity comes from. After its last hour the series repeats."""

    regions: tuple[str, ...]
    of: NDArray[np.int64]  # (M,) client's row -> region
    hours: tuple[HourlyIntensity, ...]
    start: float  # seconds since 1970 when the run begins

    def mean_intensity(
        self, rows: NDArray[np.int64], at: FloatArray, seconds: FloatArray
    ) -> FloatArray:
        """(rows,) mean g/kWh of each client's region over so many seconds from `at` on."""
        mean = np.empty(len(rows))
        for region, hours in enumerate(self.hours):
            mine = self.of[rows] == region
            mean[mine] = _mean_intensity(hours, self.start + at[mine], seconds[mine])
        return mean

    def compute_emissions(
        self, rows: NDArray[np.int64], at: FloatArray, seconds: FloatArray, joules: FloatArray
    ) -> FloatArray:
        """What work of so many joules emits, spread evenly over its time."""
        return joules / JOULES_PER_KWH * self.mean_intensity(rows, at, seconds)

    def forecast_intensity(self, at: float, hours: int) -> FloatArray:
        """(hours,) mean intensity over all clients in the coming hours, which are known."""
        rows = np.arange(len(self.of))
        when = [np.full(len(self.of), at + h * HOUR) for h in range(hours)]
        return np.array(
            [
                float(self.mean_intensity(rows, second, np.zeros(len(rows))).mean())
                for second in when
            ]
        )


def _mean_intensity(hours: HourlyIntensity, at: FloatArray, seconds: FloatArray) -> FloatArray:
    """Mean over [at, at + seconds] of a step function; the value at `at` where that is no time."""
    total = np.concatenate([[0.0], np.cumsum(hours.values)])
    length = len(hours.values)

    def integrate_up_to(x: FloatArray) -> FloatArray:
        """The integral from the first hour to x hours after it; the series repeats."""
        laps, rest = np.divmod(x, length)
        whole = np.minimum(rest.astype(np.int64), length - 1)
        return np.asarray(laps * total[-1] + total[whole] + (rest - whole) * hours.values[whole])

    a, b = (at - hours.first) / HOUR, (at + seconds - hours.first) / HOUR
    now = hours.values[np.minimum(np.mod(a, length).astype(np.int64), length - 1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (integrate_up_to(b) - integrate_up_to(a)) / (b - a)
    return np.where(b - a > 1e-9, mean, now)


def build_carbon_grid(
    path: str,
    regions: str | Mapping[str, float] | None,
    start: str | None,
    clients: Sequence[str],
    seed: int,
) -> CarbonGrid:
    """A fleet's grid: regions by name, or a seeded mix; default: all regions of the file alike."""
    intensities = load_intensities(path)
    if isinstance(regions, str):
        regions = {regions: 1.0}
    mix = dict(regions) if regions else dict.fromkeys(intensities, 1.0)
    for name in mix:
        if name not in intensities:
            raise BadInput(
                f"fleet.regions {name!r} is not in {path!r}; {suggest_name(name, intensities)}"
            )
    hours = tuple(intensities[name] for name in mix)
    begin = max(series.first for series in hours) if start is None else parse_time(start)
    for name, series in zip(mix, hours, strict=True):
        if not series.first <= begin < series.end_time:
            span = format_date_range(series.first, series.end_time)
            raise BadInput(
                f"fleet.start {start!r} is outside the figures of {name}; they go from {span}"
            )
    of = np.zeros(len(clients), np.int64)
    order = make_stream(seed, "regions").permutation(len(clients))
    edges = np.round(np.cumsum([0.0, *mix.values()]) / sum(mix.values()) * len(clients)).astype(int)
    for region in range(len(mix)):
        of[order[edges[region] : edges[region + 1]]] = region
    return CarbonGrid(tuple(mix), of, hours, begin)


def get_utc_offset(name: str) -> float | None:
    """Hours that a region's clocks are ahead of UTC, where they are known."""
    fits = [
        key for key in UTC_OFFSET_HOURS if name == key or name.startswith((f"{key}-", f"{key}_"))
    ]
    return float(UTC_OFFSET_HOURS[max(fits, key=len)]) if fits else None


def parse_time(text: str) -> float:
    """Seconds since 1970 of a date or a time in ISO's form; UTC, unless it says otherwise."""
    try:
        when = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        raise BadInput(
            f"start {text!r} is no moment; write for example 2020-06-01 or 2020-06-01T18:00"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


@lru_cache(maxsize=8)
def load_intensities(path: str) -> dict[str, HourlyIntensity]:
    """Every region in a file, or in a folder of csv files."""
    try:
        where = Path(path)
        files = sorted(where.glob("*.csv")) if where.is_dir() else [where]
        if len(files) > MAX_FILES:
            raise ValueError(f"{len(files)} files, more than {MAX_FILES}")
        intensities: dict[str, dict[int, list[float]]] = {}
        if where.suffix == ".npz":
            return _load_npz_intensities(where)
        for file in files:
            for region, hour, value in _read_csv_rows(file):
                intensities.setdefault(region, {}).setdefault(hour, []).append(value)
    except BadInput:
        raise
    except (OSError, ValueError, LookupError, TypeError, OverflowError, csv.Error) as why:
        raise BadInput(
            f"fleet.carbon {path!r} cannot be read: {format_one_line(why, 120)}; {REMEDY}"
        ) from why
    if not intensities:
        raise BadInput(f"fleet.carbon {path!r} holds no figures; {REMEDY}")
    return {region: _fill_missing_hours(hours) for region, hours in intensities.items()}


def _fill_missing_hours(hours: Mapping[int, Sequence[float]]) -> HourlyIntensity:
    """Means by the hour; an hour without a figure has the one before it."""
    first, last = min(hours), max(hours)
    if last - first > MAX_HOURS:
        raise BadInput(
            f"fleet.carbon spans {last - first} hours, more than twenty years; is its time column a"
            " time?"
        )
    values = np.empty(last - first + 1)
    for i in range(len(values)):
        values[i] = np.mean(hours[first + i]) if first + i in hours else values[i - 1]
    return HourlyIntensity(first * HOUR, values)


def _read_csv_rows(file: Path) -> Iterator[tuple[str, int, float]]:
    where = f"fleet.carbon {str(file)!r}"
    lines = parse_csv(read_text_limited(file, MAX_FILE_BYTES, REMEDY, where=where))
    header = [cell.strip().lower() for cell in next(lines, (1, []))[1]]
    time = next((header.index(name) for name in TIME_COLUMNS if name in header), None)
    zone = next((header.index(name) for name in ZONE_COLUMNS if name in header), None)
    value = _find_intensity_column(header)
    if time is None or value is None:
        raise ValueError(f"{file.name} has no time or no carbon intensity among its columns")
    for number, row in lines:
        if len(row) > value and not row[value].strip():
            continue
        try:
            hour = math.floor(parse_time(row[time].strip().replace("Z", "+00:00")) / HOUR)
            grams = float(row[value])
        except (BadInput, ValueError, IndexError):
            raise ValueError(f"{file.name} line {number} has no time and number") from None
        if not 0 <= grams < 1e5:
            raise ValueError(f"{file.name} line {number}: {grams:g} g/kWh")
        if zone is not None and len(row) <= zone:
            raise ValueError(f"{file.name} line {number} has no region")
        yield file.stem if zone is None else row[zone].strip(), hour, grams


def _find_intensity_column(header: Sequence[str]) -> int | None:
    """The column of the life-cycle intensity, or of any carbon intensity."""
    plain = [name.replace("_", " ") for name in header]
    fits = [i for i, name in enumerate(plain) if "carbon intensity" in name or name == "avg ci"]
    cycle = [i for i in fits if "life" in plain[i] or "lca" in plain[i]]
    return next(iter(cycle or fits), None)


def _load_npz_intensities(path: Path) -> dict[str, HourlyIntensity]:
    regions: dict[str, HourlyIntensity] = {}
    arrays = npz.load_npz(path, None, f"fleet.carbon {str(path)!r}")
    for name, column in arrays.items():
        if f"{name}_start" in arrays:
            values: Any = np.asarray(column, np.float64)
            plausible = values.ndim == 1 and np.isfinite(values).all() and (values >= 0).all()
            if not plausible or not len(values):
                raise ValueError(f"{name} is no row of intensities")
            regions[name] = HourlyIntensity(parse_time(str(arrays[f"{name}_start"])), values)
    if not regions:
        raise ValueError("it has no REGION and REGION_start")
    return regions


def format_date_range(first: float, end: float) -> str:
    """The dates of two times in seconds since 1970."""
    days = [datetime.fromtimestamp(second, UTC).date().isoformat() for second in (first, end)]
    return " to ".join(days)
