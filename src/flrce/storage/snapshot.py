"""State as named tensors and plain data, and back to the same bits and types.

A piece's state is a dataclass; its fields are written by what they are, a state of any other kind
as one value:

- tensors with metadata "rows" are tables over clients ("square": over pairs). Of a table marked
  "trained", only the
  rows of clients that had a task in the round are written: the piece promises to change no others.
  Of any other table the rows that changed are found, and written;
- dict[int, Tensor] with metadata "rounds" are tables by round whose entries never change: each is
  written once;
- other tensors are written whole, and all else as `state_values` encodes it.
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
TRAINED = "trained"  # metadata "rows" of a table of which only rows of clients with a task change
# how an entry that is no plain number or text says what it is
VALUE, TABLE, CLASS = ("$value", "$table", "$class")
ROWS_OF = "k/"  # before a table's name: numbers of the rows that a file has of it


@dataclass(frozen=True)
class Snapshot:
    """What one commit adds to the disk."""

    whole: NamedTensors  # the model and what is small
    # table -> (changed, ...) rows, `k` their numbers, and what those clients keep
    rows: dict[str, Tensor | TableRows]
    rounds: NamedTensors  # "table/round" -> every entry of the tables by round
    scalars: dict[str, Any]  # "role.field" -> plain data
    # tables of which the changed rows are to be found
    tables: NamedTensors = field(default_factory=dict)


def take_snapshot(state: State, changed_rows: Sequence[int]) -> Snapshot:
    """The parts of a state to write; `changed_rows` are those to store."""
    found = Snapshot({"w": state.w}, {}, {}, {})
    index = torch.tensor(changed_rows, dtype=torch.long)
    for role, piece_state in state.server_state.items():
        if not is_dataclass(piece_state):
            found.scalars[role] = _encode_entry(role, piece_state, found.whole)
            continue
        if find_class(_type_name(piece_state)) and not type(piece_state).__module__.startswith(
            "flrce."
        ):
            found.scalars[role] = {CLASS: _type_name(piece_state)}
        for f in list_fields(piece_state):
            _take_field(
                f"{role}.{f.name}", getattr(piece_state, f.name), f.metadata, changed_rows, found
            )
    for k in changed_rows:
        for name, tensor in state.client_states.get(state.roster[k], {}).items():
            found.rows[f"carry/{k}/{name}"] = tensor
    found.rows["k"] = index
    return found


def _take_field(
    key: str, value: Any, metadata: Mapping[str, Any], changed_rows: Sequence[int], found: Snapshot
) -> None:
    """One field of a piece's state, put where it belongs."""
    writable, rows = (
        isinstance(value, Tensor) and value.dtype in SAFETENSORS_DTYPES,
        metadata.get("rows"),
    )
    if writable and rows == TRAINED:
        found.rows[key] = TableRows(value, tuple(changed_rows))
    elif writable and rows and value.is_contiguous() and value.dim() and len(value):
        found.tables[key], found.scalars[key] = value, {TABLE: len(value)}
    elif writable and not rows and value.is_contiguous():
        found.whole[key] = value
    elif metadata.get("rounds"):
        found.rounds.update({f"{key}/{r}": tensor for r, tensor in value.items()})
    elif metadata.get("plain"):
        found.scalars[key] = value
    else:
        found.scalars[key] = _encode_entry(key, value, found.whole)


def _encode_entry(key: str, value: Any, whole: NamedTensors) -> Any:
    """A value as plain data; its tensors join the small ones under names of their own."""
    count = 0

    def put_tensor(tensor: Tensor) -> str:
        nonlocal count
        count += 1
        name = f"{key}#{count}"
        whole[name] = (
            tensor
            if tensor.dtype in SAFETENSORS_DTYPES
            else tensor.contiguous().reshape(-1).view(torch.uint8)
        )
        return name

    node = encode_value(value, put_tensor)
    return {VALUE: node} if isinstance(node, list) else node


def _type_name(state: Any) -> str:
    return f"{type(state).__module__}:{type(state).__qualname__}"


