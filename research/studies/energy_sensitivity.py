"""Does the ranking of methods by joules hold when the device's figures vary within their ranges?

    python research/studies/energy_sensitivity.py [--seeds 10] [--rounds 60] [--out research/results/energy]

Trains FedAvg, FLrce and frugal on the digits and counts each client's bytes, batches and FLOPs up
to the first round at which the final model reaches the target. These do not depend on the device.
Their joules are then counted again for draws of the device's figures, each log-uniform within its
range around `jetson-nano`.
"""

import argparse
import csv
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from flrce import Experiment
from flrce.devices.costs import DeviceProfile, load_profile
from flrce.simulation import runs

METHODS = ("fedavg", "flrce", "frugal")
#: figure -> by how many times it may be less or more: boards of one kind differ by less
RANGES = {
    "batch_seconds": 10.0,  # 0.5 to 50 ms
    "flops": 3.0,
    "active_watts": 1.4,
    "idle_watts": 1.4,
    "up_bits": 4.0,
    "down_bits": 4.0,
    "up_joules": 5.0,
    "down_joules": 5.0,
}
COLUMNS = ("t", "bytes_up", "bytes_down", "flops", "batches")
DRAWS = 2000


def train(method, seed, rounds, target):
    """(lines, 5) of COLUMNS of every client up to the round that reached the target, and which of
    them trained; None: no round did.
    """
    exp = Experiment(rounds=rounds, seed=seed, recipe={"name": method}, engine={"workers": 1})
    with tempfile.TemporaryDirectory() as place:
        found = runs.run(exp, Path(place) / "run", allow_divergence=True)
        lines = [json.loads(x) for x in (Path(place) / "run" / "clients.jsonl").open()]
    reached = [h.t for h in found.history if (h.final_model_metric or 0.0) >= target]
    if not reached:
        return None
    lines = [line for line in lines if line["t"] <= reached[0]]
    trained = np.array([line["outcome"] not in ("asked", "evaluated") for line in lines])
    return np.array([[line[name] for name in COLUMNS] for line in lines], float), trained


def count_joules(lines, trained, device):
    """The joules of these lines on a device; who has trained waits for the round's slowest."""
    t, up, down, flops, batches = lines.T
    compute = device.batch_seconds * batches + flops / device.flops
    seconds = compute + 8 * up / device.up_bits + 8 * down / device.down_bits
    rounds = [seconds[trained & (t == each)] for each in np.unique(t)]
    waiting = sum((some.max(initial=0.0) - some).sum() for some in rounds)
    radio = device.up_joules * up + device.down_joules * down
    return float((device.active_watts * compute + radio).sum() + device.idle_watts * waiting)


def draw_device(device: DeviceProfile, rng: np.random.Generator) -> DeviceProfile:
    factors = {name: most ** rng.uniform(-1, 1) for name, most in RANGES.items()}
    return replace(device, **{name: getattr(device, name) * x for name, x in factors.items()})


def compare(work, devices):
    """(devices, methods) mean joules over seeds."""
    return np.array(
        [[np.mean([count_joules(*one, d) for one in work[m]]) for m in METHODS] for d in devices]
    )


def resample_ratio(some, others, device, rng):
    """2.5 and 97.5 % of the ratio of mean joules over seeds that are drawn again (bootstrap)."""
    a, b = (np.array([count_joules(*one, device) for one in each]) for each in (some, others))
    draws = [rng.choice(a, len(a)).mean() / rng.choice(b, len(b)).mean() for _ in range(DRAWS)]
    return np.quantile(draws, [0.025, 0.975])


def tabulate(work, nominal):
    rng, rows = np.random.default_rng(0), []
    devices = [nominal, *(draw_device(nominal, rng) for _ in range(DRAWS))]
    joules = compare(work, devices)
    ratios = joules / joules[:, :1]
    held = []
    for a, b in ((1, 0), (2, 0), (2, 1)):
        ratio, wins = joules[0, a] / joules[0, b], (joules[1:, a] < joules[1:, b]).mean()
        pair = f"{METHODS[a]} spends less than {METHODS[b]}"
        low, high = resample_ratio(work[METHODS[a]], work[METHODS[b]], nominal, rng)
        spread = [f"{low:.3f}", f"{high:.3f}"]
        held.append([pair, "", f"{ratio:.3f}", f"{100 * wins:.1f}", *spread])
    for i, method in enumerate(METHODS):
        low, high = np.quantile(ratios[1:, i], [0.05, 0.95])
        row = [method, len(work[method]), f"{joules[0, i]:.1f}", f"{ratios[0, i]:.3f}"]
        rows.append([*row, f"{low:.3f}", f"{high:.3f}", f"{ratios[:, i].max():.3f}"])
    for name, most in RANGES.items():  # one figure at its ends, the others as they are
        ends = [replace(nominal, **{name: getattr(nominal, name) * most**s}) for s in (-1, 1)]
        ends = compare(work, ends)
        ends = ends / ends[:, :1]
        for i, method in enumerate(METHODS[1:], 1):
            pair = [f"{x:.3f}" for x in ends[:, i]]
            rows.append([f"{method}, {name} x 1/{most:g} and x {most:g}", "", "", "", *pair, ""])
    return rows, held


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=Path("research/results/energy"))
    options = parser.parse_args()
    work = {}
    for method in METHODS:
        found = [
            train(method, seed, options.rounds, options.target) for seed in range(options.seeds)
        ]
        work[method] = [lines for lines in found if lines is not None]
        print(f"{method}: {len(work[method])} of {options.seeds} runs reached {options.target}")
    rows, held = tabulate(work, load_profile("jetson-nano"))
    options.out.mkdir(parents=True, exist_ok=True)
    heads = ("method", "runs that reached the target", "joules", "of fedavg's")
    with (options.out / "sensitivity.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*heads, "5 % of draws", "95 % of draws", "largest"])
        writer.writerows(rows)
        writer.writerow([])
        writer.writerow(
            [
                "pair",
                "",
                "ratio of joules, nominal",
                f"% of {DRAWS} draws",
                "2.5 % over seeds",
                "97.5 % over seeds",
            ]
        )
        writer.writerows(held)
    for row in held:
        print(row)


if __name__ == "__main__":
    main()
