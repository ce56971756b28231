"""flrce deploy monitor: what Prometheus and Grafana read about runs under way."""

import json
from pathlib import Path

from flrce.cli.deploy import fill_placeholders, read_template, write_new_file

MONITORING_FILES = ("prometheus.yml", "alerts.yml", "grafana-dashboard.json")  # JSON is YAML


def write_monitoring(folder: Path, target: str) -> None:
    """Write prometheus.yml, alerts.yml and a Grafana dashboard for `flrce watch --metrics`."""
    values = {"@target@": json.dumps(target)[1:-1]}
    for name in MONITORING_FILES:
        text = fill_placeholders(read_template(name), values)
        write_new_file(folder / name, text, "deploy monitor")
    print(f"wrote {folder}; start `flrce watch RUN --metrics {target}` and Prometheus there")
