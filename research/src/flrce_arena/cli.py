"""flrce arena plan.toml --out runs/arena"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from flrce.cli.options import parse_on_option
from flrce.cli.targets import prepare_folder
from flrce.cli.terminal import print_table
from flrce.config.experiment import read_toml
from flrce.core import metric_format
from flrce.core.bounds import format_value
from flrce.core.user_code import find_names, trust_file
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_arena import job, page, records
from flrce_arena.execute import get_executor
from flrce_arena.leaderboard import (
    Leaderboard,
    build_leaderboards,
    compute_pareto_points,
    rank_without_each_task,
)
from flrce_arena.paired import compare_with_reference
from flrce_arena.plan import ArenaPlan
from flrce_arena.records import CellRecord, list_cost_axes
from flrce_arena.stops import evaluate_stop_rules
from flrce_arena.target_costs import compute_cost_to_reference
from flrce_arena.task_card import describe_plan

PLAN_FILE = "plan.toml"  # of an arena that was run
LEADERBOARD_FILE = "leaderboard.csv"


def run_arena(
    plan: Path,
    out: Path,
    against: Path | None,
    tasks: str | None,
    where: str,
    as_json: bool,
    trust: bool = False,
) -> None:
    """Run what is not recorded yet, then rank, draw and write."""
    tables = load_plan_tables(plan, against, tasks)
    trusted = trust_file(str(plan.parent.absolute()), everything=trust)
    asked = ArenaPlan.from_tables(tables, str(plan), trusted)
    prepare_folder(out, "--out")
    known = records.unpack_records(against) if against else []
    name, settings = parse_on_option(where)
    executor = get_executor(name, {**asked.cluster, **settings})
    result = job.run_plan(asked, out, executor, known, None if as_json else _print_progress)
    cells = _add_rival_records(result.judged, known, asked)
    if not any(p.method == asked.reference for p in cells):
        why = result.failed[0][1] if result.failed else "none was planned"
        raise BadInput(f"no run of the reference {asked.reference!r} ended: {why}")
    ranked = build_leaderboards(cells, asked.budgets, asked.reference)
    report = build_report(asked, cells, ranked, result)
    write_atomically(out / PLAN_FILE, tomli_w.dumps(tables).encode())
    write_atomically(out / LEADERBOARD_FILE, _format_leaderboards_csv(ranked).encode(), BY_UMASK)
    write_atomically(out / "arena.json", json.dumps(report, indent=1).encode())
    path = page.write_arena_page(cells, ranked, report, out / "arena.html")
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        for board in ranked:
            if board.share == max(asked.budgets):
                _print_leaderboard(board, cells)
        print(f"page: {path}")
    if result.failed:
        label, why = result.failed[0]
        print(
            f"{len(result.failed)} cells failed; first: {label}: {why}; the same command tries"
            " them again"
        )
        raise SystemExit(1)


def build_report(
    plan: ArenaPlan,
    cells: Sequence[CellRecord],
    ranked: Sequence[Leaderboard],
    result: job.ArenaResult,
) -> dict[str, Any]:
    """What arena.json holds."""
    axes, reference, share = list_cost_axes(cells), plan.reference, max(plan.budgets)
    reached = {axis: compute_cost_to_reference(cells, axis, reference) for axis in axes}
    paired = compare_with_reference(cells, "joules", share, reference)
    return {
        "boards": list(map(asdict, ranked)),
        "fronts": {axis: list(map(asdict, compute_pareto_points(cells, axis))) for axis in axes},
        "without": rank_without_each_task(cells, "joules", share, reference),
        "reached": {axis: list(map(asdict, lines)) for axis, lines in reached.items()},
        "paired": list(map(asdict, paired)),
        "reference": reference,
        "left_out": {method: dict(tasks) for method, tasks in plan.without.items()},
        "stops": list(map(asdict, evaluate_stop_rules(cells, plan.build_stop_rules()))),
        "settings": {f"{p.task}/{p.method}": dict(p.tried) for p in result.judged},
        "failed": list(map(list, result.failed)),
        "about": describe_plan(plan),
    }


def load_plan_tables(plan: Path, against: Path | None, tasks: str | None) -> dict[str, Any]:
    """The plan's tables. Held against an arena, a plan needs methods only: the rest is as it was
    there.
    """
    own = read_toml(plan, "give an arena's plan (TOML)")
    there = against / PLAN_FILE if against else None
    if there is not None and there.is_file() and isinstance(own.get("methods"), dict):
        base = read_toml(there)
        require_same_tasks(own, base, plan)
        methods, reference = base.get("methods"), base.get("reference", "fedavg")
        reference = own.get("reference", reference)
        known = isinstance(methods, dict) and isinstance(reference, str) and reference in methods
        rival = {reference: methods[reference]} if known else {}  # type: ignore[index]
        replaced = (*own, "methods", "without")
        taken = {key: value for key, value in base.items() if key not in replaced}
        refuse_names({**taken, "methods": rival}, there)
        own = {**taken, "without": {}, **own, "methods": {**rival, **own["methods"]}}
    if tasks is not None and isinstance(own.get("tasks"), dict):
        some = [name.strip() for name in tasks.split(",")]
        for name in some:
            if name not in own["tasks"]:
                hint = suggest_name(name, own["tasks"])
                raise BadInput(f"--tasks {name!r} is no task of {plan}; {hint}")
        own = {**own, "tasks": {name: own["tasks"][name] for name in some}}
        if isinstance(own.get("without"), dict):
            reasons = own["without"].items()
            own["without"] = {method: _filter_reasons(some, each) for method, each in reasons}
    return own


def _filter_reasons(tasks: Sequence[str], reasons: Any) -> Any:
    """Of a method's reasons not to be run on tasks, those about these tasks."""
    if not isinstance(reasons, dict):
        return reasons
    return {task: why for task, why in reasons.items() if task in tasks}


