"""What should be handed back: the last model, its average, or the average unless rounds go straight
on?

    python research/studies/averages.py decide                       levels of headway, on the stop's decision set
    python research/studies/averages.py confirm                      what ours handed back in the runs that confirmed the stop
    python research/studies/averages.py fresh                        FedAvg's models in the headline's runs: ours minus last
    python research/studies/averages.py run --out DIR --data CACHE   paired runs on other seeds [--share 0/4] [--seconds 300]
    python research/studies/averages.py table DIR [--page research/docs/average.md]   their differences, with 95 % intervals; into the page

Nothing else in a run depends on its average as long as nothing stops it: runs of one seed train the
same models.

Plan of `run`, written before it: cells and seeds below, the metric at the end of T rounds. FedAvg's
models are handed back by the plain average, by the mean of the last quarter of all models (at the
end of a run FedSWA's) and by ours (its last model is in the same record); FLrce's own, without its
stop, by ours. "ours" is kept as the default if it is not below the plain average over all cells
together (lower end of the interval of the paired differences above -0.2 points), and is said to
help in the cells whose interval lies above 0. The goal that was set: FLrce's model is at least that
of FedAvg with the plain average on 95 % of the seeds. It is met if the lower end of the exact 95 %
interval of that share is above 0.95, missed if its upper end is below; the same share is told of
FedAvg's models with ours, where no luck of the selection enters.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from headline_tables import PLAN, embed, markdown, read

from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce_reproduction.execute import load_dataset

PLAIN, OURS = {"piece": "ema", "ease": 4.0}, {"piece": "ema", "ease": 4.0, "level": 0.15}
ARMS = {
    "average": {"name": "fedavg", "average": PLAIN},
    "quarter": {"name": "fedavg", "average": {"piece": "growing-tail"}},
    "ours": {"name": "fedavg", "average": OURS},
    "flrce": {"name": "flrce-no-stop", "preset": "default", "average": OURS},
}
SEEDS = range(600, 610)
#: cell -> tables; T both short and long, rates both right and low
CELLS = {
    "digits, labels, T = 20": ("digits", 20, 0.05, 5, {"partition": "dirichlet", "alpha": 0.1}),
    "digits, labels, T = 100": ("digits", 100, 0.05, 5, {"partition": "dirichlet", "alpha": 0.1}),
    "digits, sizes, low rate, T = 60": ("digits", 60, 0.01, 1, {"partition": "quantity"}),
    "mnist-writers, T = 20": ("mnist-writers", 20, 0.05, 1, {"partition": "natural"}),
    "mnist-writers, T = 80": ("mnist-writers", 80, 0.05, 1, {"partition": "natural"}),
    "femnist, T = 30": ("femnist", 30, 0.05, 2, {"partition": "dirichlet", "alpha": 0.1}),
    "femnist, T = 100": ("femnist", 100, 0.05, 2, {"partition": "dirichlet", "alpha": 0.1}),
    "smartwatch, T = 40": ("smartwatch", 40, 0.05, 1, {"partition": "natural"}),
    "fed-heart, T = 60": ("fed-heart", 60, 0.005, 1, {"partition": "given"}),
}
FEW_OF = 20  # evaluations of a data set that a mean is told of
FEW = {
    "smartwatch": (10, 3),
    "fed-heart": (4, 2),
}  # clients, of which so many a round; else 100 and 10


def experiment(cell: str, arm: str, seed: int) -> Experiment:
    name, T, lr, epochs, data = CELLS[cell]
    M, P = FEW.get(name, (100, 10))
    own = {"model": {"name": "logistic"}} if name == "fed-heart" else {}
    return Experiment.from_tables(
        {
            "seed": seed,
            "rounds": T,
            "clients": M,
            "per_round": P,
            "recipe": ARMS[arm],
            **own,
            "data": {"name": name} | data,
            "train": {"lr": lr, "epochs": epochs, "batch": 16},
            "engine": {"eval_every": T, "workers": 1, "device": "cpu"},
        }
    )


def run(options: argparse.Namespace) -> None:
    until, (part, parts) = time.monotonic() + options.seconds, map(int, options.share.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    path, pools = options.out / f"averages-{part}.jsonl", {}
    done = {(row["cell"], row["seed"]) for row in rows_of(options.out)}
    for seed, cell in [(seed, cell) for seed in SEEDS for cell in CELLS][
        part::parts
    ]:  # a cut leaves whole seeds
        if (cell, seed) in done or time.monotonic() > until:
            continue
        name = CELLS[cell][0]
        if name not in pools:
            pools[name] = load_dataset(name, options.data, verify=False)
        found = {
            arm: (
                runs.run(
                    experiment(cell, arm, seed), data=pools[name], allow_divergence=True
                ).history[-1]
            )
            for arm in ARMS
        }
        row = {"cell": cell, "seed": seed, "last": found["average"].last_model_metric}
        with path.open("a") as file:
            file.write(
                json.dumps(row | {arm: record.final_model_metric for arm, record in found.items()})
                + "\n"
            )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    texts += [
        gzip.decompress(path.read_bytes()).decode() for path in sorted(folder.glob("*.jsonl.gz"))
    ]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def interval(values: list[float]) -> tuple[float, float]:
    from scipy.stats import t as student  # here: runs are made where there may be none

    half = (
        float(student.ppf(0.975, len(values) - 1))
        * float(np.std(values, ddof=1))
        / len(values) ** 0.5
    )
    return float(np.mean(values)), half


def table(folder: Path) -> str:
    """Differences of the model handed back in points, paired by seed.

    Cells of one data set and seed begin with the same rounds, so the last row (not in the plan)
    takes the mean of a seed's cells, where it has all, for one observation.
    """
    rows = rows_of(folder)
    by_seed = {
        seed: [row for row in rows if row["seed"] == seed]
        for seed in sorted({row["seed"] for row in rows})
    }
    whole = [mine for mine in by_seed.values() if {row["cell"] for row in mine} == set(CELLS)]
    names, pairs = (
        ("last", *ARMS),
        (("ours", "last"), ("ours", "quarter"), ("ours", "average"), ("flrce", "average")),
    )
    lines = [
        [
            "cell",
            "runs",
            *names,
            *(f"{a} - {b}" for a, b in pairs),
            *(f"{a} >= {b}" for a, b in pairs[2:]),
        ]
    ]
    for cell in [*CELLS, "all"]:
        mine = [row for row in rows if cell in (row["cell"], "all")]
        if len(mine) < 2:
            continue
        levels = [f"{100 * np.mean([row[name] for row in mine]):.1f}" for name in names]
        shares = [
            share(sum(row[one] >= row[other] for row in mine), len(mine))
            for one, other in pairs[2:]
        ]
        lines.append(
            [cell, len(mine), *levels, *(difference(mine, *pair) for pair in pairs), *shares]
        )
    if len(whole) > 1:
        means = [{name: np.mean([row[name] for row in mine]) for name in names} for mine in whole]
        gaps = [difference(means, *pair) for pair in pairs]
        lines.append(["all, a seed's mean as one", len(whole), *[""] * len(names), *gaps, "", ""])
    return markdown(lines)


def difference(rows: list[dict[str, Any]], one: str, other: str) -> str:
    mean, half = interval([100 * (row[one] - row[other]) for row in rows])
    return f"{mean:+.2f} ± {half:.2f}"


def share(k: int, n: int) -> str:
    """k of n and the exact 95 % interval of the share (Clopper and Pearson), in per cent."""
    from scipy.stats import beta

    low = beta.ppf(0.025, k, n - k + 1) if k else 0.0
    high = beta.ppf(0.975, k + 1, n - k) if k < n else 1.0
    return f"{k} of {n} [{100 * low:.0f}, {100 * high:.0f}]"


def evaluations(path: Path) -> Iterator[tuple[str, int, float, float]]:
    """(data set, run, mean headway by then, handed back minus last model in points) of every
    evaluation recorded.
    """
    for number, one in enumerate(map(json.loads, gzip.decompress(path.read_bytes()).splitlines())):
        series, sign, straight, known = one["series"], (-1 if one["lower"] else 1), 0.0, 0.0
        for headway, averaged, raw in zip(
            series["headway"], series["averaged"], series["raw"], strict=True
        ):
            if headway is not None:
                straight, known = 0.9 * straight + 0.1 * headway, 0.9 * known + 0.1
            if known and averaged is not None and raw is not None:
                yield one["dataset"], number, straight / known, 100 * sign * (averaged - raw)


def decide(folder: Path) -> None:
    """The plain average minus the last model by the mean headway at that time, in the runs that
    levels are from.
    """
    found = [each for path in sorted(folder.glob("decide*.jsonl.gz")) for each in evaluations(path)]
    names = sorted({name for name, *_ in found})
    print(
        "| mean headway | evaluations | average - last, points | of these below -1 |"
        f" {' | '.join(names)} |"
    )
    print("|---" * (4 + len(names)) + "|")
    edges = [-1.0, -0.1, 0.0, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0]
    for low, high in pairwise(edges):
        mine = [(name, gain) for name, _, headway, gain in found if low <= headway < high]
        gains = np.array([gain for _, gain in mine])
        each = [[gain for name, gain in mine if name == wanted] for wanted in names]
        told = [f"{np.mean(some):+.1f}" if len(some) >= FEW_OF else "" for some in each]
        worse = 100 * np.mean(gains < -1)
        print(
            f"| {low:+.2f} to {high:+.2f} | {len(mine)} | {gains.mean():+.2f} | {worse:.0f} % |"
            f" {' | '.join(told)} |"
        )


def confirm(folder: Path) -> None:
    """What ours handed back minus the last model, mean over a run's evaluations, in runs that had
    no part in it.
    """
    runs_of: dict[str, dict[int, list[float]]] = {}
    for name, number, _, gain in evaluations(folder / "confirm.jsonl.gz"):
        runs_of.setdefault(name, {}).setdefault(number, []).append(gain)
    print("| data set | runs | ours - last, points | evaluations below -1 |\n|---|---|---|---|")
    for name, each in [
        *sorted(runs_of.items()),
        ("all", {i: g for some in runs_of.values() for i, g in some.items()}),
    ]:
        mean, half = interval([float(np.mean(gains)) for gains in each.values()])
        worse = 100 * np.mean([gain < -1 for gains in each.values() for gain in gains])
        print(f"| {name} | {len(each)} | {mean:+.2f} ± {half:.2f} | {worse:.1f} % |")


def fresh() -> None:
    """Ours minus the last model after all rounds of FedAvg, on the headline's seeds."""
    found = read(Path(__file__).parent.parent / "results" / "headline")
    print(
        "| data set | seeds | ours - last, points | least | ours >= last |\n|---|---|---|---|---|"
    )
    for task in [*PLAN["tasks"], "all"]:
        mine = [found[key] for key in found if task in (key[0], "all") and key[1] == "uniform"]
        ends = [(line["handed"], line["last"], last_of(line["handed"])) for line in mine]
        gains = [100 * (handed[t] - last[t]) for handed, last, t in ends]
        if gains:
            mean, half = interval(gains)
            good = share(sum(gain >= 0 for gain in gains), len(gains))
            print(
                f"| {task} | {len(gains)} | {mean:+.2f} ± {half:.2f} | {min(gains):+.2f} | {good} |"
            )


def last_of(values: list[float | None]) -> int:
    """The last round (from 0) that was judged."""
    return max(t for t, value in enumerate(values) if value is not None)


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("phase", choices=["decide", "confirm", "fresh", "run", "table"])
    ask.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).parent.parent / "results" / "stop"
    )
    ask.add_argument("--out", type=Path)
    ask.add_argument("--page", type=Path)
    ask.add_argument("--data", type=Path)
    ask.add_argument("--share", default="0/1")
    ask.add_argument("--seconds", type=float, default=1e9)
    options = ask.parse_args()
    if options.phase == "run":
        run(options)
    elif options.phase == "fresh":
        fresh()
    elif options.phase == "table":
        made = table(options.folder)
        if options.page:
            embed({"averages": made}, options.page)
        print(made)
    else:
        {"decide": decide, "confirm": confirm}[options.phase](options.folder)


if __name__ == "__main__":
    main()
