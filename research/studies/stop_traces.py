"""Runs without a stop, with every signal that a stop could look at: the ground of research/docs/stop.md.

    python research/studies/stop_traces.py PLAN.json --data CACHE --out DIR [--device cuda] [--seconds 300]
    [--share 0/4]

A plan holds tables of experiments: "all", then by data set, regime and setting, each laid over the
one before; and `runs`, [data set, regime, setting] of every cell. Seeds come in groups, and a group
goes through all cells before the next begins, so that a plan that is cut short leaves a balanced
set. Runs of one data set and setting are trained together, `--stack` at most. `--share I/N`: N
processes with the same `--out` each take the next stack that nobody has taken. What is done is
written at once, and what is not when time is up is written as far as it got.
"""

import argparse
import json
import os
import signal
import time
import traceback
from functools import cache
from pathlib import Path

import torch

from flrce.config.experiment import Experiment, build_net
from flrce.data.cache import load_prepared as prepared
from flrce.data.sources import load_source
from flrce.models.flat import make_layout, pack_model
from flrce.simulation import runs

EVERY = ("headway", "conflicts", "joules", "seconds")
JUDGED = {"averaged": "final_model_metric", "raw": "last_model_metric"}


def cells(plan):
    """(group of seeds, cell, tables, seed) of every run; a group goes through all cells before the
    next begins.
    """
    for group, seeds in enumerate(plan["seeds"]):
        for name in plan["runs"]:
            tables = {**plan["all"], "lr_times": 1}
            for kind, key in zip(("data", "regimes", "settings"), name, strict=True):
                tables = merged(tables, plan[kind][key])
            times = tables.pop("lr_times")
            tables = merged(tables, {"train": {"lr": tables["train"]["lr"] * times}})
            for seed in seeds:
                yield group, name, tables, seed


def merged(one, two):
    """Tables laid over tables."""
    both = dict(one)
    for key, value in two.items():
        both[key] = (
            merged(one[key], value)
            if isinstance(value, dict) and isinstance(one.get(key), dict)
            else value
        )
    return both


class Trace:
    """One run's series."""

    def __init__(self, name, tables, seed, device, pool, folder=None):
        self.name, self.seed = name, seed
        engine = {**tables.get("engine", {}), "device": "cpu" if device == "cpu" else "auto"}
        if (path := data_folder_file(tables["data"]["name"], folder)) is not None:
            rest = {key: value for key, value in tables["data"].items() if key != "name"}
            tables = {**tables, "data": {**rest, "path": str(path)}}
        self.experiment = Experiment.from_tables({**tables, "seed": seed, "engine": engine})
        net = build_net(self.experiment.model.name, pool.spec, seed, self.experiment.model.options)
        self.first = pack_model(net, make_layout(net)).float()
        self.series = {
            key: [] for key in (*EVERY, *JUDGED, "bytes", "way", "chosen", "holdouts", "flagged")
        }
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
        s["way"].append(short(float((w - self.first).norm())))
        s["chosen"].append([self.rows[c] for c in h.replied])
        s["holdouts"].append([short(x, 3) for x in h.holdouts])
        s["flagged"].append([self.rows[c] for c in h.flagged])
        self.told = {
            "metric": h.metric,
            "lower": h.lower,
            "M": h.clients,
            "P": self.experiment.per_round,
        }

    def line(self, classes):
        """What is known so far: whole rounds only."""
        rounds = min(map(len, self.series.values()))
        series = {key: values[:rounds] for key, values in self.series.items()}
        cell = dict(zip(("dataset", "regime", "setting"), self.name, strict=True))
        told = {**cell, "seed": self.seed, "classes": classes, **self.told, "held": self.held}
        return json.dumps({**told, "series": series}, separators=(",", ":"))


def data_folder_file(name, folder):
    """The arrays x, y and group of a data set that is no prepared one, FOLDER/NAME.npz; or None."""
    path = None if folder is None else folder / f"{name}.npz"
    return path if path is not None and path.exists() else None


def short(value, digits=4):
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def together(traces, samples, beside):
    """All of them as one stack, on the GPU where there is one; `beside`: processes that share its
    memory.
    """
    jobs = [(trace.experiment, None) for trace in traces]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs.run_in_process(
        jobs,
        data=lambda _: samples,
        watch=lambda i, done: traces[i](done),
        device=device,
        beside=beside,
    )


def stacked(wanted, most):
    """Runs in the plan's order, those of one data set and setting and one group of seeds together,
    `most` at most.
    """
    groups = {}
    for group, name, tables, seed in wanted:
        groups.setdefault((group, name[0], name[2]), []).append((name, tables, seed))
    return [runs_[at : at + most] for runs_ in groups.values() for at in range(0, len(runs_), most)]


def taken(folder, number):
    """Whether another process has this stack; if not, it is ours from now on."""
    try:
        (folder / f"taken-{number}").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


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
    parser.add_argument("--stack", type=int, default=9, help="runs trained together")
    parser.add_argument(
        "--beside", type=int, default=1, help="processes that share the GPU's memory"
    )
    parser.add_argument("--only", default="", help="these data sets, a,b")
    parser.add_argument("--rounds", type=int, help="fewer than planned, for a trial")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, part = time.monotonic(), int(options.share.split("/")[0])

    @cache
    def pool(name):
        if options.data is None or name == "digits":
            return load_source(name)
        path = data_folder_file(name, options.data)
        return prepared(options.data / name) if path is None else load_source(name, path)

    plan = json.loads(options.plan.read_text())
    wanted = [
        run for run in cells(plan) if not options.only or run[1][0] in options.only.split(",")
    ]
    if options.seconds < 1e6:
        signal.setitimer(signal.ITIMER_REAL, options.seconds)
    with (options.out / f"{options.plan.stem}-{part}.jsonl").open("a") as f:
        for number, stack in enumerate(stacked(wanted, options.stack)):
            if taken(options.out, number):
                continue
            start = time.monotonic()
            if options.rounds:
                stack = [
                    (name, {**tables, "rounds": options.rounds}, seed)
                    for name, tables, seed in stack
                ]
            told = ", ".join(f"{'/'.join(name)}/{seed}" for name, _, seed in stack)
            try:
                traced(stack, pool(stack[0][1]["data"]["name"]), f, options)
            except Exception:  # one stack that fails is not the end of the others
                traceback.print_exc()
            print(
                f"{time.monotonic() - began:.0f} s: {time.monotonic() - start:.1f} s for {told}",
                flush=True,
            )


def traced(stack, samples, f, options):
    """These runs, and their lines into f."""
    traces = [
        Trace(name, tables, seed, options.device, samples, options.data)
        for name, tables, seed in stack
    ]
    salvage(f, traces, len(samples.classes))
    try:
        if options.device != "cpu":
            together(traces, samples, options.beside)
        else:
            torch.set_num_threads(1)
            for trace in traces:
                runs.run(trace.experiment, data=samples, watch=trace, allow_divergence=True)
    finally:
        salvage(f, [], 0)
        f.writelines(trace.line(len(samples.classes)) + "\n" for trace in traces if trace.told)
        f.flush()


if __name__ == "__main__":
    main()
