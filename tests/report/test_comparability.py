"""Scores of different data, metrics or splits are not put side by side."""

import json
from pathlib import Path

import numpy as np
import pytest

from flrce import Experiment
from flrce.cli.cli import main
from flrce.errors import BadInput
from flrce.report import page, tables, verdict
from flrce.report.tasks import group_by_task, split_key
from flrce.simulation import runs
from flrce.storage import read

SMALL = {"rounds": 2, "clients": 6, "per_round": 3, "engine": {"workers": 1}}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg and the default on digits by two splits, the default on a table of classes and on one of
    values.
    """
    out, rng = tmp_path_factory.mktemp("apart"), np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    for name in ("fedavg", "frugal"):
        runs.run(Experiment(**SMALL, recipe={"name": name}), out / name)
    even = {"partition": "iid"}
    runs.run(Experiment(**SMALL, data=even), out / "iid")
    runs.run(Experiment(**SMALL, data=even), out / "classes", data=(x, (x[:, 0] > 0).astype(int)))
    linear = {"name": "linear"}
    runs.run(Experiment(**SMALL, data=even, model=linear), out / "values", data=(x, x.sum(1)))
    return out


def test_a_report_of_several_tasks_is_several_reports(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["report", str(folder), "--out", str(tmp_path / "r.html")]) == 0
    told = capsys.readouterr().out
    assert "3 different tasks, reported apart" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "r-digits.html",
        "r-mine-Accuracy.html",
        "r-mine-MAE.html",
    ]
    assert "<p>Against" not in (tmp_path / "r-mine-MAE.html").read_text()
    assert main(["report", str(folder), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["headline"]
    named = {(row["task"], row["metric"]) for row in rows}
    assert named == {("digits", "accuracy"), ("mine, Accuracy", "accuracy"), ("mine, MAE", "mae")}


def test_one_task_is_one_report(folder: Path, tmp_path: Path) -> None:
    some = [str(folder / name) for name in ("fedavg", "frugal")]
    assert main(["report", *some, "--out", str(tmp_path / "r.html")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_other_splits_are_not_compared_in_a_sentence(folder: Path) -> None:
    groups = tables.group_runs(
        read.read_runs([folder / name for name in ("fedavg", "frugal", "iid")])
    )
    told = [sentence for sentence in verdict.describe_groups(groups) if " used " in sentence]
    assert len(told) == 1
    assert "iid" not in told[0]
    assert split_key(groups[0].runs[0]) != split_key(groups[2].runs[0])


def test_commands_that_average_refuse_several_tasks(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["reach", str(folder), "--target", "0.5"]) == 2
    assert "different tasks" in capsys.readouterr().err
    both = tmp_path / "both"
    both.mkdir()
    for name in ("frugal", "classes"):
        (both / name).symlink_to(folder / name)
    assert main(["whatif", str(both), "--rounds", "1"]) == 2
    assert "different tasks" in capsys.readouterr().err
    with pytest.raises(BadInput, match="different tasks"):
        page.write_report([folder], tmp_path / "r.html")
    assert len(group_by_task(read.read_runs([folder]))) == 3
