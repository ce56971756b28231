"""Runs under way, read from their folders alone: how far each is, what it spends, and when it will
be done.

A folder is only read, and nothing is locked: whoever trains there does not notice. Files may grow,
be cut back by a resume, or vanish between two looks.
"""

import os
import platform
import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_one_line
from flrce.report.endings import describe_state, get_planned_rounds
from flrce.report.ledger_tail import RecordTail
from flrce.report.selection import describe_round_reach, get_phase
from flrce.report.verdict import collect_run_notes
from flrce.storage import metric_format as words
from flrce.storage.limited import describe_error, read_limited
from flrce.storage.manifest import known_marks
from flrce.storage.read import RecordedRun, read_settings
from flrce.storage.run_notes import explain_divergence
from flrce.storage.seal import (
    MANIFESTS,
    SEAL_FILE,
    DamagedRun,
    FileMarks,
    parse_document,
    read_sealed_file,
)

MAX_FOLDER_DEPTH = 3  # folders below a given one in which runs are looked for
MAX_CURVE_POINTS = 240  # of a curve
RECENT_EVALUATIONS = 10  # evaluations that say what a point costs now
MAX_LISTED_CLIENTS = 40  # clients, and refused replies, that are listed
WATCHED_FILES = ("rounds.jsonl", "experiment.toml", "partition.json", "lock", SEAL_FILE, *MANIFESTS)
RUN_MARKER_FILES = ("rounds.jsonl", "lock", SEAL_FILE)  # one of which a run directory holds
PACE_ROUNDS = 20  # rounds from whose times the end is estimated


