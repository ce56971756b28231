"""Saved runs as tables and figures for a paper."""

import csv

import numpy as np
import pytest

import flrce
from flrce.errors import BadInput
from flrce.simulation.runs import run_seeds

TINY = {"rounds": 3, "clients": 6, "per_round": 2, "train": {"epochs": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "fedprox"):
        run_seeds(flrce.Experiment(**TINY, recipe={"name": name}), [0, 1, 2], place / name)
    return place


def test_the_summary_has_means_and_intervals_of_the_seeds(folder):
    results = flrce.read_results(folder)
    heads, rows = results.summarize()
    assert [row[:2] for row in rows] == [["fedavg", 3], ["fedprox", 3]]
    values = [100 * run.summary["value"] for run in results.groups[0].runs]
    accuracy = rows[0][2]
    assert accuracy.mean == pytest.approx(np.mean(values), rel=1e-6)
    t_quantile = 4.302653  # of two degrees of freedom, 97.5 %
    assert accuracy.half == pytest.approx(t_quantile * np.std(values, ddof=1) / 3**0.5, rel=1e-5)
    latex = results.to_latex()
    assert f"fedavg & 3 & ${accuracy.mean:.1f} \\pm {accuracy.half:.1f}$" in latex
    assert latex.count("&") == 3 * (len(heads) - 1)


def test_rounds_are_those_of_the_ledgers(folder, tmp_path):
    results = flrce.read_results(folder / "fedavg" / "seed-1")
    results.to_csv(tmp_path / "rounds.csv", "rounds")
    with open(tmp_path / "rounds.csv") as opened:
        rows = list(csv.DictReader(opened))
    (run,) = results.groups[0].runs
    assert [float(row["accuracy"]) for row in rows] == [r.accuracy for r in run.rounds]
    spent = np.cumsum([r.joules for r in run.rounds])
    np.testing.assert_allclose([float(row["joules"]) for row in rows], spent, rtol=1e-9)


def test_everything_is_saved(folder, tmp_path):
    pytest.importorskip("matplotlib")
    names = [path.name for path in flrce.read_results(folder).save(tmp_path / "paper")]
    figures = ["bytes.png", "joules.png", "rounds.png"]
    assert names == sorted([*figures, "rounds.csv", "summary.csv", "summary.tex"])
    assert (tmp_path / "paper" / "joules.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes_are_told(folder):
    results = flrce.read_results(folder)
    with pytest.raises(BadInput, match="did you mean 'joules'"):
        results.plot("joule")
    with pytest.raises(BadInput, match="use summary or rounds"):
        results.to_csv("x.csv", "round")
