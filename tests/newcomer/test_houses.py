"""A regression on a csv of houses: whole prices, dates, gaps, an id, and no word on partition or
kind.
"""

import csv
import json

import numpy as np
import pytest
import torch
from torch import nn

import flrce
from flrce.cli.cli import main
from flrce.core import metric_format
from flrce.data.user import to_source
from flrce.errors import BadInput

HOUSES = {"fill": "mean", "target": "price", "standardise": True}
EXPERIMENT = {"rounds": 3, "clients": 4, "per_round": 2, "seed": 1}


def write_houses(path, rows=240):
    rng = np.random.default_rng(7)
    area, rooms = rng.normal(110, 30, rows), rng.integers(1, 7, rows)
    price = 2500 * area + 9000 * rooms + rng.normal(0, 9000, rows)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["house_id", "sold", "area", "rooms", "price"])
        for i in range(rows):
            sold = f"{2015 + i % 9}-{1 + i % 12:02d}-{1 + i % 28:02d}"
            gap = "" if i % 20 == 0 else f"{area[i]:.1f}"
            table.writerow([f"H{i:04d}", sold, gap, rooms[i], round(price[i])])
    return path


def test_prices_are_learnt_and_predicted_in_euros(tmp_path, capsys):
    file, run = write_houses(tmp_path / "houses.csv"), tmp_path / "run"
    sets = ["data.path=" + str(file), "data.target=price", "data.fill=mean"]
    sets += ["data.standardise=true", "clients=4", "per_round=2", "rounds=4"]
    options = [part for pair in sets for part in ("--set", pair)]
    assert main(["run", *options, "--out", str(run)]) == 0
    told = capsys.readouterr().err
    assert "taken as values (a regression)" in told
    assert "column 'sold' holds dates, taken as years since 2000" in told
    assert main(["predict", str(run), str(file)]) == 0
    baseline = json.loads((run / "partition.json").read_text())["baseline"]["metrics"]["mae"]
    assert 30_000 < baseline < 90_000  # 0.8 deviations of about 77,000 euros
    table = {"sold": ["2020-05-01"], "area": [110.0], "rooms": [3]}
    model = flrce.load(run)
    assert 200_000 < float(model.predict(table).values[0]) < 400_000  # 2500 * 110 + 9000 * 3
    mae = json.loads((run / "summary.json").read_text())["metrics"]["mae"]
    assert mae < 0.6 * baseline


def test_an_exported_regression_gives_raw_values(tmp_path):
    file = write_houses(tmp_path / "houses.csv")
    experiment = flrce.Experiment(**EXPERIMENT, data={**HOUSES, "path": str(file)})
    flrce.run(experiment, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "m.pt2")]) == 0
    model = flrce.load(tmp_path / "run")
    x = torch.tensor([[20.3, 110.0, 3.0], [21.0, float("nan"), 5.0]])
    out = torch.export.load(tmp_path / "m.pt2").module()(x)
    np.testing.assert_allclose(out[:, 0].detach(), model.predict(x).values, rtol=1e-5)


def test_metrics_of_standardised_values_are_those_of_raw_ones():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (1000 * x[:, 0] + 5000).astype(np.float32)
    source = to_source((x, y), standardise=True)
    mean, deviation = float(y.mean()), float(y.std())
    np.testing.assert_allclose(source.y, (y - mean) / deviation, atol=1e-5)
    objective = flrce.Experiment().build_objective("values", source.preprocessing)
    out, target = torch.zeros(60, 1), torch.from_numpy(source.y)
    found = {
        m.name: m.value(m.of(out, target).double().numpy()) for m in objective.evaluation_metrics
    }
    assert found["mae"] == pytest.approx(float(np.abs(y - mean).mean()), rel=1e-4)
    assert found["mse"] == pytest.approx(float(y.var()), rel=1e-4)
    assert found["r2"] == pytest.approx(0.0, abs=1e-4)


