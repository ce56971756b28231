"""What a target costs with FLrce's default, against FedAvg with the same average and the same bits.

    python studies/headline.py run   --data CACHE --out DIR [--tasks digits,femnist] [--device cuda] [--stack 12] \
        [--seconds 500] [--share 0/4] [--plan studies/plans/frontier-average.json]
    python studies/headline.py table --out results/headline
    python studies/headline.py holdouts --data CACHE --out DIR --tasks digits,mnist-writers

plans/headline.json holds tasks, rows, seeds and the rule; runs found in DIR are not made again. A run without an
average is the same run, judged by its last model. `holdouts` says what judging costs the default: joules of 20 rounds
of the target seeds with it over those without. With --stack the rows of several seeds train as one stack. What time
cut off is kept too: a task counts with the rounds that all its runs have, if that is half of them or more.
"""

import argparse
import gzip
import json
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np

from flrce import runs
from flrce.config import Experiment
from flrce.results.paper.execute import load
from flrce.stops.worth import Worth

PLANS = Path(__file__).parent / "plans"
PLAN = json.loads((PLANS / "headline.json").read_text())
COSTS = ("joules", "active", "bytes_up", "bytes", "rounds")
LAST = {"uniform": "FedAvg: uniform, no average"}  # runs that are shown a second time, by their last model


def experiment(task, row, seed, device="cpu"):
    """The plan's tables for one run."""
    own = PLAN["tasks"][task]
    recipe = {
        key: {"AVERAGE": PLAN["average"], "BITS": PLAN["bits"]}.get(value, value) if isinstance(value, str) else value
        for key, value in PLAN["rows"][row].items()
    }
    tables = {
        **PLAN["all"], **own, "seed": seed, "recipe": recipe, "data": {**PLAN["all"]["data"], **own["data"]},
        "engine": {**PLAN["all"]["engine"], "device": device},
    }  # fmt: skip
    if tables["data"]["partition"] == "natural":
        tables["data"].pop("alpha")
    return Experiment.of(tables)


def wanted(task):
    """(task, row, seed), seed by seed: a cut leaves whole seeds."""
    yield from ((task, PLAN["base"], seed) for seed in PLAN["targets"])
    for seed in PLAN["seeds"]:
        yield from ((task, row, seed) for row in PLAN["rows"])


class TimeUp(Exception):
    pass


