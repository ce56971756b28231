"""Which recipe is worth its joules and bytes, when every one of them hands back the same average?

    python research/studies/headline.py run --plan research/studies/plans/frontier-average.json --data CACHE --out DIR
    python research/studies/frontier.py research/results/frontier [research/docs/frontier.md]     tables, into the page too, and DIR/frontier.svg

The plan's rule: curves are means over seeds; the front has the points that no cheaper point of
another curve reaches; budgets are compared by rows that other seeds chose.
"""

import json
import sys
from pathlib import Path

import numpy as np
from headline_tables import PLANS, embed, even, levels, markdown, read
from scipy.stats import t as student

PLAN = json.loads((PLANS / "frontier-average.json").read_text())
COSTS, UNITS = ("joules", "bytes"), {"joules": ("kJ", 1e3), "bytes": ("MB", 1e6)}
SHARES = (1.0, 0.5, 0.25)  # of what the base spends in all its rounds
DRAWS = 1000


def ours(row):
    """FLrce's own, not the published method."""
    return row.startswith("flrce") and "(" not in row


def curves(found, task):
    """Row -> {seed: (evaluations, 3)}: level in %, joules, bytes; seeds that every row has."""
    lines = {(row, seed): line for (of, row, seed), line in found.items() if of == task}
    rows = [row for row in PLAN["rows"] if any(key[0] == row for key in lines)]
    seeds = [seed for seed in PLAN["seeds"] if all((row, seed) in lines for row in rows)]
    return {row: {seed: curve(lines[row, seed]) for seed in seeds} for row in rows}


def curve(line):
    judged = np.flatnonzero([value is not None for value in line["handed"]])
    columns = [np.round(100 * levels(line), 6), *(np.cumsum(line[cost]) for cost in COSTS)]
    return np.stack(columns, 1)[judged]


def front(means, column):
    """(row, level, cost) of the points that no cheaper one reaches, cheapest first."""
    points = [(row, point[0], point[column]) for row, points in means.items() for point in points]
    kept, best = [], 0.0
    for point in sorted(points, key=lambda p: (p[2], -p[1])):
        if point[1] > best:
            best = point[1]
            kept.append(point)
    return kept


def mean(found, seeds):
    return {row: np.mean([each[seed] for seed in seeds], 0) for row, each in found.items()}


def often(found, column, rng):
    """Row -> share of resamplings of the seeds in which it has a point on the front."""
    seeds = list(next(iter(found.values())))
    counts = dict.fromkeys(found, 0)
    for _ in range(DRAWS):
        drawn = rng.choice(seeds, len(seeds))
        for row in {row for row, *_ in front(mean(found, drawn), column)}:
            counts[row] += 1
    return {row: count / DRAWS for row, count in counts.items()}


def at(points, column, budget):
    """Level at the last evaluation within the budget; 0 if there is none."""
    within = points[points[:, column] <= budget]
    return float(within[-1, 0]) if len(within) else 0.0


def budgets(found, column):
    """(share, budget, by seed: our best row minus the others' best, which rows): rows chosen on the
    other seeds.
    """
    seeds = list(next(iter(found.values())))
    halves = [seeds[::2], seeds[1::2]]
    for share in SHARES:
        budget = share * float(
            np.mean([points[-1, column] for points in found[PLAN["base"]].values()])
        )
        gaps, rows = [], []
        for chosen_on, judged_on in (halves, halves[::-1]):
            score = {
                row: np.mean([at(each[s], column, budget) for s in chosen_on])
                for row, each in found.items()
            }
            best = [
                max(filter(which, score), key=score.get)
                for which in (ours, lambda row: not ours(row))
            ]
            gaps += [
                at(found[best[0]][s], column, budget) - at(found[best[1]][s], column, budget)
                for s in judged_on
            ]
            rows.append(best)
        yield share, budget, gaps, rows


def interval(values):
    half = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values)), float(half)


def verdict(middle, half):
    return "FLrce's" if middle - half > 0 else "the others'" if middle + half < 0 else "undecided"


