"""State on disk: one commit point a round, cost proportional to the round's P clients, and proof of every byte.

A round writes two files: `T.state` (the model and what is small) and `T.rows` (the rows of the server's tables that the
round touched, and what its clients keep). The manifest names every file still needed with its length and SHA-256; it is
written aside, fsynced and renamed: that rename is the commit. The previous manifest and its files stay as a spare.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flrce.errors import BadInput
from flrce.types import Record, Round, State

SCHEMA = 1
MANIFEST, SPARE = "manifest.json", "manifest.previous.json"


@dataclass(frozen=True)
class Commit:
    """What the manifest says."""

    t: int
    attempt: int
    roster: tuple[str, ...]
    files: dict[str, dict[str, Any]]  # name -> sha256, bytes
    latest: str  # stem of the newest state file
    rows: dict[str, str]  # row of the tables -> file that holds it
    rounds: dict[str, str]  # "table/key" of tables by round -> file
    scalars: dict[str, Any]  # what the pieces remember besides tensors
    ledger: dict[str, int]  # length of each ledger file at the commit
    experiment: str  # fingerprint of the configuration
    schema: int = SCHEMA


def save_round(folder: Path, done: Round, ledger: Mapping[str, int], experiment: str) -> None:
    """Commit one round."""
    folder.mkdir(parents=True, exist_ok=True)
    before, state = _read(folder / MANIFEST), done.state
    stem = f"{len(state.history):06d}"
    whole, rows, rounds, scalars = _flatten(state, done.touched, before.rounds if before else {}, stem)
    where = (before.rows if before else {}) | {str(k): f"{stem}.rows" for k in done.touched}
    files = {f"{stem}.state": _write(folder / f"{stem}.state", whole)}
    if rows:
        files[f"{stem}.rows"] = _write(folder / f"{stem}.rows", rows)
    needed = {*where.values(), *rounds.values()}
    kept = {name: entry for name, entry in (before.files if before else {}).items() if name in needed}
    commit = Commit(
        state.t, state.attempt, state.roster, kept | files, stem, where, rounds, scalars, dict(ledger), experiment
    )
    _commit(folder, commit, before)


def restore(folder: Path, state: State, history: Mapping[str, Path], experiment: str) -> State | None:
    """The last committed state; `state` is the initial one of the same recipe. None: nothing was committed.

    A damaged newest checkpoint falls back on the spare. The ledger files are cut to their length at that commit.
    """
    problems = []
    for name in (MANIFEST, SPARE):
        path = folder / name
        if not path.exists():
            continue
        try:
            commit = _read(path)
            assert commit is not None
            restored = _load(folder, commit, state)
        except (ValueError, KeyError, OSError, TypeError, AssertionError, SafetensorError) as why:
            problems.append(f"{path}: {why}")
            continue
        if commit.experiment != experiment:
            raise BadInput(f"{path.parent.parent} was made by another experiment file; use its own, or another --out")
        if name == SPARE:
            os.replace(path, folder / MANIFEST)
        _cut(commit, history)
        return replace(restored, history=_history(history["rounds.jsonl"]))
    if problems:
        raise BadInput(f"checkpoint is damaged beyond its spare ({'; '.join(problems)}); start anew with another --out")
    return None


def _flatten(
    state: State, touched: tuple[int, ...], old: Mapping[str, str], stem: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """State as (whole tensors, touched rows, tables by round and the file of each entry, everything else)."""
    whole, rows, rounds, scalars = {"w": state.w}, {}, {}, {}
    index = torch.tensor(touched, dtype=torch.long)
    for role, memory in state.memory.items():
        for f in fields(memory):
            key, value = f"{role}.{f.name}", getattr(memory, f.name)
            if isinstance(value, Tensor) and f.metadata.get("rows"):
                if len(touched):
                    rows[key] = value[index]
            elif isinstance(value, Tensor):
                whole[key] = value
            elif isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values()):
                for r, tensor in value.items():
                    rounds[f"{key}/{r}"] = old.get(f"{key}/{r}", f"{stem}.rows")
                    if rounds[f"{key}/{r}"] == f"{stem}.rows":
                        rows[f"{key}/{r}"] = tensor
            else:
                scalars[key] = value
    for k in touched:
        for name, tensor in state.carry.get(state.roster[k], {}).items():
            rows[f"carry/{k}/{name}"] = tensor
    if len(touched):
        rows["k"] = index
    return whole, {key: value.contiguous() for key, value in rows.items()}, rounds, scalars


def _load(folder: Path, commit: Commit, state: State) -> State:
    """A State as the manifest describes it."""
    loaded = {name: _checked(folder / name, entry) for name, entry in commit.files.items()}
    whole = loaded[f"{commit.latest}.state"]
    memory = {}
    for role, start in state.memory.items():
        values: dict[str, Any] = {}
        for f in fields(start):
            key, template = f"{role}.{f.name}", getattr(start, f.name)
            if f.metadata.get("rows"):
                values[f.name] = _table(template, key, bool(f.metadata.get("square")), commit, loaded)
            elif key in whole:
                values[f.name] = whole[key]
            elif isinstance(template, dict):
                mine = {name: file for name, file in commit.rounds.items() if name.startswith(f"{key}/")}
                values[f.name] = {int(name.rpartition("/")[2]): loaded[file][name] for name, file in mine.items()}
            else:
                values[f.name] = type(template)(commit.scalars[key])
        memory[role] = replace(start, **values)
    carry: dict[str, dict[str, Tensor]] = {}
    for k, file in commit.rows.items():
        prefix = f"carry/{k}/"
        mine = {name.removeprefix(prefix): x for name, x in loaded[file].items() if name.startswith(prefix)}
        if mine:
            carry[commit.roster[int(k)]] = mine
    return State(commit.t, whole["w"], memory, commit.roster, carry, (), commit.attempt)


def _table(
    template: Tensor, key: str, square: bool, commit: Commit, loaded: Mapping[str, Mapping[str, Tensor]]
) -> Tensor:
    """A table over clients, put together from the rows' files; square tables grow with the roster both ways."""
    M = len(commit.roster)
    table = template.new_zeros((M, M) if square else (M, *template.shape[1:]))
    if template.numel() and template.dim() == 1:
        table.fill_(template[0].item())  # what a row is before it is first written
    for k, file in commit.rows.items():
        row = loaded[file][key][int((loaded[file]["k"] == int(k)).nonzero()[0, 0])]
        table[(int(k), *(slice(size) for size in row.shape))] = row
    return table


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    data = save({key: value.clone() for key, value in tensors.items()})
    write_through(path, data)
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def write_through(path: Path, data: bytes) -> None:
    """Write a file aside, make sure it is on disk, and rename it into place."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


def _commit(folder: Path, commit: Commit, before: Commit | None) -> None:
    if before:
        write_through(folder / SPARE, (folder / MANIFEST).read_bytes())
    write_through(folder / MANIFEST, json.dumps(asdict(commit)).encode())
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    needed = {MANIFEST, SPARE, *commit.files, *(before.files if before else ())}
    for path in folder.iterdir():
        if path.name not in needed:
            path.unlink()


def _read(path: Path) -> Commit | None:
    if not path.exists():
        return None
    raw = json.loads(path.read_bytes())
    if raw.get("schema") != SCHEMA:
        raise BadInput(
            f"{path} has schema {raw.get('schema')}, this version reads {SCHEMA}; use the version that wrote it"
        )
    return Commit(**{**raw, "roster": tuple(raw["roster"])})


def _checked(path: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    data = path.read_bytes()
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path.name} is not as it was written")
    return load(data)


def _cut(commit: Commit, history: Mapping[str, Path]) -> None:
    for name, path in history.items():
        length = commit.ledger[name]
        if not path.exists() or path.stat().st_size < length:
            raise BadInput(f"{path} is shorter than the checkpoint says; restore it or start anew with another --out")
        os.truncate(path, length)


def _history(path: Path) -> tuple[Record, ...]:
    return tuple(record(json.loads(line)) for line in path.read_text().splitlines())


def record(row: Mapping[str, Any]) -> Record:
    """A ledger line as a Record."""
    known = {f.name for f in fields(Record)}
    return Record(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key in known})
