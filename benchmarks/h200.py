"""Client steps per second of the stacked trainer on one GPU, against a plain PyTorch loop and the
counted floor.

    PYTHONPATH=src python3 benchmarks/h200.py [--quick | --short] [--only paper | networks]

The paper's networks here, those of every other kind in h200_networks.py. Writes h200.{json,md} and
networks.{json,md} to $OUT, or to benchmarks/results. A client step: one SGD step of one client on
one batch. Random data: speed does not depend on it, and correctness is checked against float64 on
the CPU with fresh draws.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h200_networks
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.models.flat import make_layout, pack_model, unpack_model
from flrce.models.graph import build_layer_chain
from flrce.models.nets import PAPER_CNNS, build_network
from flrce.training.gpu.batch_trainer import ClientBatchTrainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, SHIFT, RATE, SAMPLES = 1 / 64, -2.0, 0.05, 10_000
#: network, classes, batch, lanes
SETTINGS = [
    ("cnn-cifar", 10, 128, (10, 60, 200, 600)),
    ("cnn-emnist", 62, 16, (60, 600)),
    ("cnn-speech", 35, 16, (60, 600)),
]


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each call, the device's queue empty before and after; one call warms
    up.
    """
    call()
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and float32 product rate, as found on this
    machine.
    """
    big = 1 << (28 if DEVICE == "cuda" else 22)
    a, b = torch.rand(big, device=DEVICE), torch.empty(big, device=DEVICE)
    copy_s = statistics.median(seconds(lambda: b.copy_(a), 10))
    n = 8192 if DEVICE == "cuda" else 512
    x, y = torch.randn(n, n, device=DEVICE), torch.randn(n, n, device=DEVICE)
    product_s = statistics.median(seconds(lambda: x @ y, 5))
    return {
        "copy_tb_s": 8 * big / copy_s / 1e12,
        "matmul_fp32_tflop_s": 2 * n**3 / product_s / 1e12,
    }


def floor(shape: tuple[int, ...], net: nn.Module, batch: int) -> dict[str, float]:
    """FLOPs of one client step, and the bytes it has to move if every layer's result goes through
    memory once.

    Per sample and layer: a convolution's output is written and read twice (pooling, backward);
    everything else is written, read, and its gradient written and read. Weights: read forward and
    backward, then read and written.
    """
    flops, moved = 0, 2 * int(np.prod(shape))  # the uint8 input, forward and backward
    for at, layer in enumerate(build_layer_chain(net, shape).layers):
        size = int(np.prod(layer.out))
        if layer.kind in ("conv", "linear"):
            taps = (
                int(np.prod(layer["kernel"])) * layer.inside[0]
                if layer.kind == "conv"
                else layer.inside[0]
            )
            flops += 2 * size * taps * (2 if at == 0 else 3)
        moved += 4 * size * {"conv": 3, "maxpool": 4, "linear": 4}.get(layer.kind, 0)
    return {
        "mflop": batch * flops / 1e6,
        "mbyte": (batch * moved + 16 * make_layout(net).trainable) / 1e6,
    }


def samples(shape: tuple[int, ...], classes: int, N: int = SAMPLES) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(int(time.time()))
    x = torch.randint(0, 256, (N, *shape), dtype=torch.uint8, generator=rng)
    return x, torch.randint(0, classes, (N,), generator=rng)


def plans(N: int, lanes: int, sizes: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng()
    return [rng.integers(0, N, sum(sizes)) for _ in range(lanes)], [np.array(sizes)] * lanes


def loop(
    net: nn.Module, x: Tensor, y: Tensor, order: np.ndarray, sizes: np.ndarray, dtype: torch.dtype
) -> nn.Module:
    """The plain loop: torch's own layers, autograd and SGD, one client after another."""
    net = net.to(dtype).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for index in torch.from_numpy(order).to(x.device).split(sizes.tolist()):
        optimizer.zero_grad()
        F.cross_entropy(net(x[index].to(dtype) * SCALE + SHIFT), y[index]).backward()
        optimizer.step()
    return net


