"""Where does a selection help? Candidates against turns by chance, on healthy fleets and on fleets
with trouble.

    PYTHONPATH=src python research/studies/selection.py run research/studies/plans/selection-decide.json --data CACHE
    --out DIR \
        [--device cuda] [--seconds 110] [--share 0/4]
    python research/studies/selection.py table DIR

A plan names data sets, cells, candidates and seeds, and which comparisons count (`primary`). The
endpoint of a run is the averaged model's accuracy, mean over clients' hold-outs (which are clean),
in the last full sweep (ceil(M/P) rounds); candidates are compared with "chance" by paired
differences over seeds, Student's 95 % intervals, and p-values by Holm over a data set's primary
comparisons. Where a plan says "stack", the runs of all its cells, for so many seeds at a time, go
through a GPU as one.

    python research/studies/selection.py headline DIR --target cifar10=0.545

is the price of a target that was fixed on other seeds: joules (with and without waiting) and bytes
until the averaged model reaches it, as ratios to uniform sampling with the same average and the
same bits, by seed; censored runs count as never, and are counted.
"""

import argparse
import gzip
import json
import time
import traceback
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import candidates
import numpy as np

from flrce.config.experiment import Experiment
from flrce.simulation import runs
from flrce_reproduction import plan as paper
from flrce_reproduction.execute import load_dataset, read_dataset_sizes

TURNS = {"piece": "in-turn", "by": "chance"}
WRONG = {"piece": "wrong-labels", "share": 0.2, "wrong": 0.4}
#: cell -> what differs from M = 100, P = 10, Dirichlet(.1)
CELLS = {
    "labels, P=10": {},
    "labels, P=3": {"per_round": 3},
    "sizes, P=10": {"regime": "quantity"},
    "wrong labels": {"trouble": [WRONG]},
    "rare classes": {"trouble": [{"piece": "rare-classes", "share": 0.05, "classes": 2}]},
    "wrong labels and rare classes": {
        "trouble": [WRONG, {"piece": "rare-classes", "share": 0.05, "classes": 2}]
    },
    "free-riders, stale": {"trouble": [{"piece": "free-riders", "share": 0.2, "sends": "stale"}]},
    "free-riders, noise": {"trouble": [{"piece": "free-riders", "share": 0.2, "sends": "noise"}]},
    "slow devices, other labels": {"trouble": [{"piece": "slow-labels", "share": 0.3}]},
}
CAPPED = {"piece": "mean", "cap": 5.0}
BITS = {"piece": "error-feedback", "inner": {"piece": "quantize", "bits": 4}}
#: candidate -> [recipe]; all hand back the same average, and but for those named by their rule have
#: the same mean
CANDIDATES = {
    "uniform": {"selector": "uniform"},
    "chance": {"selector": TURNS},
    "sizes": {"selector": {"piece": "in-turn", "by": "sizes"}},
    "balance": {"selector": {"piece": "in-turn", "by": "balance"}},
    "balance, best of all": {"selector": {"piece": "in-turn", "by": "balance", "tries": 0}},
    "agreement": {"selector": {"piece": "in-turn", "by": "agreement"}},
    "herded (CD-GraB)": {"selector": "herded"},
    "clustered by size": {"name": "clustered-sampling", "by": "size"},
    "clustered by similarity": {"name": "clustered-sampling", "by": "similarity"},
    "like FedLECC": {"selector": {"piece": "like-fedlecc", "key": "KEY"}},
    "oort": {"name": "oort"},
    "the paper's H": {"selector": {"piece": "relationship"}},
    "oracle": {"selector": {"piece": "label-oracle", "key": "KEY"}},
    "related": {"selector": TURNS, "aggregator": "related"},
    "related, power 2": {"selector": TURNS, "aggregator": {"piece": "related", "power": 2.0}},
    "related, level .6": {"selector": TURNS, "aggregator": {"piece": "related", "level": 0.6}},
    "related and balance": {
        "selector": {"piece": "in-turn", "by": "balance"},
        "aggregator": "related",
    },
    "trimmed mean": {"selector": TURNS, "aggregator": "trimmed"},
    "krum": {"selector": TURNS, "aggregator": {"piece": "krum", "attackers": 2}},
    "clipped mean": {"selector": TURNS, "aggregator": "clipped"},
    "centred clipping": {"selector": TURNS, "aggregator": "centred-clip"},
    "geometric median": {"selector": TURNS, "aggregator": "geometric-median"},
    "uniform, 4 bits": {"selector": "uniform", "compressor": BITS},
    "chance, 4 bits": {"selector": TURNS, "compressor": BITS},
    "balance, 4 bits": {"selector": {"piece": "in-turn", "by": "balance"}, "compressor": BITS},
    "default, 4 bits": {"name": "flrce", "preset": "default", "compressor": BITS},
}


