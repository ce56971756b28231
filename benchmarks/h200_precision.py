"""What `engine.precision` does to a run's end: tf32 and bf16 against float32, seed by seed.

    PYTHONPATH=src python3 benchmarks/h200_precision.py --device cuda [--seeds 5] [--cases 0,1,2]

A process a precision and network, side by side. Writes precision.{json,md} to $OUT, or to
benchmarks/results: differences of the last five evaluations' mean to float32's, with Student's 95 %
interval over seeds.
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

HERE = Path(__file__).resolve().parent
BASE = {"per_round": 10, "recipe": {"name": "fedavg"}}
WRITERS = {"clients": 31, "data": {"name": "femnist", "partition": "natural"}}
#: what is trained, for how many rounds
CASES = {
    "cnn-emnist, FEMNIST's writers": {
        "rounds": 60,
        **WRITERS,
        "model": {"name": "cnn-emnist"},
        "train": {"epochs": 1, "batch": 32, "lr": 0.1},
    },
    "resnet-8, FEMNIST's writers": {
        "rounds": 60,
        **WRITERS,
        "model": {"name": "resnet-8"},
        "train": {"steps": 12, "batch": 32, "lr": 0.1},
    },
    "gru, Shakespeare's roles": {
        "rounds": 40,
        "clients": 50,
        "data": {"name": "shakespeare-tokens", "partition": "natural", "minimum": 40},
        "model": {"name": "gru", "options": {"embedding": 16, "width": 128, "layers": 1}},
        "train": {"steps": 10, "batch": 16, "lr": 2.0},
    },
}
PRECISIONS = ("float32", "tf32", "bf16")
STUDENT = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    8: 2.365,
    10: 2.262,
}  # 97.5 % by number of seeds


def ends(name: str, precision: str, seeds: int, device: str, beside: int) -> list[float]:
    """Where runs end, seed by seed; `beside`: processes that share the device's memory."""
    from flrce.config.experiment import Experiment
    from flrce.simulation.runs import run_in_process

    engine = {"precision": precision, "eval_every": 2}
    made = [
        Experiment.from_tables(BASE | CASES[name] | {"seed": 100 + s, "engine": engine})
        for s in range(seeds)
    ]
    found = run_in_process([(exp, None) for exp in made], device=device, beside=beside)
    return [
        statistics.mean(
            [r.last_model_metric for r in each.history if r.last_model_metric is not None][-5:]
        )
        for each in found
    ]


def table(report: dict[str, Any]) -> str:
    lines = [
        "# Precision of clients' products, and where runs end",
        "",
        (
            f"{report['device']}, torch {report['torch']}. FedAvg, 10 clients a round; mean of the"
            " last five evaluations' accuracy, in points; differences to float32 with the same"
            " seed, 95 % interval."
        ),
        "",
        "| network | seeds | float32 | tf32 | bf16 |",
        "|---|---|---|---|---|",
    ]
    for name, found in report["cases"].items():
        if not all(isinstance(found.get(each), list) for each in PRECISIONS):
            lines.append(f"| {name} | {found} | | | |")
            continue
        n = len(found["float32"])
        cells = [f"{100 * statistics.mean(found['float32']):.1f}"]
        for each in PRECISIONS[1:]:
            gaps = [100 * (a - b) for a, b in zip(found[each], found["float32"], strict=True)]
            cells.append(
                f"{statistics.mean(gaps):+.2f} ± {STUDENT[n] * statistics.stdev(gaps) / n**0.5:.2f}"
            )
        lines.append(f"| {name} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--device", default="cuda")
    ask.add_argument("--seeds", type=int, default=5, choices=sorted(STUDENT))
    ask.add_argument("--cases", default="0,1,2")
    ask.add_argument(
        "--beside", type=int, default=1, help="processes that share the device's memory"
    )
    ask.add_argument(
        "--one", nargs=2, help="CASE PRECISION: this one, its ends as json on the last line"
    )
    ask.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", HERE / "results")))
    given = ask.parse_args()
    if given.one:
        return print(
            json.dumps(ends(given.one[0], given.one[1], given.seeds, given.device, given.beside))
        )
    names = [list(CASES)[int(i)] for i in given.cases.split(",")]
    beside = len(names) * len(PRECISIONS)
    options = ["--device", given.device, "--seeds", str(given.seeds), "--beside", str(beside)]
    started = {
        (name, precision): subprocess.Popen(
            [sys.executable, __file__, *options, "--one", name, precision],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
        for precision in PRECISIONS
    }
    about = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    report: dict[str, Any] = {
        "device": about,
        "torch": torch.__version__,
        "cases": {name: {} for name in names},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for (name, precision), process in started.items():
        said = process.communicate()[0].strip().splitlines()
        report["cases"][name][precision] = "failed" if process.returncode else json.loads(said[-1])
        (given.out / "precision.json").write_text(json.dumps(report, indent=1) + "\n")
    (given.out / "precision.md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
