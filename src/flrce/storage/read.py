"""Read run directories, finished or not, as plain data."""

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Required, get_type_hints

import numpy as np
from annotated_types import Ge
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from flrce.core.cost_table import add_cost_row
from flrce.core.files import parse_toml
from flrce.core.record import FLAT_FIELDS, GROUPS, RoundRecord, fill_start_times
from flrce.errors import BadInput, format_one_line
from flrce.storage.ledger_lines import MAX_MAPPED_CLIENTS
from flrce.storage.manifest import known_marks
from flrce.storage.seal import (
    MAX_SETTINGS_BYTES,
    SEAL_FILE,
    FileMarks,
    parse_document,
    read_lines,
    read_sealed_file,
)
from flrce.storage.stored_recipe import RecordedRun as RecordedRun
from flrce.storage.stored_recipe import RelationChange as RelationChange

# A run writes no larger numbers and no more rounds.
MAX_FIGURE, MAX_ROUNDS = 1e30, 10**9


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
    grams: float
    other: dict[str, float]
    figures: dict[str, float]


class RelationLine(TypedDict, total=False):
    """A line of relations.jsonl."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)  # type: ignore[misc]
    t: Required[Annotated[int, Ge(0)]]
    k: Required[list[Annotated[int, Ge(0)]]]
    H: Required[list[float]]
    Omega: str


def _make_round_line() -> Any:
    """The type of a line of rounds.jsonl: the flat fields of a record."""
    types: dict[str, Any] = get_type_hints(RoundRecord)
    for group in GROUPS.values():
        types |= get_type_hints(group)
    columns = {name: types[name] for name in FLAT_FIELDS}
    make_table: Any = TypedDict
    return make_table("RoundLine", {**columns, "t": Required[int]}, total=False)


ROUND_LINE = TypeAdapter(_make_round_line())
CLIENT_LINE = TypeAdapter(ClientLine)
RELATION_LINE = TypeAdapter(RelationLine)


def read_runs(folders: Sequence[Path | str]) -> list[RecordedRun]:
    """Every run in the folders: runs, folders of seeds, or folders of recipes with seeds."""
    runs: dict[Path, RecordedRun] = {}
    for folder in map(Path, folders):
        if not os.path.exists(folder):
            raise BadInput(f"{folder} does not exist; give a run directory (flrce run --out)")
        paths = sorted(run_folders(folder, 2), key=_natural_sort_key)
        if not paths:
            raise BadInput(
                f"{folder} is not a run: neither it nor its folders have a rounds.jsonl; give a run"
                " directory (flrce run --out)"
            )
        runs |= {path.resolve(): read_run(path) for path in paths if path.resolve() not in runs}
    return list(runs.values())


def run_folders(place: Path, depth: int) -> set[Path]:
    """Folders at most `depth` levels below `place` that have the rounds or the seal of a run."""
    levels = ["*/" * level for level in range(depth + 1)]
    names = [f"{level}{name}" for level in levels for name in ("rounds.jsonl", SEAL_FILE)]
    return {path.parent for name in names for path in place.glob(name)}


def read_single_run(folder: Path | str) -> RecordedRun:
    """The only run in a folder."""
    runs = read_runs([folder])
    if len(runs) > 1:
        names = ", ".join([*(str(run.folder) for run in runs[:3]), *["..."] * (len(runs) > 3)])
        raise BadInput(f"{folder} holds {len(runs)} runs; name one of them: {names}")
    return runs[0]


def read_run(folder: Path) -> RecordedRun:
    """One run directory, checked against its seal or last commit."""
    try:
        marks, is_sealed = known_marks(folder)
        experiment = read_settings(folder, marks)
        run = RecordedRun(
            folder,
            experiment,
            fill_start_times(map(validate_round_line, _read_lines(folder / "rounds.jsonl", marks))),
            tuple(map(_validate_client_line, _read_lines(folder / "clients.jsonl", marks))),
            _read_json(folder / "partition.json", marks),
            tuple(map(_parse_relation, _read_lines(folder / "relations.jsonl", marks))),
            _read_json(folder / "summary.json", marks),
            is_sealed,
            _read_json(folder / "final.json", marks),
        )
        _validate_run(run)
        return run
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
        reason = why.errors()[0]["msg"] if isinstance(why, ValidationError) else why
        raise BadInput(
            f"{folder} cannot be read as a run: {format_one_line(reason, 200)}; was it edited?"
        ) from why


@contextmanager
def explain_damaged_runs(runs: Sequence[RecordedRun]) -> Iterator[None]:
    """Turn any error of a report on unsealed runs, which may have any contents, into BadInput."""
    try:
        yield
    except (BadInput, OSError):
        raise
    except Exception as why:
        unsealed = [run.folder for run in runs if not run.sealed]
        if not unsealed:
            raise
        reason = f"{type(why).__name__}: {format_one_line(why, 100)}"
        raise BadInput(f"{unsealed[0]} has invalid figures ({reason}); was it edited?") from why


def _validate_run(run: RecordedRun) -> None:
    """Raise ValueError if a number in the files would make a table larger than the run was."""
    if not isinstance(run.experiment.get("recipe", {}), Mapping):
        raise ValueError("experiment.toml names no recipe")
    names = run.partition.get("clients", ())
    if not isinstance(names, list | tuple):
        raise ValueError("partition.json lists no clients")
    max_rows = len(names) + len({client for h in run.rounds for client in h.chosen})
    for relation in run.relations:
        if any(k >= max_rows for k in relation.k):
            raise ValueError(f"relations.jsonl names row {max(relation.k)} of {max_rows} clients")


def validate_round_line(row: Mapping[str, Any]) -> RoundRecord:
    """The record of a round's line; ValueError for a wrong type or a number out of bounds."""
    present = {key: value for key, value in row.items() if value is not None}
    values = ROUND_LINE.validate_python(present)
    record = RoundRecord(**values)
    figures = [value for value in values.values() if isinstance(value, int | float)]
    evaluation = record.evaluation
    figures += [x for x in (*evaluation.holdouts, *evaluation.held) if x is not None]
    figures += (*record.costs.other.values(), *record.figures.values())
    if not 0 <= record.t <= MAX_ROUNDS or any(abs(value) > MAX_FIGURE for value in figures):
        raise ValueError(
            f"rounds.jsonl has a number out of bounds in round {format_one_line(record.t, 20)}"
        )
    for name in record.costs.other:
        add_cost_row(name)
    return record


