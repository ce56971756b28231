"""Whole rounds on one GPU: flrce, a plain PyTorch loop and pfl-research, the same work in turn.

    PYTHONPATH=src python3 benchmarks/h200_peers.py [--networks cnn,resnet-8] [--passes 2] [--rounds
    8]

The work is that of bench.py (peers/work.py), samples and network on the GPU for everybody. Each
pass starts every peer in a process of its own; the first rounds, in which kernels are recorded and
ways are measured, are left out. pfl must be importable (PYTHONPATH); a peer that cannot run is
named with its reason. Writes h200-peers.{json,md} to $OUT, or to benchmarks/results.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench import prepare

HERE = Path(__file__).resolve().parent
PEERS = {
    "flrce": ("ours.py", "--kernel", "auto"),
    "plain PyTorch loop": ("plain.py",),
    "pfl-research": ("pfl_peer.py",),
}
WARM = 3


def rounds_of(
    script: tuple[str, ...], folder: Path, network: str, rounds: int, seed: int, device: str
) -> list[dict[str, Any]]:
    name, *more = script
    command = [
        sys.executable,
        HERE / "peers" / name,
        *more,
        "--rounds",
        rounds,
        "--data",
        folder,
        "--seed",
        seed,
    ]
    given = {
        **os.environ,
        "FLRCE_BENCH_NETWORK": network,
        "FLRCE_BENCH_DEVICE": device,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, env=given
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"round"')]
    if done.returncode or len(lines) != rounds:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1][:200])
    return lines


def table(report: dict[str, Any]) -> str:
    lines = [
        "# Whole rounds beside others, on one GPU",
        "",
        (
            f"{report['device']}, torch {report['torch']}; {report['passes']} passes of everyone in"
            f" turn, {WARM} warm-up rounds left out; median (least-most) over rounds. Training 10"
            " clients and judging the model on all hold-outs."
        ),
        "",
        "| network | | ms a round | times flrce | steps | samples judged | accuracy at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, found in report["networks"].items():
        ours = found.get("flrce")
        base = (
            statistics.median(line["seconds"] for line in ours)
            if isinstance(ours, list)
            else float("nan")
        )
        for name, rounds in found.items():
            if isinstance(rounds, str):
                lines.append(f"| {network} | {name} | {rounds} | | | | |")
                continue
            ms = sorted(1e3 * line["seconds"] for line in rounds)
            middle, last = statistics.median(ms), rounds[-1]
            lines.append(
                f"| {network} | {name} | {middle:.1f} ({ms[0]:.1f}-{ms[-1]:.1f}) |"
                f" {middle / 1e3 / base:.1f} | {last['steps']} | {last['evaluated']} |"
                f" {last['accuracy']:.3f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--networks", default="cnn,resnet-8")
    ask.add_argument("--passes", type=int, default=2)
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--work", type=Path, default=HERE.parent / ".bench")
    ask.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE / "results")))
    given = ask.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    networks: dict[str, dict[str, Any]] = {name: {} for name in given.networks.split(",")}
    report = {
        "device": about,
        "torch": torch.__version__,
        "passes": given.passes,
        "networks": networks,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for network, found in networks.items():
        folder = given.work / f"gpu-{network}"
        prepare(folder, network)
        for seed in range(given.passes):
            for name, script in PEERS.items():
                try:
                    lines = rounds_of(script, folder, network, given.rounds, seed, device)
                    found.setdefault(name, []).extend(lines[WARM:])
                except (RuntimeError, subprocess.TimeoutExpired) as why:
                    found[name] = f"cannot run: {why}"
                (given.out / "h200-peers.json").write_text(json.dumps(report, indent=1) + "\n")
                (given.out / "h200-peers.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
