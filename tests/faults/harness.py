"""A small run that uses every kind of memory, children to kill, and the bytes to compare
afterwards.
"""

import os
import signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from flrce.config.experiment import Experiment
from flrce.data.sources import load_source
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.storage import failpoint

#: what must be byte-identical after any disturbance
FILES = (
    "experiment.toml",
    "rounds.jsonl",
    "clients.jsonl",
    "relations.jsonl",
    "partition.json",
    "summary.json",
    "model.safetensors",
    "relations.safetensors",
)
DATA = load_source("digits", None)
#: anchors are tables by round, the tail mean too; error feedback makes clients keep a residual
EVERYTHING = {
    "name": "flrce-topk",
    "preset": "authors",
    "stop": "never",
    "average": {"piece": "tail", "last": 2},
}
#: worker processes, so that there is somebody to kill
ENGINE = {"workers": 1, "kernel": "torch"}
KILLED = -signal.SIGKILL


def experiment(
    rounds: int = 3, recipe: Mapping[str, object] = EVERYTHING, **more: object
) -> Experiment:
    tables = {
        "rounds": rounds,
        "clients": 8,
        "per_round": 3,
        "train": {"epochs": 1},
        "engine": ENGINE,
    }
    return Experiment.from_tables({**tables, "recipe": dict(recipe), **more})


def go(folder: Path, resume: bool = False, what: Experiment | None = None) -> runs.Result:
    return runs.run(what or experiment(), folder, resume, data=DATA)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def same(folder: Path, reference: Mapping[str, bytes]) -> None:
    """Fails with the names of the files that differ."""
    found = contents(folder)
    assert found.keys() == reference.keys()
    assert not [name for name in reference if found[name] != reference[name]]


CHILD_SECONDS = 300  # a child that hangs is ended by a signal then


def in_child(work: Callable[[], object], where: str = "", log: Path | None = None) -> int:
    """Run in a forked child under a failpoint; its exit code, negative for a signal, 2 for bad
    input.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    signal.alarm(CHILD_SECONDS)
    try:
        os.environ.pop(failpoint.FAILPOINT_VARIABLE, None)
        if where:
            os.environ[failpoint.FAILPOINT_VARIABLE] = where
        failpoint.call_counts.clear()
        if log:
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        work()
        code = 0
    except BadInput as why:
        os.write(2, f"{why}\n".encode())
        code = 2
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def places(record: Path) -> list[str]:
    """Every passage of a recorded run as name:count, in order."""
    count: dict[str, int] = {}
    found = []
    for name in record.read_text().split():
        count[name] = count.get(name, 0) + 1
        found.append(f"{name}:{count[name]}")
    return found
