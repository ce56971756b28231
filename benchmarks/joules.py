"""Joules predicted against joules measured on this machine, over networks and batch sizes.

    PYTHONPATH=src python3 benchmarks/joules.py --out DIR [--seconds 180]
    PYTHONPATH=src python3 benchmarks/joules.py --read DIR          # tables of what was measured

Energy is read from NVML's counter, where that fails from `nvidia-smi` (power, sampled every 50 ms),
and without a GPU from a fake meter (2 W of time and 5 W of processor time), so that the script can
be rehearsed.

Models of a training step's joules, each fitted by relative least squares and tried on what was not
fitted: a network that none of the others is (leave one network out), and a batch size (leave one
size out).

- watts: constant power times measured time: what a data sheet and a stopwatch give;
- linear: a + b FLOPs: a profile with a fixed cost of a batch and a rate;
- launches: a tensors + b FLOPs: the fixed cost by how much is launched, counted as tensors that are
  trained;
- operations: a operations + b bytes, as the step's operations are dispatched: no time need be
  measured;
- profile: a operations + b bytes + c FLOPs: a profile with `operation_seconds` and `memory_bytes`;
- two powers: a T + b bytes + c FLOPs, where T = max(operations, bytes + FLOPs) is fitted as well:
  launches and work overlap, and the device draws idle power whatever it does;
- traffic, timed: the same of measured seconds: power that is drawn whatever happens, and what
  moving data (and computing) costs on top.

Which form is best was not decided beforehand, so that the best of them is flattered by having been
looked for. `chosen` is what an honest search gives: all forms of up to three quantities, for each
network that is left out the one that leaves the others best, one by one. `untimed` the same without
measured seconds.
"""

import argparse
import ctypes
import functools
import itertools
import json
import math
import statistics
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import torch

from flrce.devices.costs import training_flops
from flrce.devices.flops import TrafficCounter
from flrce.models.nets import build_network

#: network -> (shape of a sample, outputs)
NETWORKS = {
    "cnn-digits": ((1, 8, 8), 10), "cnn-emnist": ((1, 28, 28), 62), "cnn-speech": ((1, 32, 32), 30),
    "cnn-cifar": ((3, 32, 32), 10), "resnet-8": ((3, 32, 32), 10), "resnet-20": ((3, 32, 32), 10),
    "resnet-18": ((3, 32, 32), 10), "mlp": ((3, 32, 32), 10),
}  # fmt: skip
#: further ones, of benchmarks/networks.py: name -> its place there
FURTHER = {"vgg": 1, "lstm": 4, "gpt": 5, "gpt-lora": 6}
SIZES = (8, 32, 128, 256)
#: model -> the quantities that its joules are linear in
MODELS = {
    "watts": ("seconds",),
    "linear": ("one", "flops"),
    "launches": ("tensors", "flops"),
    "operations": ("operations", "bytes"),
    "profile": ("operations", "bytes", "flops"),
    "two powers": ("time", "bytes", "flops"),
    "traffic": ("seconds", "bytes"),
    "timed": ("seconds", "bytes", "flops"),
}
QUANTITIES = ("seconds", "flops", "operations", "bytes", "tensors", "one")
FAKE_WATTS = (2.0, 5.0)  # of time, of processor time


