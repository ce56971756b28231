"""What `headline.py run` left, read and compared: the tables of the headline (see headline.py for
the commands).
"""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

PLANS = Path(__file__).parent / "plans"
PLAN = json.loads((PLANS / "headline.json").read_text())
COSTS = {
    "joules": "joules",
    "active": "joules without waiting",
    "bytes_up": "bytes up",
    "bytes": "bytes",
    "rounds": "rounds",
}
GOAL = 0.80
LAST = {
    "uniform": "FedAvg: uniform, no average"
}  # runs that are shown a second time, by their last model
NAMES = {
    LAST["uniform"]: "FedAvg: no average, 32 bits",
    "uniform": "+ average",
    PLAN["base"]: "+ 4 bits: the base",
    "chance, 4 bits": "+ turns by chance",
    "default": "FLrce's default, 4 bits",
}
REST = [
    "task",
    "rounds, over those of turns by chance",
    "joules of a round, over the base's",
    "model after all rounds, minus the base's, points",
]
STOP = [
    "task",
    "runs that the stop ends",
    "mean round",
    "before the target",
    "joules of those of all rounds",
    "points below the end",
    "most",
]


def read(folder):
    found = {}
    for path in sorted(folder.glob("headline-*.jsonl.gz")):
        with gzip.open(path, "rt") as f:
            for line in map(json.loads, f):
                key = tuple(line["key"])
                if key not in found or len(line["last"]) > len(found[key]["last"]):
                    found[key] = line
    return found


def even(found):
    """Runs of a task cut to the rounds that all of them have; seeds of which a run has fewer than
    half are left out.
    """
    T, kept = PLAN["all"]["rounds"], {}
    short = {(key[0], key[2]) for key, line in found.items() if len(line["last"]) < T / 2}
    found = {key: line for key, line in found.items() if (key[0], key[2]) not in short}
    least = {
        task: min(len(line["last"]) for key, line in found.items() if key[0] == task)
        for task, *_ in found
    }
    for key, line in found.items():
        n = least[key[0]]
        series = {
            name: values[:n]
            for name, values in line.items()
            if isinstance(values, list) and name != "key"
        }
        kept[key] = (
            line
            | series
            | {"stopped": line["stopped"] if (line["stopped"] or T + 1) <= n else None}
        )
    return kept


def levels(line, what="handed"):
    """(T,) mean of the last sweep's evaluations by round; nan before there are any."""
    values = np.array([np.nan if x is None else x for x in line[what]])
    seen = ~np.isnan(values)
    sums, counts = np.cumsum(np.where(seen, values, 0.0)), np.cumsum(seen)
    sweep = line["sweep"]
    sums[sweep:], counts[sweep:] = (
        sums[sweep:] - sums[:-sweep].copy(),
        counts[sweep:] - counts[:-sweep].copy(),
    )
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def spent(line, t):
    """What each cost comes to over the first t rounds."""
    return {cost: float(t) if cost == "rounds" else float(np.sum(line[cost][:t])) for cost in COSTS}


def reached(line, target, what="handed"):
    """Rounds until the level has the target; None: never."""
    hits = np.flatnonzero(levels(line, what) >= target)
    return int(hits[0]) + 1 if len(hits) else None


def bounds(values):
    """Geometric mean and 95 % limits of ratios, from their logarithms."""
    half = spread(values) if len(values) > 1 else np.nan
    return np.exp([np.mean(values), np.mean(values) - half, np.mean(values) + half])


def interval(values):
    return "{:.2f} [{:.2f}, {:.2f}]".format(*bounds(values))


def compared(found, task):
    """Target, and of every row: (how many reached it, of how many, cost -> logarithms of ratios by
    seed).
    """
    base = PLAN["base"]
    ends = [
        levels(found[task, base, seed])[-1]
        for seed in PLAN["targets"]
        if (task, base, seed) in found
    ]
    target, rows = 0.95 * float(np.mean(ends)), {}
    shown = [(row, row, "handed") for row in PLAN["rows"]] + [
        (name, row, "last") for row, name in LAST.items()
    ]
    for name, row, what in shown:
        mine = {
            seed: found[task, row, seed] for seed in PLAN["seeds"] if (task, row, seed) in found
        }
        ratios, got = defaultdict(dict), 0
        for seed, line in mine.items():
            t, other = reached(line, target, what), found.get((task, base, seed))
            got += t is not None
            b = reached(other, target) if other else None
            if t is None or b is None:
                continue
            for cost, value in spent(line, t).items():
                ratios[cost][seed] = float(np.log(value / spent(other, b)[cost]))
        rows[name] = got, len(mine), ratios
    return target, rows


