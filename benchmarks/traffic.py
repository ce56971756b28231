"""What crosses between host and GPU in a round of a large model, and what the round takes: updates
kept there or not.

    PYTHONPATH=src python3 benchmarks/traffic.py [--before OTHER_SRC] [--floats 107] [--rounds 3]
    [--seconds 80]

Arms take turns, each in a process of its own: `device` and `host` (engine.updates), and with
--before the package in another folder as it is. Each runs FedAvg and FLrce with its sketched map:
an MLP on random samples, 10 of 20 clients a round, two steps each, an evaluation after every round,
no run directory. The first round is not counted; of the last the profiler sums the copies. Then
small runs: same bits twice, and as with updates on the host; a run cut and resumed. Writes
traffic.json and traffic.md to $OUT, or to benchmarks/results.
"""

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, P, SAMPLES, BATCH = 20, 10, 64, 32
RECIPES = ("fedavg", "flrce")
COLUMNS = (
    "to the host GB, profiled",
    "counted",
    "to the GPU GB, profiled",
    "counted",
    "host peak GB",
    "GPU peak GB",
)
HERE = Path(__file__).resolve().parent


def network(floats: float) -> nn.Module:
    """784 - 2 h - 2 h - h - 10, of about so many million floats."""
    h = max(8, int((floats * 1e6 / 6) ** 0.5) // 8 * 8)
    torch.manual_seed(0)
    sizes = (784, 2 * h, 2 * h, h, 10)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def samples(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 784)).astype(np.float32), rng.integers(0, 10, count)


