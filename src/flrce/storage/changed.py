"""Which rows of a table over clients changed since the last commit: whatever a piece wrote, and
wherever.

A table may be written in place, so that there is nothing to compare it with but a copy; of one that
is large, each row's digest is kept instead.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

LARGE = 2**28  # bytes of a table from which digests of its rows are kept, not a copy


class TableWatch:
    """Tables as they were when they were last written."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}  # of each table's rows
        self.marks: dict[str, Tensor] = {}  # (M, ...) bytes of each row, or their digests

    def find_changed_rows(self, key: str, table: Tensor) -> tuple[int, ...]:
        """Rows that are not as they were; all of a table that is new, or whose rows have another
        type or shape.
        """
        if self.kinds.get(key) != _table_kind(table):
            return tuple(range(len(table)))
        before, now = self.marks[key], mark_rows(table)
        shared = min(len(before), len(now))
        differ = (before[:shared] != now[:shared]).any(1).nonzero()[:, 0]
        return (*differ.tolist(), *range(shared, len(now)))

    def remember_tables(self, tables: Mapping[str, Tensor]) -> None:
        """Take these tables as they are now, and forget all others."""
        self.kinds = {key: _table_kind(table) for key, table in tables.items()}
        self.marks = {key: mark_rows(table).clone() for key, table in tables.items()}


def mark_rows(table: Tensor) -> Tensor:
    """(M, ...) uint8: rows that differ in any bit have different ones."""
    rows = table.detach().contiguous().reshape(len(table), table[:1].numel()).view(torch.uint8)
    if rows.numel() < LARGE:
        return rows
    digests = [hashlib.blake2b(row.numpy().data, digest_size=16).digest() for row in rows]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(len(rows), -1)


def _table_kind(table: Tensor) -> tuple[torch.dtype, torch.Size]:
    return table.dtype, table.shape[1:]
