"""Tables as data: intervals over seeds, csv for programs, Markdown for people, and where every
number comes from.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flrce.core.intervals import half_width

NOT_RUN_TEXT = "not yet run"


@dataclass(frozen=True)
class SeedInterval:
    """A mean over seeds and the half-width of its 95 % interval (Student's t); one seed has
    none.
    """

    mean: float
    half: float | None
    n: int

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "SeedInterval | None":
        found = list(values)
        if not found:
            return None
        n = len(found)
        half = float(half_width(found)) if n > 1 else None
        return cls(fmean(found), half, n)

    def is_above(self, bound: float) -> bool | None:
        """Whether all of the interval is at the bound or above, or all of it below; None: it
        reaches over the bound.
        """
        if self.half is None:
            return None  # one seed tells nothing about the next
        if self.mean - self.half >= bound:
            return True
        return False if self.mean + self.half < bound else None

    def divide_by(self, unit: float) -> "SeedInterval":
        return SeedInterval(self.mean / unit, self.half and self.half / unit, self.n)

    def format_interval(self, digits: int, signed: bool = False) -> str:
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:{'+' if signed else ''}.{digits}f}{half}"


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float]
) -> SeedInterval | None:
    """ours - theirs, seed by seed."""
    both = sorted({*ours} & {*theirs})
    return SeedInterval.from_values(ours[seed] - theirs[seed] for seed in both)


@dataclass(frozen=True)
class TableColumn:
    """`digits` after the point; `signed` shows a plus."""

    name: str
    digits: int = 1
    signed: bool = False


def parse_columns(text: str) -> tuple[TableColumn, ...]:
    """Columns with | between them, each with its digits: "method|accuracy %:2|difference:+2"."""
    columns = []
    for part in text.split("|"):
        name, _, digits = part.partition(":")
        columns.append(TableColumn(name, int(digits or 1), digits.startswith("+")))
    return tuple(columns)


@dataclass(frozen=True)
class Provenance:
    """What made a table: the command that makes it again, and what its cells ran on."""

    command: str
    versions: tuple[str, ...]
    hardware: tuple[str, ...]

    def format_lines(self) -> list[str]:
        versions = "; ".join(self.versions) or NOT_RUN_TEXT
        hardware = "; ".join(self.hardware) or NOT_RUN_TEXT
        return [f"Command: `{self.command}`", f"Versions: {versions}. Hardware: {hardware}."]


@dataclass(frozen=True)
class PaperTable:
    """Rows hold intervals, numbers, words, or None where there is nothing to say."""

    name: str  # of its files
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    long: tuple[TableColumn, ...] = ()  # the same round by round, for a csv of its own
    long_rows: tuple[tuple[Any, ...], ...] = ()

    def get_column_index(self, name: str) -> int:
        return [column.name for column in self.columns].index(name)

    def to_markdown(self, source: Provenance) -> str:
        """The table for people."""
        cells = [
            [_format_value(value, column) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]
        names = [column.name for column in self.columns]
        grid = [f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)]
        about = (
            "Mean ± half-width of the 95 % interval over seeds (Student's t); differences between"
            " methods are taken seed by seed."
        )
        lines = [f"### {self.title}", "", *grid, "", about, *self.notes, ""]
        return "\n".join([*lines, *source.format_lines()]) + "\n"

    def to_csv(self, source: Provenance, long: bool = False) -> str:
        """The table for programs: full precision, an interval as mean, half-width and number of
        seeds.
        """
        columns, rows = (self.long, self.long_rows) if long else (self.columns, self.rows)
        wide = [any(isinstance(row[i], SeedInterval) for row in rows) for i in range(len(columns))]
        file = io.StringIO()
        for line in (self.title, *self.notes, *source.format_lines()):
            file.write(f"# {line}\n")
        writer = csv.writer(file, lineterminator="\n")
        names = [column.name for column in columns]
        writer.writerow(_expand_cells(names, wide, lambda name: [name, f"{name} ±", "seeds"]))
        for row in rows:
            writer.writerow(_expand_cells(row, wide, _to_csv_cells))
        return file.getvalue()


def _expand_cells(values: Sequence[Any], wide: Sequence[bool], widen: Any) -> list[Any]:
    cells: list[Any] = []
    for value, spread in zip(values, wide, strict=True):
        cells += widen(value) if spread else ["" if value is None else value]
    return cells


def _to_csv_cells(value: Any) -> list[Any]:
    if isinstance(value, SeedInterval):
        return [f"{value.mean:.10g}", "" if value.half is None else f"{value.half:.10g}", value.n]
    return ["" if value is None else value, "", ""]


def _format_value(value: Any, column: TableColumn) -> str:
    if isinstance(value, SeedInterval):
        return value.format_interval(column.digits, column.signed)
    if isinstance(value, float):
        return f"{value:{'+' if column.signed else ''}.{column.digits}f}"
    return "" if value is None else str(value)
