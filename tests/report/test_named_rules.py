"""flrce whatif with rules that the command line names."""

import json

import pytest

from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.methods.stopping.budget import CostBudget, CostLimit, Patience
from flrce.report.named_rules import FigureLimit, build_limits, build_named_pieces
from report_helpers import compared

OWN = """
from dataclasses import dataclass
import flrce

@dataclass(frozen=True)
class AfterRound(flrce.StopRule):
    rounds: int = 3

    def __call__(self, history):
        return "enough" if len(history) >= self.rounds else ""
"""


@pytest.fixture
def run():
    return str(compared() / "flrce-no-stop" / "seed-0")


def test_a_class_of_ones_own_is_replayed(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "after_round.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    table = '{ piece = "after_round:AfterRound", rounds = 5 }'
    assert main(["whatif", run, "--stop", "after_round:AfterRound", "--stop", table, "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["runs"][0]["rules"]
    assert [(rule["rule"], rule["stop"], rule["why"]) for rule in rules] == [
        ("after_round:AfterRound", 3, "enough"),
        (table, 5, "enough"),
    ]
    assert main(["whatif", run, "--stop", "after_round:AfterRound", "--budget", "rounds=4"]) == 0
    shown = capsys.readouterr().out
    assert "4 rounds" in shown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--stop", "os:system"], "os"),
        (["--stop", "patient"], "did you mean"),
        (["--stop", "{ piece ="], "give a name"),
        (["--budget", "joules"], "NAME=VALUE"),
        (["--budget", "joules=-1"], "above 0"),
        (["--budget", "epsilon=3"], "--budget epsilon"),
    ],
)
def test_what_is_no_rule_ends_with_one_line(run, given, says, capsys):
    assert main(["whatif", run, *given]) == 2
    said = capsys.readouterr().err.strip()
    assert says in said
    assert said.count("\n") == 0


def test_names_become_rules():
    assert build_named_pieces("stop", ['{ piece = "patience", rounds = 4 }']) == {
        '{ piece = "patience", rounds = 4 }': Patience(4)
    }
    limits = build_limits("joules=5, rounds=2,epsilon=1.5", ["epsilon"])
    assert limits == {
        "5 joules": CostLimit("joules", 5.0),
        "2 rounds": CostBudget(rounds=2),
        "1.5 epsilon": FigureLimit("epsilon", 1.5),
    }
    with pytest.raises(BadInput, match="epsilon"):
        build_limits("epsilon=1", [])


def test_a_limit_of_a_figure():
    history = [RoundRecord(t, figures={"epsilon": 0.5 * t}) for t in (1, 2, 3)]
    rule = FigureLimit("epsilon", 1.0)
    assert [bool(rule(history[:i])) for i in range(4)] == [False, False, True, True]
    assert rule(history[:2]) == "epsilon reached 1 (1)"
    assert rule([RoundRecord(1)]) == ""


def test_a_figure_with_a_forecast_stops_before_the_limit() -> None:
    """As privacy-budget does: a spent epsilon cannot be given back."""
    rule = FigureLimit("epsilon", 1.5)
    rounds = [
        RoundRecord(t, figures={"epsilon": 1.0 + t / 5, "epsilon_next": 1.2 + t / 5})
        for t in (1, 2, 3)
    ]
    assert [bool(rule(rounds[:t])) for t in (1, 2, 3)] == [False, True, True]
    assert rule(rounds[:2]) == "epsilon would pass 1.5 in the next round (1.6)"
