"""What is kept of a cell: its course, round by round, and all that a stop rule may look at; a few
kB.
"""

import gzip
import json
import os
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_type_hints

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from pydantic import ConfigDict, ValidationError, create_model

from flrce.core.bounds import explain_validation_error
from flrce.core.cost_table import BASIS_FIELDS, COSTS, list_spent_costs
from flrce.core.record import GROUPS
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, format_one_line
from flrce.storage.disk import make_folder, write_atomically
from flrce.storage.limited import describe_error, open_regular, read_limited, split_lines
from flrce_arena.plan import ArenaCell

RECORDS_FILE = "records.jsonl.gz"
SCHEMA_VERSION = 2
MAX_CELL_BYTES = 2**24  # of one cell: a hundred rounds have 17 kB
MAX_UNPACK_RATIO = 20  # of unpacked to packed bytes: records have 6
MIN_UNPACKED_BYTES = 2**26  # allowed however small the packed file is
#: of a round's record: what replayed rules look at
KEPT_FIELDS = (
    *("t", "outcome", "exploit", "conflicts", "votes", "consensus", "headway", "accuracy"),
    *("averaged", "loss", "bytes_up", "bytes_down", "joules", "joules_wasted", "grams", "began"),
    *("seconds", "stop", "clients", "replied"),
)
# kept too where clients say how good the models are that they are sent
CLIENT_REPORT_FIELDS = ("holdouts", "held", "flagged")
OPTIONAL_FIELDS = (*CLIENT_REPORT_FIELDS, "other")
FloatSeries = NDArray[np.float64]
ClientNumber = Annotated[int, Ge(0), Le(10**6)]  # clients of one round
#: the types of a round's fields, those of its groups among them
ROUND_HINTS = {
    name: hint
    for kind in (RoundRecord, *GROUPS.values())
    for name, hint in get_type_hints(kind).items()
}
#: column -> what it holds, as the record has it; a stranger's arena may hold anything
COLUMN_TYPES: dict[str, Any] = {
    **{name: ROUND_HINTS[name] for name in KEPT_FIELDS},
    "replied": ClientNumber | list[ClientNumber],
    "value": float | None,
    "holdouts": list[float | None],
    "held": list[int],
    "flagged": list[int],
    "other": dict[str, float],
}
COLUMN_FIELDS: dict[str, Any] = {
    name: (types.GenericAlias(list, kind), [] if name in OPTIONAL_FIELDS else ...)
    for name, kind in COLUMN_TYPES.items()
}
COLUMNS_MODEL = create_model(
    "Columns", __config__=ConfigDict(strict=True, extra="forbid"), **COLUMN_FIELDS
)


@dataclass(frozen=True)
class CellRecord:
    """A cell that was run."""

    task: str
    method: str
    seed: int
    tried: Mapping[str, Any]
    fingerprint: str
    metric: str
    lower: bool  # whether less of it is better
    recipe: Mapping[str, Any]  # as the experiment named it
    rounds: Mapping[str, Sequence[Any]]  # column -> one value a round; "value": the final model

    def cumulative_cost(self, axis: str) -> FloatSeries:
        """(T,) what had been spent by the end of each round."""
        return np.array(COSTS[axis].accumulate(self.history), dtype=np.float64)

    def get_value_within(self, axis: str, budget: float) -> float | None:
        """The last model judged before the budget was passed; None: not one."""
        courses = zip(self.rounds["value"], self.cumulative_cost(axis), strict=True)
        return _find_last_value([value for value, spent in courses if spent <= budget])

    @property
    def final_value(self) -> float | None:
        return _find_last_value(self.rounds["value"])

    @cached_property
    def history(self) -> tuple[RoundRecord, ...]:
        """The rounds again as rules read them; clients bear numbers instead of their names."""
        columns = {name: values for name, values in self.rounds.items() if name != "value"}
        records = []
        for value, *cells in zip(self.rounds["value"], *columns.values(), strict=True):
            row: dict[str, Any] = dict(zip(columns, cells, strict=True))
            replied = row["replied"]
            row["replied"] = ("",) * replied if isinstance(replied, int) else _to_names(replied)
            row |= {name: tuple(row[name]) for name in ("holdouts", "held") if name in row}
            if "flagged" in row:
                row["flagged"] = dict.fromkeys(_to_names(row["flagged"]), "")
            metrics = {} if value is None or self.metric == "accuracy" else {self.metric: value}
            more: Any = {"metric": self.metric, "lower": self.lower, "metrics": metrics}
            records.append(RoundRecord(**row, **more))
        return tuple(records)


def _to_names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(str, numbers))


def _find_last_value(values: Sequence[float | None]) -> float | None:
    return next((float(value) for value in reversed(values) if value is not None), None)


def list_cost_axes(found: Iterable[CellRecord]) -> tuple[str, ...]:
    """What methods are compared along: an optional cost only where somebody spent any."""
    cells = list(found)
    costs = list_spent_costs(lambda cost: sum(cost.of_run(cell.history) for cell in cells))
    return tuple(cost.name for cost in costs)


