"""Where and when a run emitted its CO2, and what it would have emitted at another time."""

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flrce.core.types import RoundRecord
from flrce.devices.carbon import CarbonGrid, format_date_range, load_intensities, parse_time
from flrce.errors import BadInput
from flrce.storage.read import RecordedRun, get_line_seconds

HOURS_PER_DAY = 24


def sum_grams_by_hour(runs: Sequence[RecordedRun]) -> dict[str, list[float]]:
    """Region -> grams by hour of the day (UTC); empty if no run knows its regions."""
    grams: dict[str, list[float]] = {}
    for run in runs:
        regions, start = run.partition.get("regions"), run.partition.get("begins")
        if not isinstance(regions, list) or not isinstance(start, int | float):
            continue
        if len(regions) < len(run.roster):
            continue
        began = {h.t: h.began for h in run.rounds}
        for line in run.costs:
            row = run.client_indices.get(line["client"])
            if line.get("grams") and row is not None and row < len(regions):
                hour = int((start + began.get(line["t"], 0.0)) // 3600 % HOURS_PER_DAY)
                hours = grams.setdefault(str(regions[row]), [0.0] * HOURS_PER_DAY)
                hours[hour] += float(line["grams"])
    return grams


def render_carbon_table(runs: Sequence[RecordedRun]) -> str:
    """A table of regions by hours, marked where more was emitted; "" if nothing is known."""
    grams = sum_grams_by_hour(runs)
    most = max((max(hours) for hours in grams.values()), default=0.0)
    if not most:
        return ""
    head = "".join(f"<th>{hour}</th>" for hour in range(HOURS_PER_DAY))
    rows = []
    for region, hours in sorted(grams.items(), key=lambda item: -sum(item[1])):
        cells = "".join(_render_carbon_cell(value, most) for value in hours)
        rows.append(f"<tr><th>{html.escape(region)}</th>{cells}<td>{sum(hours):.3g}</td></tr>")
    return (
        '<section aria-labelledby="h-carbon"><h2 id="h-carbon">CO2 by region and hour</h2>'
        '<p class="note">Grams of all runs, by the hour of the day (UTC) in which their round'
        " began; marked: a "
        "quarter, half, three quarters of the most.</p>"
        '<div class="scroll" role="region" aria-labelledby="h-carbon" tabindex="0"><table'
        ' id="carbon">'
        f"<thead><tr><th>Region</th>{head}<th>all</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _render_carbon_cell(value: float, most: float) -> str:
    """A number, and how it stands to the largest: styles may not be written in place."""
    mark = "·▪▣■"[min(int(4 * value / most), 3)] if value else ""
    return f"<td>{mark} {value:.2g}</td>" if value else "<td></td>"


@dataclass(frozen=True)
class ShiftedEmissions:
    """A run's grams had it begun at another time, with the same rounds, clients and joules."""

    start: str
    grams: float
    ratio: float  # of what was booked


def shift_run_start(run: RecordedRun, starts: Sequence[str]) -> list[ShiftedEmissions]:
    """The same work at other times; who would have been there then only a new run can tell."""
    fleet, regions = run.experiment.get("fleet", {}), run.partition.get("regions")
    path = fleet.get("carbon")
    booked = sum(h.grams for h in run.rounds)
    if not isinstance(path, str) or not isinstance(regions, list) or not booked:
        raise BadInput(f"--start: {run.folder} has no grams to move; run it with fleet.carbon")
    known, names = load_intensities(path), list(dict.fromkeys(map(str, regions)))
    if any(name not in known for name in names):
        raise BadInput(f"--start: {path} no longer has the regions of {run.folder}")
    of = np.array([names.index(str(name)) for name in regions], np.int64)
    index = {client: k for client, k in run.client_indices.items() if k < len(regions)}
    lines = [line for line in run.costs if line["client"] in index]
    rows = np.array([index[line["client"]] for line in lines], np.int64)
    at = np.array(find_send_times(run.rounds, lines))
    seconds = np.array([get_line_seconds(line) for line in lines])
    joules = np.array([line.get("joules", 0.0) for line in lines])
    hours = tuple(known[name] for name in names)
    emissions = []
    for start in starts:
        begin = parse_time(start.strip())
        if not all(each.first <= begin < each.end_time for each in hours):
            first, end = max(each.first for each in hours), min(each.end_time for each in hours)
            raise BadInput(
                f"--start {start.strip()}: outside the figures in {path}; they go from"
                f" {format_date_range(first, end)}"
            )
        grid = CarbonGrid(tuple(names), of, hours, begin)
        grams = float(grid.compute_emissions(rows, at, seconds, joules).sum())
        emissions.append(ShiftedEmissions(start.strip(), grams, grams / booked))
    return emissions


def find_send_times(
    rounds: Sequence[RoundRecord], lines: Sequence[Mapping[str, Any]]
) -> list[float]:
    """When each line's client was sent its task: in an earlier round where its reply is old, and in
    the try of a round that it was chosen in, of those that were abandoned too.
    """
    began, tries = {h.t: h.began for h in rounds}, defaultdict(list)
    for h in rounds:
        for client in h.chosen:
            tries[h.t, client].append(h.began)
    times = []
    for line in lines:
        t = line["t"] - line.get("age", 0)
        mine = [] if line["outcome"] in ("asked", "evaluated") else tries[t, line["client"]]
        times.append(mine.pop(0) if mine else began.get(t, 0.0))
    return times
