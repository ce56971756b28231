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

from flrce.apps.show import sparkline
from flrce.errors import BadInput, brief
from flrce.results.live import Watcher, left

EVERY = 1.0  # seconds between two looks
ROWS = 12  # runs in the terminal's table; the rest is counted
NAMES = 12  # clients in a line
LONGEST = 40  # characters of a folder's name
HEADS = ("run", "state", "round", "headline", "course", "conflicts", "J a point", "energy", "traffic", "left")


def watch(runs: tuple[Path, ...], page: bool, port: int, once: bool, as_json: bool) -> None:
    """Show runs under way, in the terminal or on a page of this machine's own."""
    places = list(runs) or [Path("runs")]
    watcher = Watcher(places)
    found = watcher.look()
    if as_json:
        print(json.dumps(found, indent=1))
    elif page:
        serve(watcher, places, port)
    elif once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 120).print(board(found))
    else:
        follow(watcher)


def serve(watcher: Watcher, places: list[Path], port: int) -> None:
    """The page, until Ctrl-C."""
    from flrce.apps.served import HOST, secret, server

    key = secret(places)
    with server(watcher, port, key) as web:
        print(f"watching {', '.join(map(str, places))}: http://{HOST}:{web.server_address[1]}/{key}/", flush=True)
        print("this machine only; Ctrl-C ends the page, not the runs", flush=True)
        web.serve_forever(poll_interval=0.2)


def follow(watcher: Watcher) -> None:
    """The terminal, until Ctrl-C."""
    with Live(console=Console(), refresh_per_second=4, transient=True) as live:
        while True:
            try:
                live.update(board(watcher.look()))
            except BadInput as why:  # the folder was moved away; it may come back
                live.update(Text(str(why)))
            time.sleep(EVERY)


def board(runs: list[dict[str, Any]]) -> Group:
    """A line for every run, and more about the first of them."""
    if not runs:
        return Group(Text("no runs yet; `flrce run` makes one"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    budgets = any(run.get("budget") for run in runs)
    for i, head in enumerate((*HEADS, "budget left") if budgets else HEADS):
        table.add_column(head, overflow="fold", no_wrap=i > 0)
    for run in runs[:ROWS]:
        cells = (*row(run), budget(run)) if "t" in run else (place(run), brief(run["state"], 60))
        table.add_row(*map(Text, cells if budgets else cells[: len(HEADS)]))
    more = [Text(f"and {len(runs) - ROWS} more; name a folder to see them alone")] if len(runs) > ROWS else []
    return Group(table, *more, *(detail(runs[0]) if "t" in runs[0] else []))


def row(run: dict[str, Any]) -> tuple[str, ...]:
    """A run in one line."""
    values = [value for _, value in run["handed"]]
    conflicts = f"{run['conflicts'][-1][1]:.1f}" if run["conflicts"] else "--"
    return (
        place(run), run["state"], f"{run['t']} of {run['T']}",
        f"{run['metric']['name']} {run['shown']}", sparkline(values, 12), conflicts, price(run),
        f"{run['spent']['joules']:.3g} J", f"{run['spent']['bytes'] / 1e6:.3g} MB", left(run["ends"]),
    )  # fmt: skip


def place(run: dict[str, Any]) -> str:
    """A run's folder; of a long one the end, which tells runs apart."""
    name = brief(run["folder"], 1000)
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def price(run: dict[str, Any]) -> str:
    """Joules for a point, over the last evaluations."""
    found = run["price"]
    if found is None:
        return "--"
    return "no gain" if found["joules"] is None else f"{found['joules']:.3g}"


def budget(run: dict[str, Any]) -> str:
    """What is left of every budget."""
    return ", ".join(f"{100 * each['left'] / each['limit']:.0f} % of {each['name']}" for each in run["budget"]) or "--"


def detail(run: dict[str, Any]) -> list[Text]:
    """Who trained last, and what went wrong."""
    lines = []
    if run["round"] is not None:
        last = run["round"]
        names = ", ".join(brief(name, 24) for name in last["chosen"][:NAMES])
        more = f" and {last['count'] - NAMES} more" if last["count"] > NAMES else ""
        lines.append(f"round {last['t']} of {run['folder']}: {names}{more}; {last['replied']} counted")
    if run["refusals"]:
        t, client, reason = run["refused"][0]
        lines.append(f"{run['refusals']} replies refused, the last in round {t}: {brief(client, 40)}: {brief(reason)}")
    lines += [f"note: {note}" for note in run["notes"]]
    return [Text(brief(line, 400)) for line in lines]
