"""What a terminal shows: a live line per run, plain lines in a pipe, and tables."""

import json
import logging
import math
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flrce.core.cost_table import COSTS
from flrce.core.metric_format import format_metric_value
from flrce.core.record import format_figures
from flrce.core.types import Round, RoundRecord
from flrce.errors import InterruptedRun
from flrce.report.selection import get_phase


class ProgressDisplay:
    """A small live board on a terminal, and plain lines on stderr.

    In a pipe every round prints a line; with `per_run` only the last round of a run does, on a
    terminal too. Before the first round the board names the step of the preparation. `stop` is the
    rule whose psi is shown; `again` is the command that resumes after Ctrl-C.
    """

    def __init__(
        self, title: str, T: int, stop: Any = None, again: str = "", per_run: bool = False
    ) -> None:
        self.T, self.console, self.again = T, Console(stderr=True), again
        self.per_run = per_run
        self.records: list[RoundRecord] = []
        self.seen = 0  # rounds since this began
        # notes are told once, however many seeds or files have the same
        self.said: set[str] = set()
        self.handler, self.level = _ProgressLogHandler(self), logging.NOTSET
        self.live: Live | None = None
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=8, transient=True)
        self.restart(title, stop)

    def __call__(self, done: Round, title: str = "") -> None:
        r = done.record
        if title and title != self.title:  # the next seed
            self.restart(title, self.stop)
        # those before a resume among them
        self.records, self.seen = (list(done.state.history), self.seen + 1)
        ended = bool(r.stop) or r.t == self.T
        if self.live:
            self.live.update(self.build_board())
            if ended:
                self.live.console.print(Text(self.format_line()))
        elif ended or not self.per_run:
            print(self.format_line(), file=sys.stderr, flush=True)

    def restart(self, title: str, stop: Any = None) -> None:
        """The next run of several."""
        self.title, self.stop, self.began, self.seen = title, stop, time.monotonic(), 0
        self.records = []

    def format_line(self) -> str:
        """The last round in one line."""
        r = self.records[-1]
        if r.final_model_metric is None:
            value = "  --  "
        else:
            value = f"{format_metric_value(r.metric, r.final_model_metric):>6}"
        left = f"{self.seconds_left:4.0f} s left" if r.t < self.T else ""
        parts = [
            self.title,
            f"round {r.t:>3}/{self.T}",
            get_phase(r),
            f"{r.metric} {value}",
            f"conflicts {r.conflicts:3.1f}" if find_psi(self.stop) is not None else "",
            f"{self.nbytes / 1e6:8.2f} MB",
            f"{self.joules:9.1f} J",
            format_figures(r.figures),
            f"stopped: {r.stop}" if r.stop else left,
        ]
        return "  ".join(filter(None, parts))

    def build_board(self) -> Table:
        """The run so far: curves of metric and conflicts, costs, time left."""
        r, psi = self.records[-1], find_psi(self.stop)
        values = [h.final_model_metric for h in self.records if h.final_model_metric is not None]
        board = Table.grid(padding=(0, 2))
        board.add_row(
            Text(self.title, style="bold"),
            Text(f"round {r.t} of {self.T}, {self.seconds_left:.0f} s left"),
        )
        shown = "not evaluated yet"
        if values:
            newest = format_metric_value(r.metric, values[-1])
            shown = f"{newest:>7}  {format_sparkline(values)}"
        board.add_row(Text(r.metric), Text(shown))
        if psi is not None:
            course = format_sparkline([h.conflicts for h in self.records])
            board.add_row(Text("conflicts"), Text(f"{r.conflicts:5.1f}    {course} of psi {psi:g}"))
        if get_phase(r):
            board.add_row(Text("selection"), Text(get_phase(r)))
        if r.figures:
            board.add_row(Text("figures"), Text(format_figures(r.figures)))
        board.add_row(Text("spent"), Text(f"{self.nbytes / 1e6:.2f} MB, {self.joules:.1f} J"))
        return board

    @property
    def joules(self) -> float:
        return COSTS["joules"].of_run(self.records)

    @property
    def nbytes(self) -> float:
        return COSTS["bytes"].of_run(self.records)

    @property
    def seconds_left(self) -> float:
        """Seconds until T at the pace so far."""
        return (self.T - self.records[-1].t) * (time.monotonic() - self.began) / max(self.seen, 1)

    def show_message(self, message: str, level: int) -> None:
        """What the engine says: a step of the preparations, or something to know."""
        if message in self.said:
            return
        if level >= logging.WARNING:
            self.said.add(message)
            (self.live.console if self.live else self.console).print(
                Text(f"note: {message}"), soft_wrap=True
            )
        elif self.live and not self.records:
            self.live.update(Text(f"{self.title}: {message} ..."))

    def __enter__(self) -> "ProgressDisplay":
        log = logging.getLogger("flrce")
        self.level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self.handler)
        logging.getLogger("flwr").setLevel(logging.WARNING)
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        why: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        log = logging.getLogger("flrce")
        log.removeHandler(self.handler)
        log.setLevel(self.level)
        if self.live:
            self.live.stop()
        if isinstance(why, KeyboardInterrupt):
            raise InterruptedRun(self.describe_progress()) from None
        if why is not None:
            why.add_note(self.describe_progress())

    def describe_progress(self) -> str:
        """How far the run got, what is kept, and how to go on."""
        if not self.records:
            return "before the first round; nothing was trained yet"
        reached = f"after round {self.records[-1].t} of {self.T}"
        if self.again:
            return f"{reached}; go on with: {self.again}"
        return f"{reached}; nothing was kept (--no-save)"


