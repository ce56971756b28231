"""A stop of the user's own is explained and drawn, by readers that import none of it."""

import json
import sys

from flrce.cli.cli import main
from flrce.report.cost_per_point import build_course_chart
from flrce.report.why import explain_run_end
from flrce.storage.read import read_run

OWN = """
from dataclasses import dataclass
import flrce
from flrce.core.roles import StopCourse

@dataclass(frozen=True)
class Mean(flrce.Aggregator):
    def __call__(self, w, updates, state):
        p = updates.n / updates.n.sum()
        return w + (p @ updates.U.double()).to(w.dtype)

@dataclass(frozen=True)
class Shrinking(flrce.StopRule):
    limit: float = 0.0

    def __call__(self, history):
        return "losses are small" if history[-1].loss < self.limit else ""

    def explain(self, history):
        return f"The loss was last {history[-1].loss:.1f}."

    def trace(self, history):
        rounds, losses = zip(*((h.t, h.loss) for h in history))
        limits = (self.limit,) * len(rounds)
        return StopCourse("loss", "limit", "loss of the model", "nats", rounds, losses, limits)

@dataclass(frozen=True)
class Clumsy(flrce.StopRule):
    def __call__(self, history):
        return ""

    def explain(self, history):
        raise KeyError("figure")
"""
TOML = """
rounds = 2
clients = 6
per_round = 2
[engine]
workers = 1
[train]
epochs = 1
[recipe]
name = "fedavg"
"""


def run(folder, monkeypatch, recipe, *options):
    (folder / "ownstop.py").write_text(OWN)
    (folder / "own.toml").write_text(TOML + recipe)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "ownstop", raising=False)
    assert main(["run", "own.toml", "--out", "run", *options]) == 0
    monkeypatch.delitem(sys.modules, "ownstop", raising=False)
    (folder / "ownstop.py").unlink()
    return read_run(folder / "run")


def test_a_stop_of_ones_own_is_explained_and_drawn(tmp_path, monkeypatch, capsys):
    recorded = run(tmp_path, monkeypatch, 'stop = { piece = "ownstop:Shrinking", limit = 0.5 }')
    losses = [h.loss for h in recorded.rounds]
    assert f"The loss was last {losses[-1]:.1f}." in explain_run_end(recorded).sentences
    chart = build_course_chart(recorded)
    assert (chart["title"], chart["looks"], chart["limit"]) == (
        "loss of the model",
        [1, 2],
        [0.5] * 2,
    )
    assert main(["report", "run", "--out", "page.html"]) == 0
    assert "loss of the model" in (tmp_path / "page.html").read_text()
    assert "ownstop" not in sys.modules


def test_its_neighbours_in_any_of_are_explained_too(tmp_path, monkeypatch, capsys):
    stop = 'stop = "ownstop:Shrinking"\n[stop]\njoules = 1000'
    recorded = run(tmp_path, monkeypatch, stop, "--set", 'engine.name="simulator"')
    assert [rule.piece for rule in recorded.stop_rules][:-1] == ["Shrinking"]


def test_a_stop_that_cannot_explain_itself_loses_no_run(tmp_path, monkeypatch, capsys, caplog):
    recorded = run(tmp_path, monkeypatch, 'stop = "ownstop:Clumsy"')
    assert recorded.summary["rounds"] == 2
    assert "stop rule Clumsy is not explained" in caplog.text


def test_a_shipped_stop_is_known_beside_an_own_aggregator(tmp_path, monkeypatch, capsys):
    own = 'aggregator = "ownstop:Mean"\nstop = { piece = "patience", rounds = 1, least = 1.0 }'
    recorded = run(tmp_path, monkeypatch, own)
    assert recorded.recipe is None
    assert [type(rule).__name__ for rule in recorded.stop_rules] == ["Patience"]


def test_malformed_rules_in_a_summary_are_left_out(tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, 'stop = "ownstop:Shrinking"')
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["stop_rules"] += [3, {"piece": "x", "course": {"name": 1}}]
    path.write_text(json.dumps(summary))
    (tmp_path / "run" / "checksums.json").unlink()
    assert [rule.piece for rule in read_run(tmp_path / "run").stop_rules] == ["Shrinking"]


def test_a_sentence_of_several_rules_is_said_once(tmp_path, monkeypatch, capsys):
    stop = 'stop = { piece = "patience", rounds = 1, least = 1.0 }\n[stop]\njoules = 1000'
    sentences = explain_run_end(run(tmp_path, monkeypatch, stop)).sentences
    assert len([text for text in sentences if "no gain of" in text]) == 1
