"""Convert a State to named tensors and plain data, and back to the same bits and types.

The state of a piece is usually a dataclass, written field by field; any other state is written as
one
value:

- tensors with metadata "rows" are tables over clients ("square": over pairs). Of a table marked
  "trained", only the rows of clients with a task in the round are written: the piece promises to
  change no others. Of any other table, the changed rows are found by comparison;
- dict[int, Tensor] with metadata "rounds" are tables by round whose entries never change: each is
  written once;
- other tensors are written completely, and all other values as `state_values` encodes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from flrce.core.state_values import (
    build_dataclass,
    decode_value,
    encode_value,
    find_class,
    list_fields,
    load_class,
)
from flrce.core.types import State
from flrce.errors import BadInput
from flrce.storage.tensor_file import SAFETENSORS_DTYPES, TableRows

NamedTensors = dict[str, Tensor]
TRAINED = "trained"  # metadata "rows": only rows of clients with a task change
# tags of entries that are not plain numbers or text
VALUE, TABLE, CLASS = ("$value", "$table", "$class")
ROWS_OF = "k/"  # prefix of a table's name: the row numbers that a file has of it


@dataclass(frozen=True)
class Snapshot:
    """The data that one commit writes."""

    whole: NamedTensors  # the model and small tensors
    # table -> (changed, ...) rows; `k`: their numbers; and the state of those clients
    rows: dict[str, Tensor | TableRows]
    rounds: NamedTensors  # "table/round" -> every entry of the tables by round
    scalars: dict[str, Any]  # "role.field" -> plain data
    # tables whose changed rows are found by comparison
    tables: NamedTensors = field(default_factory=dict)


def take_snapshot(state: State, changed_rows: Sequence[int]) -> Snapshot:
    """The parts of a state to write; `changed_rows` are the rows of clients to write."""
    shot = Snapshot({"w": state.w}, {}, {}, {})
    index = torch.tensor(changed_rows, dtype=torch.long)
    for role, piece_state in state.server_state.items():
        if not is_dataclass(piece_state):
            shot.scalars[role] = _encode_entry(role, piece_state, shot.whole)
            continue
        own = not type(piece_state).__module__.startswith("flrce.")
        if own and find_class(_type_name(piece_state)):
            shot.scalars[role] = {CLASS: _type_name(piece_state)}
        for f in list_fields(piece_state):
            value = getattr(piece_state, f.name)
            _take_field(f"{role}.{f.name}", value, f.metadata, changed_rows, shot)
    for k in changed_rows:
        for name, tensor in state.client_states.get(state.roster[k], {}).items():
            shot.rows[f"carry/{k}/{name}"] = tensor
    shot.rows["k"] = index
    return shot


def _take_field(
    key: str, value: Any, metadata: Mapping[str, Any], changed_rows: Sequence[int], shot: Snapshot
) -> None:
    """Add one field of a piece's state to the snapshot."""
    writable = isinstance(value, Tensor) and value.dtype in SAFETENSORS_DTYPES
    rows = metadata.get("rows")
    if writable and rows == TRAINED:
        shot.rows[key] = TableRows(value, tuple(changed_rows))
    elif writable and rows and value.is_contiguous() and value.dim() and len(value):
        shot.tables[key], shot.scalars[key] = value, {TABLE: len(value)}
    elif writable and not rows and value.is_contiguous():
        shot.whole[key] = value
    elif metadata.get("rounds"):
        shot.rounds.update({f"{key}/{r}": tensor for r, tensor in value.items()})
    elif metadata.get("plain"):
        shot.scalars[key] = value
    else:
        shot.scalars[key] = _encode_entry(key, value, shot.whole)


def _encode_entry(key: str, value: Any, whole: NamedTensors) -> Any:
    """Encode a value as plain data. Its tensors are added to `whole`."""
    count = 0

    def put_tensor(tensor: Tensor) -> str:
        nonlocal count
        count += 1
        name = f"{key}#{count}"
        if tensor.dtype in SAFETENSORS_DTYPES:
            whole[name] = tensor
        else:
            whole[name] = tensor.contiguous().reshape(-1).view(torch.uint8)
        return name

    node = encode_value(value, put_tensor)
    return {VALUE: node} if isinstance(node, list) else node


def _type_name(state: Any) -> str:
    return f"{type(state).__module__}:{type(state).__qualname__}"


