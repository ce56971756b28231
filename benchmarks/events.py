"""What a round costs the server when clients live by the clock: a million of them, and a million
events.

    PYTHONPATH=src python benchmarks/events.py --part present [--clients 1000000]
    PYTHONPATH=src python benchmarks/events.py --part events [--replies 1000000] [--recipe fedasync]

present: M clients of whom 1 % are there at any time; seconds of each part of a round, and memory.
events: FedBuff with P clients under way, `size` replies a round, until so many replies have come;
or FedAsync, with a round for each reply. Only the server's work is real. Seconds are of the clock
and of the processor: on a busy machine believe the latter, as an upper bound.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from flrce.core import loop
from flrce.core.pending import collect_replies
from flrce.core.types import ClientCost, Payload, Reply
from flrce.devices.availability import BernoulliAvailability
from flrce.devices.costs import DeviceProfile
from flrce.devices.fleet_model import build_fleet_dynamics
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.selection.relationship import RelationshipSelector

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from stub_engine import StubEngine

DEVICE = DeviceProfile("device", 0.5, 5.0, 1e10, 0.01, 1e7, 2e7, 2e-6, 1e-6)


class Fleet(StubEngine):
    """An engine whose clients send noise; how long each takes follows from its row."""

    trainable = 0

    def __init__(self, M, d, presence, seed=0):
        self.trainable, self.names = d, tuple(f"client-{k}" for k in range(M))
        self.fleet_dynamics = (
            None
            if presence is None
            else build_fleet_dynamics(seed, self.names, _Same(), [presence])
        )
        self.u = 1e-3 * torch.randn(d, generator=torch.Generator().manual_seed(seed))

    def clients(self, t):
        return self.names

    def count_samples(self, client):
        return 100

    def count_all_samples(self, clients):
        return torch.full((len(clients),), 100.0, dtype=torch.float64)

    def estimate(self, task):
        return ClientCost(
            4000, 4000, compute_seconds=60.0 + task.k % 997, joules=300.0, idle_watts=0.5
        )

    def train(self, w, tasks, client_states, keep=None):
        return [
            Reply(
                task.client,
                task.t,
                Payload({"u": self.u.roll(task.k)}),
                100,
                1.0,
                1.0,
                self.estimate(task),
            )
            for task in tasks
        ]


class _Same(dict):
    def __missing__(self, client):
        return DEVICE


def resident(field="VmRSS"):
    """Bytes of this process in memory; VmHWM: the most so far."""
    lines = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return 1024 * int(lines[field].split()[0])


def one_round(recipe, engine, state, seed=0):
    start = time.perf_counter()
    plan = loop.plan_round(recipe, engine, state, seed)
    begun = time.perf_counter()
    came = collect_replies(recipe, engine, plan.pending, plan.state, plan.keep)
    trained = time.perf_counter()
    done = loop.close_round(recipe, engine, plan, came)
    return done, {
        "begin": begun - start,
        "train": trained - begun,
        "finish": time.perf_counter() - trained,
    }


def present(M, T, d=1000):
    """Rounds of two recipes among 1 % of a million."""
    found = {"M": M, "d": d, "share": 0.01}
    before, began = resident(), time.perf_counter()
    engine = Fleet(M, d, BernoulliAvailability(0.01, 3600.0))
    found["fleet_seconds"] = time.perf_counter() - began
    recipes = {
        "fedavg": CATALOGUE["fedavg"](P=100),
        "fedbuff": CATALOGUE["fedbuff"](P=100),
        "flrce, sketch 64": replace(
            CATALOGUE["flrce-no-stop"](P=100), selector=RelationshipSelector(decay=0.7, sketch=64)
        ),
    }
    for name, recipe in recipes.items():
        state, rows = loop.make_initial_state(recipe, engine, torch.randn(d)), []
        for _ in range(T):
            done, row = one_round(recipe, engine, state)
            state = done.state
            rows.append(
                row
                | {
                    "chosen": len(done.record.chosen),
                    "left": sum(why.startswith("left") for why in done.record.rejected.values()),
                }
            )
        seconds = [sum(row[key] for key in ("begin", "train", "finish")) for row in rows[1:]]
        found[name] = {
            "median_seconds": statistics.median(seconds),
            "worst_seconds": max(seconds),
            "rounds": rows,
        }
        print(name, {k: v for k, v in found[name].items() if k != "rounds"}, flush=True)
    found["most_bytes"] = resident("VmHWM") - before
    return found


def events(name, replies, P, size, limit, M=10_000, d=100):
    """Seconds for so many replies under a buffered pace, or as many as come within the limit."""
    recipe = CATALOGUE[name](P=P, **({"size": size} if name == "fedbuff" else {}))
    engine, size = Fleet(M, d, None), recipe.pace.size
    state, began, count, marks = (
        loop.make_initial_state(recipe, engine, torch.randn(d)),
        time.perf_counter(),
        0,
        [],
    )
    worked = time.process_time()
    while count < replies and time.perf_counter() - began < limit:
        done, _ = one_round(recipe, engine, state)
        state, count = done.state, count + len(done.record.replied)
        if len(state.history) % 500 == 0:
            marks.append([count, time.perf_counter() - began])
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    return {
        "replies": count,
        "P": P,
        "size": size,
        "seconds": seconds,
        "per_second": count / seconds,
        "marks": marks,
        "rounds": state.t,
        "cpu_seconds": cpu,
        "per_cpu_second": count / cpu,
        "most_bytes": resident("VmHWM"),
        "clock_days": (state.history[-1].began + state.history[-1].seconds) / 86400,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("present", "events"), required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--replies", type=int, default=1_000_000)
    parser.add_argument("--under-way", type=int, default=100)
    parser.add_argument("--recipe", choices=("fedbuff", "fedasync"), default="fedbuff")
    parser.add_argument("--size", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    if options.part == "present":
        found = present(options.clients, options.rounds)
    else:
        found = events(
            options.recipe, options.replies, options.under_way, options.size, options.seconds
        )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "events.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    hardware = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__},"
        f" {torch.get_num_threads()} threads"
    )
    part = options.part if options.part == "present" else options.recipe
    path.write_text(json.dumps({**kept, part: {**found, "hardware": hardware}}, indent=1))
    print(
        {
            key: value
            for key, value in found.items()
            if key not in ("marks",) and not isinstance(value, dict)
        }
    )


if __name__ == "__main__":
    main()
