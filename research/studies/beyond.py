"""The tables and plots of research/docs/first-study.md from recorded runs: `python research/studies/beyond.py [OUT
[PAGE]]`.

Runs were made by `research/studies/traces.py` without a stop. A stop rule is a pure function of the record,
so every rule here is replayed on them, with the pieces that ship. Accuracy was measured every fifth
round: a run that stops in between counts with what was last measured.
"""

import csv
import gzip
import json
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from flrce.core.types import RoundRecord
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.no_headway import NoHeadway

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {"cifar10": 10, "cifar100": 100, "femnist": 62, "speech": 30}
PAIRS = (
    ("fedavg + ema", "fedavg"),
    ("flrce", "fedavg"),
    ("flrce", "fedavg + ema"),
    ("flrce + q4", "fedavg"),
    ("flrce + q4", "fedavg + ema"),
    ("flrce + q4-short", "fedavg + q4-short, ema"),
)
SELECTIONS = ("uniform", "balance", "chance", "agreement", "paper", "capped", "mean", "divfl")
RULES = {
    "the paper: conflicts >= 5, its selection": (UpdateConflicts(5.0), "paper"),
    "conflicts >= 5": UpdateConflicts(5.0),
    "conflicts >= 5 in 2 of 5, after 20": UpdateConflicts(5.0, r=2, n=5, after=20),
    "headway of 10 < 0, after 20": NoHeadway(0.0, 0.0, 10, after=20),
    "headway of 20 < 0, after 20": NoHeadway(0.0, 0.0, 20, after=20),
    "headway of 20 < -.04, after 20": NoHeadway(-0.04, 0.0, 20, after=20),
    "headway of 20 < .2 of the first, after 20": NoHeadway(0.0, 0.2, 20, after=20),
    "headway of 20 < .4 of the first - .08, after 20": NoHeadway(after=20),
    "frugal: the same, after 39": NoHeadway(after=39),
    "the same, after 59": NoHeadway(after=59),
    "balanced (default): the same, after 69": NoHeadway(),
    "accurate: the same, after 84": NoHeadway(after=84),
    "default, but turns by chance": (NoHeadway(), "chance"),
    "default, but uniform sampling": (NoHeadway(), "uniform"),
}


@dataclass(frozen=True)
class Run:
    dataset: str
    regime: str
    recipe: str
    seed: int
    series: dict

    @property
    def group(self):
        return self.dataset, self.regime

    @property
    def T(self):
        return len(self.series["joules"])

    @cached_property
    def history(self):
        s = self.series
        return [
            RoundRecord(
                t + 1, exploit=s["exploit"][t], conflicts=s["conflicts"][t], headway=s["headway"][t]
            )
            for t in range(self.T)
        ]

    def at(self, t, field="averaged"):
        """Accuracy in % as last measured by round t; of the raw model where there is no average."""
        found = [x for x in self.series[field][:t] if x is not None]
        return 100 * found[-1] if found else self.at(t, "accuracy")

    def spent(self, t):
        """Joules and bytes up to round t."""
        return np.array(
            [
                sum(self.series["joules"][:t]),
                sum(self.series["bytes_up"][:t] + self.series["bytes_down"][:t]),
            ]
        )

    def reaches(self, target):
        """The first round whose averaged model was seen at `target` % or above; None: it never
        was.
        """
        measured = enumerate(self.series["averaged"], 1)
        return next((t for t, x in measured if x is not None and 100 * x >= target), None)

    def stop(self, rule):
        """The round in which the rule ends the run; None: it goes on to T."""
        return next((t for t in range(1, self.T) if rule(self.history[:t])), None)


def load(files):
    found = {}
    for file in files:
        with gzip.open(file, "rt") as f:
            for row in map(json.loads, f):
                run = Run(row["dataset"], row["regime"], row["recipe"], row["seed"], row["series"])
                found[(*run.group, run.recipe, run.seed)] = run
    return list(found.values())


def interval(values):
    values = np.asarray(values, float)
    half = (
        student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        if len(values) > 1
        else np.nan
    )
    return f"{values.mean():+.2f} ± {half:.2f}"


