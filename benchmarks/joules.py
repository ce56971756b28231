"""Joules predicted against joules measured, on a GPU's own energy counter (NVML), over networks and
batch sizes.

    PYTHONPATH=src python benchmarks/joules.py --out DIR [--seconds 120]
    PYTHONPATH=src python benchmarks/joules.py --read DIR          # tables of what was measured

Models of a training step's joules, each fitted by relative least squares and tried on what was not
fitted: a network that none of the others is (leave one network out), and a batch size (leave one
size out).

- watts: constant power times measured time: what a data sheet and a stopwatch give;
- linear: a + b FLOPs: flrce's profiles (a batch's fixed cost, a rate);
- launches: a tensors + b FLOPs: the fixed cost by how much is launched, counted as tensors that are
  trained;
- operations: a operations + b bytes, as the step's operations are dispatched: no time need be
  measured;
- traffic: a seconds + b bytes: power that is drawn whatever happens, and what moving data costs on
  top.

Which form is best was not decided beforehand, so that the best of them is flattered by having been
looked for. `chosen` is what an honest search gives: all forms of one or two quantities (seconds,
FLOPs, operations, bytes, tensors, 1), for each network that is left out the one that leaves the
others best, one by one. `untimed` the same without seconds.
"""

import argparse
import ctypes
import itertools
import json
import math
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flrce.devices.costs import training_flops
from flrce.models.nets import build_network

#: network -> (shape of a sample, outputs)
NETWORKS = {
    "cnn-digits": ((1, 8, 8), 10), "cnn-emnist": ((1, 28, 28), 62), "cnn-speech": ((1, 32, 32), 30),
    "cnn-cifar": ((3, 32, 32), 10), "resnet-8": ((3, 32, 32), 10), "resnet-20": ((3, 32, 32), 10),
    "resnet-18": ((3, 32, 32), 10), "mlp": ((3, 32, 32), 10),
}  # fmt: skip
SIZES = (16, 64, 256, 1024)
#: model -> the quantities that its joules are linear in
MODELS = {
    "watts": ("seconds",),
    "linear": ("one", "flops"),
    "launches": ("tensors", "flops"),
    "operations": ("operations", "bytes"),
    "traffic": ("seconds", "bytes"),
}
QUANTITIES = ("seconds", "flops", "operations", "bytes", "tensors", "one")
#: operations that only look at a tensor another way: nothing is launched for them
VIEWS = (
    "view",
    "detach",
    "t.default",
    "expand",
    "alias",
    "as_strided",
    "unsqueeze",
    "transpose",
    "slice",
    "permute",
    "select",
)