def tables(folder):
    """Name -> Markdown: every row's joules, bytes and rounds, all costs of the default, where its
    stop ends runs.
    """
    found = even(read(folder))
    tasks = [task for task in PLAN["tasks"] if any(key[0] == task for key in found)]
    known, made = {task: compared(found, task) for task in tasks}, {}
    for cost in ("joules", "bytes", "rounds"):
        lines = [["task", "target, %", *NAMES.values()]]
        for task, (target, rows) in known.items():
            lines.append([task, f"{100 * target:.1f}", *(cell(rows[name], cost) for name in NAMES)])
        means = [overall(over(known, name, cost), len(tasks)) for name in NAMES]
        made[f"headline-{cost}"] = [*lines, [f"all {len(tasks)}", "", *means]]
    lines = [
        [
            "FLrce's default, 4 bits",
            "rounds run",
            *COSTS.values(),
            f"upper limit of joules below {GOAL:.2f}",
        ]
    ]
    for task, (_, rows) in known.items():
        T = len(found[task, PLAN["base"], PLAN["targets"][0]]["last"])
        met = holds(list(rows["default"][2]["joules"].values()))
        lines.append([task, T, *(cell(rows["default"], cost) for cost in COSTS), met])
    means = [interval(over(known, "default", cost)) for cost in COSTS]
    lines.append([f"all {len(tasks)}", "", *means, holds(over(known, "default", "joules"))])
    made["headline-default"] = lines
    made["headline-rest"] = [REST, *(rest(found, task, known[task][1]) for task in tasks)]
    made["headline-stop"] = [STOP, *(stops(found, task, known[task][0]) for task in tasks)]
    return {name: markdown(lines) for name, lines in made.items()}


def rest(found, task, rows):
    """What relations and judging change: the default beside turns by chance, a round of it, its
    model at the end.
    """
    mine, turns = rows["default"][2], rows["chance, 4 bits"][2]
    both = [seed for seed in mine["rounds"] if seed in turns["rounds"]]
    order = interval([mine["rounds"][seed] - turns["rounds"][seed] for seed in both])
    round_of = interval([mine["joules"][seed] - mine["rounds"][seed] for seed in mine["rounds"]])
    seeds = [
        seed
        for seed in PLAN["seeds"]
        if (task, "default", seed) in found and (task, PLAN["base"], seed) in found
    ]
    ends = [
        [100 * levels(found[task, row, seed])[-1] for seed in seeds]
        for row in ("default", PLAN["base"])
    ]
    gaps = np.subtract(*ends)
    return [task, order, round_of, f"{np.mean(gaps):+.2f} ± {spread(gaps):.2f}"]


def spread(values):
    """Half of a 95 % interval."""
    from scipy.stats import t as student

    return student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5


def over(known, name, cost):
    """The mean logarithm of each task in which every run got there: leaving out those that did not
    would flatter.
    """
    each = [rows[name] for _, rows in known.values()]
    return [float(np.mean(list(ratios[cost].values()))) for got, of, ratios in each if got == of]


def overall(values, tasks):
    return (
        interval(values)
        if len(values) == tasks
        else f"{interval(values)} ({len(values)} of {tasks} tasks)"
    )


def holds(values):
    return "yes" if bounds(values)[2] < GOAL else "no"


def cell(row, cost):
    """A ratio with its interval; where not all runs reached the target, how many did, and their
    ratio if most.
    """
    got, of, ratios = row
    told = interval(list(ratios[cost].values())) if len(ratios[cost]) > of / 2 else ""
    return told if got == of else f"{told} ({got} of {of} got there)".strip()


def markdown(lines):
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]]) + "\n"


def embed(made, page):
    """Put every table between its marks in the page."""
    text = page.read_text()
    for name, told in made.items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(marks, lambda m, told=told: m[1] + told + m[2], text, flags=re.S)
    page.write_text(text)


def stops(found, task, target):
    """Where the default's stop ends the runs."""
    mine = [
        found[task, "default", seed] for seed in PLAN["seeds"] if (task, "default", seed) in found
    ]
    ended = [(line, line["stopped"]) for line in mine if line["stopped"]]
    told = [task, f"{len(ended)} of {len(mine)}"]
    if not ended:
        return [*told, "", "", "", "", ""]
    early = sum((reached(line, target) or 1e9) > t for line, t in ended)
    lost = [100 * (levels(line)[-1] - levels(line)[t - 1]) for line, t in ended]
    share = [sum(line["joules"][:t]) / sum(line["joules"]) for line, t in ended]
    mean = np.mean([t for _, t in ended])
    return [
        *told,
        f"{mean:.0f}",
        early,
        f"{100 * np.mean(share):.0f} %",
        f"{np.mean(lost):.1f}",
        f"{np.max(lost):.1f}",
    ]