def selections(runs):
    """Every selection against uniform sampling, seed by seed."""
    seen = {(*run.group, run.recipe, run.seed): run for run in runs}
    rows = []
    for group in sorted({run.group for run in runs}):
        for name in SELECTIONS:
            mine = [run for run in runs if run.group == group and run.recipe == name]
            pairs = [(run, seen[(*group, "uniform", run.seed)]) for run in mine]
            if mine:
                row = [*group, name, len(mine)]
                for field in ("accuracy", "averaged"):
                    row.append(f"{np.mean([run.at(100, field) for run in mine]):.1f}")
                    gaps = [a.at(100, field) - b.at(100, field) for a, b in pairs]
                    row.append("" if name == "uniform" else interval(gaps))
                swings = [
                    abs(np.diff([x for x in run.series["accuracy"][39:] if x is not None])).mean()
                    for run in mine
                ]
                rows.append([*row, f"{100 * np.mean(swings):.1f}"])
    head = [
        "data set",
        "regime",
        "selection",
        "seeds",
        "raw model %",
        "minus uniform",
        "averaged %",
        "minus uniform",
        "swing, points",
    ]
    return head, rows


def judged(runs, rules):
    """Trust and thrift of every rule, on balanced turns unless it says otherwise."""
    raw = {
        (*run.group, run.seed): run.at(100, "accuracy") for run in runs if run.recipe == "uniform"
    }
    rows = []
    for name, case in rules.items():
        rule, recipe = case if isinstance(case, tuple) else (case, "balance")
        for group in sorted({run.group for run in runs if run.recipe == recipe}):
            mine = [run for run in runs if run.group == group and run.recipe == recipe]
            stops = [run.stop(rule) for run in mine]
            ends = [t or run.T for run, t in zip(mine, stops, strict=True)]
            gaps = [run.at(run.T) - run.at(t) for run, t in zip(mine, ends, strict=True)]
            close = [gap <= 2 for gap, t in zip(gaps, stops, strict=True) if t]
            flat = [
                t is not None and t <= 70
                for run, t in zip(mine, stops, strict=True)
                if run.at(100) - run.at(60) < 2
            ]
            beats = [
                run.at(t) >= raw[(*group, run.seed)] for run, t in zip(mine, ends, strict=True)
            ]
            saved = 1 - np.array(
                [run.spent(t) / run.spent(run.T) for run, t in zip(mine, ends, strict=True)]
            ).mean(0)
            rows.append(
                [
                    name,
                    *group,
                    f"{len(close)} of {len(mine)}",
                    f"{np.mean(ends):.0f}",
                    f"{sum(close)} of {len(close)}",
                    f"{sum(flat)} of {len(flat)}",
                    f"{np.mean(gaps):.1f}",
                    f"{max(gaps):.1f}",
                    f"{sum(beats)} of {len(beats)}",
                    f"{100 - np.mean(ends):.0f} %",
                    *(f"{100 * x:.0f} %" for x in saved),
                ]
            )
    head = [
        "rule",
        "data set",
        "regime",
        "stopped",
        "round",
        "trust",
        "thrift",
        "mean loss",
        "worst loss",
        "at least FedAvg",
        "rounds saved",
        "joules saved",
        "bytes saved",
    ]
    return head, rows


def turns(runs):
    """What each part of the default adds at T: the average, going in turn, and balancing those who
    go together.
    """
    at = {(*run.group, run.recipe, run.seed): run.at(100) for run in runs}
    raw = {
        (*run.group, run.seed): run.at(100, "accuracy") for run in runs if run.recipe == "uniform"
    }
    rows = []
    for group in sorted({run.group for run in runs}):
        seeds = sorted(run.seed for run in runs if run.group == group and run.recipe == "uniform")
        row = [
            *group,
            len(seeds),
            interval([at[(*group, "uniform", seed)] - raw[(*group, seed)] for seed in seeds]),
        ]
        for ours, theirs in (("chance", "uniform"), ("balance", "chance")):
            known = (*group, "chance", seeds[0]) in at
            gaps = (
                [at[(*group, ours, seed)] - at[(*group, theirs, seed)] for seed in seeds]
                if known
                else []
            )
            row.append(interval(gaps) if gaps else "not run")
        rows.append(row)
    head = [
        "data set",
        "regime",
        "seeds",
        "uniform: average minus raw model",
        "averages: chance minus uniform",
        "averages: balance minus chance",
    ]
    return head, rows


def sweeps(runs, regime="quantity", length=10):
    """Joules of a round by its place in the sweep (M / P rounds), over the mean of all; the first
    sweep left out.
    """
    rows = []
    for group in sorted({run.group for run in runs if run.regime == regime}):
        for recipe in ("uniform", "balance"):
            mine = [run for run in runs if run.group == group and run.recipe == recipe]
            joules = np.array([run.series["joules"][length:] for run in mine]).reshape(-1, length)
            rows.append([group[0], recipe, *(f"{x:.2f}" for x in joules.mean(0) / joules.mean())])
    return ["data set", "selection", *(f"round {i}" for i in range(1, length + 1))], rows