def test_several_values_and_tables_by_client_are_standardised_together():
    rng = np.random.default_rng(3)
    parts = {
        f"site {k}": (rng.normal(k, 1, (40, 3)).astype(np.float32), rng.normal(9 * k, 2, (40, 2)))
        for k in range(3)
    }
    source = to_source(parts, standardise=True)
    np.testing.assert_allclose(source.y.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(source.y.std(0), 1, atol=1e-5)
    assert len(source.preprocessing.target_mean) == 2
    sets = {k: torch.utils.data.TensorDataset(*map(torch.tensor, xy)) for k, xy in parts.items()}
    np.testing.assert_allclose(to_source(sets, standardise=True).y, source.y, atol=1e-5)
    result = flrce.run(flrce.Experiment(rounds=1, data={"standardise": True}), data=parts)
    assert result.history[-1].metric == "mae"


def test_a_network_of_ones_own_learns_standardised_values():
    x = np.random.default_rng(4).normal(size=(80, 2)).astype(np.float32)
    y = (3e5 + 1e5 * x[:, 0]).astype(np.float32)
    experiment = flrce.Experiment(**EXPERIMENT, data={"standardise": True})
    result = flrce.run(experiment, data=(x, y), model=nn.Linear(2, 1), objective=nn.L1Loss())
    assert 0 < result.summary["metrics"]["mae"] < 2e5


@pytest.mark.parametrize(
    ("y", "kind", "told"),
    [
        (np.arange(100) % 3, "classes", ""),
        (np.arange(2000) % 62, "classes", "if they are values say"),
        (np.arange(100) * 7, "values", "taken as values"),
    ],
)
def test_whole_numbers_of_a_table(y, kind, told, caplog):
    x = np.random.default_rng(0).normal(size=(len(y), 2)).astype(np.float32)
    assert to_source((x, y)).kind == kind
    assert (told in caplog.text) if told else not caplog.records
    assert to_source((x, y), kind="classes").kind == "classes"


def test_images_with_many_classes_stay_classes(caplog):
    x = np.zeros((90, 1, 4, 4), np.uint8)
    assert to_source((x, np.arange(90))).kind == "classes"


def test_dates(tmp_path):
    table = {"day": np.array(["2000-01-01", "2001-01-01T12:00:00"] * 20), "y": np.arange(40) % 2}
    source = to_source(table)
    np.testing.assert_allclose(source.x[:2, 0], [0, 366.5 / 365.25], atol=1e-4)
    assert source.preprocessing.columns[0].date
    assert source.features == ("day",)
    with pytest.raises(BadInput, match="column 'day', row 1: 'soon' is no date"):
        source.preprocessing.encode_table({"day": np.array(["soon"])})


def test_a_run_that_learnt_raw_values_is_not_resumed_with_standardised_ones(tmp_path):
    file = write_houses(tmp_path / "houses.csv")
    experiment = flrce.Experiment(**EXPERIMENT, data={**HOUSES, "path": str(file)})
    flrce.run(experiment, tmp_path / "run")
    card = json.loads((tmp_path / "run/model.json").read_text())
    for key in ("target_mean", "target_deviation"):
        del card["samples"]["preprocessing"][key]
    (tmp_path / "run/model.json").write_text(json.dumps(card))
    with pytest.raises(BadInput, match="earlier version"):
        flrce.run(experiment.model_copy(update={"rounds": 4}), tmp_path / "run", resume=True)


def test_few_clients_all_train_in_each_round():
    assert flrce.Experiment(clients=4).per_round == 4
    assert flrce.Experiment(clients=40).per_round == 10
    with pytest.raises(BadInput, match="per_round must be at most clients = 4, got 5"):
        flrce.Experiment(clients=4, per_round=5)


def test_a_table_given_as_the_experiment_is_told(tmp_path, capsys):
    file = write_houses(tmp_path / "houses.csv")
    assert main(["run", str(file)]) == 2
    assert f"houses.csv is data, not an experiment file; name it with --set data.path={file}" in (
        capsys.readouterr().err
    )


def test_a_column_of_numbers_is_no_text():
    with pytest.raises(BadInput, match="'a' holds numbers"):
        to_source({"a": np.arange(40.0) / 7, "y": np.arange(40) % 2}, text="a")


def test_large_errors_have_no_exponent():
    assert metric_format.format_metric_value("mae", 17243.73) == "17244"
    assert metric_format.format_metric_value("mae", 17.24373) == "17.24"
    assert [metric_format.metric_digits("mae", n) for n in (0.4, 2000.0, 17243.7)] == [4, 1, 0]