def build_cell_record(cell: ArenaCell, history: Sequence[RoundRecord]) -> CellRecord:
    """What to keep of a finished run."""
    last = history[-1] if history else RoundRecord(0)
    names = [name for name in KEPT_FIELDS if name != "replied"]
    rounds = {name: [_round_digits(getattr(h, name)) for h in history] for name in names}
    rounds |= _collect_client_columns(history)
    other = [_round_amounts(h.other) for h in history]
    if any(other):
        rounds["other"] = other
    rounds["value"] = [_round_digits(h.final_model_metric) for h in history]
    recipe = dict(cell.experiment.model_dump(mode="json", exclude_none=True)["recipe"])
    place = (cell.task, cell.method, cell.seed, cell.tried, cell.fingerprint)
    return CellRecord(*place, last.metric, last.lower, recipe, rounds)


def _collect_client_columns(history: Sequence[RoundRecord]) -> dict[str, list[Any]]:
    """How many replied; who, and what they said, where that is more than nothing."""
    if not any(h.holdouts for h in history):
        return {"replied": [len(h.replied) for h in history]}
    names = dict.fromkeys(name for h in history for name in (*h.replied, *h.flagged))
    number = {name: i for i, name in enumerate(names)}
    return {
        "replied": [[number[name] for name in h.replied] for h in history],
        "holdouts": [[_round_digits(value) for value in h.holdouts] for h in history],
        "held": [list(h.held) for h in history],
        "flagged": [[number[name] for name in h.flagged] for h in history],
    }


def _round_digits(value: Any) -> Any:
    """Six digits: below what seeds differ by."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _round_amounts(other: Mapping[str, float]) -> dict[str, float]:
    """Without what the joules rest on, which would be half of a record."""
    return {n: _round_digits(amount) for n, amount in other.items() if n not in BASIS_FIELDS}


def save_cell_record(found: CellRecord, path: Path) -> None:
    """One cell; whole, or not there."""
    make_folder(path.parent)
    write_atomically(path, _format_record(found).encode())


def _format_record(record: CellRecord, sort_keys: bool = False) -> str:
    table = {"schema": SCHEMA_VERSION, **asdict(record)}
    return json.dumps(table, separators=(",", ":"), sort_keys=sort_keys)


def pack_records(found: Iterable[CellRecord], path: Path) -> None:
    """All cells in one file, the same bytes for the same cells."""
    lines = sorted(_format_record(each, sort_keys=True) for each in found)
    make_folder(path.parent)
    write_atomically(path, gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def load_cell_record(path: Path) -> CellRecord:
    """A cell's file."""
    try:
        return _parse_cell_record(read_limited(path, MAX_CELL_BYTES), str(path))
    except OSError as why:
        raise BadInput(
            f"{path}: cannot be read ({describe_error(why)}); remove it, and the cell is run again"
        ) from why


def unpack_records(folder: Path) -> list[CellRecord]:
    """Every cell of a packed arena."""
    path = folder / RECORDS_FILE if folder.is_dir() else folder
    try:
        with open_regular(path) as file:
            return [_parse_cell_record(line, str(path)) for line in unpack_lines(file)]
    except FileNotFoundError as why:
        raise BadInput(
            f"{folder} holds no arena ({RECORDS_FILE}); give the folder of one that was run"
        ) from why
    except BadInput:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as why:
        raise BadInput(
            f"{path} is damaged ({describe_error(why)}); make it again with flrce arena"
        ) from why


def unpack_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a packed file, unpacked as far as they are asked for; ValueError for more than
    records come to.
    """
    limit = max(MIN_UNPACKED_BYTES, MAX_UNPACK_RATIO * os.fstat(file.fileno()).st_size)
    total = 0
    with gzip.open(file, "rb") as unpacked:
        for line in split_lines(unpacked, limit=MAX_CELL_BYTES, half=True):
            total += len(line)
            if total > limit:
                raise ValueError(f"it unpacks to more than {limit} bytes")
            yield line


def _parse_cell_record(text: bytes, where: str) -> CellRecord:
    try:
        raw = json.loads(text)
        if raw.pop("schema") != SCHEMA_VERSION:
            raise BadInput(
                f"{where} has another schema than {SCHEMA_VERSION}; use the version that wrote it"
            )
        found = CellRecord(**raw)
        fields = (found.task, found.method, found.fingerprint, found.metric)
        named = all(isinstance(text, str) for text in fields)
        if not named or type(found.seed) is not int or type(found.lower) is not bool:
            raise ValueError("it does not say which cell it is")
        COLUMNS_MODEL.model_validate(found.rounds)
        lengths = {len(found.rounds[name]) for name in {*KEPT_FIELDS, "value", *found.rounds}}
        if len(lengths) != 1:
            raise ValueError("columns of different lengths")
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
        if isinstance(why, BadInput):
            raise
        problem = f"{type(why).__name__}: {format_one_line(why, 100)}"
        if isinstance(why, ValidationError):
            problem = explain_validation_error(why)
        raise BadInput(f"{where} is no cell of an arena ({problem}); remove it") from why