BEFORE = NoHeadway()  # the default's stop when these runs were made


def when(runs, rule=BEFORE):
    """In which rounds the default's rule ends runs, beside a clock that ends all of them in the
    first round it may.
    """
    rows = []
    for group in sorted({run.group for run in runs if run.recipe == "balance"}):
        mine = [run for run in runs if run.group == group and run.recipe == "balance"]
        stops = [t for t in (run.stop(rule) for run in mine) if t]
        dead = [run for run in mine if run.stop(rule) and run.at(100) < 300 / CLASSES[group[0]]]
        close = sum(run.at(100) - run.at(rule.after + 1) <= 2 for run in mine)
        rounds = ", ".join(f"{t}: {stops.count(t)}" for t in sorted(set(stops)))
        rows.append(
            [*group, f"{len(stops)} of {len(mine)}", rounds, len(dead), f"{close} of {len(mine)}"]
        )
    head = [
        "data set",
        "regime",
        "stopped",
        "round: runs",
        "of these below 3 x chance at T",
        f"within 2 points of T at round {rule.after + 1}, stopped or not",
    ]
    return head, rows


def fair(runs, share=0.95):
    """Joules and rounds until `share` of what FedAvg with the same average has after T rounds, ours
    over FedAvg's.

    Both hand back the same average and stop nowhere; the target is FedAvg's own, seed by seed. No
    ratio is given for a group in which some of our runs never get there: dropping those would
    flatter us.
    """
    seen = {(*run.group, run.recipe, run.seed): run for run in runs}
    rows, means = [], []
    for group in sorted({run.group for run in runs}):
        pairs = [
            (run, seen[(*group, "balance", run.seed)])
            for run in runs
            if run.group == group and run.recipe == "uniform"
        ]
        reached = [
            (run.reaches(share * run.at(100)), ours.reaches(share * run.at(100)))
            for run, ours in pairs
        ]
        done = [(a, b) for a, b in reached if b]
        row = [*group, f"{len(done)} of {len(pairs)}"]
        if len(done) < len(pairs):
            rows.append([*row, "", ""])
            continue
        spent = [
            (ours.spent(b)[0] / run.spent(a)[0], b / a)
            for (run, ours), (a, b) in zip(pairs, done, strict=True)
        ]
        logs = np.log(spent)  # (seeds, 2)
        means.append(logs.mean(0))
        rows.append([*row, *(times(column) for column in logs.T)])
    rows.append(["all of these", "", len(means), *(times(column) for column in np.array(means).T)])
    return [
        "data set",
        "regime",
        "ours get there",
        "joules, ours / FedAvg's",
        "rounds, ours / FedAvg's",
    ], rows


def times(logs):
    """A geometric mean and its 95 % interval."""
    half = student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    return "{:.2f} [{:.2f}, {:.2f}]".format(
        *np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    )


def paired(runs):
    """The recipe to start with beside FedAvg, with and without the average; CIFAR10,
    Dirichlet(0.1).
    """
    seen = {(run.recipe, run.seed): run for run in runs}
    rows = []
    for ours, theirs in PAIRS:
        both = [(run, seen[(theirs, run.seed)]) for run in runs if run.recipe == ours]
        gaps = [a.at(100) - b.at(100) for a, b in both]
        shares = np.mean([a.spent(100) / b.spent(100) for a, b in both], 0)
        rows.append(
            [ours, theirs, len(both), interval(gaps), *(f"{100 * x:.0f} %" for x in shares)]
        )
    return ["recipe", "against", "seeds", "points at T", "joules", "bytes"], rows


def curves(runs):
    """Recipe -> (rounds, 3): mean accuracy, kJ and MB at every measured round."""
    found = {}
    for name in dict.fromkeys(run.recipe for run in runs):
        mine = [run for run in runs if run.recipe == name]
        measured = [t + 1 for t, x in enumerate(mine[0].series["accuracy"]) if x is not None]
        points = [[[run.at(t), *(run.spent(t) / (1e3, 1e6))] for t in measured] for run in mine]
        found[name] = (measured, np.mean(points, 0), np.std([p[-1][0] for p in points], ddof=1))
    return found


def front(found, column):
    """(recipe, round, accuracy, cost) of the points that no cheaper one reaches."""
    points = [
        (name, t, *p[[0, column]])
        for name, (rounds, P, _) in found.items()
        for t, p in zip(rounds, P, strict=True)
    ]
    best, kept = 0.0, []
    for point in sorted(points, key=lambda p: (p[3], -p[2])):
        if point[2] > best:
            best = point[2]
            kept.append(point)
    return kept


