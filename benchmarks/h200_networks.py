"""Networks of every kind on one GPU: client steps of the variant that the engine would choose, against
plain PyTorch.

    PYTHONPATH=src python3 benchmarks/h200_networks.py [--others] [--quick] [--cases 0,3]

Writes networks.json and networks.md to $OUT, or to benchmarks/results; with --others, which
measures more kinds of networks with 10 lanes in float32 only, others.json and others.md. The loop
and the chosen way take turns: calls of 50 steps of the loop, and whole calls of 8 of the way,
results included. TF32 is off in both unless a row says so. Random data: speed does not depend on
it.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import CASES, Case
from others import OTHERS
from torch import Tensor, nn

from flrce.models.flat import pack_model
from flrce.models.inputs import scale_inputs
from flrce.training.gpu.batch_trainer import ClientBatchTrainer
from flrce.training.gpu.variants import Variant
from flrce.training.precision import autocast_network, use_precision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE, STEPS = 0.05, 8
SMI = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
Row = tuple[int, str, int]  # case, precision, lanes


@dataclass(frozen=True)
class Listing:
    """Networks to measure, in which rows. `turns`: of the loop and the way; `asks`: whether
    nvidia-smi is asked.
    """

    name: str
    title: str
    cases: Sequence[Case]
    rows: Sequence[Row]
    turns: int
    asks: bool


def usual() -> list[Row]:
    """Everything in float32 with 10 lanes and, but for ResNet-18, 60; some in other precisions."""
    found: list[Row] = []
    for i in range(len(CASES)):
        found += [(i, "float32", lanes) for lanes in ((10,) if i == 3 else (10, 60))]
    return [
        *found,
        (3, "tf32", 10),
        (3, "bf16", 10),
        (1, "tf32", 10),
        (5, "bf16", 10),
        (4, "tf32", 10),
    ]


NETWORKS = Listing(
    "networks", "Networks of every kind, many clients at once", CASES, usual(), turns=5, asks=True
)
MORE = Listing(
    "others",
    "More kinds of networks, many clients at once",
    OTHERS,
    [(i, "float32", 10) for i in range(len(OTHERS))],
    turns=3,
    asks=False,
)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(call: Any) -> float:
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=RATE)


def loop(
    case: Case,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    order: np.ndarray,
    sizes: np.ndarray,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """The plain loop: torch's own layers, autograd and SGD, one client after another."""
    net = net.train()
    optimizer = optimizer or sgd(net)
    objective, dtype = case.objective, next(net.parameters()).dtype
    for index in torch.from_numpy(order).to(x.device).split(sizes.tolist()):
        batch = scale_inputs(x[index], *case.scaling)
        optimizer.zero_grad()
        objective.losses(
            net(batch.to(dtype) if batch.is_floating_point() else batch), y[index]
        ).mean().backward()
        optimizer.step()
    return net


def flops(case: Case) -> float:
    """Of one client step: products forward, by inputs and by weights; those by weights only where
    these train.
    """
    return case.batch * products(
        case.net(), scale_inputs(case.samples(1, 0)[0], *case.scaling), training=True
    )


def products(net: nn.Module, x: Tensor, training: bool = False) -> float:
    """FLOPs of the layers' products for x: forward, and in training by inputs, and by weights where
    these train.
    """
    total = 0.0

    def note(layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        nonlocal total
        times = (
            2
            if not training
            else 6
            if any(p.requires_grad for p in layer.parameters(recurse=False))
            else 4
        )
        if isinstance(layer, nn.Linear):
            total += times * given[0].numel() * layer.out_features
        elif isinstance(layer, nn.Conv1d | nn.Conv2d):
            total += times * out.numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.ConvTranspose2d):
            total += times * given[0].numel() * layer.weight[0].numel()
        elif isinstance(layer, nn.RNNBase):
            total += (
                times
                * given[0].shape[0]
                * given[0].shape[1]
                * sum(p.numel() for p in layer.parameters())
            )
        elif isinstance(layer, nn.MultiheadAttention):  # torch's own, whose products are no layers
            tokens, width = out[0].numel() // layer.embed_dim, layer.embed_dim
            total += times * tokens * width * (4 * width + 2 * out[0].shape[1])

    for layer in net.modules():
        layer.register_forward_hook(note)
    with torch.no_grad():
        net.eval()(x)
    return total


