"""The arena as one job that can be interrupted at any point: what is recorded is not run again."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flrce.arena import records
from flrce.arena.execute import Executor, clear, here
from flrce.arena.plan import Cell, Plan, Tried, pairs
from flrce.arena.records import Played

log = logging.getLogger("flrce")
Told = Callable[[int, int, str], None]  # cells done, cells in all, the last one


@dataclass(frozen=True)
class Found:
    """What an arena brought: the runs that judge, those that chose settings, and cells that failed with why."""

    judged: tuple[Played, ...]
    trials: tuple[Played, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def everything(self) -> tuple[Played, ...]:
        return (*self.judged, *self.trials)


def run(
    plan: Plan, out: Path, execute: Executor = here, against: Sequence[Played] = (), told: Told | None = None
) -> Found:
    """Every cell that is not recorded yet, in `out` or among `against`; then all records in one file.

    First what chooses settings, then what judges: the second cannot be known before the first is done.
    """
    known = {found.fingerprint: found for found in against}
    trials = [cell for task, method in pairs(plan) for cell in plan.trials(task, method)]
    at_most = len(trials) + len(plan.seeds) * len(list(pairs(plan)))
    tell = told or (lambda done, total, label: None)
    tuned, lost = _played(trials, out, execute, known, lambda done, label: tell(done, at_most, label))
    judged = [
        cell
        for task, method in pairs(plan)
        for cell in plan.judged(task, method, chosen(plan.settings(task, method), _of(tuned, task, method)))
    ]
    judged.sort(key=lambda cell: cell.seed)  # what there is of an unfinished arena compares everybody
    found, failed = _played(judged, out, execute, known, lambda done, label: tell(len(trials) + done, at_most, label))
    result = Found(tuple(found), tuple(tuned), tuple((cell.label, why) for cell, why in (*lost, *failed)))
    records.pack(result.everything, out / records.FILE)
    return result


def _played(
    cells: Sequence[Cell], out: Path, execute: Executor, known: dict[str, Played], told: Callable[[int, str], None]
) -> tuple[list[Played], list[tuple[Cell, str]]]:
    """The records of these cells in their order, and those that failed."""
    done: dict[str, Played] = {}
    missing: list[Cell] = []
    for cell in cells:
        path = out / "cells" / f"{cell.folder}.json"
        if cell.fingerprint in known:
            done[cell.fingerprint] = known[cell.fingerprint]
        elif path.exists():
            done[cell.fingerprint] = records.load(path)
        else:
            missing.append(cell)
    failed: list[tuple[Cell, str]] = []
    if cells:
        told(len(done), "")
    for cell, outcome in execute(missing, out / "running") if missing else ():
        if isinstance(outcome, str):
            failed.append((cell, outcome))
            log.warning("%s: %s", cell.label, outcome)
        else:
            records.save(outcome, out / "cells" / f"{cell.folder}.json")
            done[cell.fingerprint] = outcome
            clear(out / "running", cell)
        told(len(done) + len(failed), cell.label)
    return [done[cell.fingerprint] for cell in cells if cell.fingerprint in done], failed


def chosen(settings: Sequence[Tried], tuned: Iterable[Played]) -> Tried:
    """The settings with the best mean at the end over the tuning seeds; the first of equals, and of none."""
    tuned = list(tuned)

    def merit(tried: Tried) -> float:
        found = [p for p in tuned if p.tried == tried]
        values = [p.final for p in found if p.final is not None]
        if not values or not all(map(math.isfinite, values)):
            return float("-inf")
        mean = sum(values) / len(values)
        return -mean if found[0].lower else mean

    return max(settings, key=merit)


def _of(found: Iterable[Played], task: str, method: str) -> list[Played]:
    return [p for p in found if (p.task, p.method) == (task, method)]
