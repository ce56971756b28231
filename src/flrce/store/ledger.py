"""The run directory: what was asked, one JSON line per round and per client, and what came of it."""

import base64
import hashlib
import json
import math
import os
import platform
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from flrce.errors import BadInput, brief
from flrce.round.living import dated, elapsed
from flrce.store import checkpoint
from flrce.store.disk import Lines, Lock, sync_folder, write_through
from flrce.store.failpoint import failpoint
from flrce.store.seal import SEAL, SEALED, document, seal
from flrce.types import Record, Round, State
from flrce.version import __version__

FILES = ("rounds.jsonl", "clients.jsonl", "relations.jsonl")
MAPPED = 300  # clients up to which the rows of Omega are kept round by round, for the report's slider
FREE = ("engine.workers", "engine.device")  # settings that change no result
LENGTH = "rounds"  # changes where a run ends, and no round before that


class Ledger:
    """An open run directory; nobody else can open it meanwhile.

    `experiment` is kept as experiment.toml; a run goes on only under the same one, but for settings such as the number
    of workers, which change no result, and its length: a run may be extended. And on the same data.
    """

    def __init__(
        self, folder: Path, experiment: str, partition: Mapping[str, Any], resume: bool, kernel: str = ""
    ) -> None:
        self.folder, self.closed = folder, False
        before = experiment
        with _reported(folder):
            _named(folder)
            refuse_unless_new(folder, resume)
            folder.mkdir(parents=True, exist_ok=True)
            _own(folder)
            self.lock = Lock(folder / "lock")
            try:
                before = _same_experiment(folder / "experiment.toml", experiment)
                _same_data(folder / "partition.json", partition)
                write_through(folder / "experiment.toml", experiment.encode())
                write_through(folder / "partition.json", json.dumps(partition).encode())
            except BaseException:
                self.lock.close()
                raise
        made_by = versions() | ({"kernel": kernel} if kernel else {})  # other kernels, other bits
        former = {former_fingerprint(before), former_fingerprint(experiment)}
        self.journal = checkpoint.Journal(folder / "checkpoint", fingerprint(experiment), made_by, former)
        self.files = {name: Lines(folder / name) for name in FILES}
        self.committed: State | None = None

    def restore(self, state: State) -> State:
        """The state of the last committed round, or the initial one; the ledger is cut to match it."""
        with _reported(self.folder):
            found = self.recover(state)
            if found is None:
                self._nothing_lost()
            marks = self.journal.last.ledger if self.journal.last else {}
            (self.folder / SEAL).unlink(missing_ok=True)  # what it describes may change now
            for name, lines in self.files.items():
                lines.open(marks.get(name))
            sync_folder(self.folder)
        return found or state

    def recover(self, start: State) -> State | None:
        """What is committed, read back from the disk; nothing is changed. `start` is a fresh initial state."""
        found = self.journal.restore(start, self._verify)
        if found is not None and self.journal.last is not None:
            length = self.journal.last.ledger["rounds.jsonl"]["bytes"]
            lines = (self.folder / "rounds.jsonl").read_bytes()[:length].splitlines()
            found = replace(found, history=dated(record(json.loads(line)) for line in lines))
        self.committed = found
        return found

    def append(self, done: Round) -> None:
        """Write one round's lines, then commit it."""
        self.lock.check()
        failpoint("round.done")
        rows = [asdict(client) for client in done.clients]
        clients = [{k: v for k, v in row.items() if k != "spent"} | row["spent"] for row in rows]
        relation = relations_of(done)
        with _reported(self.folder):
            self.files["rounds.jsonl"].append(_jsonl([asdict(done.record)]))
            self.files["clients.jsonl"].append(_jsonl(clients))
            self.files["relations.jsonl"].append(_jsonl([relation] if relation else []))
            for lines in self.files.values():
                lines.sync()
            marks = {name: lines.mark for name, lines in self.files.items()}
            self.journal.save(done, marks, self.lock.check)
        self.committed = done.state
        failpoint("round.committed")

    def finish(
        self, state: State, trainable: int, model: Mapping[str, Tensor], last: Mapping[str, Tensor] | None = None,
        final: Mapping[str, Any] | None = None, base: int = 0,
    ) -> None:  # fmt: skip
        """Write the model handed back, the `last` one where that is another, the relationship map and the summary.

        `final` is how good the model is for each client and each class, `base` what the fixed part of it weighs.
        """
        self.lock.check()
        memory = state.memory.get("selector")
        summary = summarise(state.history, state.w.numel(), trainable, base)
        with _reported(self.folder):
            write_through(self.folder / "model.safetensors", save({k: v.contiguous() for k, v in model.items()}))
            if last is not None:
                write_through(self.folder / "last.safetensors", save({k: v.contiguous() for k, v in last.items()}))
            if memory is not None and hasattr(memory, "Omega") and memory.H is not None:
                tables = {"Omega": memory.Omega, "H": memory.H, "R": memory.R}
                kept = {name: table for name, table in tables.items() if table is not None}  # a sketch has no Omega
                write_through(self.folder / "relations.safetensors", save(kept))
            if final is not None:
                write_through(self.folder / "final.json", json.dumps(finite(final), indent=1).encode())
            write_through(self.folder / "summary.json", json.dumps(finite(summary), indent=1).encode())
            seal(self.folder, self.journal.last.ledger if self.journal.last else {})
            sync_folder(self.folder)

    def close(self) -> None:
        for lines in self.files.values():
            lines.close()
        self.lock.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify(self, marks: checkpoint.Marks) -> None:
        for name, lines in self.files.items():
            lines.verify(marks.get(name))

    def _nothing_lost(self) -> None:
        """A crash before the first commit leaves at most one round's line; more of them had a checkpoint once."""
        path = self.folder / "rounds.jsonl"
        count = path.read_bytes().count(b"\n") if path.exists() else 0
        if count > 1:
            raise BadInput(f"{path} holds {count} rounds but checkpoint/ has none: put it back, or use another --out")


