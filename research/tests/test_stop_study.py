"""The tables on stopping follow from the committed runs by the committed script, and the page shows
them.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from flrce.methods.stopping.budget import Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "results" / "stop"


@pytest.fixture(scope="module")
def study():
    sys.path.insert(0, str(ROOT / "studies"))  # it imports the rule of before
    spec = importlib.util.spec_from_file_location("stop_study", ROOT / "studies" / "stop.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules["stop_study"] = found  # dataclasses look themselves up
    spec.loader.exec_module(found)
    return found


def test_replays_in_one_pass_are_those_of_the_pieces(study):
    for run in study.load([TABLES / "decide.jsonl.gz"])[::30]:
        assert study.headway(run) == run.stops(NoHeadway())
        assert study.conflicts(run) == run.stops(UpdateConflicts(run.P / 2))
        assert study.patience(run) == run.stops(Patience(10))
        assert study.Gain()(run) == run.stops(MarginalGain())


def test_measures_worked_by_hand(study):
    """Evaluated every round, one client a sweep: A is 0, 10, 20, 24, 25, 25, 25, 25; twice 4 rounds
    bring 1 point.
    """
    values = [0.0, 0.1, 0.2, 0.24, 0.25, 0.25, 0.25, 0.25]
    series = {"joules": [1.0] * 8, "averaged": values, "holdouts": [[x] for x in values]}
    run = study.Run("d", "r", "s", 0, 10, "accuracy", False, 1, 1, [1], series)
    assert [round(run.gain(t)) for t in (1, 2, 3, 4)] == [10, 14, 5, 1]
    assert run.star == 4
    assert [study.trusted(run, t) for t in (3, 4, 5)] == [False, True, None]
    assert [study.thrifty(run, t) for t in (4, 6, 7, None)] == [True, True, False, False]
    assert run.regret(4) == pytest.approx(
        25 - 2 * 2.321928 - (24 - 2 * 2), abs=1e-4
    )  # round 5 is worth most
    assert run.dead  # 25 % of ten classes is below 3 times chance


@pytest.mark.slow
def test_tables_and_page_are_what_the_runs_say(study, tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "stop.md").read_text())
    study.main(tmp_path, page)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.md") if path != page}
    assert made == {path.name: path.read_text() for path in TABLES.glob("*.md")}
    assert page.read_text() == (ROOT / "docs" / "stop.md").read_text()


@pytest.mark.slow
def test_fresh_tables_are_what_the_fresh_runs_say(study, tmp_path):
    """Of four runs only: the whole table takes minutes."""
    sys.modules["stop"] = study
    spec = importlib.util.spec_from_file_location(
        "stop_confirm", ROOT / "studies" / "stop_confirm.py"
    )
    confirm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(confirm)
    runs = study.load([ROOT / "results" / "stop-fresh" / "runs.jsonl.gz"])[::36]
    head, rows = confirm.list_cells(runs)
    committed = (ROOT / "results" / "stop-fresh" / "cells.md").read_text()
    for row in rows:
        stops = row[head.index("stops in round")]
        line = next(
            line
            for line in committed.splitlines()
            if f"| {row[0]} | {row[1]} |" in line and row[2] in line
        )
        assert stops in line


def test_conformal_risk_control_by_hand(study):
    """29 tasks, one of them stopped too early: (1 + 1) / 30 is below 8 %, (3 + 1) / 30 is not."""
    from stop_tasks import choose_margin

    risks = {0.0: [1.0] * 3 + [0.0] * 26, 0.5: [1.0] + [0.0] * 28}
    assert choose_margin(risks, 0.25) == 0.5
    assert choose_margin({0.0: [0.0] * 5}, 0.25) == 0.25  # five tasks cannot tell
