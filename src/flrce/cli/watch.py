"""flrce watch runs"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flrce.cli.terminal import format_sparkline
from flrce.errors import BadInput, format_one_line
from flrce.report.live import RunWatcher, format_time_left

REFRESH_SECONDS = 1.0  # seconds between two looks
MAX_TABLE_ROWS = 12  # runs in the terminal's table; the rest is counted
MAX_CLIENT_NAMES = 12  # clients in a line
MAX_FOLDER_CHARACTERS = 40  # characters of a folder's name
TABLE_HEADINGS = (
    "run",
    "state",
    "round",
    "headline",
    "course",
    "conflicts",
    "J a point",
    "energy",
    "traffic",
    "left",
)


def watch_runs(
    runs: tuple[Path, ...],
    page: bool,
    port: int,
    once: bool,
    as_json: bool,
    metrics: str | None = None,
) -> None:
    """Show runs under way, in the terminal, on a page of this machine's own, or to Prometheus."""
    places = list(runs) or [Path("runs")]
    watcher = RunWatcher(places)
    if metrics is not None:
        return serve_metrics(watcher, metrics)
    if not once and not as_json:
        wait_for_folders(places)
    if as_json:
        print(json.dumps(watcher.take_snapshot(), indent=1))
    elif page:
        serve_watch_page(watcher, places, port)
    elif once or not sys.stdout.isatty():
        board = build_watch_board(watcher.take_snapshot())
        Console(width=None if sys.stdout.isatty() else 120).print(board)
    else:
        follow_runs(watcher)


def wait_for_folders(places: list[Path]) -> None:
    """Wait until every folder is there: a run that was just started makes its own."""
    missing = [place for place in places if not place.exists()]
    if missing:
        names = ", ".join(map(str, missing))
        print(f"waiting for {names}; Ctrl-C ends", file=sys.stderr, flush=True)
    while not all(place.exists() for place in places):
        time.sleep(REFRESH_SECONDS / 2)


def serve_watch_page(watcher: RunWatcher, places: list[Path], port: int) -> None:
    """The page, until Ctrl-C."""
    from flrce.cli.watch_server import HOST, build_watch_server, derive_page_key

    key = derive_page_key(places)
    with build_watch_server(watcher, port, key) as web:
        print(
            f"watching {', '.join(map(str, places))}: http://{HOST}:{web.server_address[1]}/{key}/",
            flush=True,
        )
        print("this machine only; Ctrl-C ends the page, not the runs", flush=True)
        web.serve_forever(poll_interval=0.2)


def serve_metrics(watcher: RunWatcher, address: str) -> None:
    """Prometheus' endpoint, until Ctrl-C."""
    from flrce.cli.watch_server import HOST, build_metrics_server

    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise BadInput(f"--metrics {address!r}: use PORT, or HOST:PORT to listen beyond {HOST}")
    with build_metrics_server(watcher, host or HOST, int(port)) as web:
        print(f"metrics: http://{host or HOST}:{web.server_address[1]}/metrics", flush=True)
        web.serve_forever(poll_interval=0.2)


def follow_runs(watcher: RunWatcher) -> None:
    """The terminal, until Ctrl-C."""
    with Live(console=Console(), refresh_per_second=4, transient=True) as live:
        while True:
            try:
                live.update(build_watch_board(watcher.take_snapshot()))
            except BadInput as why:  # the folder was moved away; it may come back
                live.update(Text(str(why)))
            time.sleep(REFRESH_SECONDS)


def build_watch_board(runs: list[dict[str, Any]]) -> Group:
    """A line for every run, and more about the first of them."""
    if not runs:
        return Group(Text("no runs yet; `flrce run` makes one"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    budgets = any(run.get("budget") for run in runs)
    for i, head in enumerate((*TABLE_HEADINGS, "budget left") if budgets else TABLE_HEADINGS):
        table.add_column(head, overflow="fold", no_wrap=i > 0)
    for run in runs[:MAX_TABLE_ROWS]:
        cells = (
            (*format_run_row(run), format_budgets(run))
            if "t" in run
            else (format_folder(run), format_one_line(run["state"], 60))
        )
        table.add_row(*map(Text, cells if budgets else cells[: len(TABLE_HEADINGS)]))
    more = (
        [Text(f"and {len(runs) - MAX_TABLE_ROWS} more; name a folder to see them alone")]
        if len(runs) > MAX_TABLE_ROWS
        else []
    )
    return Group(table, *more, *(describe_last_round(runs[0]) if "t" in runs[0] else []))


def format_run_row(run: dict[str, Any]) -> tuple[str, ...]:
    """A run in one line."""
    values = [value for _, value in run["handed"]]
    conflicts = f"{run['conflicts'][-1][1]:.1f}" if run["conflicts"] else "--"
    return (
        format_folder(run),
        run["state"],
        f"{run['t']} of {run['T']}",
        f"{run['metric']['name']} {run['shown']}",
        format_sparkline(values, 12),
        conflicts,
        format_point_price(run),
        format_energy_spent(run),
        f"{run['spent']['bytes'] / 1e6:.3g} MB",
        format_time_left(run["ends"]),
    )


def format_folder(run: dict[str, Any]) -> str:
    """A run's folder; of a long one the end, which tells runs apart."""
    name = format_one_line(run["folder"], 1000)
    return name if len(name) <= MAX_FOLDER_CHARACTERS else f"…{name[1 - MAX_FOLDER_CHARACTERS :]}"


def format_point_price(run: dict[str, Any]) -> str:
    """Joules for a point, over the last evaluations."""
    found = run["price"]
    if found is None or run["energy"] == "unknown":
        return "--"
    return "no gain" if found["joules"] is None else f"{found['joules']:.3g}"


def format_energy_spent(run: dict[str, Any]) -> str:
    """The joules so far; "unknown" where no client measures them and no profile models them."""
    return "unknown" if run["energy"] == "unknown" else f"{run['spent']['joules']:.3g} J"


def format_budgets(run: dict[str, Any]) -> str:
    """What is left of every budget."""
    return (
        ", ".join(
            f"{100 * each['left'] / each['limit']:.0f} % of {each['name']}"
            for each in run["budget"]
        )
        or "--"
    )


def describe_last_round(run: dict[str, Any]) -> list[Text]:
    """Who trained last, and what went wrong."""
    lines = []
    if run["round"] is not None:
        last = run["round"]
        names = ", ".join(format_one_line(name, 24) for name in last["chosen"][:MAX_CLIENT_NAMES])
        more = (
            f" and {last['count'] - MAX_CLIENT_NAMES} more"
            if last["count"] > MAX_CLIENT_NAMES
            else ""
        )
        lines.append(
            f"round {last['t']} of {run['folder']}: {names}{more}; {last['replied']} counted"
            + (f"; {last['reach']}" if last.get("reach") else "")
        )
    if run["refusals"]:
        t, client, reason = run["refused"][0]
        lines.append(
            f"{run['refusals']} replies refused, the last in round {t}:"
            f" {format_one_line(client, 40)}: {format_one_line(reason)}"
        )
    lines += [f"note: {note}" for note in run["notes"]]
    return [Text(format_one_line(line, 400)) for line in lines]