class NvmlCounter:
    """The GPU's energy counter."""

    source = "NVML's energy counter"

    def __init__(self):
        self.handle, self.library = ctypes.c_void_p(), ctypes.CDLL("libnvidia-ml.so.1")
        self.ask("nvmlInit_v2")
        self.ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))
        self.read()

    def ask(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with code {code}")

    def read(self):
        value = ctypes.c_ulonglong()
        self.ask("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(value))
        return value.value / 1e3


class SampledPower:
    """`nvidia-smi`'s power, integrated over time by a thread."""

    source = "nvidia-smi's power, sampled every 50 ms"
    COMMAND = ("nvidia-smi", "-i", "0", "--query-gpu=power.draw", "--format=csv,noheader,nounits")

    def __init__(self, command=COMMAND):
        asked = subprocess.Popen([*command, "-lms", "50"], stdout=subprocess.PIPE, text=True)
        self.joules, self.watts, self.at = 0.0, float(asked.stdout.readline()), time.perf_counter()
        self.lock = threading.Lock()
        threading.Thread(target=self.integrate, args=(asked.stdout,), daemon=True).start()

    def integrate(self, lines):
        for line in lines:
            with self.lock:
                self.advance(float(line))

    def advance(self, watts):
        now = time.perf_counter()
        self.joules += self.watts * (now - self.at)
        self.watts, self.at = watts, now

    def read(self):
        with self.lock:
            self.advance(self.watts)
            return self.joules


class FakeMeter:
    """Stands in where there is no GPU."""

    source = f"a fake meter: {FAKE_WATTS[0]:g} W of time, {FAKE_WATTS[1]:g} W of processor time"

    def read(self):
        return FAKE_WATTS[0] * time.perf_counter() + FAKE_WATTS[1] * time.process_time()


def open_meter(device):
    """What reads this device's joules."""
    if device != "cuda":
        return FakeMeter()
    try:
        return NvmlCounter()
    except OSError as why:
        print(f"{why}; asking nvidia-smi", flush=True)
        return SampledPower()


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


@functools.cache
def count_flops(name):
    """FLOPs to train on one sample."""
    if name in FURTHER:
        from networks import CASES

        case = CASES[FURTHER[name]]
        shape = tuple(case.samples(1, 0)[0].shape[1:])
        return training_flops(case.net(), shape, tokens=case.shape is None)
    shape, outputs = NETWORKS[name]
    return training_flops(build_network(name, shape, outputs, 0), shape)


def stepper(name, size, device):
    """One training step of a network, and its trained tensors."""
    if name in FURTHER:
        from networks import CASES

        case = CASES[FURTHER[name]]
        net = case.net().to(device)
        x, y = (each.to(device) for each in case.samples(size, 0))
        x = x if case.shape is None else x.float() * case.scaling[0] + case.scaling[1]
    else:
        shape, outputs = NETWORKS[name]
        net = build_network(name, shape, outputs, 0).to(device)
        x, y = torch.rand(size, *shape, device=device), torch.arange(size, device=device) % outputs
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1e-9)

    def step():
        optimiser.zero_grad(set_to_none=True)
        out = net(x)
        if y.ndim == 2:  # a target after every token
            out = out.reshape(-1, out.shape[-1])
        torch.nn.functional.cross_entropy(out, y.flatten()).backward()
        optimiser.step()

    return step, sum(p.requires_grad for p in net.parameters())


def counted(row, device="cpu"):
    """The row with its step's operations and bytes."""
    if "operations" in row:
        return row
    step, _ = stepper(row["net"], row["size"], device)
    step()  # what is made by the first step only
    with TrafficCounter() as seen:
        step()
    return {**row, "operations": seen.operations, "bytes": seen.moved_bytes}


def measure(name, size, meter, device, lasts):
    """Seconds and joules of a step, over at least `lasts` seconds after a warm-up."""
    step, tensors = stepper(name, size, device)
    for _ in range(5):
        step()
    wait(device)
    began, before, steps = time.perf_counter(), meter.read(), 0
    while time.perf_counter() - began < lasts:
        for _ in range(4):
            step()
        steps += 4
        wait(device)
    joules, seconds = meter.read() - before, time.perf_counter() - began
    row = {
        "net": name,
        "size": size,
        "flops": size * count_flops(name),
        "tensors": tensors,
        "steps": steps,
        "seconds": seconds / steps,
        "joules": joules / steps,
    }
    return counted(row, device)


def idle(meter, lasts):
    time.sleep(1.0)
    before, began = meter.read(), time.perf_counter()
    time.sleep(lasts)
    return (meter.read() - before) / (time.perf_counter() - began)


def solve(X, y):
    """(p,) the coefficients of least relative squares, none of them below 0: the best of all
    subsets of the columns, since there are few.
    """
    scale = X.max(0)
    A, best, least = X / np.where(scale, scale, 1) / y[:, None], None, math.inf
    for count in range(1, X.shape[1] + 1):
        for some in map(list, itertools.combinations(range(X.shape[1]), count)):
            w, *_ = np.linalg.lstsq(A[:, some], np.ones(len(y)), rcond=None)
            left = float(((A[:, some] @ w - 1) ** 2).sum())
            if (w >= 0).all() and left < least:
                best, least = np.zeros(X.shape[1]), left
                best[some] = w
    return best / np.where(scale, scale, 1)


def column(name, rows):
    return np.array([1.0 if name == "one" else row[name] for row in rows], float)


def fit_time(rows, turns=20):
    """(a, b, c) of seconds = max(a operations, b bytes + c FLOPs): rows are divided into those that
    launching bounds and those that work bounds until nothing changes.
    """
    seconds, launches = column("seconds", rows), column("operations", rows)
    X = np.stack([column("bytes", rows), column("flops", rows)], 1)
    a, rest = float((seconds / launches).min()), np.zeros(2)
    for _ in range(turns):
        bound = a * launches >= X @ rest if rest.any() else seconds < 1.3 * a * launches
        if bound.any():
            a = float(np.median((seconds / launches)[bound]))
        if (~bound).sum() < 2:
            break
        rest = solve(X[~bound], seconds[~bound])
    return a, *rest


def features(names, rows, fold=None):
    """(n, p) what a model's joules are linear in; "time" is predicted by a fit of the fold's
    rows.
    """
    found = []
    for name in names:
        if name == "time":
            a, b, c = fit_time(fold)
            work = b * column("bytes", rows) + c * column("flops", rows)
            found.append(np.maximum(a * column("operations", rows), work))
        else:
            found.append(column(name, rows))
    return np.stack(found, 1)


def predict(names, rest, out):
    """(n,) the joules of the rows `out` by a fit of the rows `rest`."""
    fitted = solve(features(names, rest, rest), column("joules", rest))
    return features(names, out, rest) @ fitted


def folds(rows, key):
    """(rows that share a `key`, the others), for each value of it."""
    for value in dict.fromkeys(row[key] for row in rows):
        yield [row for row in rows if row[key] == value], [row for row in rows if row[key] != value]


def errors(names, rows, key):
    """Relative errors of every row as predicted by a fit without the rows that share its `key`."""
    return [
        (row, float(guess / row["joules"] - 1))
        for out, rest in folds(rows, key)
        for row, guess in zip(out, predict(names, rest, out), strict=True)
    ]


def searched(rows, key, quantities, most=3):
    """Errors where the form itself is chosen without what is left out, and how often each form
    was.
    """
    forms = [
        form for count in range(1, most + 1) for form in itertools.combinations(quantities, count)
    ]
    found, won = [], {}
    for out, rest in folds(rows, key):
        best = min(forms, key=lambda form: rate_form(form, rest, key))
        won[best] = won.get(best, 0) + 1
        guesses = predict(best, rest, out)
        found += [
            (row, float(guess / row["joules"] - 1)) for row, guess in zip(out, guesses, strict=True)
        ]
    return found, won


def rate_form(form, rows, key):
    """How far a form is off, rounded: of equally good ones, the simplest is taken."""
    return round(statistics.mean(missed(e) for _, e in errors(form, rows, key)), 6)


def missed(error):
    """A relative error as a distance: half is as far off as twice."""
    return abs(math.log(max(1 + error, 1e-9)))


def line(model, name, found):
    off = sorted(abs(e) for _, e in found)
    worst = max(found, key=lambda pair: abs(pair[1]))
    return (
        f"| {model} | {name} | {statistics.median(off):.0%} | {off[int(0.9 * (len(off) - 1))]:.0%}"
        f" | {worst[1]:+.0%} ({worst[0]['net']}, {worst[0]['size']}) |"
    )


def describe_time(rows):
    """How far off the predicted seconds of a step are, network by network."""
    found = []
    for out, rest in folds(rows, "net"):
        guesses = features(("time",), out, rest)[:, 0]
        found += [(row, float(g / row["seconds"] - 1)) for row, g in zip(out, guesses, strict=True)]
    return line("two powers: seconds", "a network", found)


def page(results):
    """The results as a page."""
    rows = [counted(row) for row in results["rows"]]
    source = f", {results['source']}" if "source" in results else ""
    lines = [
        "# Joules predicted and measured",
        "",
        (
            f"{results['hardware']}{source}; idle {results['idle_watts']:.0f} W. One training step,"
            f" float32, {results['lasts']} s each after a warm-up; {len(rows)} pairs of network and"
            " batch size."
        ),
        "",
        "| model | left out | median error | 90 % of errors below | worst |",
        "|---|---|---|---|---|",
    ]
    notes = []
    for key, name in (("net", "a network"), ("size", "a batch size")):
        if len({row[key] for row in rows}) < 3:  # a search leaves one out of what is left
            continue
        lines += [line(model, name, errors(names, rows, key)) for model, names in MODELS.items()]
        for model, some in (("chosen", QUANTITIES), ("untimed", QUANTITIES[1:])):
            found, won = searched(rows, key, some)
            lines.append(line(model, name, found))
            forms = ", ".join(
                f"{' + '.join(form)} ({times})" for form, times in sorted(won.items())
            )
            notes.append(f"- {model}, without {name}: {forms}")
        lines += [describe_time(rows)] if key == "net" else []
    lines += ["", "Forms that the search took, and for how many of what was left out:", "", *notes]
    lines += ["", "| network | batch | GFLOP | operations | MB | ms | J | W |", "|" + 8 * "---|"]
    lines += [
        f"| {r['net']} | {r['size']} | {r['flops'] / 1e9:.3g} | {r['operations']} |"
        f" {r['bytes'] / 1e6:.3g} | {1e3 * r['seconds']:.2f} | {r['joules']:.3g} |"
        f" {r['joules'] / r['seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def describe_hardware(device):
    if device != "cuda":
        return f"CPU, torch {torch.__version__}"
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, driver and limit {told}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="for all of it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default=",".join((*NETWORKS, *FURTHER)))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options = parser.parse_args()
    if options.read:
        results = json.loads((options.read / "joules.json").read_text())
        (options.read / "joules.md").write_text(page(results))
        print(page(results))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    names, sizes = options.networks.split(","), [int(size) for size in options.sizes.split(",")]
    # a second or so of each pair goes into building, counting and warming up
    lasts = max(0.2, (options.seconds - 20) / (len(names) * len(sizes)) - 1.0)
    meter, began = open_meter(options.device), time.monotonic()
    results = {
        "hardware": describe_hardware(options.device),
        "source": meter.source,
        "lasts": round(lasts, 2),
        "idle_watts": idle(meter, min(4.0, lasts)),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        for name in names:
            if time.monotonic() - began > options.seconds - lasts:
                print(f"no time left for {name}, {size}", flush=True)
                continue
            results["rows"].append(measure(name, size, meter, options.device, lasts))
            (options.out / "joules.json").write_text(json.dumps(results, indent=1))
            print(results["rows"][-1], flush=True)
    (options.out / "joules.md").write_text(page(results))
    print(page(results), flush=True)


if __name__ == "__main__":
    main()