def require_same_tasks(own: Mapping[str, Any], base: Mapping[str, Any], plan: Path) -> None:
    """BadInput where a task of the plan has the name of one that was run, and other data, clients
    or objective.
    """
    mine, theirs = own.get("tasks"), base.get("tasks")
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return
    for name in mine.keys() & theirs.keys():
        if not isinstance(mine[name], Mapping) or not isinstance(theirs[name], Mapping):
            continue  # the plan's own check says so
        for key in ("data", "clients", "objective", "model"):
            if mine[name].get(key) != theirs[name].get(key):
                raise BadInput(
                    f"{plan}: task {name!r} has another {key} than the task of that name in"
                    " --against; rename it, or leave tasks out to take those of --against"
                )


def refuse_names(tables: dict[str, Any], path: Path) -> None:
    """BadInput where an arena's plan names code: plans of others are data, and nothing in them is
    imported.
    """
    for key, name in find_names(tables):
        raise BadInput(
            f"{path}: {format_one_line(key, 60)} = {format_value(name)} names code, and --against"
            " reads data alone; to run it, copy what is yours into your own plan"
        )


def _add_rival_records(
    judged: Sequence[CellRecord], known: Sequence[CellRecord], plan: ArenaPlan
) -> list[CellRecord]:
    """This plan's runs, and of the arena it is held against those on the same tasks and seeds."""
    mine = {(p.task, p.method) for p in judged}
    tuning = set(plan.tuning.seeds) if plan.tuning.has_choice else set()
    rivals = [
        p
        for p in known
        if p.task in plan.tasks and (p.task, p.method) not in mine and p.seed not in tuning
    ]
    every = [*judged, *rivals]
    metrics = {p.task: p.metric for p in judged}
    for p in rivals:
        if p.metric != metrics.get(p.task, p.metric):
            raise BadInput(
                f"--against: {p.task} was judged by {p.metric} there, here by {metrics[p.task]};"
                " rename it"
            )
    return every


def _format_leaderboards_csv(ranked: Sequence[Leaderboard]) -> str:
    """Every leaderboard in one table for programs."""
    tasks = list(dict.fromkeys(task for board in ranked for task in board.budgets))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["axis", "share", "method", "rank", "low", "high", "leads", "critical", *tasks])
    for board in ranked:
        for s in board.standings:
            means = [s.scores[task].mean if task in s.scores else None for task in tasks]
            figures = [s.rank, s.low, s.high, s.first, board.critical, *means]
            cells = ("" if x is None else f"{x:.5g}" for x in figures)
            lines.writerow([board.axis, board.share, s.method, *cells])
    return text.getvalue()


def _print_progress(done: int, total: int, label: str) -> None:
    print(f"{done} of at most {total} cells{f': {label}' if label else ''}", flush=True)


def _print_leaderboard(board: Leaderboard, found: Sequence[CellRecord]) -> None:
    metrics = {p.task: p.metric for p in found if p.task in board.budgets}
    rows: list[list[str]] = []
    for s in board.standings:
        scores = [
            s.scores[task]
            .divide_by(metric_format.metric_unit(metrics[task]))
            .format_interval(metric_format.metric_digits(metrics[task]))
            for task in board.budgets
        ]
        spread = "--" if s.low is None or s.high is None else f"{s.low:.2f} to {s.high:.2f}"
        leads = "--" if s.first is None else f"{100 * s.first:.0f} %"
        rows.append([s.method, f"{s.rank:.2f}", spread, leads, *scores])
    near = ""
    if board.is_tied:
        near = (
            "; no method can be told from any other: ranks differ by less than"
            f" {board.critical:.2f}"
        )
    elif board.critical is not None:
        near = f"; ranks closer than {board.critical:.2f} are not told apart"
    headings = [
        f"{task}: {metric_format.format_metric_heading(metrics[task])}" for task in board.budgets
    ]
    title = f"at equal {board.axis}{near}"
    print_table(title, ["method", "rank", "95 %", "leads", *headings], rows)
