"""Figures that pieces report: from the piece to the ledger and to everything that reads it."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from test_loop import Made, vec

import flrce
from flrce import Aggregator, Experiment
from flrce.cli.terminal import ProgressDisplay
from flrce.core.loop import make_initial_state, rounds
from flrce.errors import BadInput
from flrce.methods.catalogue import recipes
from flrce.methods.stopping.budget import CostBudget
from flrce.report.page import render_report
from flrce.report.run_detail import build_figure_series
from flrce.report.tracking import list_round_metrics
from flrce.report.whatif import replay_rule
from flrce.report.why import explain_client, explain_round, explain_run_end
from flrce.storage.read import read_run


@dataclass(frozen=True)
class Counted(Aggregator):
    """The mean; remembers how many replies it has seen and reports them."""

    def initial_state(self, M, d, D):
        return torch.zeros(M)

    def __call__(self, w, updates, memory):
        return w + updates.U.mean(0)

    def observe(self, memory, event):
        memory = memory.clone()
        memory[event.updates.k] += 1
        return memory

    def report_figures(self, memory, event):
        return {"replies": memory.sum(), "squared-round": event.t**2}

    def report_client_figures(self, memory, event):
        return {"times": {k: memory[k] for k in event.updates.k.tolist()}}


@dataclass(frozen=True)
class Reports(Aggregator):
    """Reports what it is given."""

    round_figures: object
    client_figures: object

    def __call__(self, w, updates, memory):
        return w

    def report_figures(self, memory, event):
        return self.round_figures

    def report_client_figures(self, memory, event):
        return self.client_figures


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "run"
    recipe = replace(recipes.fedavg(P=3), aggregator=Counted())
    result = flrce.run(Experiment(recipe=recipe, rounds=3, clients=6), folder)
    return result, read_run(folder)


def test_the_ledger_holds_what_the_piece_reported(recorded):
    result, run = recorded
    for history in (result.history, run.rounds):
        assert [h.figures for h in history] == [
            {"replies": 3.0 * t, "squared-round": t**2} for t in (1, 2, 3)
        ]
    seen: dict[str, int] = {}
    for line in run.costs:
        seen[line["client"]] = seen.get(line["client"], 0) + 1
        assert line["figures"] == {"times": seen[line["client"]]}
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["figures"] == {"replies": 9.0, "squared-round": 9.0}


def test_reports_and_trackers_show_them(recorded):
    result, run = recorded
    assert list(result.to_pandas()["squared-round"]) == [1, 4, 9]
    assert list_round_metrics(run.rounds[1])["figures/replies"] == 6
    assert build_figure_series(run) == {"replies": [3, 6, 9], "squared-round": [1, 4, 9]}
    assert '"squared-round":[1.0,4.0,9.0]' in render_report([run])
    assert explain_round(run, 2).facts["figures"] == {"replies": 6, "squared-round": 4}
    client = run.rounds[0].chosen[0]
    assert (
        "Figures of the pieces on this client: times 1." in explain_client(run, client, 1).sentences
    )
    assert any("squared-round 9" in sentence for sentence in explain_run_end(run).sentences)
    outcome = replay_rule(run, "2 rounds", CostBudget(rounds=2))
    assert outcome.figures == {"replies": 6, "squared-round": 4}
    board = ProgressDisplay("counted", 3)
    board.records = list(run.rounds)
    assert "replies 9, squared-round 9" in board.format_line()


def test_tables_have_a_column_for_each_with_its_interval(recorded):
    from flrce.cli.run import build_result_table
    from flrce.simulation.result import summarize_seeds

    summary = recorded[0].summary
    heads, rows = build_result_table({"counted": summarize_seeds([summary])})
    assert dict(zip(heads, rows[0], strict=True))["squared-round"] == "9.000"
    plain = {key: value for key, value in summary.items() if key != "figures"}
    both = {"counted": summarize_seeds([summary]), "other": summarize_seeds([plain])}
    heads, rows = build_result_table(both)
    assert rows[1][heads.index("replies")] == "--"


@pytest.mark.parametrize(
    ("round_figures", "client_figures", "says"),
    [
        ({"epsilon": math.inf}, {}, "finite"),
        ({"epsilon": "much"}, {}, "finite"),
        ({"two words": 1}, {}, "cannot name a figure"),
        ({"joules": 1}, {}, "a field of every record"),
        ([1.0], {}, "returned a list"),
        ({}, {"share": {99: 1.0}}, "had no task in the round"),
        ({}, {"share": 1.0}, "returned a float"),
        ({}, {"share": {0: math.nan}}, "finite"),
    ],
)
def test_what_is_no_figure_is_refused_in_one_line(round_figures, client_figures, says):
    engine = Made(lambda client, t, w: vec(1.0, 0.0), ["a", "b"])
    recipe = replace(recipes.fedavg(P=2), aggregator=Reports(round_figures, client_figures))
    with pytest.raises(BadInput, match=says) as why:
        list(rounds(recipe, engine, make_initial_state(recipe, engine, torch.zeros(2)), 1, 0))
    assert "\n" not in str(why.value)
    assert "Reports" in str(why.value)
