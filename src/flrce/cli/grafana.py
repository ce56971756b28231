"""The Grafana dashboard of `flrce deploy monitor`."""

from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
#: title, unit, and its curves: metric without "flrce_" -> legend
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Rounds", "short", {"rounds_committed": "committed", "rounds_planned": "planned"}),
    ("Model's metric", "short", {"metric": "{{metric}}"}),
    ("Traffic", "decbytes", {"bytes": "training", "evaluation_bytes": "evaluation"}),
    ("Energy (absent where unknown)", "joule", {"joules": "energy"}),
    (
        "Clients of the newest round",
        "short",
        {"clients_chosen": "chosen", "clients_replied": "counted", "clients_refused": "refused"},
    ),
    (
        "Refused replies and abandoned rounds",
        "short",
        {"replies_refused": "refused", "rounds_abandoned": "abandoned"},
    ),
    ("Budget left", "percentunit", {"budget_left_ratio": "{{budget}}"}),
    ("Forecast: time until the last round", "s", {"end_timestamp_seconds": "time left"}),
    ("Conflicts", "short", {"conflicts": "conflicting peers"}),
)
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # panels in a row, and their size in Grafana's units


def build_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; a variable chooses the runs."""
    runs = {"name": "run", "type": "query", "datasource": SOURCE, "includeAll": True, "multi": True}
    runs |= {"query": "label_values(flrce_up, run)", "refresh": 2}
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "flrce runs",
        "uid": "flrce-runs",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, runs]},
        "panels": [_build_panel(i, *panel) for i, panel in enumerate(PANELS)],
    }


def _build_panel(i: int, title: str, unit: str, curves: dict[str, str]) -> dict[str, Any]:
    place = {"x": WIDTH * (i % COLUMNS), "y": HEIGHT * (i // COLUMNS), "w": WIDTH, "h": HEIGHT}
    targets = []
    for letter, (name, legend) in zip("ABC", curves.items(), strict=False):
        expression = f'flrce_{name}{{run=~"$run"}}'
        if name.endswith("_timestamp_seconds"):
            expression += " - time()"
        curve = {"refId": letter, "expr": expression, "legendFormat": f"{{{{run}}}} {legend}"}
        targets.append(curve)
    return {
        "id": i + 1,
        "title": title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }
