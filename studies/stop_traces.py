"""Runs without a stop, with every signal that a stop could look at: the ground of docs/beyond.md.

    python studies/stop_traces.py PLAN.json --data CACHE --out DIR [--device cuda] [--seconds 300] [--share 0/4]

A plan holds tables of experiments: "all", then by data set, regime and setting, each laid over the one before; and
`runs`, [data set, regime, setting] of every cell. Seeds come in groups, and a group goes through all cells before the
next begins, so that a plan that is cut short leaves a balanced set. `--share I/N` is every N-th stack of `--stack`
runs; what is done is written at once, and what is not when time is up is written as far as it got.
"""

import argparse
import gzip
import json
import os
import signal
import time
from functools import cache
from pathlib import Path

import torch

from flrce import runs
from flrce.config import Experiment, build_net
from flrce.data.cache import load as prepared
from flrce.data.sources import source
from flrce.models.flat import layout, pack

EVERY = ("headway", "consensus", "conflicts", "joules", "seconds")
JUDGED = {"averaged": "handed", "raw": "headline"}


def cells(plan):
    """(cell, tables, seed) of every run; the first seeds of all cells come before further ones of any."""
    for seeds in plan["seeds"]:
        for name in plan["runs"]:
            tables = {**plan["all"], "lr_times": 1}
            for kind, key in zip(("data", "regimes", "settings"), name, strict=True):
                tables = merged(tables, plan[kind][key])
            times = tables.pop("lr_times")
            tables = merged(tables, {"train": {"lr": tables["train"]["lr"] * times}})
            for seed in seeds:
                yield name, tables, seed


def merged(one, two):
    """Tables laid over tables."""
    both = dict(one)
    for key, value in two.items():
        both[key] = merged(one[key], value) if isinstance(value, dict) and isinstance(one.get(key), dict) else value
    return both


class Trace:
    """One run's series."""

    def __init__(self, name, tables, seed, device, pool):
        self.name, self.seed = name, seed
        engine = {**tables.get("engine", {}), "device": "cpu" if device == "cpu" else "auto"}
        self.experiment = Experiment.of({**tables, "seed": seed, "engine": engine})
        net = build_net(self.experiment.model.name, pool, seed, self.experiment.model.options)
        self.first = self.last = pack(net, layout(net)).float()
        self.series = {key: [] for key in (*EVERY, *JUDGED, "bytes", "step", "way", "chosen", "holdouts", "flagged")}
        self.rows, self.held, self.told = {}, [], {}

    def __call__(self, done):
        h, w, s = done.record, done.state.w.float(), self.series
        if h.outcome != "committed":
            return
        for client, n in zip(h.replied, h.held or [0] * len(h.replied), strict=True):
            if client not in self.rows:
                self.rows[client] = len(self.rows)
                self.held.append(n)
        for key in EVERY:
            s[key].append(short(getattr(h, key)))
        for key, field in JUDGED.items():
            s[key].append(short(getattr(h, field)))
        s["bytes"].append(h.bytes_up + h.bytes_down)
        s["step"].append(short(float((w - self.last).norm())))
        s["way"].append(short(float((w - self.first).norm())))
        s["chosen"].append([self.rows[c] for c in h.replied])
        s["holdouts"].append([short(x) for x in h.holdouts])
        s["flagged"].append([self.rows[c] for c in h.flagged])
        self.told = {"metric": h.metric, "lower": h.lower, "M": h.clients, "P": self.experiment.per_round}
        self.last = w.clone()

    def line(self, classes):
        """What is known so far: whole rounds only."""
        rounds = min(map(len, self.series.values()))
        series = {key: values[:rounds] for key, values in self.series.items()}
        cell = dict(zip(("dataset", "regime", "setting"), self.name, strict=True))
        told = {**cell, "seed": self.seed, "classes": classes, **self.told, "held": self.held}
        return json.dumps({**told, "series": series}, separators=(",", ":"))


def short(value):
    """Four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def together(traces, samples):
    """All of them as one stack, on the GPU where there is one."""
    jobs = [(trace.experiment, None) for trace in traces]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs.run_together(jobs, data=lambda _: samples, watch=lambda i, done: traces[i](done), device=device)


def salvage(f, traces, classes):
    """From now on, a process that is ended or out of time leaves what it has of these runs."""

    def leave(*_):
        f.writelines(trace.line(classes) + "\n" for trace in traces if trace.told)
        f.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGALRM, leave)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--stack", type=int, default=6, help="runs trained together")
    parser.add_argument("--only", default="", help="these data sets, a,b")
    parser.add_argument("--rounds", type=int, help="fewer than planned, for a trial")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, (part, parts) = time.monotonic(), map(int, options.share.split("/"))

    @cache
    def pool(name):
        return source(name) if options.data is None or name == "digits" else prepared(options.data / name)

    plan = json.loads(options.plan.read_text())
    wanted = [run for run in cells(plan) if not options.only or run[0][0] in options.only.split(",")]
    stacks = []
    for dataset in dict.fromkeys(name[0] for name, _, _ in wanted):
        mine = [run for run in wanted if run[0][0] == dataset]
        stacks += [(at / len(mine), mine[at : at + options.stack]) for at in range(0, len(mine), options.stack)]
    stacks = [stack for _, stack in sorted(stacks, key=lambda pair: pair[0])]  # all data sets alike, first seeds first
    longest = 0.0
    if options.seconds < 1e6:
        signal.setitimer(signal.ITIMER_REAL, options.seconds)
    with gzip.open(options.out / f"{options.plan.stem}-{part}.jsonl.gz", "at") as f:
        for stack in stacks[part::parts]:
            start = time.monotonic()
            if start - began + longest > options.seconds:
                break
            samples = pool(stack[0][1]["data"]["name"])
            if options.rounds:
                stack = [(name, {**tables, "rounds": options.rounds}, seed) for name, tables, seed in stack]
            traces = [Trace(name, tables, seed, options.device, samples) for name, tables, seed in stack]
            salvage(f, traces, len(samples.classes))
            if options.device != "cpu":
                together(traces, samples)
            else:
                torch.set_num_threads(1)
                for trace in traces:
                    runs.run(trace.experiment, data=samples, watch=trace)
            salvage(f, [], 0)
            f.writelines(trace.line(len(samples.classes)) + "\n" for trace in traces)
            f.flush()
            longest = max(longest, time.monotonic() - start)
            told = ", ".join(f"{'/'.join(trace.name)}/{trace.seed}" for trace in traces)
            print(f"{time.monotonic() - began:.0f} s: {time.monotonic() - start:.1f} s for {told}", flush=True)


if __name__ == "__main__":
    main()