@dataclass
class StateAssembly:
    """A state put together again from its files, the newest rows first."""

    start: State  # the initial state of the same recipe
    roster: tuple[str, ...]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)  # row -> file that holds its newest version
    tables: NamedTensors = field(default_factory=dict)
    client_states: dict[str, NamedTensors] = field(default_factory=dict)
    found: NamedTensors = field(default_factory=dict)  # tables whose changed rows were written
    owners: dict[str, dict[int, str]] = field(default_factory=dict)  # table of those -> as `owner`

    def __post_init__(self) -> None:
        self.owners = {
            key: {}
            for key, entry in self.scalars.items()
            if isinstance(entry, dict) and TABLE in entry
        }
        for role, state in self.start.server_state.items():
            if self.scalars.get(role, {CLASS: _type_name(state)}) != {CLASS: _type_name(state)}:
                continue  # it is something else now
            for f in list_fields(state):
                key, template = f"{role}.{f.name}", getattr(state, f.name)
                if (
                    f.metadata.get("rows")
                    and isinstance(template, Tensor)
                    and key not in self.scalars
                ):
                    square = bool(f.metadata.get("square"))  # a table may be left out
                    self.tables[key] = _make_blank_table(
                        template, len(self.roster), square, f.metadata
                    )

    def add_rows(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Place the rows of one file that no newer file holds."""
        for key in self.owners:
            self._add_changed(key, file, tensors)
        for i, k in enumerate(tensors["k"].tolist() if "k" in tensors else ()):
            if k in self.owner:
                continue
            self.owner[k] = file
            for key, table in self.tables.items():
                if key not in tensors:  # the file is whole: its hash was checked
                    raise BadInput(
                        f"the checkpoint has no table {key!r}: another version made this recipe of"
                        " other pieces; finish the run with that version, or use another --out"
                    )
                row = tensors[key][i]
                # a square table's row may have grown since
                table[(k, *(slice(size) for size in row.shape))] = row
            prefix = f"carry/{k}/"
            kept = {
                name.removeprefix(prefix): x.clone()
                for name, x in tensors.items()
                if name.startswith(prefix)
            }
            if kept:
                self.client_states[self.roster[k]] = kept

    def _add_changed(self, key: str, file: str, tensors: Mapping[str, Tensor]) -> None:
        """The same of a table whose changed rows were written: where its type or shape changed, all
        of them were.
        """
        if key not in tensors or ROWS_OF + key not in tensors:
            return
        rows, owner, count = tensors[key], self.owners[key], int(self.scalars[key][TABLE])
        if key not in self.found:
            self.found[key] = rows.new_zeros((count, *rows.shape[1:]))
        new = [
            (i, k)
            for i, k in enumerate(tensors[ROWS_OF + key].tolist())
            if k not in owner and k < count
        ]
        if new:
            at, k = zip(*new, strict=True)
            self.found[key][list(k)] = rows[list(at)]
            owner.update(dict.fromkeys(k, file))

    def build_state(self, t: int, attempt: int, whole: NamedTensors, rounds: NamedTensors) -> State:
        """The state; history is the ledger's to add."""
        state = {
            role: self._restore_state(role, start, whole, rounds)
            for role, start in self.start.server_state.items()
        }
        return State(t, whole["w"], state, self.roster, self.client_states, (), attempt)

    def _restore_state(
        self, role: str, start: Any, whole: NamedTensors, rounds: NamedTensors
    ) -> Any:
        """What one piece remembered."""
        entry = self.scalars.get(role)
        kind = type(start)
        if isinstance(entry, dict) and CLASS in entry:
            kind = kind if _type_name(start) == entry[CLASS] else load_class(entry[CLASS])
        elif role in self.scalars:
            return self._restore_value(entry, role, whole)
        if not is_dataclass(kind):
            return start  # what an older version did not remember starts here
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
            return (
                self._restore_value(entry, key, whole)
                if described
                else _restore_plain_value(template, entry)
            )
        if key in self.tables:
            return self.tables[key]
        if key in whole:
            return whole[key]
        if isinstance(template, dict) or f.metadata.get("rounds"):
            return _select_round_entries(key, rounds)
        return template  # what an older version did not remember starts here

    def _restore_value(self, entry: Any, key: str, whole: NamedTensors) -> Any:
        if not isinstance(entry, dict):
            return entry
        if TABLE not in entry:
            return decode_value(entry[VALUE], whole.__getitem__)
        if len(self.owners[key]) < entry[TABLE]:
            raise ValueError(f"{key} has {len(self.owners[key])} of {entry[TABLE]} rows")
        return self.found[key]


def _select_round_entries(key: str, rounds: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The entries of one table, oldest first, as the piece itself entered them."""
    mine = {
        int(name.rpartition("/")[2]): x for name, x in rounds.items() if name.startswith(f"{key}/")
    }
    return dict(sorted(mine.items()))


def _make_blank_table(
    template: Tensor, M: int, square: bool, metadata: Mapping[str, Any]
) -> Tensor:
    """A table of M rows as they are before they are first written."""
    # where the piece does not say
    same = float(template[0]) if template.numel() and template.dim() == 1 else 0.0
    return template.new_full(
        (M, M) if square else (M, *template.shape[1:]), metadata.get("fill", same)
    )


def _restore_plain_value(template: Any, value: Any) -> Any:
    """Plain data as JSON gave it back; lists and dicts, which were not described, in the template's
    type.
    """
    if not isinstance(value, list | dict):
        return value
    if template is None:
        return tuple(value) if isinstance(value, list) else value
    return type(template)(value)