def traffic(case: Case) -> float:
    """Bytes that one client step has to move if every layer's result goes through memory once.

    A layer's output is written and read, and so is its gradient; weights are read forward and
    backward, then read and written. Layers that act value by value (ReLU, a sum) could be part of
    the layer before: they do not count.
    """
    total = 0

    def note(layer: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        nonlocal total
        if list(layer.parameters(recurse=False)):
            total += (out[0] if isinstance(out, tuple) else out).numel()

    net = case.net().eval()
    for layer in net.modules():
        layer.register_forward_hook(note)
    with torch.no_grad():
        net(scale_inputs(case.samples(1, 0)[0], *case.scaling))
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    return 4.0 * 4 * (total * case.batch + trained)


def undropped(net: nn.Module) -> nn.Module:
    """The network, or a copy in which nothing is dropped: which values the loop drops is no
    lane's.
    """
    dropping = (nn.Dropout, nn.RNNBase, nn.MultiheadAttention)
    shares = [
        layer.p if isinstance(layer, nn.Dropout) else layer.dropout for layer in _of(net, dropping)
    ]
    if not any(shares):
        return net
    net = copy.deepcopy(net)
    for layer in _of(net, dropping):
        setattr(layer, "p" if isinstance(layer, nn.Dropout) else "dropout", 0.0)
    return net


def _of(net: nn.Module, kinds: tuple[type, ...]) -> list[Any]:
    return [layer for layer in net.modules() if isinstance(layer, kinds)]


def errors(
    case: Case, stack: ClientBatchTrainer, net: nn.Module, x: Tensor, y: Tensor, variant: Variant
) -> dict[str, Any]:
    """Relative distance of three steps' update from float64, for the way and for plain float32;
    same bits twice.
    """
    quiet = undropped(net)
    if quiet is not net:
        net, stack = quiet, stacked(case, quiet, x, y)
    batch = min(case.batch, len(x) - 1)
    sizes = [np.array([batch, batch - 1, batch // 2 + 1])] * 2
    orders = [np.random.default_rng(i).integers(0, len(x), s.sum()) for i, s in enumerate(sizes)]
    w = pack_model(net).to(DEVICE).repeat(2, 1)
    out, again = (
        stack.train(w, orders, sizes, RATE, variant=variant)[0].cpu().double() for _ in range(2)
    )
    found = {"way": 0.0, "plain": 0.0, "same_bits_twice": torch.equal(out, again)}
    start = pack_model(net).double()
    with use_precision():
        for i in range(2):
            ends = []
            for dtype in (torch.float64, torch.float32):
                here = loop(case, copy.deepcopy(net).to(DEVICE, dtype), x, y, orders[i], sizes[i])
                ends.append(_packed64(here))
            size = (ends[0] - start).norm()
            found["way"] = max(found["way"], float((out[i] - ends[0]).norm() / size))
            found["plain"] = max(found["plain"], float((ends[1] - ends[0]).norm() / size))
    return found


def _packed64(net: nn.Module) -> Tensor:
    parts = [p for p in net.parameters() if p.requires_grad] + [
        b for b in net.buffers() if b.is_floating_point()
    ]
    return torch.cat([p.detach().cpu().double().reshape(-1) for p in parts])


def busy(call: Any, least: float = 1.5) -> float | None:
    """The GPU's utilisation while calls follow each other for so many seconds; None: nobody
    tells.
    """
    if DEVICE != "cuda":
        return None
    asked = None
    begin = time.perf_counter()
    while time.perf_counter() - begin < least:
        call()
        if asked is None and time.perf_counter() - begin > least / 2:
            asked = subprocess.Popen(SMI, stdout=subprocess.PIPE, text=True)
    try:
        return float(asked.communicate(timeout=5)[0].split()[0]) if asked else None
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def stacked(
    case: Case, net: nn.Module, x: Tensor, y: Tensor, precision: str = "float32"
) -> ClientBatchTrainer:
    memory = None if DEVICE == "cuda" else 8 << 30
    return ClientBatchTrainer(
        net,
        tuple(x.shape[1:]),
        x,
        y,
        *case.scaling,
        DEVICE,
        memory,
        case.objective,
        precision=precision,
    )


def measure(
    case: Case, precision: str, lanes: int, turns: int, asks: bool, quick: bool
) -> dict[str, Any]:
    N, steps, batch = (60, 2, 4) if quick else (4000, STEPS, case.batch)
    net = case.net()
    x, y = (each.to(DEVICE) for each in case.samples(N, int(time.time())))
    stack = stacked(case, net, x, y, precision)
    rng = np.random.default_rng()
    orders, sizes = (
        [rng.integers(0, N, batch * steps) for _ in range(lanes)],
        [np.array([batch] * steps)] * lanes,
    )
    w = pack_model(net).to(DEVICE).repeat(lanes, 1)

    def tried(variant: Variant, steps: int = 2) -> float:
        few, counts = [order[: batch * steps] for order in orders], [s[:steps] for s in sizes]
        call = partial(stack.train, w, few, counts, RATE, variant=variant)
        call()
        found = min(seconds(call) for _ in range(2))
        stack.free_buffers()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        return found

    seen = {v: tried(v) for v in stack.candidates if stack.supports(v)}
    variant = stack.default_variant
    plain = autocast_network(copy.deepcopy(net).to(DEVICE), torch.device(DEVICE), precision)
    call = partial(stack.train, w, orders, sizes, RATE, variant=variant)
    call()
    slow, fast = [], []
    with use_precision(precision):
        # long calls with one optimizer: what a call costs beside its steps must not count against
        # the loop
        many = 2 if quick else 50
        order, size = rng.integers(0, N, batch * many), np.array([batch] * many)
        one = partial(loop, case, plain, x, y, order, size, sgd(plain))
        one()
        for _ in range(1 if quick else turns):  # in turn, so that both see the same machine
            slow.append(seconds(one) / many)
            fast.append(seconds(call) / (steps * lanes))
    row = {
        "network": case.name,
        "floats": stack.where.trainable,
        "precision": precision,
        "batch": batch,
        "lanes": lanes,
        "way": variant.value,
        "plain_us": 1e6 * statistics.median(slow),
        "us": 1e6 * statistics.median(fast),
        "us_range": [1e6 * min(fast), 1e6 * max(fast)],
        "plain_range": [1e6 * min(slow), 1e6 * max(slow)],
        "times": statistics.median(slow) / statistics.median(fast),
        "mflop": flops(case) / 1e6,
        "mbyte": traffic(case) / 1e6,
        "tried_ms": {v.value: 1e3 * s for v, s in seen.items()},
    }
    if asks:
        row["busy"] = busy(call)
    if lanes <= 10 and precision == "float32":
        row["error"] = errors(case, stack, net, x, y, variant)
    if DEVICE == "cuda":
        row["gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return row


def ceilings() -> dict[str, float]:
    """Products a second in each precision and bytes a second of a copy, as found on this
    machine.
    """
    n = 8192 if DEVICE == "cuda" else 256
    a = torch.randn(n, n, device=DEVICE)
    found = {}
    for precision in ("float32", "tf32", "bf16"):
        b = a.bfloat16() if precision == "bf16" else a
        with use_precision(precision):
            product = partial(torch.mm, b, b)
            found[precision] = 2 * n**3 / min(seconds(product) for _ in range(5)) / 1e12
    big = torch.rand(1 << (28 if DEVICE == "cuda" else 20), device=DEVICE)
    there = torch.empty_like(big)
    copied = min(seconds(partial(there.copy_, big)) for _ in range(5))
    return {
        "tflops": found["float32"],
        "tflops_by": found,
        "copy_tb_s": 2 * big.nbytes / copied / 1e12,
    }


def floor_us(row: dict[str, Any], about: dict[str, Any]) -> tuple[float, str]:
    """What a step takes at least: its products or its memory traffic, whichever is longer."""
    arithmetic = row["mflop"] / about["tflops_by"][row["precision"]]
    memory = row["mbyte"] / about["copy_tb_s"]
    return (arithmetic, "products") if arithmetic > memory else (memory, "memory")


def table(listing: Listing, about: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = about["rows"]
    asked = " Busy: the GPU's utilisation by nvidia-smi while the way runs." if listing.asks else ""
    lines = [
        f"# {listing.title}",
        "",
        (
            f"{about['device']}, torch {about['torch']}. Products a second: float32"
            f" {about['tflops']:.0f} TFLOP/s, TF32 {about['tflops_by']['tf32']:.0f}, bf16"
            f" {about['tflops_by']['bf16']:.0f}; copy {about['copy_tb_s']:.1f} TB/s."
        ),
        (
            "The floor is a step's products at that rate, or every layer's result through memory"
            f" once. Median of {listing.turns} turns"
        ),
        f"(least-most); times are per client step.{asked}",
        "",
        (
            "| network | floats | batch | precision | lanes | plain us | us | times plain | floor"
            " us | times floor | busy | way |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "failed" in r:
            lines.append(
                f"| {r['network']} | | | {r['precision']} | {r['lanes']} | | {r['failed']} | | |"
                " | | |"
            )
            continue
        low, high = r["us_range"]
        least, by = floor_us(r, about)
        cells = [
            r["network"],
            f"{r['floats']:,}",
            r["batch"],
            r["precision"],
            r["lanes"],
            f"{r['plain_us']:.0f}",
            f"{r['us']:.1f} ({low:.1f}-{high:.1f})",
            f"**{r['times']:.1f}**",
            f"{least:.1f} ({by})",
            f"{r['us'] / least:.1f}",
            f"{r['busy']:.0f} %" if r.get("busy") is not None else "",
            r["way"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        (
            "Error: distance of three steps' update from float64 over the update's norm, worst of"
            " two clients."
        ),
        "",
        "| network | error | plain float32's | same bits twice |",
        "|---|---|---|---|",
    ]
    for r in rows:
        if "error" in r:
            e = r["error"]
            lines.append(
                f"| {r['network']} | {e['way']:.1e} | {e['plain']:.1e} | {e['same_bits_twice']} |"
            )
    return "\n".join(lines) + "\n"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that the script runs"
    )
    parser.add_argument("--others", action="store_true", help="the networks of others.py")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further row after so many"
    )
    parser.add_argument("--cases", default="")
    parser.add_argument(
        "--out", default=os.environ.get("OUT", str(Path(__file__).parent / "results"))
    )
    args = parser.parse_args(given)
    begin = time.perf_counter()
    listing = MORE if args.others else NETWORKS
    rates = ceilings()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, **rates, "rows": []}
    wanted = [int(i) for i in args.cases.split(",")] if args.cases else range(len(listing.cases))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [(i, precision, 2 if args.quick else lanes) for i, precision, lanes in listing.rows]
    for i, precision, lanes in dict.fromkeys(rows):
        if i not in wanted or time.perf_counter() - begin > args.seconds:
            continue
        case = listing.cases[i]
        try:
            row = measure(case, precision, lanes, listing.turns, listing.asks, args.quick)
        except Exception as why:  # a row that fails must not cost the others
            row = {
                "network": case.name,
                "precision": precision,
                "lanes": lanes,
                "failed": repr(why)[:200],
            }
        report["rows"].append(row)
        print(json.dumps(row), f"{time.perf_counter() - begin:.0f} s", flush=True)
        (out / f"{listing.name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / f"{listing.name}.md").write_text(table(listing, report))
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    print((out / f"{listing.name}.md").read_text())


if __name__ == "__main__":
    main()