def experiment(dataset, cell, candidate, seed, facts, rounds, device, rates, every=1):
    """One run: the reproduction's setting for this data set, with what the cell and the candidate
    change.
    """
    changed = CELLS[cell]
    regime = changed.get("regime", "dirichlet")
    request = paper.ReproductionRequest(("table3",), (dataset,), (regime,), (seed,), rates=rates)
    usual = request.build_cell(dataset, regime, "fedavg", seed, facts).experiment.model_dump(
        exclude_none=True
    )
    P = changed.get("per_round", usual["per_round"])
    recipe = {"name": "fedavg", **CANDIDATES[candidate]}
    if recipe["name"] != "flrce":
        recipe["average"] = "ema"
    if recipe["name"] == "fedavg":
        recipe.setdefault("aggregator", CAPPED)
    selector = recipe.get("selector")
    if isinstance(selector, dict) and selector.get("key"):
        recipe["selector"] = {**selector, "key": f"{dataset}/{cell}/{seed}"}
    sweep = -(-usual["clients"] // P)
    data = {**usual["data"], **({"trouble": changed["trouble"]} if "trouble" in changed else {})}
    engine = {"eval_every": every, "device": device.removeprefix("stack-"), "workers": 1}
    T = -(-rounds // sweep) * sweep
    return Experiment.from_tables(
        {
            **usual,
            "per_round": P,
            "rounds": T,
            "data": data,
            "recipe": recipe,
            "engine": engine,
            "stop": {},
        }
    )


def tell(key, exp, pool):
    """What the oracle is told: true labels, and who harms."""
    federation = exp.federate(pool)
    classes = len(pool.classes)
    candidates.LABELS[key] = np.array(
        [np.bincount(pool.y[own], minlength=classes) for own in federation.train]
    )
    who = federation.trouble.who
    bad = {*who.get("wrong-labels", ()), *who.get("free-riders", ())}
    candidates.TROUBLED[key] = {federation.row[client] for client in bad}


def endpoint(values, sweep):
    """Mean over the last full sweep, of the rounds in it that were judged; of a run that was given
    up, the last one.
    """
    last = [value for value in values[-sweep:] if value is not None]
    known = [value for value in values if value is not None]
    return float(np.mean(last or known[-1:] or [0.0]))


def wanted(plan):
    """Stacks of (dataset, cell, candidate, seed), each with its batch; a cut leaves whole seeds."""
    for batch in plan:
        only = batch.get("only", {})
        for dataset in batch["datasets"]:
            seeds, many = batch["seeds"], batch.get("stack", 1)
            for group in [seeds[i : i + many] for i in range(0, len(seeds), many)]:
                each = {
                    (cell, seed): [
                        (dataset, cell, name, seed)
                        for name in batch["candidates"]
                        if name not in only or cell in only[name]
                    ]
                    for cell in batch["cells"]
                    for seed in group
                }
                if "stack" in batch:
                    yield batch, [key for keys in each.values() for key in keys]
                else:
                    yield from ((batch, keys) for keys in each.values())


def run(options):
    began, pools = time.monotonic(), {}
    part, parts = map(int, options.share.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    for batch, keys in list(wanted(json.loads(options.plan.read_text())))[part::parts]:
        if time.monotonic() - began > options.seconds or not keys:
            break
        dataset = keys[0][0]
        if dataset not in pools:
            pools[dataset] = load_dataset(dataset, options.data, verify=False)
        facts = read_dataset_sizes(dataset, options.data)
        how = (
            batch.get("rounds", 100),
            options.device,
            batch.get("rates", {}),
            batch.get("every", 1),
        )
        jobs = {key: experiment(*key, facts, *how) for key in keys}
        for (_, cell, _, seed), job in jobs.items():
            tell(f"{dataset}/{cell}/{seed}", job, pools[dataset])
        start = time.monotonic()
        for key, result, active in together(
            jobs, pools[dataset], options.device, max(1, parts // 2)
        ):
            with gzip.open(options.out / f"selection-{part}.jsonl.gz", "at") as f:
                f.write(
                    json.dumps(row(key, jobs[key], result, active), separators=(",", ":")) + "\n"
                )
        took, at = time.monotonic() - start, time.monotonic() - began
        print(f"{keys[0]} and so on: {len(keys)} runs in {took:.1f} s, at {at:.0f} s", flush=True)


def together(jobs, pool, device, beside=1):
    """(key, result, joules of a round without waiting) of every run; on a GPU as one stack."""
    active = {key: [] for key in jobs}

    def watch(key, done):
        waits = [
            c.spent.idle_watts * max(done.record.seconds - c.spent.seconds, 0.0)
            for c in done.clients
        ]
        active[key].append(sum(client.spent.joules for client in done.clients) - sum(waits))

    if device == "cpu":
        for key, job in jobs.items():
            try:
                result = runs.run(
                    job,
                    data=pool,
                    watch=lambda done, key=key: watch(key, done),
                    allow_divergence=True,
                )
                yield key, result, active[key]
            except Exception:
                traceback.print_exc(limit=4)
        return
    keys = list(jobs)
    with one_pool(jobs, pool) as shared:
        found = runs.run_in_process(
            [(job, None) for job in jobs.values()],
            data=lambda _: shared,
            watch=lambda i, done: watch(keys[i], done),
            device=device.removeprefix("stack-"),
            beside=beside,
        )
    for key, result in zip(keys, found, strict=True):
        yield key, result, active[key]


@contextmanager
def one_pool(jobs, pool):
    """All fleets on one pool of samples, so that they make one stack; those with other labels on
    copies of it.
    """
    fleets, copies, N = {}, [np.asarray(pool.y)], len(pool.y)
    for job in jobs.values():
        mark = (job.seed, repr(job.data), job.clients)
        if mark not in fleets:
            made = job.federate(pool)
            if made.source is not pool and made.source.x is not pool.x:
                raise ValueError("fleets with other inputs do not go into one stack")
            shift = 0
            if made.source is not pool and not np.array_equal(made.source.y, pool.y):
                shift = N * len(copies)
                copies.append(np.asarray(made.source.y))
            fleets[mark] = made, shift
    x = np.concatenate([np.asarray(pool.x)] * len(copies)) if len(copies) > 1 else pool.x
    shared = replace(pool, x=x, y=np.concatenate(copies), group=None, groups=())
    ready = {
        mark: replace(
            made,
            source=shared,
            train=tuple(part + shift for part in made.train),
            held=tuple(part + shift for part in made.held),
        )
        for mark, (made, shift) in fleets.items()
    }
    usual = Experiment.federate
    Experiment.federate = lambda self, _: ready[self.seed, repr(self.data), self.clients]
    try:
        yield shared
    finally:
        Experiment.federate = usual


def row(key, exp, result, active):
    dataset, cell, name, seed = key
    sweep, history = -(-exp.clients // exp.per_round), result.history
    short = lambda values: [None if v is None else float(f"{v:.5g}") for v in values]  # noqa: E731
    return {
        "dataset": dataset,
        "cell": cell,
        "seed": seed,
        "candidate": name,
        "rounds": len(history),
        "sweep": sweep,
        "end": endpoint([h.final_model_metric for h in history], sweep),
        "last": endpoint([h.last_model_metric for h in history], sweep),
        "averaged": short([h.final_model_metric for h in history]),
        "accuracy": short([h.last_model_metric for h in history]),
        "joules": short([h.joules for h in history]),
        "active": short(active),
        "bytes_up": [h.bytes_up for h in history],
        "bytes_down": [h.bytes_down for h in history],
        "seconds": short([h.seconds for h in history]),
    }


def read(folder):
    rows = {}
    for path in sorted(Path(folder).glob("**/selection-*.jsonl.gz")):
        try:
            with gzip.open(path, "rt") as f:
                for line in f:
                    r = json.loads(line)
                    rows[r["dataset"], r["cell"], r["seed"], r["candidate"]] = r
        except EOFError:
            print(f"{path} ends early")
    return rows


def compared(rows, dataset, against="chance"):
    """(cell, candidate) -> paired differences to `against`, in points."""
    found = defaultdict(list)
    for (d, cell, seed, name), r in rows.items():
        base = rows.get((d, cell, seed, against))
        if d == dataset and name != against and base:
            found[cell, name].append(100 * (r["end"] - base["end"]))
    return found


def holm(p):
    """Adjusted p-values, in the order given."""
    order, worst, out = np.argsort(p), 0.0, np.ones(len(p))
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def interval(d):
    """Mean and half-width of Student's 95 % interval."""
    from scipy.stats import t as student

    d = np.array(d)
    return d.mean(), (
        student.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5 if len(d) > 1 else np.nan
    )


def table(folder, against="chance", primary=()):
    """Every candidate of every cell; Holm's p over the `primary` comparisons (cell, candidate), or
    over all.
    """
    from scipy.stats import ttest_1samp

    rows, lines = read(folder), []
    for dataset in sorted({key[0] for key in rows}):
        found = compared(rows, dataset, against)
        counts = [
            key
            for key, d in found.items()
            if len(d) > 1 and np.std(d) > 0 and (not primary or key in primary)
        ]
        p = holm(np.array([float(ttest_1samp(found[key], 0).pvalue) for key in counts]))
        adjusted = dict(zip(counts, p, strict=True))
        lines += [
            (
                f"| {dataset}: cell | candidate | seeds | end, % | minus {against}, points |"
                " Holm's p |"
            ),
            "|---|---|---|---|---|---|",
        ]
        for cell in CELLS:
            ends = defaultdict(list)
            for (d, c, _, name), r in rows.items():
                if (d, c) == (dataset, cell):
                    ends[name].append(100 * r["end"])
            for name in [c for c in CANDIDATES if c in ends]:
                d = found.get((cell, name), [])
                told = "{:+.2f} ± {:.2f}".format(*interval(d)) if d else "--"
                p = f"{adjusted[cell, name]:.3f}" if (cell, name) in adjusted else "--"
                lines.append(
                    f"| {cell} | {name} | {len(ends[name])} | {np.mean(ends[name]):.1f} | {told} |"
                    f" {p} |"
                )
        lines.append("")
    return "\n".join(lines)


def reached(r, target):
    """The first round whose averaged model has the target; None: never."""
    return next(
        (t for t, value in enumerate(r["averaged"]) if value is not None and value >= target), None
    )


def headline(folder, targets, cell="labels, P=10", against="uniform, 4 bits"):
    """Cost to the target over that of `against`, seed by seed: geometric mean and 95 % interval."""
    rows, lines = read(folder), []
    for dataset, target in targets.items():
        lines += [
            (
                f"| {dataset}, target {100 * target:g} % | reached | rounds | joules | joules"
                " without waiting | bytes up | bytes |"
            ),
            "|---|---|---|---|---|---|---|",
        ]
        for name in CANDIDATES:
            mine = {
                seed: r for (d, c, seed, n), r in rows.items() if (d, c, n) == (dataset, cell, name)
            }
            if not mine:
                continue
            ratios, got = defaultdict(list), 0
            for seed, r in mine.items():
                base, t = rows.get((dataset, cell, seed, against)), reached(r, target)
                got += t is not None
                if base is None or t is None or (b := reached(base, target)) is None:
                    continue
                bytes_of = lambda r: np.add(r["bytes_up"], r["bytes_down"])  # noqa: E731
                for what, of in (
                    ("rounds", lambda r: np.ones(len(r["joules"]))),
                    ("joules", lambda r: r["joules"]),
                    ("active", lambda r: r["active"]),
                    ("up", lambda r: r["bytes_up"]),
                    ("bytes", bytes_of),
                ):
                    ratios[what].append(np.log(np.sum(of(r)[: t + 1]) / np.sum(of(base)[: b + 1])))
            cells = []
            for what in ("rounds", "joules", "active", "up", "bytes"):
                mean, half = interval(ratios[what]) if ratios[what] else (np.nan, np.nan)
                cells.append(
                    f"{np.exp(mean):.2f} [{np.exp(mean - half):.2f}, {np.exp(mean + half):.2f}]"
                )
            lines.append(f"| {name} | {got} of {len(mine)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_subparsers(dest="does", required=True)
    trains = does.add_parser("run")
    trains.add_argument("plan", type=Path)
    trains.add_argument("--data", type=Path, required=True)
    trains.add_argument("--out", type=Path, required=True)
    trains.add_argument("--device", default="cpu")
    trains.add_argument("--seconds", type=float, default=1e9)
    trains.add_argument("--share", default="0/1", help="I/N: every N-th stack, from the I-th")
    shows = does.add_parser("table")
    shows.add_argument("folder", type=Path)
    shows.add_argument("--against", default="chance")
    shows.add_argument("--plan", type=Path, help="whose primary comparisons count")
    prices = does.add_parser("headline")
    prices.add_argument("folder", type=Path)
    prices.add_argument("--target", action="append", default=[], help="such as cifar10=0.545")
    options = parser.parse_args()
    if options.does == "run":
        run(options)
    elif options.does == "table":
        plan = json.loads(options.plan.read_text()) if options.plan else []
        primary = {tuple(pair) for batch in plan for pair in batch.get("primary", ())}
        print(table(options.folder, options.against, primary))
    else:
        targets = dict(pair.split("=") for pair in options.target)
        print(headline(options.folder, {name: float(value) for name, value in targets.items()}))


if __name__ == "__main__":
    main()
