"""Tables as data: intervals over seeds, csv for programs, Markdown for people, and where every number comes from."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flrce.intervals import half_width

ABSENT = "not yet run"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half-width of its 95 % interval (Student's t); one seed has none."""

    mean: float
    half: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Interval | None":
        found = list(values)
        if not found:
            return None
        n = len(found)
        half = float(half_width(found)) if n > 1 else None
        return cls(fmean(found), half, n)

    def above(self, bound: float) -> bool | None:
        """Whether all of the interval is at the bound or above, or all of it below; None: it reaches over the bound."""
        if self.half is None:
            return None  # one seed tells nothing about the next
        if self.mean - self.half >= bound:
            return True
        return False if self.mean + self.half < bound else None

    def text(self, digits: int, signed: bool = False) -> str:
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:{'+' if signed else ''}.{digits}f}{half}"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """ours - theirs, seed by seed."""
    return Interval.of(ours[seed] - theirs[seed] for seed in sorted({*ours} & {*theirs}))


@dataclass(frozen=True)
class Column:
    """`digits` after the point; `signed` shows a plus."""

    name: str
    digits: int = 1
    signed: bool = False


@dataclass(frozen=True)
class Provenance:
    """What made a table: the command that makes it again, and what its cells ran on."""

    command: str
    versions: tuple[str, ...]
    hardware: tuple[str, ...]

    def lines(self) -> list[str]:
        return [
            f"Command: `{self.command}`",
            f"Versions: {'; '.join(self.versions) or ABSENT}. Hardware: {'; '.join(self.hardware) or ABSENT}.",
        ]


@dataclass(frozen=True)
class Table:
    """Rows hold intervals, numbers, words, or None where there is nothing to say."""

    name: str  # of its files
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    long: tuple[Column, ...] = ()  # the same round by round, for a csv of its own
    long_rows: tuple[tuple[Any, ...], ...] = ()

    def column(self, name: str) -> int:
        return [column.name for column in self.columns].index(name)

    def markdown(self, source: Provenance) -> str:
        """The table for people."""
        lines = [f"### {self.title}", "", _line([column.name for column in self.columns])]
        lines.append(_line(["---"] * len(self.columns)))
        for row in self.rows:
            lines.append(_line([_shown(value, column) for value, column in zip(row, self.columns, strict=True)]))
        lines += ["", "Mean ± half-width of the 95 % interval over seeds (Student's t); differences between methods "
                  "are taken seed by seed.", *self.notes, "", *source.lines()]  # fmt: skip
        return "\n".join(lines) + "\n"

    def csv(self, source: Provenance, long: bool = False) -> str:
        """The table for programs: full precision, an interval as mean, half-width and number of seeds."""
        columns, rows = (self.long, self.long_rows) if long else (self.columns, self.rows)
        wide = [any(isinstance(row[i], Interval) for row in rows) for i in range(len(columns))]
        file = io.StringIO()
        for line in (self.title, *self.notes, *source.lines()):
            file.write(f"# {line}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_spread([column.name for column in columns], wide, lambda name: [name, f"{name} ±", "seeds"]))
        for row in rows:
            writer.writerow(_spread(row, wide, _cells))
        return file.getvalue()


def _spread(values: Sequence[Any], wide: Sequence[bool], widen: Any) -> list[Any]:
    cells: list[Any] = []
    for value, spread in zip(values, wide, strict=True):
        cells += widen(value) if spread else ["" if value is None else value]
    return cells


def _cells(value: Any) -> list[Any]:
    if isinstance(value, Interval):
        return [f"{value.mean:.10g}", "" if value.half is None else f"{value.half:.10g}", value.n]
    return ["" if value is None else value, "", ""]


def _shown(value: Any, column: Column) -> str:
    if isinstance(value, Interval):
        return value.text(column.digits, column.signed)
    if isinstance(value, float):
        return f"{value:{'+' if column.signed else ''}.{column.digits}f}"
    return "" if value is None else str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