def errors(
    net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, batch: int
) -> dict[str, Any]:
    """Relative distance of three steps' update from float64 on the CPU, for the stack and for plain
    torch here.
    """
    stack = ClientBatchTrainer(net, shape, x, y, SCALE, SHIFT, DEVICE)
    lanes, sizes = 3, [batch, batch - 5, batch // 2]
    orders, steps = plans(len(x), lanes, sizes)
    w = pack_model(net)[None] * (1 + 0.1 * torch.rand(lanes, make_layout(net).size))
    out = stack.train(w, orders, steps, RATE)[0]
    again = stack.train(w, orders, steps, RATE)[0]
    worst, plain = 0.0, 0.0
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        for i in range(lanes):
            exact = pack64(
                loop(
                    unpack_model(copy.deepcopy(net), w[i]), x, y, orders[i], steps[i], torch.float64
                )
            )
            here = unpack_model(copy.deepcopy(net), w[i]).to(DEVICE)
            here = pack64(
                loop(here, x.to(DEVICE), y.to(DEVICE), orders[i], steps[i], torch.float32)
            )
            size = (exact - w[i].double()).norm()
            worst = max(worst, float((out[i].double() - exact).norm() / size))
            plain = max(plain, float((here - exact).norm() / size))
    return {"stack": worst, "plain_torch": plain, "same_bits_twice": torch.equal(out, again)}


def pack64(net: nn.Module) -> Tensor:
    parts = [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in parts])


