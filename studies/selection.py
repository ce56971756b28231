"""Where does a selection help? Candidates against turns by chance, on healthy fleets and on fleets with trouble.

    PYTHONPATH=src python studies/selection.py run studies/plans/selection-decide.json --data CACHE --out DIR \
        [--device cuda] [--seconds 110] [--share 0/4]
    python studies/selection.py table DIR

A plan names data sets, cells, candidates and seeds. The endpoint of a run is the averaged model's accuracy, mean over
clients' hold-outs (which are clean), in the last full sweep (ceil(M/P) rounds); candidates are compared with "chance"
by paired differences over seeds, Student's 95 % intervals, and p-values by Holm over a data set's cells and candidates.
A run below three times chance accuracy is reported as dead. Runs of one data set, cell and seed go as one stack.
"""

import argparse
import gzip
import json
import time
import traceback
from collections import defaultdict
from pathlib import Path

import candidates
import numpy as np

from flrce import runs
from flrce.config import Experiment
from flrce.results.paper import plan as paper
from flrce.results.paper.execute import facts_of, load

TURNS = {"piece": "in-turn", "by": "chance"}
WRONG = {"piece": "wrong-labels", "share": 0.2, "wrong": 0.4}
#: cell -> what differs from M = 100, P = 10, Dirichlet(.1)
CELLS = {
    "labels, P=10": {},
    "labels, P=3": {"per_round": 3},
    "sizes, P=10": {"regime": "quantity"},
    "wrong labels": {"trouble": [WRONG]},
    "rare classes": {"trouble": [{"piece": "rare-classes", "share": 0.05, "classes": 2}]},
    "wrong labels and rare classes": {"trouble": [WRONG, {"piece": "rare-classes", "share": 0.05, "classes": 2}]},
    "free-riders, stale": {"trouble": [{"piece": "free-riders", "share": 0.2, "sends": "stale"}]},
    "free-riders, noise": {"trouble": [{"piece": "free-riders", "share": 0.2, "sends": "noise"}]},
    "slow devices, other labels": {"trouble": [{"piece": "slow-labels", "share": 0.3}]},
}
CAPPED = {"piece": "mean", "cap": 5.0}
#: candidate -> [recipe]; all hand back the same average, and but for those named by their rule have the same mean
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
    "related and balance": {"selector": {"piece": "in-turn", "by": "balance"}, "aggregator": "related"},
    "trimmed mean": {"selector": TURNS, "aggregator": "trimmed"},
    "krum": {"selector": TURNS, "aggregator": {"piece": "krum", "attackers": 2}},
    "clipped mean": {"selector": TURNS, "aggregator": "clipped"},
    "centred clipping": {"selector": TURNS, "aggregator": "centred-clip"},
    "geometric median": {"selector": TURNS, "aggregator": "geometric-median"},
    "balance, clipped mean": {"selector": {"piece": "in-turn", "by": "balance"}, "aggregator": "clipped"},
}


