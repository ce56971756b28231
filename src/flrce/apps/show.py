"""What a terminal shows: a live line per run, plain lines in a pipe, and tables."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flrce.types import Round


class Progress:
    """One live line on a terminal, a plain line per round in a pipe."""

    def __init__(self, title: str, T: int) -> None:
        self.title, self.T, self.console = title, T, Console(stderr=True)
        self.live = (
            Live(console=self.console, refresh_per_second=8, transient=True) if self.console.is_terminal else None
        )
        self.began, self.first, self.joules, self.bytes = time.monotonic(), 0, 0.0, 0

    def __call__(self, done: Round, title: str = "") -> None:
        r = done.record
        self.first = self.first or r.t
        self.joules += r.joules
        self.bytes += r.bytes_up + r.bytes_down
        left = (self.T - r.t) * (time.monotonic() - self.began) / max(r.t - self.first + 1, 1)
        accuracy = (
            "  --  " if r.accuracy is None else f"{100 * (r.accuracy if r.averaged is None else r.averaged):5.1f}%"
        )
        line = (
            f"{title or self.title}  round {r.t:>3}/{self.T}  {'exploit' if r.exploit else 'explore'}  accuracy {accuracy}"
            f"  conflicts {r.conflicts:3.1f}  {self.bytes / 1e6:8.2f} MB  {self.joules:9.1f} J  {left:4.0f} s left"
        )
        if r.stop:
            line += f"  stop: {r.stop}"
        if self.live:
            self.live.update(Text(line))
            if r.stop or r.t == self.T:
                self.live.console.print(Text(line))
        else:
            print(line, file=sys.stderr, flush=True)

    def restart(self, title: str) -> None:
        """The next run of several."""
        self.title, self.began, self.first, self.joules, self.bytes = title, time.monotonic(), 0, 0.0, 0

    def __enter__(self) -> "Progress":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], as_json: bool = False) -> None:
    """Print a table for a person, or the same as JSON for a program."""
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
        return
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def figure(entry: Mapping[str, Any], scale: float = 1.0, digits: int = 1) -> str:
    """mean ± half-width, scaled."""
    if entry["mean"] is None:
        return "--"
    half = f" ± {entry['half'] * scale:.{digits}f}" if entry["half"] is not None else ""
    return f"{entry['mean'] * scale:.{digits}f}{half}"