def _named(folder: Path) -> None:
    """BadInput unless this can be the name of a folder; a name too long is the system's to refuse."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise BadInput(f"--out {os.fsencode(folder)!r} is no UTF-8; name another folder") from None
    if "\0" in str(folder):
        raise BadInput(f"--out {str(folder)!r} holds a null character; name another folder")


def _own(folder: Path) -> None:
    """BadInput if anything that a run writes in its folder is a link to somewhere else."""
    for name in (*SEALED, SEAL, "lock", "checkpoint"):
        if (folder / name).is_symlink():
            raise BadInput(f"{folder / name} is a symbolic link; a run writes only inside its folder: remove it")


def refuse_unless_new(folder: Path, resume: bool) -> None:
    """A run is gone on with only where that was asked for."""
    if (folder / "rounds.jsonl").exists() and not resume:
        raise BadInput(f"--out {folder} holds a run already; add --resume to go on, or name another folder")


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """A write that fails is the machine's trouble, not a defect: say what to do. What is committed stays."""
    try:
        yield
    except OSError as why:
        reason = why.strerror or str(why)
        raise BadInput(
            f"{brief(folder, 200)} cannot be written: {reason}; the last committed round is kept: make room, then use "
            "--resume"
        ) from why


def _same_experiment(path: Path, experiment: str) -> str:
    """Refuses another experiment than the folder's; returns the folder's own."""
    if not path.exists():
        return experiment
    try:
        before = path.read_text(encoding="utf-8")
        old, new = _flat(tomllib.loads(before)), _flat(tomllib.loads(experiment))
    except (ValueError, RecursionError) as why:
        raise BadInput(f"{path} is damaged ({brief(why, 100)}); restore it, or use another --out") from why
    changes = [
        f"{key} {old.get(key, 'unset')!r} -> {new.get(key, 'unset')!r}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and key not in (*FREE, LENGTH)
    ]
    if changes:
        raise BadInput(
            f"{path} differs from this experiment: {'; '.join(changes[:6])}; undo that, or use another --out"
        )
    rounds = path.with_name("rounds.jsonl")
    done = rounds.read_bytes().count(b'"outcome":"committed"') if rounds.exists() else 0
    if new.get(LENGTH, done) < done:
        raise BadInput(
            f"rounds = {new[LENGTH]}: {path.parent} holds {done} already; give at least that, or another --out"
        )
    return before


