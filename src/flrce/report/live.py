"""Follow runs while they train: progress, costs and the expected end, read from run directories.

Nothing is locked or written, so training is not disturbed. Between two snapshots, files may grow,
be cut back by a resume, or vanish.
"""

import hashlib
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.metric_format import format_metric_value, metric_unit
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_one_line
from flrce.report.endings import describe_state, get_planned_rounds
from flrce.report.selection import describe_reach_of_runs, describe_round_reach, get_phase
from flrce.report.tasks import get_dataset_name
from flrce.report.verdict import collect_run_notes
from flrce.storage.limited import describe_error, open_regular, read_limited, split_lines
from flrce.storage.manifest import known_marks
from flrce.storage.read import (
    RecordedRun,
    parse_lines,
    read_settings,
    run_folders,
    validate_round_line,
)
from flrce.storage.run_notes import ended_diverged, explain_divergence
from flrce.storage.seal import MANIFESTS, SEAL_FILE, DamagedRun, parse_document, read_sealed_file

MAX_FOLDER_DEPTH = 3  # levels of subfolders that are searched for runs
RECENT_EVALUATIONS = 10  # evaluations from which the current price of a point is computed
MAX_LISTED_CLIENTS = 40  # clients and rejected replies in a snapshot
MAX_CURVE_POINTS = 40  # newest points of a curve in a snapshot
WATCHED_FILES = ("rounds.jsonl", "experiment.toml", "partition.json", "lock", SEAL_FILE, *MANIFESTS)
READ_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),
)
RUNNING_STATES = ("running", "preparing")
PACE_ROUNDS = 20  # rounds from whose times the end is estimated


@dataclass
class RecordTail:
    """The records of a growing rounds.jsonl. Each line is read once.

    Reading starts again from the top if the lines read so far have changed.
    """

    path: Path
    position: int = 0  # bytes read
    last_line: bytes = b""  # the line before `position`, to recognise the file
    records: list[RoundRecord] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)  # of everything before `position`

    def read_new_lines(self, mark: Mapping[str, Any] | None = None) -> bool:
        """Read new lines up to the committed length (`mark`). Return whether there were any.

        Raise DamagedRun if the committed part differs from its hash.
        """
        before, length = self.position, None if mark is None else mark["bytes"]
        if length is not None and length < self.position:
            self._restart()
        try:
            with open_regular(self.path) as file:
                file.seek(self.position - len(self.last_line))
                if file.read(len(self.last_line)) != self.last_line:
                    self._restart()
                    file.seek(0)
                left = None if length is None else length - self.position
                self._read_lines(split_lines(file, left))
        except FileNotFoundError:
            self._restart()
        if mark is None:
            return self.position != before
        changed = mark["sha256"] and self.digest.hexdigest() != mark["sha256"]
        if changed or self.position < mark["bytes"]:
            raise DamagedRun(
                f"{self.path} is not as it was written; flrce verify {self.path.parent} checks all"
                " files"
            )
        return self.position != before

    def _read_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.digest.update(line)
            self.position, self.last_line = self.position + len(line), line
            rows = parse_lines([line], self.path.name)
            self.records += [validate_round_line(row) for row in rows]

    def _restart(self) -> None:
        self.position, self.last_line, self.records = 0, b"", []
        self.digest = hashlib.sha256()