def experiment(dataset, cell, candidate, seed, facts, rounds, device, rates):
    """One run: the reproduction's setting for this data set, with what the cell and the candidate change."""
    changed = CELLS[cell]
    regime = changed.get("regime", "dirichlet")
    request = paper.Request(("table3",), (dataset,), (regime,), (seed,), rates=rates)
    usual = request.cell(dataset, regime, "fedavg", seed, facts).experiment.model_dump(exclude_none=True)
    P = changed.get("per_round", usual["per_round"])
    recipe = {"name": "fedavg", "average": "ema", **CANDIDATES[candidate]}
    if recipe["name"] == "fedavg":
        recipe.setdefault("aggregator", CAPPED)
    selector = recipe.get("selector")
    if isinstance(selector, dict) and selector.get("key"):
        recipe["selector"] = {**selector, "key": f"{dataset}/{cell}/{seed}"}
    sweep = -(-usual["clients"] // P)
    data = {**usual["data"], **({"trouble": changed["trouble"]} if "trouble" in changed else {})}
    engine = {"eval_every": 1, "device": device, "workers": 1}
    T = -(-rounds // sweep) * sweep
    return Experiment.of(
        {**usual, "per_round": P, "rounds": T, "data": data, "recipe": recipe, "engine": engine, "stop": {}}
    )


def tell(key, exp, pool):
    """What the oracle is told: true labels, and who harms."""
    federation = exp.federate(pool)
    classes = len(pool.classes)
    candidates.LABELS[key] = np.array([np.bincount(pool.y[own], minlength=classes) for own in federation.train])
    who = federation.trouble.who
    bad = {*who.get("wrong-labels", ()), *who.get("free-riders", ())}
    candidates.TROUBLED[key] = {federation.row[client] for client in bad}


def endpoint(values, sweep):
    """Mean over the last full sweep; rounds that were given up, as those of a model that diverged, have no value."""
    known = [value for value in values if value is not None]
    return float(np.mean(known[-sweep:])) if known else 0.0


def run(options):
    plan = json.loads(options.plan.read_text())
    began, pools = time.monotonic(), {}
    part, parts = map(int, options.share.split("/"))
    batches = [(b, dataset, cell, seed) for b in plan for dataset in b["datasets"] for seed in b["seeds"]
               for cell in b["cells"]]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    for batch, dataset, cell, seed in batches[part::parts]:
        if time.monotonic() - began > options.seconds:
            break
        if dataset not in pools:
            pools[dataset] = load(dataset, options.data, verify=False)
        pool, facts, key = pools[dataset], facts_of(dataset, options.data), f"{dataset}/{cell}/{seed}"
        names = [c for c in batch["candidates"] if c not in batch.get("only", {}) or cell in batch["only"][c]]
        how = (facts, batch.get("rounds", 100), options.device, batch.get("rates", {}))
        jobs = {name: experiment(dataset, cell, name, seed, *how) for name in names}
        if not jobs:
            continue
        tell(key, next(iter(jobs.values())), pool)
        start = time.monotonic()
        try:
            found = together(jobs, pool, options.device)
        except Exception:
            traceback.print_exc(limit=4)
            continue
        rows = [row(dataset, cell, seed, name, jobs[name], result) for name, result in found.items()]
        with gzip.open(options.out / f"selection-{part}.jsonl.gz", "at") as f:
            f.writelines(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
        print(
            f"{key}: {len(rows)} runs in {time.monotonic() - start:.1f} s, at {time.monotonic() - began:.0f} s",
            flush=True,
        )


def together(jobs, pool, device):
    if device == "cuda":
        results = runs.run_together([(job, None) for job in jobs.values()], data=lambda _: pool)  # one stack
        return dict(zip(jobs, results, strict=True))
    return {name: runs.run(job, data=pool) for name, job in jobs.items()}


def row(dataset, cell, seed, name, exp, result):
    sweep, history = -(-exp.clients // exp.per_round), result.history
    short = lambda values: [None if v is None else float(f"{v:.5g}") for v in values]  # noqa: E731
    return {
        "dataset": dataset, "cell": cell, "seed": seed, "candidate": name, "rounds": len(history), "sweep": sweep,
        "end": endpoint([h.handed for h in history], sweep), "last": endpoint([h.headline for h in history], sweep),
        "averaged": short([h.handed for h in history]), "accuracy": short([h.headline for h in history]),
        "joules": short([h.joules for h in history]), "bytes_up": [h.bytes_up for h in history],
        "bytes_down": [h.bytes_down for h in history], "seconds": short([h.seconds for h in history]),
    }  # fmt: skip


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


def table(folder, against="chance"):
    from scipy.stats import t as student
    from scipy.stats import ttest_1samp

    rows, lines = read(folder), []
    for dataset in sorted({key[0] for key in rows}):
        found = compared(rows, dataset, against)
        tested = {key: float(ttest_1samp(d, 0).pvalue) for key, d in found.items() if len(d) > 1 and np.std(d) > 0}
        adjusted = dict(zip(tested, holm(np.array(list(tested.values()))), strict=True)) if tested else {}
        lines += [f"| {dataset}: cell | candidate | seeds | end, % | minus {against}, points | Holm's p |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for cell in CELLS:
            ends = defaultdict(list)
            for (d, c, _, name), r in rows.items():
                if (d, c) == (dataset, cell):
                    ends[name].append(100 * r["end"])
            for name in [c for c in CANDIDATES if c in ends]:
                d = np.array(found.get((cell, name), []))
                half = student.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5 if len(d) > 1 else np.nan
                told = f"{d.mean():+.2f} ± {half:.2f}" if len(d) else "--"
                p = adjusted.get((cell, name))
                lines.append(f"| {cell} | {name} | {len(ends[name])} | {np.mean(ends[name]):.1f} | {told} | "
                             + ("--" if p is None else f"{p:.3f}") + " |")  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    options = parser.parse_args()
    if options.does == "run":
        run(options)
    else:
        print(table(options.folder, options.against))


if __name__ == "__main__":
    main()
