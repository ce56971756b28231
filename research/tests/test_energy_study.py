"""The energy studies: their tables come from their rows, and their sums agree with the ledger."""

import csv
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from flrce import Experiment
from flrce.devices.costs import load_profile
from flrce.simulation import runs

HOME = Path(__file__).resolve().parents[1]


def load_study(name):
    spec = importlib.util.spec_from_file_location(name, HOME / "studies" / f"{name}.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return study


@pytest.fixture(scope="module")
def validation():
    return load_study("energy_validation")


@pytest.fixture(scope="module")
def sensitivity():
    return load_study("energy_sensitivity")


def test_two_powers_predict_what_follows_two_powers(validation):
    """10 s of work at 100 W and 32 s / batch of launching at 40 W; one power cannot follow that."""
    batch = np.array([4.0, 8.0, 16.0, 32.0, 64.0])
    over = 32 / batch
    rows = np.stack([batch, 10 + over, (1000 + 40 * over) / (10 + over)], 1)
    groups = {("gpu", "net", "100"): rows}
    assert validation.measure_errors(groups, two_powers=True).max() < 1e-9
    assert validation.measure_errors(groups, two_powers=False).max() > 0.05


def test_the_table_and_the_page_say_what_the_rows_say(validation):
    lines = [list(map(str, line)) for line in validation.summarize(validation.read_rows())]
    with (validation.FOLDER / "validation.csv").open() as file:
        assert list(csv.reader(file))[1:] == lines
    page = (HOME / "docs" / "energy.md").read_text()
    for _, _, rows, middle, high, worst in lines[:2]:
        assert f"{int(rows):,} epochs" in page
        assert f"| {middle} % | {high} % | {float(worst):.0f} % |" in page


@pytest.mark.parametrize("recipe", ["fedavg", "frugal"])
def test_joules_counted_from_lines_are_the_ledger_s(sensitivity, tmp_path, recipe):
    exp = Experiment(
        rounds=3, clients=8, per_round=3, recipe={"name": recipe}, engine={"workers": 1}
    )
    found = runs.run(exp, tmp_path / "run")
    lines = [json.loads(x) for x in (tmp_path / "run" / "clients.jsonl").open()]
    work = np.array([[line[name] for name in sensitivity.COLUMNS] for line in lines], float)
    trained = np.array([line["outcome"] not in ("asked", "evaluated") for line in lines])
    counted = sensitivity.count_joules(work, trained, load_profile("jetson-nano"))
    assert counted == pytest.approx(found.summary["joules"])


def test_draws_stay_within_their_ranges(sensitivity):
    rng, device = np.random.default_rng(1), load_profile("jetson-nano")
    for _ in range(50):
        drawn = sensitivity.draw_device(device, rng)
        for name, most in sensitivity.RANGES.items():
            ratio = getattr(drawn, name) / getattr(device, name)
            assert 1 / most <= ratio <= most


def test_the_page_says_what_the_draws_say():
    rows = list(csv.reader((HOME / "results/energy/sensitivity.csv").open()))
    pairs = {row[0]: row for row in rows if row and " spends less than " in row[0]}
    page = (HOME / "docs" / "energy.md").read_text()
    for method in ("flrce", "frugal"):
        _, _, ratio, share, low, high = pairs[f"{method} spends less than fedavg"]
        assert f"{float(ratio):.2f} ({float(low):.2f} to {float(high):.2f}" in page
        assert share == "100.0"
    open_share = float(pairs["frugal spends less than flrce"][3])
    assert f"fewer than FLrce in {open_share:.0f} % of the draws" in page
