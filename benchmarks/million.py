"""The sketched relationship map: its ranking against the exact one, and a million clients on one
machine.

    nice python benchmarks/million.py [--part ranking|law|million|all] [--out benchmarks/results]

Nobody trains: updates are planted, u = s (common + centre of the client's cluster + its own noise
level x white noise), so that clients of large clusters with little noise are the ones to choose.
`ranking` hears a small fleet twice, exactly and through sketches of several sizes; `law` does so
with a smaller model and more maps. `million` gives every client a past update, then plays whole
rounds of the real loop (selection, gate, aggregation, map, checkpoint) and watches memory against
what `memory.needed` says beforehand.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from flrce.core import loop
from flrce.core.memory_limits import estimate_server_bytes
from flrce.core.sketch import make_sketch, sketch_error_bound
from flrce.core.types import ClientCost, Payload, Reply, RoundEvent, RoundReplies, Updates
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.storage.checkpoint import Journal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from stub_engine import StubEngine

D, P, SCALE, CLUSTERS = 134_902, 100, 0.1, 8
SIZES = (256, 512, 1024, 2048, 4096)
GIGABYTE = 1e9


class Planted:
    """M clients in clusters of halving size; what each would send, in d floats or already
    sketched.
    """

    def __init__(self, M, d, seed=0):
        self.M, self.d, g = M, d, torch.Generator().manual_seed(seed)
        shares = torch.tensor([0.5**c for c in range(CLUSTERS)])
        self.of = torch.multinomial(shares, M, replacement=True, generator=g)
        self.noise = 0.3 + 1.7 * torch.rand(M, generator=g)
        self.centres = (
            torch.randn(CLUSTERS, d, generator=g) + torch.randn(d, generator=g)
        ) / d**0.5
        self.w = torch.randn(d, generator=g) / d**0.5

    def full(self, k):
        g = torch.Generator().manual_seed(1_000_003 * (int(k[0]) + 1))
        white = torch.randn(len(k), self.d, generator=g) / self.d**0.5
        return SCALE * (self.centres[self.of[k]] + self.noise[k, None] * white)

    def sketched(self, k, size, g):
        """Distributed as the sketch of `full`: buckets hold different coordinates, so white noise
        stays white.
        """
        centres = make_sketch(self.d, size)(self.centres)
        white = torch.randn(len(k), size, generator=g) / size**0.5
        return SCALE * (centres[self.of[k]] + self.noise[k, None] * white)


def heard(selector, V, w, passes=2):
    """H after everyone was heard, P at a time, `passes` times over."""
    M, d = V.shape
    m = selector.initial_state(M, d, d)
    for t, k in enumerate(torch.arange(M).split(P) * passes, 1):
        updates = Updates(k, V[k], torch.ones(len(k), dtype=torch.float64), d)
        m = selector.observe(m, RoundEvent(t, w, w, updates, M))
    return m.H.double()


def ranking(M, d, fleets, maps):
    """Overlap of the top P by H, and H's error, for sketches of several sizes; one row per fleet,
    size and map.

    A map follows from its size, so neighbouring sizes are independent draws: `maps` of them stand
    for each size.
    """
    rows = []
    for seed in range(fleets):
        fleet = Planted(M, d, seed)
        V = torch.cat([fleet.full(k) for k in torch.arange(M).split(P)])
        exact = heard(RelationshipSelector(), V, fleet.w)
        top = set(exact.argsort(descending=True)[:P].tolist())
        spread = float(exact.std())
        for size, other in product(SIZES, range(maps)):
            H = heard(RelationshipSelector(sketch=size + other), V, fleet.w)
            error = float((H - exact).square().mean().sqrt())
            common = len(top & set(H.argsort(descending=True)[:P].tolist()))
            correlation = float(torch.corrcoef(torch.stack([ranks(H), ranks(exact)]))[0, 1])
            rows.append(
                {
                    "fleet": seed,
                    "k": size,
                    "overlap": common / P,
                    "rank_correlation": correlation,
                    "error": error / M,
                    "bound": sketch_error_bound(size),
                    "error_over_spread": error / spread,
                }
            )
            print(rows[-1], flush=True)
    return rows


def ranks(H):
    return H.argsort().argsort().double()


class Fleet(StubEngine):
    """An engine whose clients send planted updates."""

    trainable = D

    def __init__(self, fleet):
        self.fleet, self.names = fleet, [f"client-{k}" for k in range(fleet.M)]

    def clients(self, t):
        return self.names

    def count_samples(self, client):
        return 100

    def count_all_samples(self, clients):
        return torch.full((len(clients),), 100.0, dtype=torch.float64)

    def estimate(self, task):
        return ClientCost(4 * D, 4 * D, compute_seconds=1.0)

    def train(self, w, tasks, client_states, keep=None):
        k = torch.tensor([task.k for task in tasks])
        return [
            Reply(task.client, task.t, Payload({"u": u}), 100, 1.0, 1.0, self.estimate(task))
            for task, u in zip(tasks, self.fleet.full(k), strict=True)
        ]


def resident(field="VmRSS"):
    """Bytes of this process in memory; VmHWM: the most so far."""
    lines = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return 1024 * int(lines[field].split()[0])


def fill(memory, fleet, size):
    """Everybody was heard in one of a thousand rounds before the first."""
    g = torch.Generator().manual_seed(7)
    for k in torch.arange(fleet.M).split(2**14):
        V = fleet.sketched(k, size, g)
        memory.V[k], memory.vv[k] = V, V.double().square().sum(1)
        memory.R[k] = -torch.randint(2, 1000, (len(k),), generator=g)


def million(M, size, T, seed=0):
    """Seconds of each part of a round, and the memory curve against what was stated."""
    fleet = Planted(M, D)
    engine = Fleet(fleet)
    recipe = replace(
        CATALOGUE["flrce-no-stop"](P=P), selector=RelationshipSelector(decay=0.7, sketch=size)
    )
    before = resident()
    stated = estimate_server_bytes(recipe, M, D, D)
    state = loop.make_initial_state(recipe, engine, fleet.w)
    curve = [("tables announced", resident() - before)]
    fill(state.server_state["selector"], fleet, size)
    curve.append(("everybody heard", resident() - before))
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), "million", {})
        for _ in range(T):
            state, row = one_round(recipe, engine, state, seed, journal)
            curve.append((f"round {state.t}", resident() - before))
            rounds.append({**row, "resident": curve[-1][1]})
            print(rounds[-1], flush=True)
        largest = max(path.stat().st_size for path in Path(folder).glob("*.rows"))
    peak = resident("VmHWM") - before
    return {
        "M": M,
        "P": P,
        "d": D,
        "k": size,
        "stated_bytes": stated,
        "peak_bytes": peak,
        "kept": peak <= stated,
        "curve": curve,
        "rows_file_bytes": largest,
        "rounds": rounds,
        "median_seconds": statistics.median(row["server"] for row in rounds[1:]),
        "worst_seconds": max(row["server"] for row in rounds[1:]),
    }


def one_round(recipe, engine, state, seed, journal):
    """A round of the loop, timed in parts; what clients would spend is not the server's."""
    start, cpu = time.perf_counter(), time.process_time()
    plan = loop.plan_round(recipe, engine, state, seed)
    chosen, cpu = time.perf_counter(), time.process_time() - cpu
    replies = engine.train(state.w, plan.tasks, state.client_states)
    trained, again = time.perf_counter(), time.process_time()
    done = loop.close_round(recipe, engine, plan, RoundReplies(replies))
    finished = time.perf_counter()
    journal.save(done, {}, lambda: None)
    saved, cpu = time.perf_counter(), cpu + time.process_time() - again
    return done.state, {
        "t": done.record.t,
        "exploit": done.record.exploit,
        "begin": chosen - start,
        "finish": finished - trained,
        "save": saved - finished,
        "server": saved - trained + chosen - start,
        "cpu": cpu,
        "load": os.getloadavg()[0],
    }