def _validate_client_line(row: Mapping[str, Any]) -> Mapping[str, Any]:
    CLIENT_LINE.validate_python({key: value for key, value in row.items() if value is not None})
    return row


def get_line_seconds(line: Mapping[str, Any]) -> float:
    """The seconds that a client took, by its line in clients.jsonl."""
    return float(line.get("compute_seconds", 0.0) + line.get("transfer_seconds", 0.0))


def _parse_relation(row: Mapping[str, Any]) -> RelationChange:
    line = RELATION_LINE.validate_python(row)
    k, H, packed = line["k"], line["H"], line.get("Omega")
    if len(H) != len(k):
        raise ValueError(f"relations.jsonl has {len(H)} sums for {len(k)} rows")
    Omega = None
    if packed is not None:
        cells = np.frombuffer(base64.b64decode(packed, validate=True), np.int8)
        Omega = cells.reshape(len(k), -1)
        if Omega.shape[1] > MAX_MAPPED_CLIENTS:
            raise ValueError(f"relations.jsonl has a map of {Omega.shape[1]} clients")
    return RelationChange(line["t"], tuple(k), tuple(H), Omega)


def read_settings(folder: Path, marks: FileMarks) -> dict[str, Any]:
    """The tables of a run's experiment.toml."""
    path = folder / "experiment.toml"
    if not os.path.lexists(path) and path.name not in marks:
        raise ValueError("it has no experiment.toml")
    return parse_toml(read_sealed_file(path, marks, MAX_SETTINGS_BYTES).decode())


def _read_lines(path: Path, marks: FileMarks) -> Iterator[dict[str, Any]]:
    return parse_lines(read_lines(path, marks), path.name)


def parse_lines(lines: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    """Complete lines of a file as tables."""
    for line in lines:
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{name} has a line that is not a table")
            yield row


def _read_json(path: Path, marks: FileMarks) -> dict[str, Any]:
    exists = os.path.lexists(path) or path.name in marks
    return parse_document(read_sealed_file(path, marks), path) if exists else {}


def _natural_sort_key(path: Path) -> tuple[Any, ...]:
    """Sorts seed-2 before seed-10."""
    return tuple(
        tuple((int(s) if s.isdigit() else -1, s) for s in name.split("-")) for name in path.parts
    )