def fingerprint(experiment: str) -> str:
    """Of all that decides a run's rounds."""
    settings = {key: value for key, value in _flat(tomllib.loads(experiment)).items() if key not in (*FREE, LENGTH)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def former_fingerprint(experiment: str) -> str:
    """As version 0.1 wrote it: of the text, its length included."""
    lines = [line for line in experiment.splitlines() if line.split(" = ")[0] not in ("workers", "device")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _same_data(path: Path, partition: Mapping[str, Any]) -> None:
    if not path.exists():
        return
    old, new = document(path), json.loads(json.dumps(partition))
    changed = [key for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
    if changed:
        raise BadInput(
            f"{path} was made from other data ({', '.join(changed)} differ); restore it, or use another --out"
        )


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as {"a.b": value}."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(finite(row), separators=(",", ":"), allow_nan=False).encode() + b"\n" for row in rows)


def finite(value: Any) -> Any:
    """The same with null for every float that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def record(row: Mapping[str, Any]) -> Record:
    """A ledger line as a Record; a figure that JSON could not hold was written as null and counts as none."""
    known = {f.name: f.default for f in fields(Record)}
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key in known}
    return Record(**{key: v for key, v in values.items() if v is not None or known[key] is None})


def relations_of(done: Round) -> dict[str, Any]:
    """What the round changed in the relationship map: rows k, their H, and Omega[k] as int8 (value * 127) in base64."""
    memory, k = done.state.memory.get("selector"), list(done.touched)
    if memory is None or not k or getattr(memory, "H", None) is None or not hasattr(memory, "R"):
        return {}
    line: dict[str, Any] = {"t": done.record.t, "k": k, "H": memory.H[k].tolist()}
    if getattr(memory, "Omega", None) is not None and len(memory.Omega) <= MAPPED:
        rows = (memory.Omega[k] * 127).round().to(torch.int8)  # (P, M)
        line["Omega"] = base64.b64encode(rows.numpy().tobytes()).decode()
    return line


def versions() -> dict[str, str]:
    return {"flrce": __version__, "torch": torch.__version__, "python": platform.python_version()}


def hardware() -> str:
    """The machine, with the GPU that runs go to where there is one."""
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores{gpu}"


def keep(folder: Path, experiment: str, history: Sequence[Record], summary: Mapping[str, Any]) -> None:
    """A run directory of a finished run that was not journalled: enough for reports, nothing to resume."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(record), separators=(",", ":")) for record in history]
    write_through(folder / "experiment.toml", experiment.encode())
    write_through(folder / "rounds.jsonl", "".join(f"{line}\n" for line in lines).encode())
    write_through(folder / "summary.json", json.dumps(summary, indent=1).encode())
    seal(folder, {})


def summarise(history: tuple[Record, ...], size: int, trainable: int, base: int = 0) -> dict[str, Any]:
    """A run's final figures. `base`: bytes of the model that never travel; every client is given them once."""
    done = [h for h in history if h.outcome == "committed"]
    seen = [h for h in history if h.headline is not None]  # a round that was not started may judge the one before
    last = seen[-1] if seen else Record(0)
    joules, up, down = (sum(getattr(h, name) for h in history) for name in ("joules", "bytes_up", "bytes_down"))
    handed = last.handed if last.metric == "accuracy" else None
    return {
        "rounds": len(done),
        "metric": last.metric,  # the headline of the model that is handed back, and of the last one
        "better": "lower" if last.lower else "higher",
        "value": last.handed,
        "value_last": last.headline,
        "metrics": dict(last.metrics_averaged or last.metrics),
        "accuracy": handed,
        "accuracy_last": last.accuracy,
        "accuracy_weighted": last.accuracy_weighted,
        "loss": last.loss,
        "stopped": history[-1].stop if history else "",
        "joules": joules,
        "joules_wasted": sum(h.joules_wasted for h in history),
        "joules_low": sum(h.joules_low for h in history),
        "joules_high": sum(h.joules_high for h in history),
        "grams": sum(h.grams for h in history),
        "grams_wasted": sum(h.grams_wasted for h in history),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_wasted": sum(h.bytes_wasted for h in history),
        "bytes_framing": sum(h.bytes_framing for h in history),
        "bytes_evaluation": sum(h.bytes_evaluation for h in history),
        "seconds": elapsed(history),
        "energy": "measured" if history and all(h.measured for h in history) else "modelled",
        "computation_efficiency": handed / (joules / 1e3) if handed is not None and joules else None,
        "communication_efficiency": handed / ((up + down) / 1e9) if handed is not None and up + down else None,
        "shadow_stops": _shadow_stops(done),
        "exploit_rounds": sum(h.exploit for h in done),
        "parameters": trainable,
        "floats_on_the_wire": size,
        "versions": versions(),
        "hardware": hardware(),
        **provisioned(history, base),
    }


def provisioned(history: tuple[Record, ...], base: int) -> dict[str, int]:
    """What the fixed part of the model weighs, and what it adds up to, given once to everyone asked to train."""
    asked = {client for record in history for client in record.chosen}
    return {"bytes_base": base, "bytes_provisioned": base * len(asked)} if base else {}


def _shadow_stops(done: list[Record]) -> dict[str, int]:
    """For every threshold psi of the paper's grid: the first round that would have ended the run."""
    first: dict[str, int] = {}
    for h in done:
        for psi in h.shadow:
            first.setdefault(f"{psi:g}", h.t)
    return first
