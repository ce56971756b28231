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

REFRESH_SECONDS = 1.0
MAX_TABLE_ROWS = 12
MAX_CLIENT_NAMES = 12
MAX_FOLDER_CHARACTERS = 40
TABLE_HEADINGS = (
    *("run", "state", "round", "metric", "trend", "conflicts"),
    *("J per point", "energy", "traffic", "time left", "budget left"),
)


def watch_runs(
    runs: tuple[Path, ...], once: bool, as_json: bool, metrics: str | None = None
) -> None:
    """Show runs while they train: in the terminal, as JSON, or to Prometheus."""
    places = list(runs) or [Path("runs")]
    watcher = RunWatcher(places)
    if metrics is not None:
        return serve_metrics(watcher, metrics)
    if as_json:
        return print(json.dumps(watcher.take_snapshot(), indent=1))
    if not once:
        wait_for_folders(places)
        if sys.stdout.isatty():
            return follow_runs(watcher)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(build_watch_board(watcher.take_snapshot()))


def wait_for_folders(places: list[Path]) -> None:
    """Wait until every folder exists; a run that was just started creates its own."""
    missing = [place for place in places if not place.exists()]
    if missing:
        names = ", ".join(map(str, missing))
        print(f"waiting for {names}; press Ctrl-C to stop", file=sys.stderr, flush=True)
    while not all(place.exists() for place in places):
        time.sleep(REFRESH_SECONDS / 2)


def serve_metrics(watcher: RunWatcher, address: str) -> None:
    """Serve metrics for Prometheus until Ctrl-C."""
    from flrce.report.metrics import build_metrics_server

    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    if not port.isdigit():
        raise BadInput(f"--metrics {address!r}: use PORT, or HOST:PORT to listen beyond {host}")
    with build_metrics_server(watcher, host, int(port)) as server:
        print(f"metrics: http://{host}:{server.server_address[1]}/metrics", flush=True)
        server.serve_forever(poll_interval=0.2)


def follow_runs(watcher: RunWatcher) -> None:
    """Update the table in the terminal until Ctrl-C."""
    with Live(console=Console(), refresh_per_second=4, transient=True) as live:
        while True:
            try:
                live.update(build_watch_board(watcher.take_snapshot()))
            except BadInput as error:  # the folder was moved; it may come back
                live.update(Text(str(error)))
            time.sleep(REFRESH_SECONDS)


def build_watch_board(runs: list[dict[str, Any]]) -> Group:
    """A table with a row per run, and details of the first run."""
    if not runs:
        return Group(Text("no runs yet; `flrce run` starts one"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    has_budgets = any(run.get("budget") for run in runs)
    headings = TABLE_HEADINGS if has_budgets else TABLE_HEADINGS[:-1]
    for i, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=i > 0)
    for run in runs[:MAX_TABLE_ROWS]:
        cells = format_run_row(run)
        table.add_row(*map(Text, cells[: len(headings)]))
    details = describe_last_round(runs[0]) if "t" in runs[0] else []
    if len(runs) > MAX_TABLE_ROWS:
        details.insert(0, Text(f"and {len(runs) - MAX_TABLE_ROWS} more; name a folder to see it"))
    return Group(table, *details)


def format_run_row(run: dict[str, Any]) -> tuple[str, ...]:
    if "t" not in run:  # unreadable
        return format_folder(run), format_one_line(run["state"], 60)
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
        ", ".join(map(format_budget, run["budget"])) or "--",
    )


def format_folder(run: dict[str, Any]) -> str:
    """A run's folder; of a long path the end, which distinguishes runs."""
    name = format_one_line(run["folder"], 1000)
    return name if len(name) <= MAX_FOLDER_CHARACTERS else f"…{name[1 - MAX_FOLDER_CHARACTERS :]}"


def format_point_price(run: dict[str, Any]) -> str:
    """Joules per point, over the last evaluations."""
    price = run["price"]
    if price is None or run["energy"] == "unknown":
        return "--"
    return "no gain" if price["joules"] is None else f"{price['joules']:.3g}"


def format_energy_spent(run: dict[str, Any]) -> str:
    """Joules so far; "unknown" if clients neither measure nor model them."""
    return "unknown" if run["energy"] == "unknown" else f"{run['spent']['joules']:.3g} J"


def format_budget(budget: dict[str, Any]) -> str:
    """The share left of a budget, and for how many rounds it lasts."""
    share = f"{100 * budget['left'] / budget['limit']:.0f} % of {budget['name']}"
    if budget["lasts"] is None or budget["name"] == "rounds":
        return share
    return f"{share} ({budget['lasts']} rounds)"


def describe_last_round(run: dict[str, Any]) -> list[Text]:
    """The clients of the last round, the last rejected reply, and notes."""
    lines = []
    if run["round"] is not None:
        last = run["round"]
        names = ", ".join(format_one_line(name, 24) for name in last["chosen"][:MAX_CLIENT_NAMES])
        if last["count"] > MAX_CLIENT_NAMES:
            names += f" and {last['count'] - MAX_CLIENT_NAMES} more"
        reach = f"; {last['reach']}" if last["reach"] else ""
        replies = f"{last['replied']} of {last['count']} replies accepted"
        lines.append(f"round {last['t']} of {run['folder']}: {names}; {replies}{reach}")
    if run["refusals"]:
        t, client, reason = run["refused"][0]
        lines.append(
            f"{run['refusals']} replies rejected, the last in round {t}:"
            f" {format_one_line(client, 40)}: {format_one_line(reason)}"
        )
    lines += [f"note: {note}" for note in run["notes"]]
    return [Text(format_one_line(line, 400)) for line in lines]