def built(recipe: str, arm: str, net: nn.Module, rounds: int) -> Any:
    """(experiment, its parts)."""
    from flrce.config.experiment import Experiment
    from flrce.simulation.build import build_simulation
    from flrce.simulation.run_slot import DeviceSchedulers

    engine = {} if arm == "before" else {"updates": arm}
    exp = Experiment.from_tables(
        {
            "rounds": rounds,
            "clients": CLIENTS,
            "per_round": P,
            "recipe": {"name": recipe},
            "engine": engine,
            "train": {"epochs": 1, "batch": BATCH, "lr": 0.01},
        }
    )
    schedulers = None
    if DEVICE == "cpu":
        schedulers = (
            DeviceSchedulers("cpu") if arm == "before" else DeviceSchedulers("cpu", single=True)
        )
    return exp, build_simulation(
        exp, samples(CLIENTS * SAMPLES * 4 // 3), net, schedulers=schedulers
    )


def status(name: str) -> float:
    """GB that Linux says of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0]) / 1e9


def fresh() -> None:
    """Peaks count from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def copied(trace: Any) -> dict[str, float]:
    """GB that a profile saw copied, by direction."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = {"HtoD": 0.0, "DtoH": 0.0}
    for event in events:
        for way in found:
            if way in str(event.get("name", "")) and event.get("cat") == "gpu_memcpy":
                found[way] += event["args"]["bytes"] / 1e9
    return found


def measured(recipe: str, arm: str, floats: float, rounds: int) -> dict[str, Any]:
    """One recipe in one arm, here and now."""
    net = network(floats)
    exp, made = built(recipe, arm, net, rounds + 2)
    fresh()
    before = status("VmRSS")
    seconds, found, seen = [], {}, []
    steps = made.iterate_rounds(exp)
    state = None
    for t in range(rounds + 2):
        profile = None
        if t == rounds + 1 and DEVICE == "cuda":
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profile.start()
        begin, crossed = time.perf_counter(), _crossed()
        done = next(steps)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        seen.append({way: now - crossed[way] for way, now in _crossed().items()})
        if profile is not None:
            profile.stop()
            with suppress(Exception):  # without the profiler's library there is what was counted
                found["profiled_gb"] = copied(profile)
        state = done.state
        digest = hashlib.sha256(state.w.numpy().tobytes()).hexdigest()[:16]
        del done
    made.engine.close()
    peak = {"peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9} if DEVICE == "cuda" else {}
    return {
        "recipe": recipe,
        "arm": arm,
        "floats": len(state.w),
        "seconds": [round(x, 3) for x in seconds[1:-1]],
        "first_seconds": round(seconds[0], 2),
        "counted_gb": {k: v / 1e9 for k, v in seen[-1].items()},
        **found,
        **peak,
        "host_before_gb": before,
        "host_peak_gb": status("VmHWM"),
        "digest": digest,
        "chosen": [list(h.chosen) for h in state.history],
        "conflicts": [h.conflicts for h in state.history],
    }


def _crossed() -> dict[str, int]:
    try:
        from flrce.core.tensor_bytes import transferred_bytes
    except ImportError:  # the package before
        return {}
    return {"up": transferred_bytes.up, "down": transferred_bytes.down}


def checks() -> dict[str, bool]:
    """Small runs on the device: what was promised of bits."""
    from flrce.config.experiment import Experiment
    from flrce.data.user import to_source
    from flrce.simulation import runs

    source = to_source(samples(800))

    def run(
        recipe: str, where: str, out: Path | None = None, rounds: int = 4, resume: bool = False
    ) -> str:
        exp = Experiment.from_tables(
            {
                "rounds": rounds,
                "clients": 10,
                "per_round": 4,
                "recipe": {"name": recipe},
                "engine": {"updates": where},
                "train": {"epochs": 1, "batch": 32},
            }
        )
        result = runs.run_in_process([(exp, out)], resume, lambda name: source, device=DEVICE)[0]
        flat = torch.cat([x.flatten().float() for x in result.model.values()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()

    found = {}
    for recipe in ("fedavg", "flrce", "fedadam", "fednova", "fedprox", "moon"):
        one = run(recipe, "device")
        found[f"{recipe}: same bits twice"] = one == run(recipe, "device")
        found[f"{recipe}: as with updates on the host"] = one == run(recipe, "host")
    with tempfile.TemporaryDirectory() as folder:
        straight = run("flrce", "device", Path(folder) / "a")
        run("flrce", "device", Path(folder) / "b", rounds=2)
        found["flrce: cut and resumed"] = straight == run(
            "flrce", "device", Path(folder) / "b", resume=True
        )
    return found


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("--before", default="")
    told.add_argument("--floats", type=float, default=107.0, help="millions")
    told.add_argument("--rounds", type=int, default=3)
    told.add_argument("--seconds", type=float, default=600.0)
    told.add_argument("--arm", default="", help="of this process")
    args = told.parse_args()
    if args.arm == "checks":
        print(json.dumps(checks()))
        return
    if args.arm:
        for recipe in RECIPES:
            print(json.dumps(measured(recipe, args.arm, args.floats, args.rounds)), flush=True)
        return
    out = Path(os.environ.get("OUT", HERE / "results"))
    out.mkdir(parents=True, exist_ok=True)
    began, rows, checked = time.monotonic(), [], {}
    for arm in ("device", *(("before",) if args.before else ()), "host", "checks"):
        left = args.seconds - (time.monotonic() - began)
        if left < 5:
            break
        for line in _asked(arm, args, left):
            rows.append(line) if "recipe" in line else checked.update(line)
        report = {"device": _machine(), "torch": torch.__version__, "rows": rows, "checks": checked}
        (out / "traffic.json").write_text(json.dumps(report, indent=1))
        (out / "traffic.md").write_text(table(report))
    print((out / "traffic.md").read_text())


def _asked(arm: str, args: argparse.Namespace, left: float) -> list[dict[str, Any]]:
    """The lines of one arm's process, as far as it came."""
    command = [
        sys.executable,
        __file__,
        "--arm",
        arm,
        "--floats",
        str(args.floats),
        "--rounds",
        str(args.rounds),
    ]
    path = os.environ.get("PYTHONPATH", "")
    env = os.environ | ({"PYTHONPATH": f"{args.before}:{path}"} if arm == "before" else {})
    worker = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        text, _ = worker.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        worker.kill()
        text, _ = worker.communicate()
    return [
        json.loads(line)
        for line in text.splitlines()
        if line.startswith("{") and line.endswith("}")
    ]


def _machine() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def table(report: dict[str, Any]) -> str:
    """The same for readers."""
    lines = [
        (
            f"{report['device']}, torch {report['torch']}; {P} of {CLIENTS} clients a round,"
            f" batches of {BATCH}."
        ),
        "",
        f"| recipe | updates | floats | s a round | {' | '.join(COLUMNS)} |",
        f"|---|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    for row in report["rows"]:
        s, seen, counted = row["seconds"], row.get("profiled_gb", {}), row["counted_gb"]
        crossed = (seen.get("DtoH"), counted.get("down"), seen.get("HtoD"), counted.get("up"))
        peaks = (row["host_peak_gb"] - row["host_before_gb"], row.get("peak_gpu_gb"))
        figures = ["-" if x is None else f"{x:.2f}" for x in (*crossed, *peaks)]
        told = f"{statistics.median(s):.2f} ({min(s):.2f}-{max(s):.2f})"
        lines.append(
            f"| {row['recipe']} | {row['arm']} | {row['floats']:,} | {told} |"
            f" {' | '.join(figures)} |"
        )
    digests = {
        recipe: {row["digest"] for row in report["rows"] if row["recipe"] == recipe}
        for recipe in RECIPES
    }
    same = ", ".join(
        f"{recipe} {'yes' if len(found) == 1 else 'no'}"
        for recipe, found in digests.items()
        if found
    )
    lines += ["", "Seconds: median (least-most). Host peak: beyond what the process held before."]
    lines += ["", f"Same model to the bit in all arms: {same}."]
    lines += [f"- {name}: {'yes' if fine else 'NO'}" for name, fine in report["checks"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
