"""flrce deploy monitor: what Prometheus and Grafana read about runs under way."""

import json
from pathlib import Path
from typing import Any

from flrce.cli.deploy import write_new_file

#: alert -> (expression, how long it must hold, severity, text)
ALERTS = {
    "TooFewNodes": (
        "flrce_up == 1 and flrce_clients_replied < 0.5 * flrce_clients_chosen",
        "10m",
        "warning",
        "fewer than half of the clients of the newest round replied",
    ),
    "RepeatedRefusals": (
        "flrce_up == 1 and delta(flrce_replies_refused[30m]) > 5",
        "0m",
        "warning",
        "more than 5 replies were refused within 30 minutes; flrce why shows the reasons",
    ),
    "AbandonedRounds": (
        "flrce_up == 1 and delta(flrce_rounds_abandoned[1h]) > 1",
        "0m",
        "critical",
        "rounds are abandoned: too few clients reply; three in a row end the run",
    ),
    "StalledRound": (
        "flrce_up == 1 and time() - flrce_last_round_timestamp_seconds > 3600",
        "0m",
        "critical",
        "no round was written for an hour",
    ),
    "BudgetAlmostSpent": (
        "flrce_up == 1 and flrce_budget_left_ratio < 0.1",
        "0m",
        "warning",
        "less than a tenth of a budget is left",
    ),
    "RunInterrupted": (
        "flrce_up == 0 and flrce_stopped_early == 0"
        " and flrce_rounds_committed < flrce_rounds_planned",
        "5m",
        "critical",
        "nobody trains in the folder and the run is not finished; start the server again",
    ),
    "UnreadableFolder": (
        "flrce_unreadable == 1",
        "5m",
        "critical",
        "a run folder is damaged or cannot be read; flrce verify checks it",
    ),
}
#: panel -> (expressions by legend, Grafana's unit)
PANELS: dict[str, tuple[dict[str, str], str]] = {
    "Rounds": ({"committed": "flrce_rounds_committed", "planned": "flrce_rounds_planned"}, "short"),
    "Model's metric": ({"{{metric}}": "flrce_metric"}, "short"),
    "Traffic": ({"training": "flrce_bytes", "evaluation": "flrce_evaluation_bytes"}, "decbytes"),
    "Energy (absent where unknown)": ({"energy": "flrce_joules"}, "joule"),
    "Clients of the newest round": (
        {
            "chosen": "flrce_clients_chosen",
            "counted": "flrce_clients_replied",
            "refused": "flrce_clients_refused",
        },
        "short",
    ),
    "Refused replies and abandoned rounds": (
        {"refused": "flrce_replies_refused", "abandoned": "flrce_rounds_abandoned"},
        "short",
    ),
    "Budget left": ({"{{budget}}": "flrce_budget_left_ratio"}, "percentunit"),
    "Forecast: time until the last round": (
        {"time left": "flrce_end_timestamp_seconds - time()"},
        "s",
    ),
    "Conflicts": ({"conflicting peers": "flrce_conflicts"}, "short"),
}
PANEL_WIDTH, PANEL_HEIGHT, PANELS_PER_ROW = 8, 8, 3  # of Grafana's 24 columns


def write_monitoring(folder: Path, target: str) -> None:
    """Write prometheus.yml, alerts.yml and a Grafana dashboard for `flrce watch --metrics`."""
    for name, text in render_monitoring_files(target).items():
        write_new_file(folder / name, text, "deploy monitor")
    print(f"wrote {folder}; start `flrce watch RUN --metrics {target}` and Prometheus there")


def render_monitoring_files(target: str) -> dict[str, str]:
    """Name -> text of every file. JSON is YAML, so one writer serves both."""
    scrape = {
        "global": {"scrape_interval": "15s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [{"job_name": "flrce", "static_configs": [{"targets": [target]}]}],
    }
    return {
        "prometheus.yml": _format_json(scrape),
        "alerts.yml": _format_json({"groups": [{"name": "flrce", "rules": build_alert_rules()}]}),
        "grafana-dashboard.json": _format_json(build_dashboard()),
    }


def build_alert_rules() -> list[dict[str, Any]]:
    """Prometheus' rules of ALERTS."""
    return [
        {
            "alert": name,
            "expr": expression,
            "for": lasting,
            "labels": {"severity": severity},
            "annotations": {"summary": "{{ $labels.run }}: " + text},
        }
        for name, (expression, lasting, severity, text) in ALERTS.items()
    ]


def build_dashboard() -> dict[str, Any]:
    """Grafana's dashboard of PANELS, with a choice of runs and of the data source."""
    return {
        "title": "flrce runs",
        "uid": "flrce-runs",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${source}"},
                    "query": "label_values(flrce_up, run)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [
            _build_panel(i, title, expressions, unit)
            for i, (title, (expressions, unit)) in enumerate(PANELS.items())
        ],
    }


def _build_panel(i: int, title: str, expressions: dict[str, str], unit: str) -> dict[str, Any]:
    row, column = divmod(i, PANELS_PER_ROW)
    return {
        "id": i + 1,
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {
            "h": PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "x": column * PANEL_WIDTH,
            "y": row * PANEL_HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "expr": _select_run(expression),
                "legendFormat": f"{{{{run}}}} {legend}",
            }
            for n, (legend, expression) in enumerate(expressions.items())
        ],
    }


def _select_run(expression: str) -> str:
    """An expression whose first metric is of the chosen runs."""
    name, _, rest = expression.partition(" ")
    return f'{name}{{run=~"$run"}}' + (f" {rest}" if rest else "")


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
