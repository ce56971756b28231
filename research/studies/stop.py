"""The tables of research/docs/stop.md, from recorded runs: `python research/studies/stop.py [OUT
[PAGE]]`.

Runs were made by `research/studies/stop_traces.py` without a stop; every rule is a pure function of the
record and is replayed on them, with the pieces that ship. A(t) is the metric of the model handed
back, on all hold-outs, averaged over the last sweep, in points; G(t) = A(2t) - A(t); t* the first
round from which G stays below 2.

Trust: G < 2 where the rule stops; a stop after the middle of a recorded run cannot be judged,
unless 2 points were gained by its end already, and is left out. Thrift: it stops by 1.5 t*; a run
that is too short to have a t* has one beyond its middle at least, and counts where that decides.
Regret: what the best round would be worth, A(t) - 2 log2 t, less what the rule's round is worth;
beside it a clock that stops all runs of a cell in the rule's own mean round. Runs that end near
chance are dead and reported apart. Confirming runs count if they went on for 3 t* or 240 rounds.
"""

import gzip
import json
import re
import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import earlier_stop
import numpy as np
from earlier_stop import MAX_LIAR_SHARE, MAX_SLOPE_RATIO
from scipy.stats import norm
from scipy.stats import t as student

from flrce.core.types import RoundRecord
from flrce.methods.stopping.marginal_gain import (
    ProgressReports,
    collect_reports,
    estimate_gain,
    is_check_due,
)
from flrce.methods.stopping.no_headway import NoHeadway

ROOT = Path(__file__).resolve().parent.parent
PRICE = 2.0  # points a doubling
LATE = 1.5  # times t*
ENOUGH = 240  # rounds
OLD = NoHeadway()  # the default's stop of version 0.1