@dataclass
class WatchedRun:
    """One run directory that is read repeatedly."""

    folder: Path
    tail: RecordTail
    #: (modification time of rounds.jsonl, committed rounds) of the newest snapshots
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_ROUNDS))
    run: RecordedRun | None = None
    file_stamps: tuple[Any, ...] = ()
    view: dict[str, Any] = field(default_factory=dict)

    def take_snapshot(self) -> dict[str, Any]:
        """The run as plain data (`build_run_view`), or its folder and an error as the state."""
        try:
            owner = find_lock_holder(self.folder / "lock")
            stamps = (*(_get_file_stamp(self.folder / name) for name in WATCHED_FILES), owner)
            if self.run is None or stamps != self.file_stamps:
                self._read_run()
                self.file_stamps = stamps
                self.view = self._build_view(owner)
        except READ_ERRORS as error:
            self.run, self.tail = None, RecordTail(self.tail.path)
            word = "damaged" if isinstance(error, DamagedRun) else "unreadable"
            state = f"{word}: {format_one_line(describe_error(error), 120)}"
            self.view = {"folder": str(self.folder), "state": state}
        return self.view

    def _read_run(self) -> None:
        marks, _ = known_marks(self.folder)
        grown = self.tail.read_new_lines(marks.get("rounds.jsonl"))
        experiment = read_settings(self.folder, marks)
        path = self.folder / "partition.json"
        exists = path.name in marks or os.path.lexists(path)
        partition = parse_document(read_sealed_file(path, marks), path) if exists else {}
        records = tuple(self.tail.records)
        self.run = RecordedRun(self.folder, experiment, records, (), partition, (), {})
        done = len(self.run.committed_rounds)
        if grown and (not self.times or self.times[-1][1] != done):
            if self.times and done < self.times[-1][1]:
                self.times.clear()
            self.times.append((_get_modification_time(self.tail.path), done))

    def _build_view(self, owner: str) -> dict[str, Any]:
        assert self.run is not None
        last_write = _get_modification_time(self.tail.path)
        return build_run_view(self.run, owner, self._estimate_end_time(), last_write)

    def _estimate_end_time(self) -> float | None:
        """When the last round would end at the recent pace; None if unknown."""
        assert self.run is not None
        done, began = len(self.run.committed_rounds), _get_modification_time(self.folder / "lock")
        points = list(self.times)
        if len(points) == 1 and 0 < began < points[0][0]:
            points.insert(0, (began, 0))  # one snapshot so far: assume a start at round 1
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        pace = (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
        return points[-1][0] + pace * max(get_planned_rounds(self.run) - done, 0)


@dataclass
class RunWatcher:
    """All runs below some folders, also those that appear later."""

    places: Sequence[Path]
    watched: dict[Path, WatchedRun] = field(default_factory=dict)

    def take_snapshot(self) -> list[dict[str, Any]]:
        """Views of all runs: first those that train now, then the newest."""
        folders = {folder for place in self.places for folder in find_run_folders(place)}
        for vanished in self.watched.keys() - folders:
            del self.watched[vanished]
        for folder in folders - self.watched.keys():
            self.watched[folder] = WatchedRun(folder, RecordTail(folder / "rounds.jsonl"))
        views = [watched.take_snapshot() for watched in self.watched.values()]
        return sorted(
            views, key=lambda view: (not is_running(view), -view.get("last", 0.0), view["folder"])
        )


def is_running(view: Mapping[str, Any]) -> bool:
    """Whether a process trains in the folder of a view now."""
    return str(view["state"]).startswith(RUNNING_STATES)


def find_run_folders(place: Path) -> set[Path]:
    """Run directories at or below a folder, also those without a finished round."""
    if not os.path.isdir(place):
        raise BadInput(f"{place} is no folder; give a run directory, or one that holds some")
    levels = ["*/" * depth for depth in range(MAX_FOLDER_DEPTH + 1)]
    locked = {path.parent for level in levels for path in place.glob(f"{level}lock")}
    started = {folder for folder in locked if (folder / "experiment.toml").exists()}
    return run_folders(place, MAX_FOLDER_DEPTH) | started


def find_lock_holder(lock: Path) -> str:
    """Who trains in a folder now: "here", the name of another machine, or "" for nobody."""
    try:
        text = read_limited(lock, 1000).decode(errors="replace").strip()
        holder = re.fullmatch(r"process (\d{1,10}) on (.*)", text)
    except OSError:
        return ""
    if not holder:
        return ""
    if holder[2] != platform.node():
        return format_one_line(holder[2], 60)
    try:
        handles = os.listdir(f"/proc/{holder[1]}/fd")
        links = {_read_link(f"/proc/{holder[1]}/fd/{handle}") for handle in handles}
        return "here" if str(lock.resolve()) in links else ""
    except PermissionError:  # another user's
        return "here"
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def build_run_view(run: RecordedRun, owner: str, ends: float | None, last: float) -> dict[str, Any]:
    """A run as plain data for the terminal, JSON and Prometheus. Names are not escaped."""
    T = get_planned_rounds(run)
    done = len(run.committed_rounds)
    state = describe_run_state(run, owner)
    metric = str(run.summary["metric"])
    refused = [[h.t, client, reason] for h in run.rounds for client, reason in h.rejected.items()]
    return {
        "folder": str(run.folder),
        "recipe": run.name,
        "data": str(run.experiment.get("data", {}).get("path") or get_dataset_name(run)),
        "seed": run.seed,
        "state": state,
        "T": T,
        "t": done,
        "M": len(run.roster),
        "P": run.P,
        "last": last,
        "ends": ends if state.startswith(RUNNING_STATES) and done < T else None,
        "metric": {"name": metric},
        "value": run.summary["value"],
        "shown": format_metric_value(metric, run.summary["value"]),
        "handed": list_newest_points(run.rounds, lambda h: h.final_model_metric),
        "conflicts": list_newest_points(run.committed_rounds, run.count_conflicts),
        "round": describe_newest_round(run),
        "refused": refused[-MAX_LISTED_CLIENTS:][::-1],
        "refusals": len(refused),
        "abandoned": sum(h.outcome == "abandoned" for h in run.rounds),
        "spent": sum_costs(run.rounds),
        "evaluation": sum(h.bytes_evaluation for h in run.rounds),
        "energy": run.summary["energy"],
        "price": compute_recent_price(run.rounds, metric),
        "budget": compute_remaining_budgets(run),
        "stop": run.rounds[-1].stop if run.rounds else "",
        "notes": list_run_notes(run, state),
    }


def describe_newest_round(run: RecordedRun) -> dict[str, Any] | None:
    """The clients of the last round and the number of their replies."""
    if not run.rounds:
        return None
    newest = run.rounds[-1]
    return {
        "t": newest.t,
        "outcome": newest.outcome,
        "phase": get_phase(newest),
        "count": len(newest.chosen),
        "chosen": list(newest.chosen[:MAX_LISTED_CLIENTS]),
        "replied": len(newest.replied),
        "rejected": len(newest.rejected),
        "reach": describe_round_reach(newest, len(run.roster)),
    }


def describe_run_state(run: RecordedRun, owner: str) -> str:
    """The state of a run: "finished", "stopped early", "running", "preparing", "diverged" or
    "interrupted".
    """
    state = describe_state(run.rounds, get_planned_rounds(run))
    if state != "unfinished":
        return state
    if not owner:
        return "diverged" if ended_diverged(run.rounds) else "interrupted"
    word = "running" if run.rounds else "preparing"
    return word if owner == "here" else f"{word} on {owner}"


def list_run_notes(run: RecordedRun, state: str) -> list[str]:
    """Notes on a run; of a run that still trains only that it diverges."""
    if not state.startswith(RUNNING_STATES):
        reach = describe_reach_of_runs([run])
        return [*collect_run_notes(run), *filter(None, [reach])] if run.rounds else []
    return [note for note in [explain_divergence(run.rounds)] if note]


def sum_costs(records: Sequence[RoundRecord]) -> dict[str, float]:
    return {name: sum(map(cost.of_round, records)) for name, cost in COSTS.items()}


def compute_recent_price(records: Sequence[RoundRecord], metric: str) -> dict[str, Any] | None:
    """The cost of one point (of a share; else one unit) over the last evaluations.

    The costs are None if the metric did not improve.
    """
    evaluated = [i for i, h in enumerate(records) if h.final_model_metric is not None]
    if len(evaluated) < 2:
        return None
    first, last = evaluated[-min(RECENT_EVALUATIONS + 1, len(evaluated))], evaluated[-1]
    before, after = records[first].final_model_metric, records[last].final_model_metric
    assert before is not None
    assert after is not None
    gain = (after - before) / metric_unit(metric) * (-1 if records[last].lower else 1)
    costs = sum_costs(records[first + 1 : last + 1])
    prices = {name: costs[name] / gain if gain > 0 else None for name in ("joules", "bytes")}
    return {"rounds": last - first, "gain": gain, **prices}


def compute_remaining_budgets(run: RecordedRun) -> list[dict[str, Any]]:
    """What is left of each budget, and for how many rounds that lasts at the recent cost."""
    recent = run.committed_rounds[-RECENT_EVALUATIONS:]
    round_costs = {name: cost / max(len(recent), 1) for name, cost in sum_costs(recent).items()}
    budgets = []
    for rule in run.stop_rules:
        for name, limit in rule.limits.items():
            left = max(float(limit) - COSTS[name].of_run(run.rounds), 0.0)
            lasts = int(left / round_costs[name]) if round_costs[name] else None
            budgets.append({"name": name, "limit": float(limit), "left": left, "lasts": lasts})
    return budgets


def list_newest_points(
    records: Sequence[RoundRecord], read_value: Callable[[RoundRecord], float | None]
) -> list[list[float]]:
    """[round, value] of the newest records that have a value."""
    values = [(h.t, read_value(h)) for h in records]
    points = [[t, float(f"{value:.5g}")] for t, value in values if value is not None]
    return points[-MAX_CURVE_POINTS:]


def _get_file_stamp(path: Path) -> tuple[int, int]:
    """Modification time and size, by which a change of a file is noticed."""
    try:
        status = os.stat(path)
        return status.st_mtime_ns, status.st_size
    except OSError:
        return 0, -1


def _get_modification_time(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def format_time_left(ends: float | None, now: float | None = None) -> str:
    """The time until `ends`, in words.

    >>> format_time_left(1000.0, now=880.0)
    '2 min'
    """
    if ends is None:
        return "--"
    seconds = max(ends - (time.time() if now is None else now), 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
