"""The run directory: what was asked, one JSON line per round and per client, and what came of it."""

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from flrce import checkpoint
from flrce.errors import BadInput
from flrce.types import Record, Round, State
from flrce.version import __version__

FILES = ("rounds.jsonl", "clients.jsonl")


class Ledger:
    """An open run directory; nobody else can open it meanwhile.

    `experiment` is kept as experiment.toml; a run goes on only under the same one, but for lines such as the number of
    workers, which change no result.
    """

    def __init__(self, folder: Path, experiment: str, partition: Mapping[str, Any], resume: bool) -> None:
        self.folder, self.fingerprint = folder, hashlib.sha256("\n".join(_lines(experiment)).encode()).hexdigest()
        if (folder / "rounds.jsonl").exists() and not resume:
            raise BadInput(f"--out {folder} holds a run already; add --resume to go on, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = _lock(folder / "lock")
        self._config(experiment)
        checkpoint.write_through(folder / "partition.json", json.dumps(partition).encode())
        self.files: dict[str, IO[bytes]] = {}
        self.committed: State | None = None

    def restore(self, state: State) -> State:
        """The state of the last committed round, or the initial one; the ledger is cut to match it."""
        found = checkpoint.restore(
            self.folder / "checkpoint", state, {name: self.folder / name for name in FILES}, self.fingerprint
        )
        mode = "ab" if found else "wb"
        self.files = {name: open(self.folder / name, mode) for name in FILES}  # noqa: SIM115: closed in close()
        self.committed = found
        return found or state

    def append(self, done: Round) -> None:
        """Write one round's lines, then commit it."""
        self._line("rounds.jsonl", asdict(done.record))
        for client in done.clients:
            row = asdict(client)
            spent = row.pop("spent")
            self._line("clients.jsonl", row | spent)
        for f in self.files.values():
            f.flush()
            os.fsync(f.fileno())
        lengths = {name: f.tell() for name, f in self.files.items()}
        checkpoint.save_round(self.folder / "checkpoint", done, lengths, self.fingerprint)
        self.committed = done.state

    def finish(self, state: State, trainable: int, model: Mapping[str, Tensor]) -> None:
        """Write the model, the relationship map and the summary."""
        checkpoint.write_through(self.folder / "model.safetensors", save({k: v.contiguous() for k, v in model.items()}))
        memory = state.memory.get("selector")
        if memory is not None and hasattr(memory, "Omega"):
            tables = {"Omega": memory.Omega, "H": memory.H, "R": memory.R}
            checkpoint.write_through(self.folder / "relations.safetensors", save(tables))
        summary = summarise(state.history, state.w.numel(), trainable)
        checkpoint.write_through(self.folder / "summary.json", json.dumps(summary, indent=1).encode())

    def close(self) -> None:
        for f in self.files.values():
            f.close()
        self.lock.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, name: str, row: Mapping[str, Any]) -> None:
        self.files[name].write(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def _config(self, experiment: str) -> None:
        path = self.folder / "experiment.toml"
        if path.exists() and (changes := set(_lines(path.read_text())) ^ set(_lines(experiment))):
            raise BadInput(
                f"{path} differs from this experiment in {'; '.join(sorted(changes)[:6])}: use another --out"
            )
        checkpoint.write_through(path, experiment.encode())


def _lines(experiment: str) -> list[str]:
    """The lines of an experiment that decide its result."""
    return [line for line in experiment.splitlines() if line.split(" = ")[0] not in ("workers", "device")]


def _lock(path: Path) -> IO[str]:
    handle = open(path, "a+")  # noqa: SIM115: held while the run lives
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        raise BadInput(
            f"{path.parent} is in use by {handle.read().strip() or 'another run'}; wait, or stop it"
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {platform.node()}")
    handle.flush()
    return handle


def summarise(history: tuple[Record, ...], size: int, trainable: int) -> dict[str, Any]:
    """A run's final figures."""
    done = [h for h in history if h.outcome == "committed"]
    seen = [h for h in done if h.accuracy is not None]
    last = seen[-1] if seen else Record(0)
    joules, up, down = (sum(getattr(h, name) for h in history) for name in ("joules", "bytes_up", "bytes_down"))
    handed = last.averaged if last.averaged is not None else last.accuracy
    return {
        "rounds": len(done),
        "accuracy": handed,
        "accuracy_last": last.accuracy,
        "accuracy_weighted": last.accuracy_weighted,
        "loss": last.loss,
        "stopped": history[-1].stop if history else "",
        "joules": joules,
        "joules_wasted": sum(h.joules_wasted for h in history),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_wasted": sum(h.bytes_wasted for h in history),
        "bytes_framing": sum(h.bytes_framing for h in history),
        "bytes_evaluation": sum(h.bytes_evaluation for h in history),
        "seconds": sum(h.seconds for h in history),
        "energy": "measured" if history and all(h.measured for h in history) else "modelled",
        "computation_efficiency": handed / (joules / 1e3) if handed is not None and joules else None,
        "communication_efficiency": handed / ((up + down) / 1e9) if handed is not None and up + down else None,
        "shadow_stops": _shadow_stops(done),
        "exploit_rounds": sum(h.exploit for h in done),
        "parameters": trainable,
        "floats_on_the_wire": size,
        "versions": {"flrce": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _shadow_stops(done: list[Record]) -> dict[str, int]:
    """For every threshold psi of the paper's grid: the first round that would have ended the run."""
    first: dict[str, int] = {}
    for h in done:
        for psi in h.shadow:
            first.setdefault(f"{psi:g}", h.t)
    return first