def stacked(
    stack: ClientBatchTrainer, net: nn.Module, lanes: int, batch: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Whole calls of train(): plans up, vectors in, every step, vectors and losses out."""
    orders, sizes = plans(SAMPLES, lanes, [batch] * steps)
    w = pack_model(net).to(DEVICE).repeat(lanes, 1)
    times = seconds(lambda: stack.train(w, orders, sizes, RATE), repeats)
    each = [1e6 * t / (lanes * steps) for t in times]
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    median = statistics.median(each)
    return {
        "lanes": lanes,
        "us_per_step": median,
        "min": min(each),
        "max": max(each),
        "steps_per_s": 1e6 / median,
        "peak_gib": peak,
    }


def skewed(
    stack: ClientBatchTrainer, net: nn.Module, batch: int, short: int, long: int
) -> dict[str, float]:
    """59 clients of `short` steps beside one of `long`: seconds, and what a lockstep of 60 lanes
    would take.
    """
    orders, sizes = plans(SAMPLES, 60, [batch] * short)
    big = plans(SAMPLES, 1, [batch] * long)
    w = pack_model(net).to(DEVICE).repeat(60, 1)
    spent = min(
        seconds(lambda: stack.train(w, [*orders[1:], *big[0]], [*sizes[1:], *big[1]], RATE), 2)
    )
    return {"short_steps": short, "long_steps": long, "seconds": spent}


def measure(
    name: str,
    classes: int,
    batch: int,
    lanes: tuple[int, ...],
    quick: bool,
    limits: dict[str, float],
) -> dict[str, Any]:
    shape = PAPER_CNNS[name][0]
    net = build_network(name, shape, classes, seed=0)
    x, y = samples(shape, classes)
    bound = floor(shape, net, batch)
    bound["us_arithmetic"] = bound["mflop"] / limits["matmul_fp32_tflop_s"]
    bound["us_memory"] = bound["mbyte"] / limits["copy_tb_s"]
    order, sizes = plans(len(x), 1, [batch] * (3 if quick else 50))
    here, gx, gy = copy.deepcopy(net).to(DEVICE), x.to(DEVICE), y.to(DEVICE)
    times = seconds(
        lambda: loop(here, gx, gy, order[0], sizes[0], torch.float32), 1 if quick else 5
    )
    plain = 1e6 * statistics.median(times) / len(sizes[0])
    result: dict[str, Any] = {
        "network": name,
        "batch": batch,
        "floor": bound,
        "plain_us_per_step": plain,
        "stacked": [],
    }
    result["error"] = errors(net, shape, x, y, batch)
    stack = ClientBatchTrainer(net, shape, x, y, SCALE, SHIFT, DEVICE)
    for k in lanes:
        row = stacked(stack, net, k, batch, 2 if quick else 15, 1 if quick else 5)
        row["times_plain"] = plain / row["us_per_step"]
        row["times_floor"] = row["us_per_step"] / max(bound["us_arithmetic"], bound["us_memory"])
        result["stacked"].append(row)
        print(
            f"{name} B={batch} lanes={k}: {row['us_per_step']:.1f} us, {row['times_plain']:.0f}x"
            " plain",
            flush=True,
        )
    result["skewed"] = (
        skewed(stack, net, batch, 2, 5) if quick else skewed(stack, net, batch, 20, 1000)
    )
    w, index = pack_model(net).to(DEVICE).repeat(6, 1), np.arange(len(x) if not quick else 300)
    result["evaluate_us_per_sample"] = (
        1e6 * min(seconds(lambda: stack.evaluate(w, index), 3)) / (6 * len(index))
    )
    return result


def table(report: dict[str, Any]) -> str:
    found = report["ceilings"]
    lines = [
        f"# Stacked trainer on {report['device']}",
        "",
        (
            f"torch {report['torch']}, triton {report['triton']}, float32; TF32 off (convolution's"
            " weight gradient:"
        ),
        (
            f"three TF32 products each). Copy {found['copy_tb_s']:.2f} TB/s, product"
            f" {found['matmul_fp32_tflop_s']:.1f} TFLOP/s."
        ),
        (
            "One warm-up, median of 5 whole `train` calls of 15 steps (spread in the json); times"
            " are per client step."
        ),
        "",
        (
            "| network | batch | lanes | plain us | stacked us | client steps/s | times plain |"
            " floor us | times floor |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        bound = max(r["floor"]["us_arithmetic"], r["floor"]["us_memory"])
        for s in r["stacked"]:
            cells = [
                r["network"],
                r["batch"],
                s["lanes"],
                f"{r['plain_us_per_step']:.0f}",
                f"{s['us_per_step']:.1f}",
                f"{s['steps_per_s']:,.0f}",
                f"{s['times_plain']:.0f}",
                f"{bound:.1f}",
                f"{s['times_floor']:.1f}",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        (
            "Error: distance of three steps' update from float64 on the CPU, over the update's"
            " norm, worst of 3 clients:"
        ),
        (
            "about 5e-7, or 1e-5 to 1e-3 where a max-pool or ReLU decides the other way in float32,"
            " as in plain torch too."
        ),
        (
            "Skewed: seconds for 59 clients of 20 steps beside one of 1000. Evaluate: us per"
            " sample, 6 models at once."
        ),
        "",
        (
            "| network | error, stack | error, plain torch | same bits twice | skewed s | evaluate"
            " us |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        e = r["error"]
        cells = [
            r["network"],
            f"{e['stack']:.1e}",
            f"{e['plain_torch']:.1e}",
            e["same_bits_twice"],
            f"{r['skewed']['seconds']:.2f}",
            f"{r['evaluate_us_per_sample']:.2f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that the script runs"
    )
    parser.add_argument(
        "--short", action="store_true", help="10 and 60 lanes of the paper's networks only"
    )
    parser.add_argument("--only", choices=("paper", "networks"))
    parser.add_argument(
        "--out", default=os.environ.get("OUT", str(Path(__file__).parent / "results"))
    )
    args = parser.parse_args()
    if args.only != "networks":
        paper(args)
    if args.only != "paper":
        h200_networks.main(["--out", args.out, *["--quick"] * args.quick])


def paper(args: argparse.Namespace) -> None:
    """The stacked trainer on the paper's networks."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "absent"
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU ({platform.machine()})"
    report = {
        "device": device,
        "torch": torch.__version__,
        "triton": version,
        "ceilings": ceilings(),
        "results": [],
    }
    for name, classes, batch, lanes in SETTINGS:
        few = (2,) if args.quick else tuple(k for k in lanes if not args.short or k <= 60)
        report["results"].append(
            measure(name, classes, 8 if args.quick else batch, few, args.quick, report["ceilings"])
        )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "h200.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "h200.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
