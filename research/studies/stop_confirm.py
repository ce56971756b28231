"""The confirming tables of research/docs/stop.md: `python research/studies/stop_confirm.py [PAGE]`.

Runs of the plans `stop-confirm-4` (17 settings that had no part in any choice) and `stop-confirm-3`
(14 settings, part of the decision set since), evaluated every round, no stop; every rule is
replayed on them. Differences to "gained less than 3 points since t / 2" are
paired by run; intervals are 95 %, by a bootstrap that draws settings, then runs within them.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import stop

from flrce.methods.stopping import memory
from flrce.methods.stopping.marginal_gain import add_memory

RESULTS = stop.ROOT / "results"
SETS = {"fresh-4": RESULTS / "stop-fresh-4", "fresh": RESULTS / "stop-fresh"}
LATE = 2.0  # times t*
DRAWS = 4000
SIMPLE = "3 points since t / 2"


class SinceEvery:
    """The simple rule where the model is evaluated in each `every`-th round."""

    def __init__(self, points, every):
        self.points, self.every = points, every

    def __call__(self, run):
        levels = thin_levels(run, self.every)
        ahead = range(2 * run.sweep, run.T + 1)
        return next((t for t in ahead if levels[t] - levels[t // 2] < self.points), None)


@cache
def thin_levels(run, every):
    """(T + 1,) the level by round, from evaluations in each `every`-th round."""
    values = run.points(np.array(run.series["averaged"], float))
    at = np.arange(1, run.T + 1)
    at, values = at[at % every == 0], values[at % every == 0]
    levels = np.full(run.T + 1, np.nan)
    for t in range(at[0], run.T + 1):
        recent = (at <= t) & (at > t - run.sweep)
        levels[t] = values[recent].mean() if recent.any() else values[at <= t][-1]
    return levels


class Remembering:
    """The rule with the other seeds of the same setting as its memory (`like`)."""

    def __init__(self, runs, evidence="reports"):
        self.runs, self.evidence = runs, evidence

    def __call__(self, run):
        others = [x for x in self.runs if x.cell == run.cell and x.seed != run.seed]
        summary = memory.summarize_curves([read_curve(x) for x in others])
        for look in stop.assess(run, self.evidence):
            remembered = memory.look_up_earlier_gain(summary, look.t)
            seen = look if remembered is None else add_memory(look, remembered)
            if seen.should_stop:
                return look.t
        return None


@cache
def read_curve(run):
    return memory.compute_gain_curve(run.history)


class SinceReports:
    """The simple rule by the mean of clients' reports of the last sweep, free of traffic as ours."""

    def __init__(self, points):
        self.points = points

    def __call__(self, run):
        levels = compute_report_levels(run)
        ahead = range(2 * run.sweep, run.T + 1)
        return next((t for t in ahead if levels[t] - levels[t // 2] < self.points), None)


@cache
def compute_report_levels(run):
    """(T + 1,) the mean of the reports of the last sweep, in points."""
    found = stop.collect_reports(run.history)
    t, values = found.clients.t, found.clients.value / found.unit
    count = np.bincount(t, minlength=run.T + 1).cumsum()
    total = np.bincount(t, values, minlength=run.T + 1).cumsum()
    before = np.maximum(np.arange(run.T + 1) - run.sweep, 0)
    return (total - total[before]) / np.maximum(count - count[before], 1)


RULES = {
    "reports (the default)": stop.Gain(),
    **{
        f"evaluations, eval_every = {every}": stop.Gain(evidence="evaluations", every=every)
        for every in (1, 2, 5)
    },
    "both": stop.Gain(evidence="both"),
    SIMPLE: stop.Since(3.0),
    **{f"the same, eval_every = {every}": SinceEvery(3.0, every) for every in (2, 5)},
    "the same, by clients' reports": SinceReports(3.0),
    "2 points since t / 2": stop.Since(2.0),
    "the rule of before": stop.Earlier(),
    "the rule of before, clients alone": stop.Earlier(by="clients"),
    "conflicts >= P / 2 (the paper's psi = 5 of 10)": stop.conflicts,
    "conflicts >= 0.55 P (psi = 5.5 of 10)": lambda run: stop.conflicts(run, 0.55),
    "no best in 10 evaluations": stop.patience,
}


def judge_run(run, t):
    """(too early, trusted or None, thrifty or None, regret, loss) of a stop in round t; None:
    never.
    """
    trust = None if t is None else stop.trusted(run, t)
    stop.LATE, before = LATE, stop.LATE
    thrift = stop.thrifty(run, t)
    stop.LATE = before
    end = max(t or run.T, int(np.flatnonzero(np.isfinite(run.A))[0]))
    loss = float(np.nanmax(run.A) - run.A[end])
    return float(trust is False), trust, thrift, run.regret(t or run.T), loss


def draw_weights(runs):
    """(draws, runs) how often each run is drawn: settings first, then runs within them."""
    rng, cells = np.random.default_rng(0), {}
    for i, run in enumerate(runs):
        cells.setdefault(run.cell, []).append(i)
    names, weights = list(cells), np.zeros((DRAWS, len(runs)))
    for draw in range(DRAWS):
        for name in rng.choice(len(names), len(names)):
            members = cells[names[name]]
            np.add.at(weights[draw], rng.choice(members, len(members)), 1)
    return weights


def format_interval(values, weights, scale=1.0, digits=2):
    """A mean with its bootstrap interval; nan stands for what cannot be judged."""
    values = np.array([np.nan if v is None else float(v) for v in values]) * scale
    known = np.isfinite(values)
    if not known.any():
        return "--"
    some = weights[:, known]
    means = (some @ values[known]) / np.maximum(some.sum(1), 1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{values[known].mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def make_rows(runs, rules):
    weights = draw_weights(runs)
    judged = {name: [judge_run(run, rule(run)) for run in runs] for name, rule in rules.items()}
    simple = judged[SIMPLE]
    rows = []
    for name, figures in judged.items():
        early, trust, thrift, regret, loss = zip(*figures, strict=True)
        fewer = [a[0] - b[0] for a, b in zip(figures, simple, strict=True)]
        less = [a[3] - b[3] for a, b in zip(figures, simple, strict=True)]
        rows.append(
            [
                name,
                format_interval(trust, weights, 100, 0),
                format_interval(thrift, weights, 100, 0),
                format_interval(early, weights, 100, 0),
                format_interval(regret, weights),
                format_interval([x > 4 for x in loss], weights, 100, 0),
                "" if name == SIMPLE else format_interval(fewer, weights, 100, 0),
                "" if name == SIMPLE else format_interval(less, weights),
            ]
        )
    return rows


HEAD = [
    "rule",
    "trust, %",
    "thrift (2 t*), %",
    "too early, % of runs",
    "regret, points",
    "loses > 4 points, % of runs",
    "too early, minus the simple rule's",
    "regret, minus the simple rule's",
]


def list_cells(runs):
    """One row a setting: t*, and where the default stops."""
    rule, rows = stop.Gain(), []
    for cell in sorted({run.cell for run in runs}):
        mine = [run for run in runs if run.cell == cell]
        stops = [rule(run) for run in mine]
        rows.append(
            [
                *cell,
                len(mine),
                ", ".join("late" if run.star is None else str(run.star) for run in mine),
                ", ".join("--" if t is None else str(t) for t in stops),
                ", ".join(
                    "--" if t is None else f"{run.gain(t):.1f}"
                    for run, t in zip(mine, stops, strict=True)
                ),
            ]
        )
    return ["data set", "regime", "setting", "runs", "t*", "stops in round", "G there"], rows


def main(page=stop.ROOT / "docs" / "stop.md"):
    for kind, folder in SETS.items():
        runs = [run for run in stop.load([folder / "runs.jsonl.gz"]) if not run.dead]
        remembering = {
            "reports, with memory of the other seeds": Remembering(runs),
            "evaluations, with memory of the other seeds": Remembering(runs, "evaluations"),
        }
        stop.write(folder, "rules", HEAD, make_rows(runs, {**RULES, **remembering}))
        stop.write(folder, "cells", *list_cells(runs))
        stop.embed(folder, page, kind)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
