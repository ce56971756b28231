"""What Prometheus and Grafana read of runs under way."""

import http.client
import json
import re
import threading

import pytest

from flrce.cli.cli import main
from flrce.cli.deploy import MONITORING_FILES, read_template
from flrce.cli.grafana import build_dashboard
from flrce.report.live import RunWatcher
from flrce.report.metrics import GAUGES, build_metrics_server, escape_label, render_metrics

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\} (\S+)')
VIEW = {
    "folder": "runs/a",
    "recipe": "flrce",
    "state": "running",
    "t": 3,
    "T": 10,
    "abandoned": 1,
    "last": 1000.0,
    "ends": None,
    "metric": {"name": "accuracy"},
    "handed": [[1, 0.5], [3, 0.75]],
    "conflicts": [],
    "spent": {"bytes": 400.0, "joules": 8.0, "seconds": 12.0},
    "evaluation": 100,
    "energy": "modelled",
    "refusals": 2,
    "M": 5,
    "round": {"count": 4, "replied": 3, "rejected": 1},
    "stop": "",
    "budget": [{"name": "bytes", "limit": 1000.0, "left": 600.0}],
}


def parse(text):
    """(metric, labels) -> value; every line must be a sample or a comment."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            found[name, labels] = float(value)
    return found


def test_a_run_by_hand():
    labels = 'run="runs/a",recipe="flrce",metric="accuracy"'
    found = parse(render_metrics([VIEW, {"folder": "runs/b", "state": "damaged: x"}]))
    assert found["flrce_up", labels] == 1
    assert found["flrce_rounds_committed", labels] == 3
    assert found["flrce_metric", labels] == 0.75
    assert found["flrce_bytes", labels] == 400
    assert found["flrce_joules", labels] == 8
    assert found["flrce_clients_replied", labels] == 3
    assert found["flrce_budget_left_ratio", f'{labels},budget="bytes"'] == 0.6
    assert found["flrce_unreadable", 'run="runs/b"'] == 1
    names = {name for name, _ in found}
    assert "flrce_conflicts" not in names  # nothing is known of them
    assert "flrce_end_timestamp_seconds" not in names
    unknown = parse(render_metrics([{**VIEW, "energy": "unknown"}]))
    assert ("flrce_joules", labels) not in unknown


def test_labels_of_strangers_cannot_break_the_format():
    name = 'a"} 1\nflrce_up{run="\\\x1b'
    assert "\n" not in escape_label(name)
    found = parse(render_metrics([{**VIEW, "folder": name}]))
    assert len([key for key in found if key[0] == "flrce_up"]) == 1


@pytest.mark.parametrize("last", ["\\", '"', "\n"])
def test_a_long_label_is_not_cut_within_an_escape(last):
    name = "a" * 199 + last + "b"
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    assert escape_label(name) == "a" * 199 + escapes[last]


def test_the_endpoint(tmp_path):
    folder = tmp_path / "runs"
    with build_metrics_server(RunWatcher([folder]), "127.0.0.1", 0) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()

        def ask(path):
            link = http.client.HTTPConnection(*web.server_address, timeout=30)
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.getheader("Content-Type"), answer.read().decode()

        assert ask("/metrics")[0] == 503  # the folder is not there yet
        code = main(["run", "--set", "rounds=2", "--set", "clients=4", "--set", "per_round=2",
                     "--out", str(folder / "a")])  # fmt: skip
        assert code == 0
        status, kind, text = ask("/metrics")
        assert status == 200
        assert kind.startswith("text/plain; version=0.0.4")
        found = parse(text)
        assert [
            value for (name, _), value in found.items() if name == "flrce_rounds_committed"
        ] == [2]
        assert ask("/")[0] == 404
        web.shutdown()


@pytest.mark.parametrize("address", ["port", "host:", "1.2.3.4"])
def test_an_address_that_is_none(address, capsys):
    assert main(["watch", "--metrics", address]) == 2
    assert "use PORT, or HOST:PORT" in capsys.readouterr().err


def test_alerts_and_panels_use_metrics_that_exist():
    known = {f"flrce_{name}" for name in GAUGES} | {"flrce_budget_left_ratio", "flrce_unreadable"}
    rules = json.loads(read_template("alerts.yml"))["groups"][0]["rules"]
    panels = build_dashboard()["panels"]
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in expressions:
        names = set(re.findall(r"flrce_\w+", expression))
        assert names
        assert names <= known, expression
    alerts = {rule["alert"] for rule in rules}
    assert {"TooFewNodes", "RepeatedRefusals", "StalledRound", "BudgetAlmostSpent"} <= alerts
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_operands_of_an_alert_have_the_same_labels():
    """PromQL drops a sample whose labels no sample of the other operand has, without `on`."""
    labels = {}
    for name, text in parse(render_metrics([VIEW, {"folder": "runs/b", "state": "x"}])):
        labels.setdefault(name, set(re.findall(r'([a-z]+)="', text)))
    for rule in json.loads(read_template("alerts.yml"))["groups"][0]["rules"]:
        used = [labels.get(name, {"run"}) for name in re.findall(r"flrce_\w+", rule["expr"])]
        shared = re.search(r"and on \(([a-z, ]+)\)", rule["expr"])
        if shared:
            for names in used:
                assert set(shared[1].split(", ")) <= names | {"instance"}  # Prometheus adds it
        else:
            assert all(names == used[0] for names in used), rule["alert"]


def test_the_files_are_written_once(tmp_path, capsys):
    folder = tmp_path / "monitor"
    assert main(["deploy", "monitor", str(folder), "--target", '10.0.0.5:9464"']) == 0
    assert {path.name for path in folder.iterdir()} == {*MONITORING_FILES, "grafana-dashboard.json"}
    scrape = json.loads((folder / "prometheus.yml").read_text())  # JSON is YAML
    assert scrape["scrape_configs"][0]["static_configs"] == [{"targets": ['10.0.0.5:9464"']}]
    assert main(["deploy", "monitor", str(folder)]) == 2
    assert "overwrites no file" in capsys.readouterr().err