class Counter:
    """The GPU's energy counter in joules; without a GPU, seconds stand in, so that the rest can be
    tried.
    """

    def __init__(self, device):
        self.device, self.handle = device, ctypes.c_void_p()
        if device == "cuda":
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
            self.ask("nvmlInit_v2")
            self.ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.handle))
        self.unit = "J" if device == "cuda" else "s (no GPU)"

    def ask(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise SystemExit(
                f"{name} failed with code {code}: this GPU has no energy counter that may be read"
            )

    def read(self):
        if self.device != "cuda":
            return time.perf_counter()
        torch.cuda.synchronize()
        value = ctypes.c_ulonglong()
        self.ask("nvmlDeviceGetTotalEnergyConsumption", self.handle, ctypes.byref(value))
        return value.value / 1e3


def stepper(name, size, device):
    """One training step of a network, and its FLOPs and trained tensors."""
    shape, outputs = NETWORKS[name]
    net = build_network(name, shape, outputs, 0).to(device)
    flops = training_flops(build_network(name, shape, outputs, 0), shape) * size
    x, y = torch.rand(size, *shape, device=device), torch.arange(size, device=device) % outputs
    optimiser = torch.optim.SGD(net.parameters(), 1e-9)

    def step():
        optimiser.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()

    return step, flops, sum(p.requires_grad for p in net.parameters())


class Dispatched(TorchDispatchMode):
    """Counts operations, and the bytes of what they read and write."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not any(word in op.__name__ for word in VIEWS):
            self.operations += 1
            given = [*args, *(out if isinstance(out, tuple | list) else [out])]
            self.bytes += sum(
                x.numel() * x.element_size() for x in given if isinstance(x, torch.Tensor)
            )
        return out


def counted(row):
    """The row with its step's operations and bytes; they are the same on every device."""
    if "operations" in row:
        return row
    step, _, _ = stepper(row["net"], row["size"], "cpu")
    step()  # what is made by the first step only
    with Dispatched() as seen:
        step()
    return {**row, "operations": seen.operations, "bytes": seen.bytes}


def measure(name, size, counter, lasts):
    """Seconds and joules of a step, over at least `lasts` seconds after a warm-up."""
    step, flops, tensors = stepper(name, size, counter.device)
    for _ in range(5):
        step()
    began, before, steps = time.perf_counter(), counter.read(), 0
    while time.perf_counter() - began < lasts:
        for _ in range(10):
            step()
        steps += 10
        if counter.device == "cuda":
            torch.cuda.synchronize()
    joules, seconds = counter.read() - before, time.perf_counter() - began
    return {
        "net": name,
        "size": size,
        "flops": flops,
        "tensors": tensors,
        "steps": steps,
        "seconds": seconds / steps,
        "joules": joules / steps,
    }


def idle(counter, lasts):
    time.sleep(1.0)
    before, began = counter.read(), time.perf_counter()
    time.sleep(lasts)
    return (counter.read() - before) / (time.perf_counter() - began)


def features(names, rows):
    """(n, p) what a model's joules are linear in; none of it is below 0."""
    return np.array(
        [[1.0 if name == "one" else row[name] for name in names] for row in rows], float
    )


def fitted(names, rows):
    from scipy.optimize import nnls

    y, X = np.array([row["joules"] for row in rows]), features(names, rows)
    scale = X.max(0)
    found, _ = nnls(X / scale / y[:, None], np.ones(len(y)))
    return found / scale


def folds(rows, key):
    """(rows that share a `key`, the others), for each value of it."""
    for value in dict.fromkeys(row[key] for row in rows):
        yield [row for row in rows if row[key] == value], [row for row in rows if row[key] != value]


def errors(names, rows, key):
    """Relative errors of every row as predicted by a fit without the rows that share its `key`."""
    found = [
        (row, guess)
        for out, rest in folds(rows, key)
        for row, guess in zip(out, features(names, out) @ fitted(names, rest), strict=True)
    ]
    return [(row, float(guess / row["joules"] - 1)) for row, guess in found]


def searched(rows, key, quantities):
    """Errors where the form itself is chosen without what is left out, and how often each form
    was.
    """
    forms = [form for count in (1, 2) for form in itertools.combinations(quantities, count)]
    found, won = [], {}
    for out, rest in folds(rows, key):
        best = min(
            forms, key=lambda form: statistics.mean(missed(e) for _, e in errors(form, rest, key))
        )
        won[best] = won.get(best, 0) + 1
        guess = features(best, out) @ fitted(best, rest)
        found += [
            (row, float(each / row["joules"] - 1)) for row, each in zip(out, guess, strict=True)
        ]
    return found, won


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


def page(results):
    """The results as a page."""
    rows = [counted(row) for row in results["rows"]]
    lines = [
        "# Joules predicted and measured",
        "",
        (
            f"{results['hardware']}; idle {results['idle_watts']:.0f} W. One training step,"
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
    lines += ["", "Forms that the search took, and for how many of what was left out:", "", *notes]
    lines += ["", "| network | batch | GFLOP | operations | MB | ms | J | W |", "|" + 8 * "---|"]
    lines += [
        f"| {r['net']} | {r['size']} | {r['flops'] / 1e9:.3g} | {r['operations']} |"
        f" {r['bytes'] / 1e6:.3g} | {1e3 * r['seconds']:.2f} | {r['joules']:.3g} |"
        f" {r['joules'] / r['seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="for all of it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options = parser.parse_args()
    if options.read:
        results = json.loads((options.read / "joules.json").read_text())
        (options.read / "joules.md").write_text(page(results))
        print(page(results))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    names, sizes = options.networks.split(","), [int(size) for size in options.sizes.split(",")]
    lasts = max(0.2, (options.seconds - 15) / (len(names) * len(sizes)) - 0.6)
    counter, began = Counter(options.device), time.monotonic()
    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    driver = ""
    if options.device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        driver = (
            ", driver and limit "
            + subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        )
    results = {
        "hardware": f"{gpu}, torch {torch.__version__}{driver}",
        "lasts": round(lasts, 2),
        "unit": counter.unit,
        "idle_watts": idle(counter, min(4.0, lasts)),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        for name in names:
            if time.monotonic() - began < options.seconds - lasts:
                results["rows"].append(measure(name, size, counter, lasts))
                (options.out / "joules.json").write_text(json.dumps(results, indent=1))
                print(results["rows"][-1], flush=True)


if __name__ == "__main__":
    main()