@dataclass
class WatchedRun:
    """One run directory, looked at again and again."""

    folder: Path
    tail: RecordTail
    # (when, rounds done)
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_ROUNDS))
    run: RecordedRun | None = None
    key: tuple[Any, ...] = ()
    shown: dict[str, Any] = field(default_factory=dict)

    def take_snapshot(self) -> dict[str, Any]:
        """What there is to say of it now."""
        try:
            stamps = tuple(_get_file_stamp(self.folder / name) for name in WATCHED_FILES)
            owner = find_lock_holder(self.folder / "lock")
            if self.run is None or (*stamps, owner) != self.key:
                marks, _ = known_marks(self.folder)
                grown = self.tail.read_new_lines(marks.get("rounds.jsonl"))
                self.run = self._build_run(marks)
                self.key = (*stamps, owner)
                done = len(self.run.committed_rounds)
                if grown and (not self.times or self.times[-1][1] != done):
                    if self.times and done < self.times[-1][1]:
                        self.times.clear()
                    self.times.append((_get_modification_time(self.tail.path), done))
                self.shown = build_run_view(
                    self.run,
                    owner,
                    self._estimate_end_time(),
                    _get_modification_time(self.tail.path),
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            self.run, self.tail = None, RecordTail(self.tail.path)
            word = "damaged" if isinstance(why, DamagedRun) else "unreadable"
            self.shown = {
                "folder": str(self.folder),
                "state": f"{word}: {format_one_line(describe_error(why), 120)}",
            }
        return self.shown

    def _build_run(self, marks: FileMarks) -> RecordedRun:
        experiment = read_settings(self.folder, marks)
        partition = self.folder / "partition.json"
        there = partition.name in marks or os.path.lexists(partition)
        told = parse_document(read_sealed_file(partition, marks), partition) if there else {}
        return RecordedRun(self.folder, experiment, tuple(self.tail.records), (), told, (), {})

    def _estimate_end_time(self) -> float | None:
        """When the last round would be over at the pace of late; None where nobody can tell."""
        assert self.run is not None
        done, began = len(self.run.committed_rounds), _get_modification_time(self.folder / "lock")
        points = list(self.times)
        if len(points) == 1 and 0 < began < points[0][0]:
            points.insert(0, (began, 0))  # seen once: as if the run had begun with round 1
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        pace = (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
        return points[-1][0] + pace * max(get_planned_rounds(self.run) - done, 0)


@dataclass
class RunWatcher:
    """Every run below some folders, those that appear later too."""

    places: Sequence[Path]
    known: dict[Path, WatchedRun] = field(default_factory=dict)

    def take_snapshot(self) -> list[dict[str, Any]]:
        """All of them, those under way first, then the newest."""
        found = {folder for place in self.places for folder in find_run_folders(place)}
        for gone in self.known.keys() - found:
            del self.known[gone]
        for folder in found - self.known.keys():
            self.known[folder] = WatchedRun(folder, RecordTail(folder / "rounds.jsonl"))
        looks = [watched.take_snapshot() for watched in self.known.values()]
        return sorted(
            looks,
            key=lambda v: (
                not v["state"].startswith(RUNNING_STATES),
                -v.get("last", 0.0),
                v["folder"],
            ),
        )


RUNNING_STATES = ("running", "preparing")


def find_run_folders(place: Path) -> set[Path]:
    """Run directories at or below a folder: whatever holds an experiment and a lock or rounds."""
    if not os.path.isdir(place):
        raise BadInput(f"{place} is no folder; give a run directory, or one that holds some")
    inside = {
        path.parent
        for depth in range(MAX_FOLDER_DEPTH + 1)
        for path in place.glob("*/" * depth + "experiment.toml")
    }
    return {
        folder
        for folder in inside
        if any(os.path.lexists(folder / name) for name in RUN_MARKER_FILES)
    }


def find_lock_holder(lock: Path) -> str:
    """Who trains in a folder now: "here", a machine's name, or "" for nobody."""
    try:
        text = read_limited(lock, 1000).decode(errors="replace").strip()
        found = re.fullmatch(r"process (\d{1,10}) on (.*)", text)
    except OSError:
        return ""
    if not found:
        return ""
    if found[2] != platform.node():
        return format_one_line(found[2], 60)
    try:
        handles = os.listdir(f"/proc/{found[1]}/fd")
        links = {_read_link(f"/proc/{found[1]}/fd/{handle}") for handle in handles}
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
    """A run as the page and the terminal show it: plain data, names as they came."""
    T, done, committed = get_planned_rounds(run), len(run.committed_rounds), run.committed_rounds
    state = describe_run_state(run, owner)
    metric = str(run.summary["metric"])
    data = run.experiment.get("data", {})
    return {
        "folder": str(run.folder),
        "recipe": run.name,
        "seed": run.seed,
        "state": state,
        "T": T,
        "t": done,
        "data": str(data.get("path") or data.get("name", "?"))
        if isinstance(data, Mapping)
        else "?",
        "M": len(run.roster),
        "P": run.P,
        "last": last,
        "ends": ends if state.startswith(RUNNING_STATES) and done < T else None,
        "metric": {
            "name": metric,
            "heading": words.format_metric_heading(metric),
            "per": words.metric_unit(metric),
        },
        "value": run.summary["value"],
        "shown": words.format_metric_value(metric, run.summary["value"]),
        "handed": sample_curve(run.rounds, lambda h: h.final_model_metric),
        "raw": sample_curve(run.rounds, lambda h: h.last_model_metric),
        "conflicts": sample_curve(committed, run.count_conflicts),
        "psi": run.psi,
        "headway": sample_curve(committed, lambda h: h.headway),
        "round": describe_newest_round(run),
        **list_clients(run),
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
    """The last round: its clients, and what came back."""
    if not run.rounds:
        return None
    newest = run.rounds[-1]
    return {
        "t": newest.t,
        "outcome": newest.outcome,
        "exploit": newest.exploit,
        "phase": get_phase(newest),
        "count": len(newest.chosen),
        "chosen": list(newest.chosen[:MAX_LISTED_CLIENTS]),
        "replied": len(newest.replied),
        "rejected": len(newest.rejected),
        "reach": describe_round_reach(newest, len(run.roster)),
    }


def list_clients(run: RecordedRun) -> dict[str, Any]:
    """Who trained how often, who has not yet, and the rejected replies, the newest first."""
    chosen = Counter(client for h in run.rounds for client in h.chosen)
    refused = [[h.t, client, reason] for h in run.rounds for client, reason in h.rejected.items()]
    return {
        "trained": [[client, n] for client, n in chosen.most_common(MAX_LISTED_CLIENTS)],
        "waiting": max(len(run.roster) - len(chosen), 0),
        "refused": refused[-MAX_LISTED_CLIENTS:][::-1],
        "refusals": len(refused),
    }


def describe_run_state(run: RecordedRun, owner: str) -> str:
    """In a word or two, what has become of a run."""
    state = describe_state(run.rounds, get_planned_rounds(run))
    if state != "unfinished":
        return state
    word = "running" if run.rounds else "preparing"
    return f"{word}{'' if owner == 'here' else f' on {owner}'}" if owner else "interrupted"


def list_run_notes(run: RecordedRun, state: str) -> list[str]:
    """What one should know of it: while it runs, only what will not come right by itself."""
    if not state.startswith(RUNNING_STATES):
        return list(collect_run_notes(run)) if run.rounds else []
    return [note for note in [explain_divergence(run.rounds)] if note]


def sum_costs(records: Sequence[RoundRecord]) -> dict[str, float]:
    return {name: sum(map(cost.of_round, records)) for name, cost in COSTS.items()}


def compute_recent_price(records: Sequence[RoundRecord], metric: str) -> dict[str, Any] | None:
    """What one point (of shares; else one unit) has cost over the last evaluations; None for a gain
    of nothing.
    """
    judged = [i for i, h in enumerate(records) if h.final_model_metric is not None]
    if len(judged) < 2:
        return None
    first, last = judged[-min(RECENT_EVALUATIONS + 1, len(judged))], judged[-1]
    before, after = records[first].final_model_metric, records[last].final_model_metric
    assert before is not None
    assert after is not None
    gain = (after - before) / words.metric_unit(metric) * (-1 if records[last].lower else 1)
    cost = sum_costs(records[first + 1 : last + 1])
    each = {name: cost[name] / gain if gain > 0 else None for name in ("joules", "bytes")}
    return {"rounds": last - first, "gain": gain, **each}


def compute_remaining_budgets(run: RecordedRun) -> list[dict[str, Any]]:
    """What is left of every budget, and for how many rounds that lasts at the price of the last
    ones.
    """
    recent = run.committed_rounds[-RECENT_EVALUATIONS:]
    each = {name: value / max(len(recent), 1) for name, value in sum_costs(recent).items()}
    found = []
    for rule in run.stop_rules:
        for name, limit in rule.limits.items():
            left = max(float(limit) - COSTS[name].of_run(run.rounds), 0.0)
            lasts = int(left / each[name]) if each[name] else None
            shown = [COSTS[name].format_amount(amount, ".3g") for amount in (limit, left)]
            found.append(
                {"name": name, "limit": float(limit), "left": left, "lasts": lasts, "shown": shown}
            )
    return found


def sample_curve(records: Sequence[RoundRecord], value: Any) -> list[list[float]]:
    """[round, value] of every record that has one; of many every so manieth, and the last."""
    points = [[h.t, float(f"{found:.5g}")] for h in records if (found := value(h)) is not None]
    step = -(-len(points) // MAX_CURVE_POINTS) or 1
    return points[:-1:step] + points[-1:]


def _get_file_stamp(path: Path) -> tuple[int, int]:
    """By which one can tell that a file was written anew."""
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, -1


def _get_modification_time(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def format_time_left(ends: float | None, now: float | None = None) -> str:
    """A time to come in words.

    >>> format_time_left(1000.0, now=880.0)
    '2 min'
    """
    if ends is None:
        return "--"
    seconds = max(ends - (time.time() if now is None else now), 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
