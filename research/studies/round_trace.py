"""What one round visits: files and functions of flrce, and how often a run builds its recipe.

    python research/studies/round_trace.py

FedAvg on the embedded digits, three rounds with one worker; everything that the second round calls
counts, from the end of the first round to the end of the second, in all threads.
"""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import flrce
from flrce import Experiment

PACKAGE = str(Path(flrce.__file__).parent) + "/"
BUILD = ("compose_recipe", "compose.py")


class Trace:
    """A profile function that notes functions of the package while `active`."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, int, str]] = set()
        self.builds, self.active = 0, False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == BUILD[0] and code.co_filename.endswith(BUILD[1]):
            self.builds += 1
        if self.active:
            self.functions.add((code.co_filename, code.co_firstlineno, code.co_name))

    def watch(self, done: Any) -> None:
        self.active = done.record.t == 1

    def count_files(self) -> int:
        return len({file for file, _, _ in self.functions})


def trace_run(engine: str) -> Trace:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        experiment = Experiment(
            data={"name": "digits"},
            clients=8,
            per_round=4,
            rounds=3,
            recipe={"name": "fedavg"},
            engine={"name": engine, "workers": 1, "kernel": "torch"},
        )
        flrce.run(experiment, watch=trace.watch)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return trace


def main() -> None:
    print("| engine | files | functions | recipe built, times a run |\n|---|---|---|---|")
    for engine in ("simulator", "flower"):
        trace = trace_run(engine)
        print(f"| {engine} | {trace.count_files()} | {len(trace.functions)} | {trace.builds} |")
        if "--files" in sys.argv:
            print("\n".join(sorted({file[len(PACKAGE) :] for file, _, _ in trace.functions})))


if __name__ == "__main__":
    main()
