"""One command fills a GPU: the same runs in one process and in several, and how busy the GPU is
meanwhile.

    PYTHONPATH=src python3 benchmarks/h200_crowd.py [--runs 32] [--rounds 20] [--workers 1,4,8]

CIFAR-10 in Dirichlet shares, the paper's network, by `run_together` as `--seeds` does. The first
call, which compiles and measures, is left out. Writes crowd.{json,md} to $OUT, or to
benchmarks/results.
"""

import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

from flrce.config.experiment import Experiment
from flrce.simulation.runs import run_together

HERE = Path(__file__).resolve().parent
SMI = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200")
WORK = {
    "clients": 50,
    "per_round": 10,
    "recipe": {"name": "fedavg"},
    "train": {"epochs": 1, "batch": 64, "lr": 0.1},
    "data": {"name": "cifar10", "partition": "dirichlet", "alpha": 0.5},
}


class Watched:
    """The GPU's utilisation between entering and leaving; nothing where nobody tells."""

    def __enter__(self) -> "Watched":
        self.seen: list[float] = []
        try:
            self.smi: Any = subprocess.Popen(SMI, stdout=subprocess.PIPE, text=True)
        except OSError:
            self.smi = None
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self.smi.stdout:
            self.seen += [float(line)] if line.strip().isdigit() else []

    def __exit__(self, *_: object) -> None:
        if self.smi:
            self.smi.terminate()


def seconds(
    runs: int, rounds: int, workers: int, device: str, first: int
) -> tuple[float, list[float]]:
    engine = {"workers": workers, "eval_every": 5}
    made = [
        Experiment.from_tables(WORK | {"rounds": rounds, "seed": first + s, "engine": engine})
        for s in range(runs)
    ]
    with Watched() as gpu:
        begin = time.perf_counter()
        run_together([(exp, None) for exp in made], device=device)
        took = time.perf_counter() - begin
    return took, gpu.seen


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--runs", type=int, default=32)
    ask.add_argument("--rounds", type=int, default=20)
    ask.add_argument("--workers", default="1,4,8")
    ask.add_argument("--passes", type=int, default=2)
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE / "results")))
    given = ask.parse_args()
    counts = [int(each) for each in given.workers.split(",")]
    seconds(max(counts), 2, max(counts), given.device, 1000)
    rows: list[dict[str, Any]] = []
    for at in range(given.passes):
        for workers in counts:
            took, seen = seconds(given.runs, given.rounds, workers, given.device, at * given.runs)
            rows.append(
                {
                    "workers": workers,
                    "seconds": took,
                    "busy": statistics.mean(seen) if seen else None,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    about = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    lines = [
        "# Several processes on one GPU",
        "",
        (
            f"{about}, torch {torch.__version__}: {given.runs} runs of {given.rounds} rounds,"
            f" {given.passes} passes in turn; start of the processes included. Busy: nvidia-smi's"
            " utilisation, mean."
        ),
        "",
        "| processes | seconds | runs a minute | busy |",
        "|---|---|---|---|",
    ]
    for workers in counts:
        mine = [row for row in rows if row["workers"] == workers]
        took = [row["seconds"] for row in mine]
        busy = [row["busy"] for row in mine if row["busy"] is not None]
        each = ", ".join(f"{s:.1f}" for s in took)
        share = f"{statistics.mean(busy):.0f} %" if busy else ""
        lines.append(
            f"| {workers} | {each} | {60 * given.runs / statistics.mean(took):.0f} | {share} |"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "crowd.json").write_text(
        json.dumps({"device": about, "rows": rows}, indent=1) + "\n"
    )
    (given.out / "crowd.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
