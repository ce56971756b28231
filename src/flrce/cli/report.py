"""flrce report runs/all --out report.html"""

import json
from collections.abc import Sequence
from pathlib import Path

from flrce.cli.targets import prepare_file
from flrce.cli.terminal import print_table
from flrce.errors import BadInput
from flrce.report import page, tables
from flrce.report.tasks import TaskRuns, group_by_task
from flrce.report.verdict import describe_groups
from flrce.storage import read


def report_runs(runs: Sequence[Path], out: Path | None, as_json: bool) -> None:
    """Write one self-contained page about any number of runs."""
    recorded = read.read_runs(runs)
    if out is not None:
        prepare_file(out, "--out")
    with read.explain_damaged_runs(recorded):
        _write_report(recorded, out or Path("report.html"), as_json)


def _write_report(found: list[read.RecordedRun], out: Path, as_json: bool) -> None:
    """A page for each task; of several, each has its task's name in its own."""
    several = group_by_task(found)
    written: list[Path] = []
    try:
        for task in several:
            path = out.with_stem(f"{out.stem}-{task.slug}") if len(several) > 1 else out
            written.append(page.write_task_report(task.runs, path))
    except OSError as why:
        raise BadInput(
            f"{why.filename or out} cannot be written: {why.strerror}; name another place"
        ) from why
    if as_json:
        headline = []
        for task in several:
            rows = tables.to_plain_rows(tables.group_runs(task.runs))
            headline += [{"task": task.label, **row} for row in rows]
        print(json.dumps({"written": list(map(str, written)), "headline": headline}, indent=1))
        return
    for task in several:
        _print_task_table(task, len(several) > 1)
    for path in written:
        print(f"wrote {path}")
    if len(several) > 1:
        print(
            f"{len(several)} different tasks, reported apart: scores of different data or metrics"
            " are not compared"
        )


def _print_task_table(task: TaskRuns, apart: bool) -> None:
    groups = tables.group_runs(task.runs)
    heads, rows = tables.build_summary_table(groups)
    digits = [digits for _, _, digits in tables.get_summary_columns(groups).values()]
    cells = []
    for label, seeds, *row in rows:
        pairs = zip(row, digits, strict=True)
        cells.append([label, str(seeds), *(cell.format_interval(n) for cell, n in pairs)])
    kept = [i for i, head in enumerate(heads) if not head.startswith(("Seeds", "Time", "Wasted"))]
    names = {1: "one seed", 2: "from least to most of two seeds"}
    spread = names.get(max(len(part.runs) for part in groups), "mean ± 95 % interval")
    title = f"{task.label}: {spread}" if apart else spread
    print_table(title, [heads[i] for i in kept], [[row[i] for i in kept] for row in cells])
    print(describe_groups(groups)[0])