@dataclass
class StateAssembly:
    """Builds a state from its files, which are added newest first."""

    start: State  # the initial state of the same recipe
    roster: tuple[str, ...]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)  # row -> file that holds its newest version
    tables: NamedTensors = field(default_factory=dict)
    client_states: dict[str, NamedTensors] = field(default_factory=dict)
    found: NamedTensors = field(default_factory=dict)  # tables found by comparison
    owners: dict[str, dict[int, str]] = field(
        default_factory=dict
    )  # table of `found` -> as `owner`

    def __post_init__(self) -> None:
        self.owners = {
            key: {}
            for key, entry in self.scalars.items()
            if isinstance(entry, dict) and TABLE in entry
        }
        for role, state in self.start.server_state.items():
            if self.scalars.get(role, {CLASS: _type_name(state)}) != {CLASS: _type_name(state)}:
                continue  # another class now
            for f in list_fields(state):
                key, template = f"{role}.{f.name}", getattr(state, f.name)
                is_table = f.metadata.get("rows") and isinstance(template, Tensor)
                if is_table and key not in self.scalars:  # a table may be absent
                    self.tables[key] = _make_blank_table(template, len(self.roster), f.metadata)

    def add_rows(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Add the rows of one file that no newer file has."""
        for key in self.owners:
            self._add_changed(key, file, tensors)
        for i, k in enumerate(tensors["k"].tolist() if "k" in tensors else ()):
            if k in self.owner:
                continue
            self.owner[k] = file
            for key, table in self.tables.items():
                if key not in tensors:  # the file is complete: its hash was checked
                    raise BadInput(
                        f"the checkpoint has no table {key!r}: in the version that wrote it,"
                        " this recipe had other pieces; finish the run with that version, or use"
                        " another --out"
                    )
                row = tensors[key][i]
                # rows of a square table may have become longer
                table[(k, *(slice(size) for size in row.shape))] = row
            prefix = f"carry/{k}/"
            own = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
            if own:
                self.client_states[self.roster[k]] = {name: x.clone() for name, x in own.items()}

    def _add_changed(self, key: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        """The same for a table of `found`. If its type or shape changed, all its rows are newer."""
        if key not in tensors or ROWS_OF + key not in tensors:
            return
        rows, owner, count = tensors[key], self.owners[key], int(self.scalars[key][TABLE])
        if key not in self.found:
            self.found[key] = rows.new_zeros((count, *rows.shape[1:]))
        numbers = enumerate(tensors[ROWS_OF + key].tolist())
        new = [(i, k) for i, k in numbers if k not in owner and k < count]
        if new:
            at, k = zip(*new, strict=True)
            self.found[key][list(k)] = rows[list(at)]
            owner.update(dict.fromkeys(k, file))

    def build_state(self, t: int, attempt: int, whole: NamedTensors, rounds: NamedTensors) -> State:
        """The state without its history, which the ledger adds."""
        state = {
            role: self._restore_state(role, start, whole, rounds)
            for role, start in self.start.server_state.items()
        }
        return State(t, whole["w"], state, self.roster, self.client_states, (), attempt)

    def _restore_state(
        self, role: str, start: Any, whole: NamedTensors, rounds: NamedTensors
    ) -> Any:
        """The state of one piece."""
        entry = self.scalars.get(role)
        kind = type(start)
        if isinstance(entry, dict) and CLASS in entry:
            kind = kind if _type_name(start) == entry[CLASS] else load_class(entry[CLASS])
        elif role in self.scalars:
            return self._restore_value(entry, role, whole)
        if not is_dataclass(kind):
            return start  # an older version stored none
        values = {
            f.name: self._restore_field(f"{role}.{f.name}", f, start, whole, rounds)
            for f in fields(kind)
        }
        return build_dataclass(kind, values)

    def _restore_field(
        self, key: str, f: Any, start: Any, whole: NamedTensors, rounds: NamedTensors
    ) -> Any:
        template = getattr(start, f.name, None)
        if key in self.scalars:
            entry = self.scalars[key]
            described = isinstance(entry, dict) and (VALUE in entry or TABLE in entry)
            if described:
                return self._restore_value(entry, key, whole)
            return _restore_plain_value(template, entry)
        if key in self.tables:
            return self.tables[key]
        if key in whole:
            return whole[key]
        if isinstance(template, dict) or f.metadata.get("rounds"):
            return _select_round_entries(key, rounds)
        return template  # an older version stored none

    def _restore_value(self, entry: Any, key: str, whole: NamedTensors) -> Any:
        if not isinstance(entry, dict):
            return entry
        if TABLE not in entry:
            return decode_value(entry[VALUE], whole.__getitem__)
        if len(self.owners[key]) < entry[TABLE]:
            raise ValueError(f"{key} has {len(self.owners[key])} of {entry[TABLE]} rows")
        return self.found[key]


def _select_round_entries(key: str, rounds: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The entries of one table by round, oldest first."""
    entries = {
        int(name.rpartition("/")[2]): x for name, x in rounds.items() if name.startswith(f"{key}/")
    }
    return dict(sorted(entries.items()))


def _make_blank_table(template: Tensor, M: int, metadata: Mapping[str, Any]) -> Tensor:
    """A table of M rows with their initial value."""
    default = float(template[0]) if template.numel() and template.dim() == 1 else 0.0
    shape = (M, M) if metadata.get("square") else (M, *template.shape[1:])
    return template.new_full(shape, metadata.get("fill", default))


def _restore_plain_value(template: Any, value: Any) -> Any:
    """Plain data from JSON. Lists and dicts without a tag get the type of the template."""
    if not isinstance(value, list | dict):
        return value
    if template is None:
        return tuple(value) if isinstance(value, list) else value
    return type(template)(value)
