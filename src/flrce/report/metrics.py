"""Runs under way as Prometheus reads them: plain text, one line per run and figure.

The format is version 0.0.4 of Prometheus' text exposition. Everything is read from run folders, so
a scrape disturbs no training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Value = float | None
View = Mapping[str, Any]  # a run as report.live shows it


@dataclass(frozen=True)
class Gauge:
    """One figure of a run."""

    name: str
    help: str
    read: Callable[[View], Value]
    kind: str = "gauge"


def read_last_point(view: View, curve: str) -> Value:
    """The newest value of a curve."""
    points = view[curve]
    return float(points[-1][1]) if points else None


def read_energy(view: View) -> Value:
    """Joules; none where nobody measured or modelled them."""
    return None if view["energy"] == "unknown" else float(view["spent"]["joules"])


def read_round(view: View, field: str) -> Value:
    """A count of the newest round."""
    return None if view["round"] is None else float(view["round"][field])


GAUGES = (
    Gauge("flrce_up", "1 while a process trains in the folder.", lambda v: float(is_running(v))),
    Gauge("flrce_rounds_committed", "Rounds committed.", lambda v: v["t"]),
    Gauge("flrce_rounds_planned", "Rounds that the run may have.", lambda v: v["T"]),
    Gauge("flrce_rounds_abandoned", "Rounds without enough replies.", lambda v: v["abandoned"]),
    Gauge(
        "flrce_last_round_timestamp_seconds",
        "When the ledger was written last.",
        lambda v: v["last"] or None,
    ),
    Gauge("flrce_end_timestamp_seconds", "Forecast of the last round's end.", lambda v: v["ends"]),
    Gauge("flrce_metric", "The model's headline metric.", lambda v: read_last_point(v, "handed")),
    Gauge(
        "flrce_conflicts",
        "Mean number of conflicting peers.",
        lambda v: read_last_point(v, "conflicts"),
    ),
    Gauge("flrce_bytes", "Bytes of training, up and down.", lambda v: v["spent"]["bytes"]),
    Gauge("flrce_evaluation_bytes", "Bytes of models to evaluate.", lambda v: v["evaluation"]),
    Gauge("flrce_joules", "Energy of clients; absent where unknown.", read_energy),
    Gauge("flrce_seconds", "Seconds of all rounds.", lambda v: v["spent"]["seconds"]),
    Gauge("flrce_replies_refused", "Replies that did not count.", lambda v: v["refusals"]),
    Gauge("flrce_clients_known", "Clients that were ever seen.", lambda v: v["M"]),
    Gauge("flrce_clients_chosen", "Clients of the newest round.", lambda v: read_round(v, "count")),
    Gauge(
        "flrce_clients_replied",
        "Replies of the newest round that counted.",
        lambda v: read_round(v, "replied"),
    ),
    Gauge(
        "flrce_clients_refused",
        "Replies of the newest round that did not count.",
        lambda v: read_round(v, "rejected"),
    ),
    Gauge(
        "flrce_stopped_early",
        "1 where a stop rule ended the run.",
        lambda v: float(bool(v["stop"])),
    ),
)


def is_running(view: View) -> bool:
    """Whether somebody trains in the folder now."""
    return str(view["state"]).startswith(("running", "preparing"))


def render_metrics(views: Sequence[View]) -> str:
    """All runs in Prometheus' text format; a run that cannot be read is `flrce_unreadable`."""
    readable = [view for view in views if "t" in view]
    lines: list[str] = []
    for gauge in GAUGES:
        samples = [(format_labels(view), gauge.read(view)) for view in readable]
        lines += format_family(gauge.name, gauge.help, gauge.kind, samples)
    budgets = [
        (format_labels(view, budget=budget["name"]), budget["left"] / budget["limit"])
        for view in readable
        for budget in view["budget"]
        if budget["limit"]
    ]
    lines += format_family("flrce_budget_left_ratio", "Share of a budget left.", "gauge", budgets)
    broken = [(format_labels(view), 1.0) for view in views if "t" not in view]
    lines += format_family("flrce_unreadable", "Folders that cannot be read.", "gauge", broken)
    return "\n".join(lines) + "\n"


def format_family(
    name: str, help_text: str, kind: str, samples: Sequence[tuple[str, Value]]
) -> list[str]:
    """One metric with its samples; none where no run has it."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return []
    head = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{{{labels}}} {format_value(value)}" for labels, value in known]


def format_labels(view: View, **more: str) -> str:
    """Labels of a run; names come from strangers, so they are escaped.

    >>> format_labels({"folder": 'a"b'})
    'run="a\\\\"b"'
    """
    labels = {"run": str(view["folder"])}
    if "recipe" in view:
        labels |= {"recipe": str(view["recipe"]), "metric": str(view["metric"]["name"])}
    return ",".join(f'{name}="{escape_label(text)}"' for name, text in {**labels, **more}.items())


def escape_label(text: str) -> str:
    """A label's value: backslash, quote and line feed escaped, other control characters dropped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(each for each in escaped if each.isprintable())[:200]


def format_value(value: float) -> str:
    """A number as Prometheus writes it."""
    return repr(float(value))
