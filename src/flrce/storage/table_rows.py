"""Rows of tables over clients: which changed since the last commit, and which file holds each."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_COPIED_BYTES = 2**28  # of larger tables, a digest of each row is kept instead of a copy


class TableWatch:
    """The tables as they were last written.

    A piece may write a table in place, so changes are found by comparison with a copy.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}  # dtype and shape of a row
        self.marks: dict[str, Tensor] = {}  # (M, ...) bytes of each row, or their digests

    def find_changed_rows(self, key: str, table: Tensor) -> tuple[int, ...]:
        """Rows that differ from the last commit; all rows of a new or reshaped table."""
        if self.kinds.get(key) != _row_kind(table):
            return tuple(range(len(table)))
        before, now = self.marks[key], mark_rows(table)
        shared = min(len(before), len(now))
        differ = (before[:shared] != now[:shared]).any(1).nonzero()[:, 0]
        return (*differ.tolist(), *range(shared, len(now)))

    def remember_tables(self, tables: Mapping[str, Tensor]) -> None:
        """Store the current contents of these tables and forget all others."""
        self.kinds = {key: _row_kind(table) for key, table in tables.items()}
        self.marks = {key: mark_rows(table).clone() for key, table in tables.items()}


def mark_rows(table: Tensor) -> Tensor:
    """(M, ...) uint8: the bytes of each row, or their digests if the table is large."""
    rows = table.detach().contiguous().reshape(len(table), table[:1].numel()).view(torch.uint8)
    if rows.numel() < MAX_COPIED_BYTES:
        return rows
    digests = [hashlib.blake2b(row.numpy().data, digest_size=16).digest() for row in rows]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(len(rows), -1)


def _row_kind(table: Tensor) -> tuple[torch.dtype, torch.Size]:
    return table.dtype, table.shape[1:]


@dataclass
class RowLocations:
    """The checkpoint file that holds the newest version of each row.

    Updating it after a commit costs time proportional to the committed rows.
    """

    owner: dict[int, str] = field(default_factory=dict)  # row -> file with its newest version
    content: dict[str, tuple[int, ...]] = field(default_factory=dict)  # file -> all rows in it
    live: Counter[str] = field(default_factory=Counter)  # file -> number of newest versions in it

    def count_current_rows(self, changed_rows: Iterable[int]) -> Counter[str]:
        """Newest versions in each file, once `changed_rows` are written elsewhere."""
        return self.live - Counter(self.owner[k] for k in changed_rows if k in self.owner)

    def move_rows(self, rows: Sequence[int], file: str) -> None:
        """Record that the newest versions of these rows are in a new file."""
        self.live = self.count_current_rows(rows) + Counter({file: len(rows)})
        self.owner.update(dict.fromkeys(rows, file))
        self.content = {name: self.content.get(name, tuple(rows)) for name in self.live}

    def find_stragglers(self, changed_rows: set[int]) -> list[int]:
        """Rows to write again so that an old file can be deleted.

        These are the current rows of the emptiest file, once fewer than half of all stored rows
        are current.
        """
        live = self.count_current_rows(changed_rows)
        if sum(len(self.content[file]) for file in live) <= 2 * live.total():
            return []
        emptiest = min(live, key=lambda file: (live[file] / len(self.content[file]), file))
        return [
            k for k in self.content[emptiest] if self.owner[k] == emptiest and k not in changed_rows
        ]