def run(options):
    until = time.monotonic() + options.seconds
    part, parts = map(int, options.share.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    found = {key for key, line in read(options.out).items() if len(line["last"]) == PLAN["all"]["rounds"]}
    many = options.stack or (1 if options.device == "cpu" else 12)
    for task in options.tasks.split(",") if options.tasks else PLAN["tasks"]:
        todo = [key for key in list(wanted(task))[part::parts] if key not in found]
        if todo and time.monotonic() < until:
            pool = load(PLAN["tasks"][task]["data"]["name"], options.data, verify=False)
        while todo and time.monotonic() < until:
            keys, todo = todo[:many], todo[many:]
            lines = [json.dumps(line, separators=(",", ":")) for line in trained(keys, pool, options, many > 1, until)]
            with gzip.open(options.out / f"headline-{part}.jsonl.gz", "at") as f:
                f.writelines(f"{line}\n" for line in lines)
            print(f"{keys[0]}: {len(keys)} runs, {until - time.monotonic():.0f} s left", flush=True)


def trained(keys, pool, options, together, until):
    """A line of figures by round for every run, as far as time allowed."""
    records, active = defaultdict(list), defaultdict(list)

    def watch(i, done):
        waits = [c.spent.idle_watts * max(done.record.seconds - c.spent.seconds, 0.0) for c in done.clients]
        active[i].append(sum(client.spent.joules for client in done.clients) - sum(waits))
        records[i].append(done.record)
        if time.monotonic() > until:
            raise TimeUp

    jobs = [experiment(*key, options.device) for key in keys]
    with suppress(TimeUp):
        if together:
            beside = int(options.share.split("/")[1])
            tables = [(job, None) for job in jobs]
            runs.run_here(tables, data=lambda _: pool, watch=watch, device=options.device, beside=beside)
        else:
            runs.run(jobs[0], data=pool, watch=lambda done: watch(0, done))
    for i, (key, job) in enumerate(zip(keys, jobs, strict=True)):
        h = records[i]
        yield {
            "key": key, "sweep": -(-job.clients // job.per_round), "handed": short(r.handed for r in h),
            "last": short(r.headline for r in h), "joules": short(r.joules for r in h), "active": short(active[i]),
            "bytes_up": [r.bytes_up for r in h], "bytes": [r.bytes_up + r.bytes_down for r in h],
            "stopped": stopped(h) if key[1] == "default" else None,
        }  # fmt: skip


def stopped(history):
    """The round in which the default's stop ends the run; None: not in these."""
    rule = Worth()
    return next((t for t in range(1, len(history) + 1) if rule(history[:t])), None)


def short(values):
    return [None if value is None else float(f"{value:.6g}") for value in values]


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
    """Runs of a task cut to the rounds that all of them have; none of a task that has fewer than half."""
    T, kept = PLAN["all"]["rounds"], {}
    least = {task: min(len(line["last"]) for key, line in found.items() if key[0] == task) for task, *_ in found}
    for key, line in found.items():
        n = least[key[0]]
        if n >= T / 2:
            series = {name: values[:n] for name, values in line.items() if isinstance(values, list) and name != "key"}
            kept[key] = line | series | {"stopped": line["stopped"] if (line["stopped"] or T + 1) <= n else None}
    return kept


def levels(line, what="handed"):
    """(T,) mean of the last sweep's evaluations by round; nan before there are any."""
    values = np.array([np.nan if x is None else x for x in line[what]])
    seen = ~np.isnan(values)
    sums, counts = np.cumsum(np.where(seen, values, 0.0)), np.cumsum(seen)
    sweep = line["sweep"]
    sums[sweep:], counts[sweep:] = sums[sweep:] - sums[:-sweep].copy(), counts[sweep:] - counts[:-sweep].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def spent(line, t):
    """What each cost comes to over the first t rounds."""
    return {cost: float(t) if cost == "rounds" else float(np.sum(line[cost][:t])) for cost in COSTS}


def reached(line, target, what="handed"):
    """Rounds until the level has the target; None: never."""
    hits = np.flatnonzero(levels(line, what) >= target)
    return int(hits[0]) + 1 if len(hits) else None


def interval(values):
    """Geometric mean and 95 % interval of ratios, from their logarithms."""
    from scipy.stats import t as student

    x = np.array(values)
    half = student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else np.nan
    return "{:.2f} [{:.2f}, {:.2f}]".format(*np.exp([x.mean(), x.mean() - half, x.mean() + half]))


def compared(found, task):
    """Target, and of every row: (how many reached it, of how many, cost -> logarithms of ratios by seed)."""
    base = PLAN["base"]
    ends = [levels(found[task, base, seed])[-1] for seed in PLAN["targets"] if (task, base, seed) in found]
    target, rows = 0.95 * float(np.mean(ends)), {}
    shown = [(row, row, "handed") for row in PLAN["rows"]] + [(name, row, "last") for row, name in LAST.items()]
    for name, row, what in shown:
        mine = {seed: found[task, row, seed] for seed in PLAN["seeds"] if (task, row, seed) in found}
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


def table(folder):
    found = even(read(folder))
    tasks = [task for task in PLAN["tasks"] if any(key[0] == task for key in found)]
    lines, over = [], defaultdict(lambda: defaultdict(list))
    for task in tasks:
        target, rows = compared(found, task)
        T = len(found[task, PLAN["base"], PLAN["targets"][0]]["last"])
        lines += [f"| {task}, target {100 * target:.1f} %, {T} rounds | reached | joules | joules without waiting | "
                  "bytes up | bytes | rounds |", "|---|---|---|---|---|---|---|"]  # fmt: skip
        for name, (got, of, ratios) in rows.items():
            cells = [interval(list(ratios[cost].values())) if ratios[cost] else "--" for cost in COSTS]
            lines.append(f"| {name} | {got} of {of} | {' | '.join(cells)} |")
            for cost in COSTS:
                if ratios[cost]:
                    over[name][cost].append(float(np.mean(list(ratios[cost].values()))))
        lines += ["", *stops(found, task, target), ""]
    lines += [f"| over {len(tasks)} tasks | joules | joules without waiting | bytes up | bytes | rounds |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for name, costs in over.items():
        lines.append(f"| {name} | {' | '.join(interval(costs[cost]) for cost in COSTS)} |")
    return "\n".join(lines)


def holdouts(options):
    for task in options.tasks.split(","):
        pool, spent = load(PLAN["tasks"][task]["data"]["name"], options.data, verify=False), []
        for asked in (True, False):
            PLAN["rows"]["default"]["holdouts"], PLAN["all"]["rounds"] = asked, 20
            histories = [runs.run(experiment(task, "default", seed), data=pool).history for seed in PLAN["targets"]]
            spent.append(sum(record.joules for history in histories for record in history))
        print(f"{task}: {spent[0] / spent[1]:.3f}")


def stops(found, task, target):
    """A sentence on where the default's stop ends the runs."""
    mine = [found[task, "default", seed] for seed in PLAN["seeds"] if (task, "default", seed) in found]
    ended = [(line, line["stopped"]) for line in mine if line["stopped"]]
    if not ended:
        return [f"The stop ends none of {len(mine)} runs within {len(mine[0]['last'])} rounds."]
    early = sum((reached(line, target) or 1e9) > t for line, t in ended)
    lost = [100 * (levels(line)[-1] - levels(line)[t - 1]) for line, t in ended]
    share = [sum(line["joules"][:t]) / sum(line["joules"]) for line, t in ended]
    mean = np.mean([t for _, t in ended])
    return [f"The stop ends {len(ended)} of {len(mine)} runs, in round {mean:.0f} on average, "
            f"{early} before the target; with {100 * np.mean(share):.0f} % of the joules of all rounds, "
            f"{np.mean(lost):.1f} points (most {np.max(lost):.1f}) below what they bring."]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("does", choices=("run", "table", "holdouts"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", type=Path, help="another than plans/headline.json, to run")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stack", type=int, help="runs that train as one; on a GPU 12")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", default="0/1", help="I/N: every N-th run, from the I-th")
    options = parser.parse_args()
    PLAN.update(json.loads(options.plan.read_text()) if options.plan else {})
    if options.does == "run":
        run(options)
    elif options.does == "holdouts":
        holdouts(options)
    else:
        print(table(options.out))


if __name__ == "__main__":
    main()
