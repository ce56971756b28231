"""Runs under way, read from their folders alone: how far each is, what it spends, and when it will be done.

A folder is only read, and nothing is locked: whoever trains there does not notice. Files may grow, be cut back by a
resume, or vanish between two looks.
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

from flrce.errors import BadInput, brief
from flrce.results.story import about, describe_state, rounds_of
from flrce.results.tail import Tail
from flrce.stops.budget import Budget
from flrce.store import headline as words
from flrce.store.limited import describe_error, read_limited
from flrce.store.manifest import known_marks
from flrce.store.notes import diverged
from flrce.store.read import Run, read_settings
from flrce.store.seal import MANIFESTS, SEAL, Damaged, Marks, contents, parse_document
from flrce.types import Record

DEEPEST = 3  # folders below a given one in which runs are looked for
POINTS = 240  # of a curve
RECENT = 10  # evaluations that say what a point costs now
SHOWN = 40  # clients, and refused replies, that are listed
WATCHED = ("rounds.jsonl", "experiment.toml", "partition.json", "lock", SEAL, *MANIFESTS)
BEGUN = ("rounds.jsonl", "lock", SEAL)  # one of which a run directory holds
PACE = 20  # rounds from whose times the end is estimated


@dataclass
class Watched:
    """One run directory, looked at again and again."""

    folder: Path
    tail: Tail
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE))  # (when, rounds done)
    run: Run | None = None
    key: tuple[Any, ...] = ()
    shown: dict[str, Any] = field(default_factory=dict)

    def look(self) -> dict[str, Any]:
        """What there is to say of it now."""
        try:
            stamps = tuple(_state_of(self.folder / name) for name in WATCHED)
            owner = holder(self.folder / "lock")
            if self.run is None or (*stamps, owner) != self.key:
                marks, _ = known_marks(self.folder)
                grown = self.tail.read(marks.get("rounds.jsonl"))
                self.run = self._run(marks)
                self.key = (*stamps, owner)
                done = len(self.run.done)
                if grown and (not self.times or self.times[-1][1] != done):
                    if self.times and done < self.times[-1][1]:
                        self.times.clear()
                    self.times.append((_stamp(self.tail.path), done))
                self.shown = view(self.run, owner, self._ends(), _stamp(self.tail.path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            self.run, self.tail = None, Tail(self.tail.path)
            word = "damaged" if isinstance(why, Damaged) else "unreadable"
            self.shown = {"folder": str(self.folder), "state": f"{word}: {brief(describe_error(why), 120)}"}
        return self.shown

    def _run(self, marks: Marks) -> Run:
        experiment = read_settings(self.folder, marks)
        partition = self.folder / "partition.json"
        there = partition.name in marks or os.path.lexists(partition)
        told = parse_document(contents(partition, marks), partition) if there else {}
        return Run(self.folder, experiment, tuple(self.tail.records), (), told, (), {})

    def _ends(self) -> float | None:
        """When the last round would be over at the pace of late; None where nobody can tell."""
        assert self.run is not None
        done, began = len(self.run.done), _stamp(self.folder / "lock")
        points = list(self.times)
        if len(points) == 1 and 0 < began < points[0][0]:
            points.insert(0, (began, 0))  # seen once: as if the run had begun with round 1
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        pace = (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
        return points[-1][0] + pace * max(rounds_of(self.run) - done, 0)


@dataclass
class Watcher:
    """Every run below some folders, those that appear later too."""

    places: Sequence[Path]
    known: dict[Path, Watched] = field(default_factory=dict)

    def look(self) -> list[dict[str, Any]]:
        """All of them, those under way first, then the newest."""
        found = {folder for place in self.places for folder in folders(place)}
        for gone in self.known.keys() - found:
            del self.known[gone]
        for folder in found - self.known.keys():
            self.known[folder] = Watched(folder, Tail(folder / "rounds.jsonl"))
        looks = [watched.look() for watched in self.known.values()]
        return sorted(looks, key=lambda v: (not v["state"].startswith(UNDER_WAY), -v.get("last", 0.0), v["folder"]))


UNDER_WAY = ("running", "preparing")


def folders(place: Path) -> set[Path]:
    """Run directories at or below a folder: whatever holds an experiment and a lock or rounds."""
    if not os.path.isdir(place):
        raise BadInput(f"{place} is no folder; give a run directory, or one that holds some")
    inside = {path.parent for depth in range(DEEPEST + 1) for path in place.glob("*/" * depth + "experiment.toml")}
    return {folder for folder in inside if any(os.path.lexists(folder / name) for name in BEGUN)}


def holder(lock: Path) -> str:
    """Who trains in a folder now: "here", a machine's name, or "" for nobody."""
    try:
        text = read_limited(lock, 1000).decode(errors="replace").strip()
        found = re.fullmatch(r"process (\d{1,10}) on (.*)", text)
    except OSError:
        return ""
    if not found:
        return ""
    if found[2] != platform.node():
        return brief(found[2], 60)
    try:
        handles = os.listdir(f"/proc/{found[1]}/fd")
        links = {_link(f"/proc/{found[1]}/fd/{handle}") for handle in handles}
        return "here" if str(lock.resolve()) in links else ""
    except PermissionError:  # another user's
        return "here"
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def view(run: Run, owner: str, ends: float | None, last: float) -> dict[str, Any]:
    """A run as the page and the terminal show it: plain data, names as they came."""
    T, done, committed = rounds_of(run), len(run.done), run.done
    state = standing(run, owner)
    metric = str(run.summary["metric"])
    chosen = Counter(client for h in run.rounds for client in h.chosen)
    refused = [(h.t, client, reason) for h in run.rounds for client, reason in h.rejected.items()]
    newest = run.rounds[-1] if run.rounds else None
    data = run.experiment.get("data", {})
    return {
        "folder": str(run.folder), "recipe": run.name, "seed": run.seed, "state": state, "T": T, "t": done,
        "data": str(data.get("path") or data.get("name", "?")) if isinstance(data, Mapping) else "?",
        "M": len(run.roster), "P": run.P, "last": last,
        "ends": ends if state.startswith(UNDER_WAY) and done < T else None,
        "metric": {"name": metric, "heading": words.heading(metric), "per": words.unit(metric)},
        "value": run.summary["value"], "shown": words.shown(metric, run.summary["value"]),
        "handed": curve(run.rounds, lambda h: h.handed), "raw": curve(run.rounds, lambda h: h.headline),
        "conflicts": curve(committed, run.conflicts), "psi": run.psi,
        "headway": curve(committed, lambda h: h.headway),
        "round": None if newest is None else {
            "t": newest.t, "outcome": newest.outcome, "exploit": newest.exploit, "count": len(newest.chosen),
            "chosen": list(newest.chosen[:SHOWN]), "replied": len(newest.replied), "rejected": len(newest.rejected),
        },
        "trained": [[client, n] for client, n in chosen.most_common(SHOWN)],
        "waiting": max(len(run.roster) - len(chosen), 0),
        "refused": [list(each) for each in refused[-SHOWN:][::-1]], "refusals": len(refused),
        "abandoned": sum(h.outcome == "abandoned" for h in run.rounds),
        "spent": spent(run.rounds), "energy": run.summary["energy"], "price": price(run.rounds, metric),
        "budget": budget(run), "stop": newest.stop if newest else "", "notes": told(run, state),
    }  # fmt: skip