@dataclass(frozen=True, eq=False)
class Run:
    """One trace."""

    dataset: str
    regime: str
    setting: str
    seed: int
    classes: int
    metric: str
    lower: bool
    M: int
    P: int
    held: list
    series: dict

    @property
    def cell(self):
        return self.dataset, self.regime, self.setting

    @property
    def T(self):
        return len(self.series["joules"])

    @property
    def sweep(self):
        return max(round(self.M / self.P), 1)

    @cached_property
    def A(self):
        """(T + 1,) by round; nan before the first evaluation."""
        seen = [(t + 1, x) for t, x in enumerate(self.series["averaged"]) if x is not None]
        at, values = np.array([t for t, _ in seen]), np.array([x for _, x in seen])
        values = self.points(values)
        found = np.full(self.T + 1, np.nan)
        for t in range(at[0], self.T + 1):
            recent = (at <= t) & (at > t - self.sweep)
            found[t] = values[recent].mean() if recent.any() else values[at <= t][-1]
        return found

    def points(self, values):
        """Hundredths; where less is better, of what the first figures were."""
        if not self.lower:
            return 100 * values
        first = next(h for h in self.series["holdouts"] if any(x is not None for x in h))
        return -100 * values / np.mean([x for x in first if x is not None])

    def gain(self, t):
        """G(t), or as much of it as the run goes on for; everything where nothing was judged by
        then.
        """
        start = self.A[t] if np.isfinite(self.A[t]) else -np.inf
        return self.A[min(2 * t, self.T)] - start

    @cached_property
    def star(self):
        """t*, or None where the run is too short to have one."""
        last = max((t for t in range(1, self.T // 2 + 1) if not self.gain(t) < PRICE), default=0)
        return last + 1 if last < self.T // 2 else None

    @property
    def whole(self):
        """Whether the run went on for long enough to judge rules by."""
        return self.T >= ENOUGH or (self.star is not None and 3 * self.star <= self.T)

    @property
    def dead(self):
        """Below 3 times chance; where there are two or three classes, 1.2 times."""
        return (
            self.metric == "accuracy"
            and self.A[self.T] < (300 if self.classes > 3 else 120) / self.classes
        )

    @cached_property
    def value(self):
        """(T + 1,) what stopping is worth: points, less the price of every doubling."""
        rounds = np.maximum(np.arange(self.T + 1), 1)
        return self.A - PRICE * np.log2(rounds)

    def regret(self, t):
        t = max(min(round(t), self.T), int(np.flatnonzero(np.isfinite(self.A))[0]))
        return float(np.nanmax(self.value) - self.value[t])

    @cached_property
    def history(self):
        s, flagged = self.series, self.series["flagged"]
        return [
            RoundRecord(
                t + 1,
                exploit=True,
                replied=tuple(map(str, s["chosen"][t])),
                holdouts=tuple(s["holdouts"][t]),
                clients=self.M,
                flagged={str(k): "" for k in flagged[t]},
                conflicts=s["conflicts"][t],
                headway=s["headway"][t],
                joules=s["joules"][t],
                bytes_up=s["bytes"][t],
                seconds=s["seconds"][t],
                metric=self.metric,
                lower=self.lower,
                accuracy=s["raw"][t] if self.metric == "accuracy" else None,
                metrics={}
                if self.metric == "accuracy" or s["raw"][t] is None
                else {self.metric: s["raw"][t]},
                averaged=s["averaged"][t],
            )
            for t in range(self.T)
        ]

    def stops(self, rule):
        """The round in which a rule ends the run; T where it never does."""
        return next((t for t in range(1, self.T + 1) if rule(self.history[:t])), None)


def load(paths):
    found = []
    for path in paths:
        with gzip.open(path, "rt") as f:
            found += [Run(**json.loads(line)) for line in f]
    return sorted(found, key=lambda run: (*run.cell, run.seed))


class Since:
    """The metric, averaged over the last sweep, has gained less than so many points since half the
    rounds.
    """

    def __init__(self, points=2.5):
        self.points = points

    def __call__(self, run):
        ahead = range(2 * run.sweep, run.T + 1)
        return next((t for t in ahead if run.A[t] - run.A[t // 2] < self.points), None)


class Growth:
    """The way from the first model grows by less than a share of itself a round, over the last
    `rounds`.

    After Lee et al., arXiv 2601.22669, of which the abstract was read: the growth rate of the task
    vector. Its constants are not told there; `share` is the one that does best on the decision set.
    """

    def __init__(self, share, rounds=10):
        self.share, self.rounds = share, rounds

    def __call__(self, run):
        way, n = run.series["way"], self.rounds
        grown = ((t, np.log(way[t - 1] / way[t - 1 - n]) / n) for t in range(n + 1, run.T + 1))
        return next((t for t, rate in grown if rate < self.share), None)


class Clock:
    """The same round for every run."""

    def __init__(self, at):
        self.at = at

    def __call__(self, run):
        return self.at if self.at <= run.T else None


class Gain:
    """`MarginalGain` as it ships, looking only where it looks; `every`: evaluations are read in
    each `every`-th round only.
    """

    def __init__(self, points=PRICE, evidence="reports", every=1):
        self.points, self.evidence, self.every = points, evidence, every

    def __call__(self, run):
        return next(
            (
                look.t
                for look in assess(run, self.evidence, self.every)
                if look.bound < self.points and look.final
            ),
            None,
        )


@cache
def assess(run, evidence, every=1):
    """Every look at a run by the rule that ships."""
    found = collect_reports(run.history)
    evaluations = found.evaluations
    kept = evaluations.t % every == 0
    thinned = type(evaluations)(
        *(values[kept] for values in (evaluations.t, evaluations.k, evaluations.value)),
        evaluations.n[kept],
        evaluations.sweep,
    )
    found = ProgressReports(found.clients, thinned, found.unit)
    looks = (
        estimate_gain(found.truncate_after(t), t, PRICE, evidence)
        for t in range(1, run.T + 1)
        if is_check_due(t)
    )
    return [look for look in looks if look is not None]


class Earlier:
    """The rule of before, which takes successive evaluations for independent; `by`: all that is
    recorded, or only one kind of figures.

    Without `bent` it is the rule as it was first frozen, on the first part of the decision set; if
    it does not wait for evaluations, as it was frozen for the second confirming runs; with `liars`
    = 0, as it was before figures were bounded.
    """

    def __init__(
        self, points=PRICE, by="all", bent=MAX_SLOPE_RATIO, waits=True, liars=MAX_LIAR_SHARE
    ):
        self.points, self.by, self.how = points, by, (bent, waits, liars)

    def __call__(self, run):
        looks = looked(run, self.by, *self.how)
        return next((v.t for v in looks if max(v.gain, v.least) < self.points and v.final), None)


@cache
def looked(run, by, bent, waits, liars):
    """Every verdict of the rule of before on a run."""
    found = collect_reports(run.history)
    nothing = found.clients.truncate_after(0)
    if by == "clients":
        found = ProgressReports(found.clients, nothing, found.unit)
    elif by == "evaluations":
        found = ProgressReports(nothing, found.evaluations, found.unit)
    every = (
        earlier_stop.estimate_gain(found.truncate_after(t), t, PRICE, bent, waits, liars)
        for t in range(1, run.T + 1)
        if is_check_due(t)
    )
    return [verdict for verdict in every if verdict is not None]


def headway(run, rule=OLD):
    """As `run.stops(NoHeadway())`, in one pass."""
    values, early = (
        run.series["headway"],
        [x for x in run.series["headway"][: rule.first] if x is not None],
    )
    known = []
    for t, value in enumerate(values, 1):
        known += [] if value is None else [value]
        if value is None or t <= rule.after or len(known) < rule.n or not early:
            continue
        if sum(known[-rule.n :]) / rule.n < rule.level + rule.share * sum(early) / len(early):
            return t
    return None


def conflicts(run, share=0.5):
    """As `run.stops(UpdateConflicts(share * run.P))`."""
    return next(
        (t for t, count in enumerate(run.series["conflicts"], 1) if count >= share * run.P), None
    )


def patience(run, many=10):
    """As `run.stops(Patience(many))`."""
    sign = -1.0 if run.lower else 1.0
    seen_ = [(t, sign * x) for t, x in enumerate(run.series["averaged"], 1) if x is not None]
    for i in range(many, len(seen_)):
        if max(x for _, x in seen_[i - many + 1 : i + 1]) <= max(
            x for _, x in seen_[: i - many + 1]
        ):
            return seen_[i][0]
    return None


SHARES = (0.03, 0.02, 0.015, 0.01, 0.007, 0.005, 0.003, 0.002, 0.001)
PRICES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
RULES = {
    "marginal-gain, clients' reports (ships)": Gain(),
    "the same, evaluations": Gain(evidence="evaluations"),
    "the same, both": Gain(evidence="both"),
    "3 points since t / 2": Since(3.0),
    "2 points since t / 2": Since(2.0),
    "the rule of before": Earlier(),
    "the rule of before, clients alone": Earlier(by="clients"),
    "headway, not before 70 (version 0.1)": headway,
    "conflicts >= 5 of 10 (the paper's psi)": conflicts,
    "conflicts >= 5.5 of 10 (the paper's psi)": partial(conflicts, share=0.55),
    "no best in 10 evaluations": patience,
}


FAMILIES = {  # every rule with its constant from early to late
    "marginal-gain, reports": {f"{points:g} points": Gain(points) for points in reversed(PRICES)},
    "marginal-gain, evaluations": {
        f"{points:g} points": Gain(points, "evaluations") for points in reversed(PRICES)
    },
    "the rule of before": {f"{points:g} points": Earlier(points) for points in reversed(PRICES)},
    "points since t / 2": {
        f"{points:g} points": Since(points) for points in (8, 6, 5, 4, 3, 2.5, 2, 1)
    },
    "headway": {
        f"after {after}": partial(headway, rule=replace(OLD, after=after))
        for after in (20, 40, 70, 100, 150)
    },
    "psi": {
        f"{share:g} P": partial(conflicts, share=share) for share in (0.4, 0.5, 0.55, 0.6, 0.7)
    },
    "no best in n evaluations": {
        f"n = {many}": partial(patience, many=many) for many in (2, 3, 5, 7, 10)
    },
    "growth rate": {f"{share:g} a round": Growth(share) for share in SHARES},
    "a clock": {f"round {at}": Clock(at) for at in (30, 50, 70, 100, 150, 200, 300)},
}


def trusted(run, t):
    """Whether twice the rounds bring less than 2 points; None where the run is too short to
    tell.
    """
    if run.gain(t) >= PRICE:
        return False
    return True if 2 * t <= run.T else None


def thrifty(run, t):
    """Whether a stop (None: never) came by 1.5 t*; None where the run is too short to tell."""
    if run.star is None:
        return True if t is not None and t <= LATE * run.T / 2 else None
    if t is None:
        return False if LATE * run.star <= run.T else None
    return t <= LATE * run.star


@dataclass(frozen=True)
class Judged:
    """A rule on some runs."""

    stops: list
    runs: list

    @property
    def stopped(self):
        return [(run, t) for run, t in zip(self.runs, self.stops, strict=True) if t is not None]

    @property
    def trust(self):
        return [x for run, t in self.stopped if (x := trusted(run, t)) is not None]

    @property
    def thrift(self):
        found = (thrifty(run, t) for run, t in zip(self.runs, self.stops, strict=True))
        return [x for x in found if x is not None]

    @property
    def both(self):
        """Whether a run was ended neither too early nor too late, of those where that can be
        told.
        """
        pairs = [
            (t is not None and trusted(run, t), thrifty(run, t))
            for run, t in zip(self.runs, self.stops, strict=True)
        ]
        return [bool(trust and thrift) for trust, thrift in pairs if None not in (trust, thrift)]

    @property
    def regret(self):
        """(runs, 2): the rule's, and that of a clock with the same mean round in the run's cell."""
        ends = {id(run): t or run.T for run, t in zip(self.runs, self.stops, strict=True)}
        cells = {}
        for run in self.runs:
            cells.setdefault(run.cell, []).append(ends[id(run)])
        return np.array(
            [[run.regret(ends[id(run)]), run.regret(np.mean(cells[run.cell]))] for run in self.runs]
        )

    @property
    def clock(self):
        """(runs,) the regret of one clock for all runs, at the geometric mean of the rule's
        rounds.
        """
        mean = np.exp(
            np.mean([np.log(t or run.T) for run, t in zip(self.runs, self.stops, strict=True)])
        )
        return np.array([run.regret(mean) for run in self.runs])

    def part(self, wanted):
        """The same on some of the runs."""
        pairs = [(t, run) for t, run in zip(self.stops, self.runs, strict=True) if wanted(run)]
        return Judged([t for t, _ in pairs], [run for _, run in pairs])


def judge(rule, runs):
    return Judged([rule(run) for run in runs], runs)


def tuned(runs):
    """The growth rate's constant that does best: most runs ended neither too early nor too late."""
    return max(SHARES, key=lambda share: float(np.mean(judge(Growth(share), runs).both)))


def of(values):
    return f"{sum(values)} of {len(values)}"


def percent(values):
    return f"{100 * np.mean(values):.0f} %" if len(values) else "--"


def rate(values):
    """A share with its 95 % interval (Wilson's)."""
    n = len(values)
    if not n:
        return "-- of 0"
    z, p = norm.ppf(0.975), np.mean(values)
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
    low, high = (100 * (middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return f"{percent(values)} [{low:.0f}, {high:.0f}] of {n}"


def interval(values):
    values = np.asarray(values, float)
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.2f} ± {half:.2f}"


def summary(results):
    """One row a rule."""
    head = [
        "rule",
        "stopped",
        "too early, of all",
        "trust",
        "cells with trust >= 90 %",
        "thrift",
        "both",
        "median round / t*",
        "regret, points",
        "minus a clock of its own in each cell",
        "minus one clock for all",
    ]
    rows = []
    for name, found in results.items():
        cells = {}
        for run, t in found.stopped:
            cells.setdefault(run.cell, []).append(trusted(run, t))
        known = [[x for x in cell if x is not None] for cell in cells.values()]
        sure = [np.mean(cell) >= 0.9 for cell in known if cell]
        early = [
            t is not None and trusted(run, t) is False
            for run, t in zip(found.runs, found.stops, strict=True)
        ]
        ratio = [
            (t or run.T) / run.star
            for run, t in zip(found.runs, found.stops, strict=True)
            if run.star
        ]
        regret = found.regret
        rows.append(
            [
                name,
                of([t is not None for t in found.stops]),
                percent(early),
                rate(found.trust),
                of(sure),
                rate(found.thrift),
                percent(found.both),
                f"{np.median(ratio):.2f}",
                f"{regret[:, 0].mean():.2f}",
                interval(regret[:, 0] - regret[:, 1]),
                interval(regret[:, 0] - found.clock),
            ]
        )
    return head, rows


def by_cell(found):
    """One row a cell."""
    head = [
        "data set",
        "regime",
        "setting",
        "M / P",
        "t*",
        "stops in round",
        "G there",
        "trust",
        "thrift",
    ]
    rows = []
    for cell in sorted({run.cell for run in found.runs}):
        mine = found.part(lambda run, cell=cell: run.cell == cell)
        stars = ", ".join("late" if run.star is None else str(run.star) for run in mine.runs)
        ends = ", ".join("--" if t is None else str(t) for t in mine.stops)
        gains = ", ".join(
            "--" if t is None else f"{run.gain(t):.1f}"
            for run, t in zip(mine.runs, mine.stops, strict=True)
        )
        rows.append(
            [*cell, mine.runs[0].sweep, stars, ends, gains, of(mine.trust), of(mine.thrift)]
        )
    return head, rows


def by_group(found):
    """One row for every size of a sweep, regime and data set."""
    head = ["", "runs", "stopped", "trust", "thrift", "both", "regret, points"]
    sweeps = {"M / P = 1 to 4": (0, 4), "M / P = 10": (5, 19), "M / P = 20 to 50": (20, 1000)}
    groups = {
        name: (lambda run, low=low, high=high: low <= run.sweep <= high)
        for name, (low, high) in sweeps.items()
    }
    groups |= {
        name: (lambda run, name=name: run.regime == name)
        for name in sorted({r.regime for r in found.runs})
    }
    groups |= {
        name: (lambda run, name=name: run.dataset == name)
        for name in sorted({r.dataset for r in found.runs})
    }
    rows = []
    for name, wanted in groups.items():
        mine = found.part(wanted)
        rows.append(
            [
                name,
                len(mine.runs),
                of([t is not None for t in mine.stops]),
                rate(mine.trust),
                rate(mine.thrift),
                percent(mine.both),
                f"{mine.regret[:, 0].mean():.2f}",
            ]
        )
    return head, rows


def families(runs):
    """Every rule with its constant from early to late: trust and thrift are always those of 2
    points.
    """
    head = ["rule", "constant", "stopped", "trust", "thrift", "both", "median round / t*"]
    rows = []
    for family, rules in FAMILIES.items():
        for constant, rule in rules.items():
            found = judge(rule, runs)
            ratio = [
                (t or run.T) / run.star
                for run, t in zip(runs, found.stops, strict=True)
                if run.star
            ]
            rows.append(
                [
                    family,
                    constant,
                    of([t is not None for t in found.stops]),
                    percent(found.trust),
                    percent(found.thrift),
                    percent(found.both),
                    f"{np.median(ratio):.2f}",
                ]
            )
    return head, rows


def draw(out, name, rows):
    """Trust against thrift, a line for every rule; the goal is the corner."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flrce"
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 5.5), layout="constrained")
    axis.axhspan(90, 102, 0.8 * 100 / 104, color="#dfeedd", lw=0)
    for i, family in enumerate(FAMILIES):
        found = [row for row in rows if row[0] == family and "--" not in row[3:5]]
        at = [(float(row[4][:-2]), float(row[3][:-2]), row[1]) for row in found]
        axis.plot(
            *zip(*[(x, y) for x, y, _ in at], strict=True),
            "o-",
            ms=4,
            lw=2 if i == 0 else 1,
            label=family,
        )
        if i == 0:
            for x, y, constant in at:
                axis.annotate(
                    constant.split()[0], (x, y), (4, 4), textcoords="offset points", fontsize=8
                )
    axis.set(
        xlim=(0, 104),
        ylim=(0, 102),
        xlabel="thrift: stops by 1.5 t*, % of runs",
        ylabel="trust: twice the rounds would not bring 2 points, % of stops",
    )
    axis.legend(fontsize=8, loc="lower left")
    figure.savefig(out / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def horizons(found, lengths=(50, 100, 400)):
    """What the rule does in runs of T rounds, which it does not know: what it would end later goes
    on to T.
    """
    head = ["T", "runs that long", "ended before T", "of these trusted, where it can be told"]
    rows = []
    for T in lengths:
        pairs = [(run, t) for run, t in zip(found.runs, found.stops, strict=True) if run.T >= T]
        ended = [(run, t) for run, t in pairs if t is not None and t < T]
        known = [x for run, t in ended if (x := trusted(run, t)) is not None]
        rows.append([T, len(pairs), len(ended), of(known)])
    return head, rows


def write(out, name, head, rows):
    lines = [head, ["---"] * len(head), *rows]
    (out / f"{name}.md").write_text(
        "".join("| " + " | ".join(map(str, row)) + " |\n" for row in lines)
    )


def embed(out, page, kind="stop"):
    """Put every table between its marks in the page."""
    text = page.read_text()
    for name in re.findall(rf"<!-- {kind}: (\S+) -->", text):
        table = (out / f"{name}.md").read_text()
        marks = rf"(<!-- {kind}: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(marks, lambda m, table=table: m[1] + table + m[2], text, flags=re.S)
    page.write_text(text)


def tables(out, name, runs, share):
    """Everything about one set of runs."""
    alive = [run for run in runs if not run.dead]
    results = {rule: judge(find, alive) for rule, find in RULES.items()}
    results[f"growth rate below {share:g} a round"] = judge(Growth(share), alive)
    ours = results["marginal-gain, clients' reports (ships)"]
    write(out, f"{name}-rules", *summary(results))
    write(out, f"{name}-cells", *by_cell(ours))
    write(out, f"{name}-groups", *by_group(ours))
    curves = families(alive)
    write(out, f"{name}-families", *curves)
    draw(out, f"{name}-families", curves[1])
    write(out, f"{name}-horizons", *horizons(ours))
    dead = [
        [*run.cell, run.seed, f"{run.A[run.T]:.1f}", Gain()(run) or "--"]
        for run in runs
        if run.dead
    ]
    write(
        out,
        f"{name}-dead",
        ["data set", "regime", "setting", "seed", "% at the end", "stops in round"],
        dead,
    )


def main(out, page, traces=ROOT / "results" / "stop"):
    out.mkdir(parents=True, exist_ok=True)
    decide = load(sorted(traces.glob("decide*.jsonl.gz")))
    share = tuned([run for run in decide if not run.dead])
    tables(out, "decide", decide, share)
    confirm = load(sorted(traces.glob("confirm*.jsonl.gz")))
    if confirm:
        tables(out, "confirm", [run for run in confirm if run.whole], share)
    if page.exists():
        embed(out, page)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:] or (ROOT / "results" / "stop", ROOT / "docs" / "stop.md")))