class _ProgressLogHandler(logging.Handler):
    """Passes the log on to the board."""

    def __init__(self, board: ProgressDisplay) -> None:
        super().__init__(logging.INFO)
        self.board = board

    def emit(self, record: logging.LogRecord) -> None:
        self.board.show_message(record.getMessage(), record.levelno)


def find_psi(stop: Any) -> float | None:
    """The psi of a stop rule, or of one among several."""
    rules = () if stop is None else stop.list_rules()
    return next((rule.psi for rule in rules if rule.psi is not None), None)


def format_sparkline(values: Sequence[float], most: int = 40) -> str:
    """The last values as a row of bars, from the lowest to the highest.

    >>> format_sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    """
    kept = values[-most:]
    low, span = min(kept, default=0.0), (max(kept, default=0.0) - min(kept, default=0.0)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / span)] for value in kept)


def format_bars(
    labels: Sequence[str], values: Sequence[float | None], texts: Sequence[str], width: int = 32
) -> list[str]:
    """A line for each value; a bar grows by as much whenever its value doubles.

    >>> format_bars(["a", "bb"], [1.0, 8.0], ["1 J", "8 J"], width=8)
    [' a  ██        1 J', 'bb  ████████  8 J']
    """
    known = [math.log2(value) for value in values if value is not None and value > 0]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    lines, most = [], max(map(len, labels), default=0)
    for label, value, text in zip(labels, values, texts, strict=True):
        share = 0.0
        if value is not None and value > 0:
            share = 0.25 + 0.75 * (math.log2(value) - low) / span
        lines.append(f"{label:>{most}}  {'█' * round(width * share):<{width}}  {text}")
    return lines


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    as_json: bool = False,
    left: Sequence[str] | None = None,
) -> None:
    """Print a table, or the same as JSON. `left`: columns of text; default: detected."""
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=1))
        return
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        wordy = i == 0 or not all(_is_number(row[i]) for row in rows)
        text = wordy if left is None else column in left
        shown.add_column(column, justify="left" if text else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(_replace_unprintable(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def _replace_unprintable(cell: str) -> str:
    """Names come from files and clients: nothing that a terminal would obey; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in cell)


def _is_number(cell: str) -> bool:
    """Whether a cell holds a number, with or without its interval."""
    number = r"[-+]?[\d.,]+(e[-+]?\d+)?( (±|to) [\d.,]+)?"
    return re.fullmatch(rf"{number}|--|yes|no|\d+ of \d+", cell.strip()) is not None