def standing(run: Run, owner: str) -> str:
    """In a word or two, what has become of a run."""
    state = describe_state(run.rounds, rounds_of(run))
    if state != "unfinished":
        return state
    word = "running" if run.rounds else "preparing"
    return f"{word}{'' if owner == 'here' else f' on {owner}'}" if owner else "interrupted"


def told(run: Run, state: str) -> list[str]:
    """What one should know of it: while it runs, only what will not come right by itself."""
    if not state.startswith(UNDER_WAY):
        return list(about(run)) if run.rounds else []
    return [note for note in [diverged(run.rounds)] if note]


def spent(records: Sequence[Record]) -> dict[str, float]:
    return {
        "joules": sum(h.joules for h in records), "bytes": sum(h.bytes_up + h.bytes_down for h in records),
        "seconds": sum(h.seconds for h in records),
    }  # fmt: skip


def price(records: Sequence[Record], metric: str) -> dict[str, Any] | None:
    """What one point (of shares; else one unit) has cost over the last evaluations; None for a gain of nothing."""
    judged = [i for i, h in enumerate(records) if h.handed is not None]
    if len(judged) < 2:
        return None
    first, last = judged[-min(RECENT + 1, len(judged))], judged[-1]
    before, after = records[first].handed, records[last].handed
    assert before is not None
    assert after is not None
    gain = (after - before) / words.unit(metric) * (-1 if records[last].lower else 1)
    cost = spent(records[first + 1 : last + 1])
    each = {name: cost[name] / gain if gain > 0 else None for name in ("joules", "bytes")}
    return {"rounds": last - first, "gain": gain, **each}


def budget(run: Run) -> list[dict[str, Any]]:
    """What is left of every budget, and for how many rounds that lasts at the price of the last ones."""
    used = {**spent(run.rounds), "rounds": float(len(run.done))}
    recent = run.done[-RECENT:]
    each = {**{name: value / max(len(recent), 1) for name, value in spent(recent).items()}, "rounds": 1.0}
    found = []
    for rule in run.rules:
        for name in ("rounds", "joules", "bytes", "seconds"):
            limit = getattr(rule, name) if isinstance(rule, Budget) else None
            if limit is not None:
                left = max(float(limit) - used[name], 0.0)
                lasts = int(left / each[name]) if each[name] else None
                found.append({"name": name, "limit": float(limit), "left": left, "lasts": lasts})
    return found


def curve(records: Sequence[Record], value: Any) -> list[list[float]]:
    """[round, value] of every record that has one; of many every so manieth, and the last."""
    points = [[h.t, float(f"{found:.5g}")] for h in records if (found := value(h)) is not None]
    step = -(-len(points) // POINTS) or 1
    return points[:-1:step] + points[-1:]


def _state_of(path: Path) -> tuple[int, int]:
    """By which one can tell that a file was written anew."""
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, -1


def _stamp(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def left(ends: float | None, now: float | None = None) -> str:
    """A time to come in words.

    >>> left(1000.0, now=880.0)
    '2 min'
    """
    if ends is None:
        return "--"
    seconds = max(ends - (time.time() if now is None else now), 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
