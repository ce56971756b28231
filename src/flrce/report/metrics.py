"""Serve figures of runs to Prometheus, in version 0.0.4 of its text format.

All figures are read from run directories, so a scrape does not disturb training.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flrce.errors import BadInput
from flrce.report.live import RunWatcher, is_running

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABEL_CHARACTERS = 200
RunView = Mapping[str, Any]  # report.live.build_run_view


def read_last_point(view: RunView, curve: str) -> float | None:
    points = view[curve]
    return float(points[-1][1]) if points else None


def read_energy(view: RunView) -> float | None:
    """Joules; None if they are neither measured nor modelled."""
    return None if view["energy"] == "unknown" else float(view["spent"]["joules"])


def read_newest_round(view: RunView, key: str) -> float | None:
    return None if view["round"] is None else float(view["round"][key])


#: name without "flrce_" -> help text, reader
GAUGES: dict[str, tuple[str, Callable[[RunView], float | None]]] = {
    "up": ("1 while a process trains in the folder.", lambda v: float(is_running(v))),
    "rounds_committed": ("Rounds committed.", lambda v: v["t"]),
    "rounds_planned": ("Planned rounds.", lambda v: v["T"]),
    "rounds_abandoned": ("Rounds without enough replies.", lambda v: v["abandoned"]),
    "last_round_timestamp_seconds": (
        "Time of the last write to the ledger.",
        lambda v: v["last"] or None,
    ),
    "end_timestamp_seconds": ("Forecast of the end of the last round.", lambda v: v["ends"]),
    "metric": ("Primary metric of the final model.", lambda v: read_last_point(v, "handed")),
    "conflicts": ("Mean number of conflicting peers.", lambda v: read_last_point(v, "conflicts")),
    "bytes": ("Bytes of training, up and down.", lambda v: v["spent"]["bytes"]),
    "evaluation_bytes": ("Bytes of models sent for evaluation.", lambda v: v["evaluation"]),
    "joules": ("Energy of clients; absent if unknown.", read_energy),
    "seconds": ("Seconds of all rounds.", lambda v: v["spent"]["seconds"]),
    "replies_refused": ("Rejected replies.", lambda v: v["refusals"]),
    "clients_known": ("Clients ever seen.", lambda v: v["M"]),
    "clients_chosen": (
        "Clients chosen in the newest round.",
        lambda v: read_newest_round(v, "count"),
    ),
    "clients_replied": (
        "Accepted replies of the newest round.",
        lambda v: read_newest_round(v, "replied"),
    ),
    "clients_refused": (
        "Rejected replies of the newest round.",
        lambda v: read_newest_round(v, "rejected"),
    ),
    "stopped_early": ("1 if a stop rule ended the run.", lambda v: float(bool(v["stop"]))),
}


def render_metrics(views: Sequence[RunView]) -> str:
    """All runs as text; a run that cannot be read is `flrce_unreadable`."""
    readable = [view for view in views if "t" in view]
    lines: list[str] = []
    for name, (help_text, read_value) in GAUGES.items():
        samples = [(format_labels(view), read_value(view)) for view in readable]
        lines += format_gauge(name, help_text, samples)
    budgets = [
        (format_labels(view, budget=budget["name"]), budget["left"] / budget["limit"])
        for view in readable
        for budget in view["budget"]
        if budget["limit"]
    ]
    lines += format_gauge("budget_left_ratio", "Share of a budget left.", budgets)
    unreadable = [(format_labels(view), 1.0) for view in views if "t" not in view]
    lines += format_gauge("unreadable", "Folders that cannot be read.", unreadable)
    return "\n".join(lines) + "\n"


def format_gauge(
    name: str, help_text: str, samples: Iterable[tuple[str, float | None]]
) -> list[str]:
    """The lines of one gauge; none if no run has a value."""
    lines = [
        f"flrce_{name}{{{labels}}} {float(value)!r}"
        for labels, value in samples
        if value is not None
    ]
    head = [f"# HELP flrce_{name} {help_text}", f"# TYPE flrce_{name} gauge"]
    return head + lines if lines else []


def format_labels(view: RunView, **extra: str) -> str:
    """Labels of a run. Names are untrusted, so they are escaped.

    >>> format_labels({"folder": 'a"b'})
    'run="a\\\\"b"'
    """
    labels = {"run": str(view["folder"])}
    if "recipe" in view:
        labels |= {"recipe": str(view["recipe"]), "metric": str(view["metric"]["name"])}
    return ",".join(f'{name}="{escape_label(text)}"' for name, text in {**labels, **extra}.items())


def escape_label(text: str) -> str:
    """Escape backslash, quote and line feed; drop other control characters."""
    plain = "".join(c for c in text if c.isprintable() or c == "\n")[:MAX_LABEL_CHARACTERS]
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def build_metrics_server(watcher: RunWatcher, host: str, port: int) -> ThreadingHTTPServer:
    """A server that answers /metrics. It shows figures of runs, but no names of clients."""
    lock = threading.Lock()

    class MetricsRequestHandler(BaseHTTPRequestHandler):
        server_version, sys_version = "flrce", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                return self.send_answer(404, "text/plain", "not found; use /metrics")
            try:
                with lock:
                    text = render_metrics(watcher.take_snapshot())
            except BadInput as error:  # a folder that does not exist yet
                return self.send_answer(503, "text/plain", f"{error}\n")
            self.send_answer(200, CONTENT_TYPE, text)

        do_HEAD = do_GET

        def send_answer(self, code: int, content_type: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log scrapes."""

    try:
        return ThreadingHTTPServer((host, port), MetricsRequestHandler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"metrics on {host}:{port}: {reason}; name another port or host") from error