def frontier(runs, out):
    found = curves(runs)
    fronts = {"kJ": front(found, 1), "MB": front(found, 2)}
    on = {unit: {name for name, *_ in points} for unit, points in fronts.items()}
    rows = [
        [
            name,
            f"{P[-1, 0]:.1f} ± {sd:.1f}",
            f"{P[-1, 1]:.2f}",
            f"{P[-1, 2]:.0f}",
            *(f"{sum(n == name for n, *_ in fronts[unit])}" for unit in on),
        ]
        for name, (_, P, sd) in sorted(found.items(), key=lambda item: -item[1][1][-1, 0])
    ]
    head = [
        "recipe",
        "accuracy after T, % ± sd",
        "kJ",
        "MB",
        "points on the front by energy",
        "by traffic",
    ]
    write(out, "frontier", head, rows)
    points = [
        [unit, name, t, f"{a:.1f}", f"{c:.4g}"]
        for unit, found in fronts.items()
        for name, t, a, c in found
    ]
    write(out, "frontier-points", ["cost", "recipe", "rounds", "accuracy %", "amount"], points)
    picture(found, fronts, out)
    for unit, points in fronts.items():
        ours = sum(name.startswith("flrce") and "(" not in name for name, *_ in points)
        print(f"front by {unit}: {ours} of {len(points)} points are FLrce combinations")


def picture(found, fronts, out):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flrce"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, (unit, points), column in zip(axes, fronts.items(), (1, 2), strict=True):
        for name, (_, P, _) in found.items():
            ours = name.startswith("flrce") and "(" not in name
            axis.plot(
                P[:, column], P[:, 0], color="#cf5a00" if ours else "#7d8a99", alpha=0.35, lw=1
            )
            axis.plot(P[-1, column], P[-1, 0], "o", ms=4, color="#cf5a00" if ours else "#7d8a99")
        axis.step(
            [p[3] for p in points], [p[2] for p in points], where="post", color="black", lw=1.4
        )
        for name in (
            "fedavg",
            "flrce",
            "flrce + q4",
            "flrce + q4-short",
            "flrce + q4-most",
            "flrce (paper)",
            "timelyfl",
        ):
            P = found[name][1]
            axis.annotate(
                name,
                (P[-1, column], P[-1, 0]),
                xytext=(4, -8),
                textcoords="offset points",
                fontsize=8,
            )
        axis.set(xlabel=f"{unit} spent by all clients", xscale="log")
    axes[0].set_ylabel("accuracy of the model handed back, %")
    axes[0].set_title("orange: FLrce and combinations; grey: others; black: the front", fontsize=9)
    for kind in ("svg", "png"):
        figure.savefig(
            out / f"frontier.{kind}", dpi=130, metadata={"Date": None} if kind == "svg" else None
        )


def write(out, name, head, rows):
    with (out / f"{name}.csv").open("w", newline="") as f:
        csv.writer(f).writerows([head, *rows])
    lines = [head, ["---"] * len(head), *rows]
    (out / f"{name}.md").write_text(
        "".join("| " + " | ".join(map(str, row)) + " |\n" for row in lines)
    )


def embed(out, page):
    """Put every table between its marks in the page."""
    text = page.read_text()
    for name in re.findall(r"<!-- beyond: (\S+) -->", text):
        table = (out / f"{name}.md").read_text()
        text = re.sub(
            rf"(<!-- beyond: {name} -->\n).*?(<!-- end -->)",
            lambda m, t=table: m[1] + t + m[2],
            text,
            flags=re.S,
        )
    page.write_text(text)


def main(out, page, traces=ROOT / "results" / "beyond" / "traces"):
    out.mkdir(parents=True, exist_ok=True)
    decide = load(sorted([*traces.glob("cifar10-*"), *traces.glob("femnist-*")]))
    write(out, "selections", *selections(decide))
    write(out, "rules", *judged(decide, RULES))
    confirm = load(sorted(traces.glob("*-confirm*")))
    if confirm:
        write(out, "confirm-selections", *selections(confirm))
        write(
            out,
            "confirm",
            *judged(
                confirm,
                {name: rule for name, rule in RULES.items() if ":" in name or "default" in name},
            ),
        )
    for name, table in (("turns", turns), ("sweeps", sweeps), ("when", when), ("fair", fair)):
        write(out, name, *table(decide + confirm))
    searched = load([traces / "frontier.jsonl.gz"])
    write(out, "paired", *paired(searched))
    frontier(searched, out)
    embed(out, page)


if __name__ == "__main__":
    main(
        *map(Path, sys.argv[1:] or (ROOT / "results" / "beyond", ROOT / "docs" / "first-study.md"))
    )
