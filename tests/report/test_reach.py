"""What a target costs, where grams were emitted, and when they would have been fewer: worked by
hand and by command.
"""

import json

import numpy as np
import pytest

from flrce.cli.cli import main
from flrce.core.types import RoundRecord
from flrce.report.carbon import shift_run_start, sum_grams_by_hour
from flrce.report.page import render_report
from flrce.report.target_costs import find_cost_to_target
from flrce.storage.read import read_runs, read_single_run


def test_costs_up_to_the_round_that_was_good_enough():
    history = (
        RoundRecord(
            1,
            accuracy=0.5,
            joules=10.0,
            bytes_up=3,
            bytes_down=4,
            grams=0.5,
            began=0.0,
            seconds=7.0,
        ),
        RoundRecord(2, "abandoned", joules=1.0, grams=0.1, began=7.0, seconds=2.0),
        RoundRecord(
            2,
            accuracy=0.7,
            averaged=0.9,
            joules=20.0,
            bytes_up=3,
            grams=1.0,
            began=100.0,
            seconds=8.0,
        ),
        RoundRecord(3, accuracy=0.95, joules=40.0, began=108.0, seconds=8.0),
    )
    # the averaged model is the final model
    assert find_cost_to_target(history, 0.9) == {
        "rounds": 2,
        "seconds": 108.0,
        "joules": 31.0,
        "bytes": 10,
        "grams": 1.6,
        "network_joules": 0.0,
    }
    assert find_cost_to_target(history, 0.4) == {
        "rounds": 1,
        "seconds": 7.0,
        "joules": 10.0,
        "bytes": 7,
        "grams": 0.5,
        "network_joules": 0.0,
    }
    assert find_cost_to_target(history, 0.96) is None
    errors = tuple(
        RoundRecord(
            t,
            metric="mae",
            lower=True,
            metrics={"mae": value},
            joules=1.0,
            began=5.0 * (t - 1),
            seconds=5.0,
        )
        for t, value in ((1, 3.0), (2, 1.5))
    )
    assert find_cost_to_target(errors, 2.0) == {
        "rounds": 2,
        "seconds": 10.0,
        "joules": 2.0,
        "bytes": 0,
        "grams": 0.0,
        "network_joules": 0.0,
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two recipes, two seeds, two regions; the first hours are dirty."""
    folder = tmp_path_factory.mktemp("grams")
    hours = np.where(np.arange(24 * 20) % 24 < 12, 400.0, 100.0)
    np.savez(
        folder / "c.npz", DE=hours, DE_start="2021-03-01", SE=hours / 10, SE_start="2021-03-01"
    )
    file = folder / "e.toml"
    file.write_text(
        "rounds = 6\nclients = 12\nper_round = 4\n[train]\nepochs = 2\n"
        f'[fleet]\ncarbon = "{folder / "c.npz"}"\nstart = "2021-03-01T02:00"\navailability = "always"\n'
    )
    assert (
        main(
            [
                "compare",
                str(file),
                "--recipes",
                "fedavg,flrce-no-stop",
                "--seeds",
                "0-1",
                "--out",
                str(folder / "all"),
            ]
        )
        == 0
    )
    return folder / "all"


def test_reach_by_command(compared, capsys):
    assert main(["reach", str(compared), "--target", "0.3"]) == 0
    shown = capsys.readouterr().out
    assert "fedavg" in shown
    assert "CO2 mg" in shown
    assert main(["reach", str(compared), "--target", "0.3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    runs = [run for run in read_runs([compared]) if run.name == told[0]["label"]]
    want = [find_cost_to_target(run.rounds, 0.3) for run in runs]
    assert told[0]["reached"] == sum(got is not None for got in want)
    assert told[0]["costs"]["grams"]["mean"] == pytest.approx(
        np.mean([got["grams"] for got in want if got])
    )
    assert main(["reach", str(compared), "--target", "80"]) == 2
    assert "is a share from 0 to 1" in capsys.readouterr().err


def test_grams_in_tables_and_report(compared):
    runs = read_runs([compared])
    found = sum_grams_by_hour(runs)
    assert sum(map(sum, found.values())) == pytest.approx(
        sum(h.grams for run in runs for h in run.rounds)
    )
    assert {hour for hours in found.values() for hour, value in enumerate(hours) if value} == {2}
    assert sum(found["DE"]) > 5 * sum(found["SE"])
    text = render_report(runs)
    assert "CO2 by region and hour" in text
    assert "<th>DE</th>" in text


def test_another_start_emits_less(compared, capsys):
    run = read_single_run(compared / "fedavg/seed-0")
    same, clean = shift_run_start(run, ["2021-03-01T02:00", "2021-03-01T14:00"])
    assert same.ratio == pytest.approx(1)
    assert clean.ratio == pytest.approx(0.25)
    assert main(["whatif", str(compared / "fedavg"), "--start", "2021-03-01T14:00"]) == 0
    assert "0.25" in capsys.readouterr().out
    assert main(["whatif", str(compared / "fedavg"), "--start", "2031-03-01"]) == 2
    assert "outside the figures" in (said := capsys.readouterr().err)
    assert "they go from 2021-03-01 to 2021-03-21" in said


def test_runs_without_grams_say_so(tmp_path, capsys):
    assert (
        main(
            [
                "run",
                "--set",
                "rounds=1",
                "--set",
                "clients=5",
                "--set",
                "per_round=2",
                "--out",
                str(tmp_path / "r"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["whatif", str(tmp_path / "r"), "--start", "2021-01-01"]) == 2
    assert "run it with fleet.carbon" in capsys.readouterr().err
    assert "CO2 by region" not in render_report([read_single_run(tmp_path / "r")])
