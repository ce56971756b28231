"""The arena as one page that needs nothing else: read offline, sent around, filtered, downloaded as csv.

As in the report (results/page.py), nothing is fetched, only our own script runs, and names are handled as text.
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

from flrce.arena.board import Board
from flrce.arena.records import Played, axes
from flrce.results.page import embed
from flrce.store import headline
from flrce.store.disk import BY_UMASK, write_through
from flrce.version import __version__

POINTS = 40  # of a curve
AT_MOST = 8  # names in one sentence


def write(found: Sequence[Played], ranked: Sequence[Board], told: Mapping[str, Any], out: Path) -> Path:
    """The page; `told` is what arena.json holds."""
    script = _asset("arena.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = Template(_asset("arena.html")).substitute(
        style=(files("flrce.results") / "assets" / "page.css").read_text("utf-8") + _asset("arena.css"),
        script=script, digest=digest, data=embed(payload(found, told)), version=__version__,
        story="".join(f"<p>{html.escape(line)}</p>" for line in story(found, ranked, told)),
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_through(out, text.encode(), BY_UMASK)
    return out


def story(found: Sequence[Played], ranked: Sequence[Board], told: Mapping[str, Any]) -> list[str]:
    """What the arena says, in words: what can be saved, who leads at equal cost, and how sure that is."""
    tasks, methods = {p.task for p in found}, {p.method for p in found}
    seeds = Counter((p.task, p.method) for p in found).values()
    many = f"at least {min(seeds)} seed{'s' * (min(seeds) > 1)} each" if max(seeds) > 1 else "one seed each"
    lines = [f"{len(methods)} methods on {len(tasks)} task{'s' * (len(tasks) > 1)}, {many}."]
    lines += [line for axis in ("joules", "bytes") if (line := saved(told, axis))]
    alike: list[str] = []  # axes on which nobody stands out
    for board in (each for each in ranked if each.share == max(b.share for b in ranked)):
        first, *others = board.standings
        if others and board.critical is not None and others[-1].rank - first.rank < board.critical:
            alike.append(board.axis)
            continue
        sure = "one seed, so nobody knows how sure that is"
        if first.first is not None:
            sure = f"first in {100 * first.first:.0f} % of draws of the seeds"
        near = [s.method for s in others if board.critical is not None and s.rank - first.rank < board.critical]
        tied = f"; not told apart from it: {', '.join(near[:AT_MOST])}" if near else ""
        more = f" and {len(near) - AT_MOST} more" if len(near) > AT_MOST else ""
        lines.append(
            f"At equal {board.axis}: {first.method} has the best mean rank, {first.rank:.1f} ({sure}){tied}{more}."
        )
    if alike:
        lines.append(f"At equal {', '.join(alike)}: by ranks over tasks, no method can be told from any other.")
    if told["failed"]:
        lines.append(f"Runs that failed, and why, are listed below: {len(told['failed'])}.")
    return lines


def saved(told: Mapping[str, Any], axis: str) -> str:
    """Of the methods that end no worse on any task, the one that gets where the reference ends for the least.

    The reference itself is there before its end now and then, since single evaluations are noisy: only what is less
    than that is saved.
    """
    lines = {line["method"]: line for line in told["reached"].get(axis, ())}
    own = lines.pop(told["reference"], None)
    least = own["share"] if own and own["share"] is not None else 1.0
    first = next((line for line in lines.values() if not line["below"]), None)
    if first is None or first["share"] is None or first["share"] >= least:
        return f"Nobody gets where {told['reference']} ends for less of its {axis} and ends no worse on any task."
    return (
        f"To where {told['reference']} ends, {first['method']} takes {_range(first)} of its {axis}, "
        f"{told['reference']} itself {_range(own) if own else '100 %'}; {first['reached']} of {first['runs']} runs get "
        "there, and on no task does it end worse in the mean."
    )


def _range(line: Mapping[str, Any]) -> str:
    sure = "" if line["low"] is None else f" (95 %: {100 * line['low']:.0f} to {100 * line['high']:.0f} %)"
    return f"{100 * line['share']:.0f} %{sure}"


def payload(found: Sequence[Played], told: Mapping[str, Any]) -> dict[str, Any]:
    """All that the script draws."""
    tasks = list(dict.fromkeys(p.task for p in found))
    methods = list(dict.fromkeys(p.method for p in found))
    metrics = {p.task: p for p in found}
    return {
        "tasks": [
            {
                "name": task, "heading": headline.heading(metrics[task].metric), "lower": metrics[task].lower,
                "unit": headline.unit(metrics[task].metric), "digits": headline.digits(metrics[task].metric),
            }
            for task in tasks
        ],
        "methods": [{"name": method, "recipe": _card(found, method)} for method in methods],
        "axes": axes(found),
        "curves": {
            task: {method: {axis: _curve(found, task, method, axis) for axis in axes(found)} for method in methods}
            for task in tasks
        },
        **told,
    }  # fmt: skip


def _card(found: Sequence[Played], method: str) -> str:
    """A method's recipe, and the settings chosen for it on each task."""
    mine = [p for p in found if p.method == method]
    lines = [json.dumps(mine[0].recipe, indent=1)]
    lines += [f"{task}: {dict(tried)}" for task, tried in {p.task: p.tried for p in mine}.items() if tried]
    return "\n".join(lines)


def _curve(found: Sequence[Played], task: str, method: str, axis: str) -> list[list[float]]:
    """Mean over seeds of the model handed back, along an axis; a run that ended keeps its last."""
    courses = []
    for p in found:
        if (p.task, p.method) == (task, method):
            pairs = [(x, y) for x, y in zip(p.spent(axis), p.rounds["value"], strict=True) if y is not None]
            courses.append(np.array([pair for pair in pairs if np.isfinite(pair[1])], np.float64).reshape(-1, 2))
    courses = [course for course in courses if len(course)]
    if not courses:
        return [[], []]
    x = np.linspace(max(c[0, 0] for c in courses), max(c[-1, 0] for c in courses), POINTS)
    y = np.mean([np.interp(x, c[:, 0], c[:, 1]) for c in courses], axis=0)
    return [[float(f"{v:.5g}") for v in values] for values in (x, y)]


def _asset(name: str) -> str:
    return (files("flrce.arena") / "assets" / name).read_text("utf-8")
