"""The arena as one page that needs nothing else: read offline, sent around, filtered, downloaded as
csv.

As in the report (report/page.py), nothing is fetched, only our own script runs, and names are
handled as text.
"""

import base64
import hashlib
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from flrce.core import metric_format
from flrce.methods.catalogue.recipes import CATALOGUE, summarize_recipe
from flrce.report.page import to_embedded_json
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce.version import __version__
from flrce_arena.leaderboard import Leaderboard, group_runs
from flrce_arena.records import CellRecord, list_cost_axes

CURVE_POINTS = 40  # of a curve
MAX_LISTED_METHODS = 8  # names in one sentence


def write_arena_page(
    found: Sequence[CellRecord], ranked: Sequence[Leaderboard], told: Mapping[str, Any], out: Path
) -> Path:
    """The page; `told` is what arena.json holds."""
    script = _read_asset("arena.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    report_style = (files("flrce.report") / "assets" / "page.css").read_text("utf-8")
    story = (f"<p>{html.escape(line)}</p>" for line in describe_arena(found, ranked, told))
    text = Template(_read_asset("arena.html")).substitute(
        style=report_style + _read_asset("arena.css"),
        script=script,
        digest=digest,
        data=to_embedded_json(build_arena_payload(found, told)),
        version=__version__,
        story="".join(story),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode(), BY_UMASK)
    return out


def describe_arena(
    found: Sequence[CellRecord], ranked: Sequence[Leaderboard], told: Mapping[str, Any]
) -> list[str]:
    """What the arena says, in words: what can be saved, who leads at equal cost, and how sure that
    is.
    """
    tasks, methods = {p.task for p in found}, {p.method for p in found}
    seeds = Counter((p.task, p.method) for p in found).values()
    many = "one seed each"
    if max(seeds) > 1:
        many = f"at least {min(seeds)} seed{'s' * (min(seeds) > 1)} each"
    lines = [f"{len(methods)} methods on {len(tasks)} task{'s' * (len(tasks) > 1)}, {many}."]
    lines += [describe_saving(told, axis) for axis in ("joules", "bytes")]
    whole = [board for board in ranked if board.share == max(b.share for b in ranked)]
    lines += [describe_leader(board) for board in whole if not board.is_tied]
    if tied := [board.axis for board in whole if board.is_tied]:
        lines.append(
            f"At equal {', '.join(tied)}: by ranks over tasks, no method can be told from any"
            f" other. {suggest_when_tied(told['reference'])}"
        )
    if told["failed"]:
        lines.append(f"Runs that failed, and why, are listed below: {len(told['failed'])}.")
    return lines


def describe_leader(board: Leaderboard) -> str:
    """Who has the best mean rank, and who cannot be told apart from it."""
    first, *others = board.standings
    sure = "one seed, so nobody knows how sure that is"
    if first.first is not None:
        sure = f"it leads in {100 * first.first:.0f} % of draws of the seeds"
    critical = board.critical or 0.0
    near = [s.method for s in others if s.rank - first.rank < critical]
    tied = f"; not told apart from it: {', '.join(near[:MAX_LISTED_METHODS])}" if near else ""
    if len(near) > MAX_LISTED_METHODS:
        tied += f" and {len(near) - MAX_LISTED_METHODS} more"
    return (
        f"At equal {board.axis}: {first.method} has the best mean rank, {first.rank:.1f}"
        f" ({sure}){tied}."
    )


def suggest_when_tied(reference: str) -> str:
    """What to do where ranks tell no method from any other."""
    return (
        f"Then take the simplest, {reference}, or what wins seed by seed on the task that is most"
        " like yours; only more tasks make the ranks surer."
    )


def describe_saving(told: Mapping[str, Any], axis: str) -> str:
    """Of the methods that end no worse on any task, the one that gets where the reference ends for
    the least.

    The reference itself is there before its end now and then, since single evaluations are noisy:
    only what is less than that is saved.
    """
    lines = {line["method"]: line for line in told["reached"].get(axis, ())}
    own = lines.pop(told["reference"], None)
    least = own["share"] if own and own["share"] is not None else 1.0
    first = next((line for line in lines.values() if not line["below"]), None)
    if first is None or first["share"] is None or first["share"] >= least:
        return (
            f"Nobody gets where {told['reference']} ends for less of its {axis} and ends no worse"
            " on any task."
        )
    return (
        f"To where {told['reference']} ends, {first['method']} takes {_format_share_range(first)}"
        f" of its {axis}, {told['reference']} itself"
        f" {_format_share_range(own) if own else '100 %'}; {first['reached']} of {first['runs']}"
        " runs get there, and on no task does it end worse in the mean."
    )


def _format_share_range(line: Mapping[str, Any]) -> str:
    share = f"{100 * line['share']:.0f} %"
    if line["low"] is None:
        return share
    return f"{share} (95 %: {100 * line['low']:.0f} to {100 * line['high']:.0f} %)"


def build_arena_payload(found: Sequence[CellRecord], told: Mapping[str, Any]) -> dict[str, Any]:
    """All that the script draws."""
    runs, axes = group_runs(found), list_cost_axes(found)
    tasks, methods = (list(dict.fromkeys(names)) for names in zip(*runs, strict=True))
    return {
        "tasks": [_describe_task(next(p for p in found if p.task == task)) for task in tasks],
        "methods": [
            {
                "name": method,
                "summary": _summarize_method(found, method),
                "recipe": _format_method_settings(found, method),
            }
            for method in methods
        ],
        "advice": suggest_when_tied(told["reference"]),
        "axes": axes,
        "curves": {
            task: {
                method: {axis: _mean_curve(runs.get((task, method), ()), axis) for axis in axes}
                for method in methods
            }
            for task in tasks
        },
        **told,
    }


def _describe_task(p: CellRecord) -> dict[str, Any]:
    """What the script must know of a task's metric."""
    return {
        "name": p.task,
        "heading": metric_format.format_metric_heading(p.metric),
        "lower": p.lower,
        "unit": metric_format.metric_unit(p.metric),
        "digits": metric_format.metric_digits(p.metric),
        "range": [0, 1] if p.metric in metric_format.SHARES else None,
    }


def _summarize_method(found: Sequence[CellRecord], method: str) -> str:
    """What its recipe does, and the paper it is from; "" for a recipe of the plan's own."""
    recipe = next(p.recipe for p in found if p.method == method)
    name = recipe.get("name")
    if name not in CATALOGUE:
        return ""
    changed = [key for key in recipe if key not in ("name", "preset")]
    more = f" Changed here: {', '.join(changed)}." if changed else ""
    preset = f" Preset {recipe['preset']}." if recipe.get("preset") else ""
    return f"{summarize_recipe(name)}{preset}{more}"


def _format_method_settings(found: Sequence[CellRecord], method: str) -> str:
    """A method's recipe, and the settings chosen for it on each task."""
    mine = [p for p in found if p.method == method]
    lines = [json.dumps(mine[0].recipe, indent=1)]
    tried = {p.task: p.tried for p in mine}
    lines += [f"{task}: {dict(settings)}" for task, settings in tried.items() if settings]
    return "\n".join(lines)


def _mean_curve(runs: Sequence[CellRecord], axis: str) -> list[list[float]]:
    """Mean over seeds of the final model, along an axis; a run that ended keeps its last."""
    courses = []
    for p in runs:
        pairs = zip(p.cumulative_cost(axis), p.rounds["value"], strict=True)
        known = [(x, y) for x, y in pairs if y is not None and np.isfinite(y)]
        if known:
            courses.append(np.array(known, np.float64))
    if not courses:
        return [[], []]
    x = np.linspace(max(c[0, 0] for c in courses), max(c[-1, 0] for c in courses), CURVE_POINTS)
    y = np.mean([np.interp(x, c[:, 0], c[:, 1]) for c in courses], axis=0)
    return [[float(f"{v:.5g}") for v in values] for values in (x, y)]


def _read_asset(name: str) -> str:
    return (files("flrce_arena") / "assets" / name).read_text("utf-8")
