"""State as named tensors and back. A table over clients is stored by rows: only those that a round touched are written.

A piece's memory is a frozen dataclass. Tensor fields with metadata "rows" are tables over clients ("square": over
pairs), dict[int, Tensor] fields are tables by round whose entries never change, other tensors are small and stored
whole, and the rest is plain data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from flrce.errors import BadInput
from flrce.store.pages import Rows
from flrce.types import State

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What one commit adds to the disk."""

    whole: Tensors  # the model and what is small
    rows: dict[str, Tensor | Rows]  # table -> (touched, ...) rows, `k` their numbers, and what those clients keep
    rounds: Tensors  # "table/round" -> every entry of the tables by round
    scalars: dict[str, Any]


def take(state: State, touched: Sequence[int]) -> Snapshot:
    """The parts of a state to write; `touched` are the rows to store."""
    found = Snapshot({"w": state.w}, {}, {}, {})
    index = torch.tensor(touched, dtype=torch.long)
    for role, memory in state.memory.items():
        for f in fields(memory):
            key, value = f"{role}.{f.name}", getattr(memory, f.name)
            if isinstance(value, Tensor) and f.metadata.get("rows"):
                found.rows[key] = Rows(value, tuple(touched))
            elif isinstance(value, Tensor):
                found.whole[key] = value
            elif isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values()):
                found.rounds.update({f"{key}/{r}": tensor for r, tensor in value.items()})
            else:
                found.scalars[key] = value
    for k in touched:
        for name, tensor in state.carry.get(state.roster[k], {}).items():
            found.rows[f"carry/{k}/{name}"] = tensor
    found.rows["k"] = index
    return found


@dataclass
class Assembly:
    """A state put together again from its files, the newest rows first."""

    start: State  # the initial state of the same recipe
    roster: tuple[str, ...]
    owner: dict[int, str] = field(default_factory=dict)  # row -> file that holds its newest version
    tables: Tensors = field(default_factory=dict)
    carry: dict[str, Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, memory in self.start.memory.items():
            for f in fields(memory):
                template = getattr(memory, f.name)
                if f.metadata.get("rows") and isinstance(template, Tensor):  # a table may be left out
                    square = bool(f.metadata.get("square"))
                    self.tables[f"{role}.{f.name}"] = _blank(template, len(self.roster), square, f.metadata)

    def add(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Place the rows of one file that no newer file holds."""
        for i, k in enumerate(tensors["k"].tolist() if "k" in tensors else ()):
            if k in self.owner:
                continue
            self.owner[k] = file
            for key, table in self.tables.items():
                if key not in tensors:  # the file is whole: its hash was checked
                    raise BadInput(
                        f"the checkpoint has no table {key!r}: another version made this recipe of other pieces; "
                        "finish the run with that version, or use another --out"
                    )
                row = tensors[key][i]
                table[(k, *(slice(size) for size in row.shape))] = row  # a square table's row may have grown since
            prefix = f"carry/{k}/"
            kept = {name.removeprefix(prefix): x.clone() for name, x in tensors.items() if name.startswith(prefix)}
            if kept:
                self.carry[self.roster[k]] = kept

    def state(self, t: int, attempt: int, whole: Tensors, rounds: Tensors, scalars: Mapping[str, Any]) -> State:
        """The state; history is the ledger's to add."""
        memory = {}
        for role, start in self.start.memory.items():
            values: dict[str, Any] = {}
            for f in fields(start):
                key, template = f"{role}.{f.name}", getattr(start, f.name)
                if key in self.tables:
                    values[f.name] = self.tables[key]
                elif key in whole:
                    values[f.name] = whole[key]
                elif isinstance(template, dict):
                    values[f.name] = _by_round(key, rounds)
                else:  # what an older version did not remember starts here
                    values[f.name] = _plain(template, scalars.get(key, template))
            memory[role] = replace(start, **values)
        return State(t, whole["w"], memory, self.roster, self.carry, (), attempt)


def _by_round(key: str, rounds: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The entries of one table, oldest first, as the piece itself entered them."""
    mine = {int(name.rpartition("/")[2]): x for name, x in rounds.items() if name.startswith(f"{key}/")}
    return dict(sorted(mine.items()))


def _blank(template: Tensor, M: int, square: bool, metadata: Mapping[str, Any]) -> Tensor:
    """A table of M rows as they are before they are first written."""
    same = float(template[0]) if template.numel() and template.dim() == 1 else 0.0  # where the piece does not say
    return template.new_full((M, M) if square else (M, *template.shape[1:]), metadata.get("fill", same))


def _plain(template: Any, value: Any) -> Any:
    """Plain data as JSON gave it back, in the template's type."""
    if value is None or template is None:
        return tuple(value) if isinstance(value, list) else value
    return type(template)(value)