def tables(folder):
    """Name -> Markdown, two of each task: all rows, and whose the budgets are."""
    found, made = even(read(folder)), {}
    for task in dict.fromkeys(key[0] for key in found):
        mine = curves(found, task)
        made[f"frontier-{task}"] = markdown(rows_of(task, mine))
        made[f"frontier-budgets-{task}"] = markdown(budgets_of(task, mine))
    return made


def rows_of(task, mine):
    seeds, rng = list(next(iter(mine.values()))), np.random.default_rng(0)
    whole = mean(mine, seeds)
    shares = {cost: often(mine, i, rng) for i, cost in enumerate(COSTS, 1)}
    points = {cost: [row for row, *_ in front(whole, i)] for i, cost in enumerate(COSTS, 1)}
    lines = [
        [
            f"{task}, {len(seeds)} seeds",
            "level at the end, % ± 95 %",
            "kJ",
            "MB",
            "points on the front, energy",
            "traffic",
            "on it in resamplings, energy",
            "traffic",
        ]
    ]
    for row, each in sorted(mine.items(), key=lambda item: -whole[item[0]][-1, 0]):
        level, half = interval([points[-1, 0] for points in each.values()])
        spent = [f"{whole[row][-1, i] / UNITS[cost][1]:.3g}" for i, cost in enumerate(COSTS, 1)]
        on = [points[cost].count(row) for cost in COSTS]
        often_on = [f"{100 * shares[cost][row]:.0f} %" for cost in COSTS]
        lines.append([row, f"{level:.1f} ± {half:.1f}", *spent, *on, *often_on])
    return lines


def budgets_of(task, mine):
    lines = [
        [f"{task}, budget", "ours, chosen on other seeds", "the others' best", "points", "whose"]
    ]
    for i, cost in enumerate(COSTS, 1):
        for share, budget, gaps, rows in budgets(mine, i):
            middle, half = interval(gaps)
            unit, per = UNITS[cost]
            names = [" / ".join(dict.fromkeys(pair[k] for pair in rows)) for k in (0, 1)]
            told = [
                f"{share:g} x: {budget / per:.3g} {unit}",
                *names,
                f"{middle:+.2f} ± {half:.2f}",
            ]
            lines.append([*told, verdict(middle, half)])
    return lines


def picture(folder):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flrce"
    from matplotlib import pyplot as plt

    found = even(read(folder))
    tasks = list(dict.fromkeys(key[0] for key in found))
    figure, axes = plt.subplots(
        len(tasks), 2, figsize=(12, 4.5 * len(tasks)), squeeze=False, layout="constrained"
    )
    for line, task in zip(axes, tasks, strict=True):
        mine = curves(found, task)
        whole = mean(mine, list(next(iter(mine.values()))))
        for i, (axis, cost) in enumerate(zip(line, COSTS, strict=True), 1):
            unit, per = UNITS[cost]
            for row, points in whole.items():
                colour = "#cf5a00" if ours(row) else "#7d8a99"
                axis.plot(points[:, i] / per, points[:, 0], color=colour, alpha=0.45, lw=1)
                axis.plot(points[-1, i] / per, points[-1, 0], "o", ms=4, color=colour)
            kept = front(whole, i)
            axis.step(
                [p[2] / per for p in kept],
                [p[1] for p in kept],
                where="post",
                color="black",
                lw=1.4,
            )
            axis.set(xlabel=f"{unit} spent by all clients", xscale="log", title=f"{task}")
        line[0].set_ylabel("model handed back, last sweep, %")
    axes[0][0].set_title(
        f"{tasks[0]}; orange: FLrce's rows, grey: others, black: the front", fontsize=10
    )
    figure.savefig(folder / "frontier.svg", metadata={"Date": None})


if __name__ == "__main__":
    where = Path(sys.argv[1])
    made = tables(where)
    picture(where)
    if len(sys.argv) > 2:
        embed(made, Path(sys.argv[2]))
    print("\n".join(made.values()))