def compared(title, rows):
    """A table of means by size of the sketch."""
    lines = [
        "",
        f"## {title}",
        "",
        f"P = {P}. Error: root mean square of H - exact H, over M; bound: sqrt(2/k).",
        "",
        (
            "| k | top P in common | rank correlation | error | bound | error x sqrt(k) | error /"
            " spread of H |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        of = [row for row in rows if row["k"] == size]
        mean = {key: statistics.mean(row[key] for row in of) for key in of[0]}
        error = statistics.mean(row["error"] ** 2 for row in of) ** 0.5
        lines.append(
            f"| {size} | {mean['overlap']:.0%} | {mean['rank_correlation']:.3f} | {error:.2e} |"
            f" {mean['bound']:.2e} | {error * size**0.5:.3f} | {mean['error_over_spread']:.3f} |"
        )
    return lines


def written(results):
    """The results as a page."""
    lines = [
        "# The sketched relationship map",
        "",
        f"{results['hardware']}.",
        *__doc__.split("\n\n")[-1:],
    ]
    if rows := results.get("ranking"):
        lines += compared(
            f"M = {results['ranking_clients']}, d = {D:,}, {results['fleets']} fleets, one map"
            " each",
            rows,
        )
    if rows := results.get("law"):
        lines += compared("Error against size: M = 500, d = 20,000, 4 fleets, 4 maps each", rows)
    if run := results.get("million"):
        work = statistics.median(r["cpu"] for r in run["rounds"][1:])
        lines += [
            "",
            f"## M = {run['M']:,}, P = {run['P']}, d = {run['d']:,}, k = {run['k']}",
            "",
            (
                f"Memory stated beforehand {run['stated_bytes'] / GIGABYTE:.2f} GB, most resident"
                f" {run['peak_bytes'] / GIGABYTE:.2f} GB beyond the bare process:"
                f" {'kept' if run['kept'] else 'NOT KEPT'}. Server's seconds per round after the"
                f" first: median {work:.1f} of processor time; by the clock"
                f" {run['median_seconds']:.1f}, worst {run['worst_seconds']:.1f}, on a shared"
                " machine (see load). A round's checkpoint rows:"
                f" {run['rows_file_bytes'] / 1e6:.1f} MB."
            ),
            "",
            (
                "Seconds by the clock; cpu: of this process, all threads; load: of the machine, so"
                " how many shared it."
            ),
            "",
            (
                "| round | exploits | select | gate, aggregate, map | checkpoint | sum | cpu | load"
                " | resident GB |"
            ),
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['t']} | {'yes' if r['exploit'] else 'no'} | {r['begin']:.1f} | {r['finish']:.1f}"
            f" | {r['save']:.1f} | {r['server']:.1f} | {r['cpu']:.1f} | {r['load']:.0f} |"
            f" {r['resident'] / GIGABYTE:.2f} |"
            for r in run["rounds"]
        ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("ranking", "law", "million", "all"), default="all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument(
        "--small", type=int, default=2000, help="clients of the comparison with the exact map"
    )
    parser.add_argument("--fleets", type=int, default=3)
    parser.add_argument("--size", type=int, default=1024, help="k of the large run")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    path = options.out / "million.json"
    found = {}
    if options.part in ("million", "all"):
        found["million"] = million(options.clients, options.size, options.rounds)
    if options.part in ("ranking", "all"):
        found["ranking"] = ranking(options.small, D, options.fleets, 1)
        found |= {"ranking_clients": options.small, "fleets": options.fleets}
    if options.part in ("law", "all"):
        found["law"] = ranking(500, 20_000, 4, 4)
    options.out.mkdir(parents=True, exist_ok=True)
    threads, name = torch.get_num_threads(), f"{platform.machine()}, {os.cpu_count()} cores"
    found["hardware"] = f"{name}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}"
    results = (
        json.loads(path.read_text()) if path.exists() else {}
    ) | found  # parts may be run apart
    path.write_text(json.dumps(results, indent=1))
    path.with_suffix(".md").write_text(written(results))


if __name__ == "__main__":
    main()
