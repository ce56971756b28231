"""Run directories as plain data. Reads what the ledger wrote, finished or not; never a State, an engine or a model."""

import base64
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Required

import numpy as np
from annotated_types import Ge
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from flrce.errors import BadInput, brief
from flrce.round.living import dated
from flrce.store.lines import MAPPED
from flrce.store.manifest import known_marks
from flrce.store.recorded import Relation as Relation
from flrce.store.recorded import Run as Run
from flrce.store.seal import MAX_SETTINGS_BYTES, SEAL, Marks, contents, parse_document, read_lines
from flrce.types import Record

MOST, MOST_ROUNDS = 1e30, 10**9  # of any figure, and of rounds: what is larger was not written by a run


class ClientLine(TypedDict, total=False):
    """A line of clients.jsonl."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)  # type: ignore[misc]
    t: Required[Annotated[int, Ge(0)]]
    client: Required[str]
    outcome: Required[str]
    n: int
    loss: float
    joules: float
    bytes_up: int
    bytes_down: int
    framing: int
    compute_seconds: float
    transfer_seconds: float


class RelationLine(TypedDict, total=False):
    """A line of relations.jsonl."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)  # type: ignore[misc]
    t: Required[Annotated[int, Ge(0)]]
    k: Required[list[Annotated[int, Ge(0)]]]
    H: Required[list[float]]
    Omega: str


RECORD, COST, RELATION = TypeAdapter(Record), TypeAdapter(ClientLine), TypeAdapter(RelationLine)


def find(folders: Sequence[Path | str]) -> list[Run]:
    """Every run in the folders: each a run, a folder of seeds, or a folder of recipes with seeds."""
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        if not os.path.exists(folder):
            raise BadInput(f"{folder} does not exist; give a run directory, as `flrce run --out` makes it")
        inside = sorted(run_folders(folder, 2), key=_natural)
        if not inside:
            raise BadInput(f"{folder} is no run: it holds no rounds.jsonl, nor do its folders; give what --out named")
        found |= {path.resolve(): read(path) for path in inside if path.resolve() not in found}
    return list(found.values())


def run_folders(place: Path, depth: int) -> set[Path]:
    """Folders at or below a place that hold a run's rounds, or the seal of one whose rounds are gone."""
    names = [f"{'*/' * level}{name}" for level in range(depth + 1) for name in ("rounds.jsonl", SEAL)]
    return {path.parent for name in names for path in place.glob(name)}


def one(folder: Path | str) -> Run:
    """The only run in a folder."""
    runs = find([folder])
    if len(runs) > 1:
        some = ", ".join(str(run.folder) for run in runs[:3])
        raise BadInput(f"{folder} holds {len(runs)} runs; name one of them: {some}{', ...' if len(runs) > 3 else ''}")
    return runs[0]


def read(folder: Path) -> Run:
    """One run directory, checked against its seal, or its last commit where it has none; half a line is left out."""
    try:
        marks, is_sealed = known_marks(folder)
        experiment = read_settings(folder, marks)
        run = Run(
            folder, experiment, dated(map(checked, _lines(folder / "rounds.jsonl", marks))),
            tuple(map(_cost, _lines(folder / "clients.jsonl", marks))), _json(folder / "partition.json", marks),
            tuple(map(_relation, _lines(folder / "relations.jsonl", marks))), _json(folder / "summary.json", marks),
            is_sealed, _json(folder / "final.json", marks),
        )  # fmt: skip
        _plausible(run)
        return run
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
        said = brief(why.errors()[0]["msg"] if isinstance(why, ValidationError) else why, 200)
        raise BadInput(f"{folder} is no readable run: {said}; was it changed by hand?") from why


@contextmanager
def careful(runs: Sequence[Run]) -> Iterator[None]:
    """What no seal vouches for may hold anything: whatever a report stumbles over is one line, not a traceback."""
    try:
        yield
    except (BadInput, OSError):
        raise
    except Exception as why:
        loose = [run.folder for run in runs if not run.sealed]
        if not loose:
            raise
        said = f"{type(why).__name__}: {brief(why, 100)}"
        raise BadInput(f"{loose[0]} holds figures that make no sense ({said}); was it changed by hand?") from why


def _plausible(run: Run) -> None:
    """ValueError where a table would grow with a number that somebody wrote, not with what the run was."""
    if not isinstance(run.experiment.get("recipe", {}), Mapping):
        raise ValueError("experiment.toml names no recipe")
    names = run.partition.get("clients", ())
    if not isinstance(names, list | tuple):
        raise ValueError("partition.json lists no clients")
    most = len(names) + len({client for h in run.rounds for client in h.chosen})
    for relation in run.relations:
        if any(k >= most for k in relation.k):
            raise ValueError(f"relations.jsonl names row {max(relation.k)} of {most} clients")


def checked(row: Mapping[str, Any]) -> Record:
    """A round's line with every figure of its type, and within bounds."""
    found = RECORD.validate_python({key: value for key, value in row.items() if value is not None})
    figures = [value for value in vars(found).values() if isinstance(value, int | float)]
    figures += [value for value in (*found.holdouts, *found.held) if value is not None]
    if not 0 <= found.t <= MOST_ROUNDS or any(abs(value) > MOST for value in figures):
        raise ValueError(f"rounds.jsonl has a figure beyond all bounds in round {brief(found.t, 20)}")
    return found


def _cost(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A client's line of a round."""
    COST.validate_python({key: value for key, value in row.items() if value is not None})
    return row


def _relation(row: Mapping[str, Any]) -> Relation:
    found = RELATION.validate_python(row)
    k, H, packed = found["k"], found["H"], found.get("Omega")
    if len(H) != len(k):
        raise ValueError(f"relations.jsonl has {len(H)} sums for {len(k)} rows")
    Omega = None if packed is None else np.frombuffer(base64.b64decode(packed, validate=True), np.int8)
    if Omega is not None:
        Omega = Omega.reshape(len(k), -1)
        if Omega.shape[1] > MAPPED:
            raise ValueError(f"relations.jsonl has a map of {Omega.shape[1]} clients")
    return Relation(found["t"], tuple(k), tuple(H), Omega)


def read_settings(folder: Path, marks: Marks) -> dict[str, Any]:
    """The tables of a run's experiment.toml."""
    path = folder / "experiment.toml"
    if not os.path.lexists(path) and path.name not in marks:
        raise ValueError("it has no experiment.toml")
    return tomllib.loads(contents(path, marks, MAX_SETTINGS_BYTES).decode())


def _lines(path: Path, marks: Marks) -> Iterator[dict[str, Any]]:
    return parsed(read_lines(path, marks), path.name)


def parsed(lines: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    """Whole lines of a file as tables."""
    for line in lines:
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{name} has a line that is no table")
            yield row


def _json(path: Path, marks: Marks) -> dict[str, Any]:
    there = os.path.lexists(path) or path.name in marks
    return parse_document(contents(path, marks), path) if there else {}


def _natural(path: Path) -> tuple[Any, ...]:
    """seed-2 before seed-10."""
    return tuple(tuple((int(s) if s.isdigit() else -1, s) for s in name.split("-")) for name in path.parts)
