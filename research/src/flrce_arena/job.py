"""The arena as one job that can be interrupted at any point: what is recorded is not run again."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flrce_arena import records
from flrce_arena.execute import ArenaExecutor, remove_cell_folder, run_cells_here
from flrce_arena.plan import ArenaCell, ArenaPlan, TunedSettings, iterate_task_methods
from flrce_arena.records import CellRecord

log = logging.getLogger("flrce")
CellProgressCallback = Callable[[int, int, str], None]  # cells done, cells in all, the last one


@dataclass(frozen=True)
class ArenaResult:
    """What an arena brought: the runs that judge, those that chose settings, and cells that failed
    with why.
    """

    judged: tuple[CellRecord, ...]
    trials: tuple[CellRecord, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def all_records(self) -> tuple[CellRecord, ...]:
        return (*self.judged, *self.trials)


def run_plan(
    plan: ArenaPlan,
    out: Path,
    execute: ArenaExecutor = run_cells_here,
    against: Sequence[CellRecord] = (),
    told: CellProgressCallback | None = None,
) -> ArenaResult:
    """Every cell that is not recorded yet, in `out` or among `against`; then all records in one
    file.

    First what chooses settings, then what judges: the second cannot be known before the first is
    done.
    """
    known = {found.fingerprint: found for found in against}
    trials = [
        cell
        for task, method in iterate_task_methods(plan)
        for cell in plan.list_tuning_cells(task, method)
    ]
    at_most = len(trials) + len(plan.seeds) * len(list(iterate_task_methods(plan)))
    tell = told or (lambda done, total, label: None)
    tuned, lost = _collect_cell_records(
        trials, out, execute, known, lambda done, label: tell(done, at_most, label)
    )
    judged = [
        cell
        for task, method in iterate_task_methods(plan)
        for cell in plan.list_evaluation_cells(
            task,
            method,
            choose_settings(plan.list_settings(task, method), _filter_records(tuned, task, method)),
        )
    ]
    judged.sort(
        key=lambda cell: cell.seed
    )  # what there is of an unfinished arena compares everybody
    found, failed = _collect_cell_records(
        judged, out, execute, known, lambda done, label: tell(len(trials) + done, at_most, label)
    )
    result = ArenaResult(
        tuple(found), tuple(tuned), tuple((cell.label, why) for cell, why in (*lost, *failed))
    )
    records.pack_records(result.all_records, out / records.RECORDS_FILE)
    return result


def _collect_cell_records(
    cells: Sequence[ArenaCell],
    out: Path,
    execute: ArenaExecutor,
    known: dict[str, CellRecord],
    told: Callable[[int, str], None],
) -> tuple[list[CellRecord], list[tuple[ArenaCell, str]]]:
    """The records of these cells in their order, and those that failed."""
    done: dict[str, CellRecord] = {}
    missing: list[ArenaCell] = []
    for cell in cells:
        path = out / "cells" / f"{cell.folder}.json"
        if cell.fingerprint in known:
            done[cell.fingerprint] = known[cell.fingerprint]
        elif path.exists():
            done[cell.fingerprint] = records.load_cell_record(path)
        else:
            missing.append(cell)
    failed: list[tuple[ArenaCell, str]] = []
    if cells:
        told(len(done), "")
    for cell, outcome in execute(missing, out / "running") if missing else ():
        if isinstance(outcome, str):
            failed.append((cell, outcome))
            log.warning("%s: %s", cell.label, outcome)
        else:
            records.save_cell_record(outcome, out / "cells" / f"{cell.folder}.json")
            done[cell.fingerprint] = outcome
            remove_cell_folder(out / "running", cell)
        told(len(done) + len(failed), cell.label)
    return [done[cell.fingerprint] for cell in cells if cell.fingerprint in done], failed


def choose_settings(
    settings: Sequence[TunedSettings], tuned: Iterable[CellRecord]
) -> TunedSettings:
    """The settings with the best mean at the end over the tuning seeds; the first of equals, and of
    none.
    """
    tuned = list(tuned)

    def mean_final_merit(tried: TunedSettings) -> float:
        found = [p for p in tuned if p.tried == tried]
        values = [p.final_value for p in found if p.final_value is not None]
        if not values or not all(map(math.isfinite, values)):
            return float("-inf")
        mean = sum(values) / len(values)
        return -mean if found[0].lower else mean

    return max(settings, key=mean_final_merit)


def _filter_records(found: Iterable[CellRecord], task: str, method: str) -> list[CellRecord]:
    return [p for p in found if (p.task, p.method) == (task, method)]
