"""Predictions with a trained model: the same preprocessing as in training, from files and Python."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_stored_runs import unpack
from torch import nn

import flrce
from flrce.cli.cli import main
from flrce.data.preprocessing import FeatureColumn, Preprocessing
from flrce.data.sources import SampleSpec, Source
from flrce.errors import BadInput

SMALL = {"rounds": 2, "clients": 4, "per_round": 2, "train": {"epochs": 1}, "seed": 3}
TABLE = """age,colour,smoker,state
50,red,yes,ill
,green,no,well
70,blue,yes,ill
20,red,no,well
"""


def write_table(path: Path, repeats: int = 12) -> Path:
    header, *rows = TABLE.splitlines()
    path.write_text("\n".join([header, *rows * repeats]) + "\n")
    return path


def run_on_table(folder: Path, **data):
    write_table(folder / "train.csv")
    options = {"target": "state", "fill": "mean", "standardise": True, **data}
    tables = {**SMALL, "data": {"path": str(folder / "train.csv"), "minimum": 2, **options}}
    return flrce.run(flrce.Experiment.from_tables(tables), folder / "run")


def by_hand(result, table):
    """Outputs for raw rows (age, colour, smoker) with the statistics of the table, worked out
    again: NaN ages become the mean, x is standardised, the logits come from a plain network.
    """
    ages = np.array([50, np.nan, 70, 20] * 12)
    filled = np.where(np.isnan(ages), np.nanmean(ages), ages)
    codes = {"red": (0, 0, 1), "green": (0, 1, 0), "blue": (1, 0, 0)}
    colour = np.array([codes[c] for c in ("red", "green", "blue", "red") * 12])
    smoker = np.array([1, 0, 1, 0] * 12)[:, None]
    x = np.column_stack([filled, colour, smoker]).astype(np.float32)
    mean, deviation = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    rows = np.array(
        [[np.nanmean(ages) if a is None else a, *codes[c], s == "yes"] for a, c, s in table]
    )
    scaled = torch.tensor(((rows.astype(np.float32) - mean) / deviation).astype(np.float32))
    network = flrce.Experiment(**SMALL).build_network(
        Source("t", x, np.zeros(48, np.int64), ("ill", "well"))
    )
    network.load_state_dict(result.model)
    with torch.no_grad():
        return torch.softmax(network.eval()(scaled), 1).numpy()


def test_a_table_is_prepared_as_in_training(tmp_path):
    result = run_on_table(tmp_path)
    rows = [(35, "blue", "no"), (None, "red", "yes"), (64, "green", "yes")]
    (tmp_path / "new.csv").write_text(
        "extra,smoker,age,colour\n"
        + "".join(f"x,{s},{'' if a is None else a},{c}\n" for a, c, s in rows)
    )
    predicted = flrce.load(tmp_path / "run").predict(tmp_path / "new.csv")
    expected = by_hand(result, rows)
    np.testing.assert_allclose(predicted.probabilities, expected, rtol=1e-5)
    assert predicted.values.tolist() == [("ill", "well")[i] for i in expected.argmax(1)]
    assert list(predicted.to_columns()) == ["sample", "state", "p(ill)", "p(well)"]


def test_python_and_files_predict_alike(tmp_path):
    run_on_table(tmp_path)
    model = flrce.load(tmp_path / "run")
    columns = {"age": [50.0, np.nan], "colour": ["red", "green"], "smoker": ["yes", "no"]}
    one = model.predict(columns).probabilities
    from_file = model.predict(tmp_path / "train.csv").probabilities[:2]
    np.testing.assert_allclose(one, from_file, rtol=1e-6)  # products of other batch sizes
    pandas = pytest.importorskip("pandas")
    assert np.array_equal(one, model.predict(pandas.DataFrame(columns)).probabilities)


def test_the_command_writes_predictions_and_a_score(tmp_path, capsys):
    run_on_table(tmp_path)
    run, file, out = (str(tmp_path / name) for name in ("run", "train.csv", "p.csv"))
    assert main(["predict", run, file, "--out", out]) == 0
    shown = capsys.readouterr().out
    with open(out) as opened:
        rows = list(csv.DictReader(opened))
    right = np.mean(
        [row["state"] == ("ill", "well", "ill", "well")[i % 4] for i, row in enumerate(rows)]
    )
    assert f"accuracy {100 * right:.1f} %" in shown
    assert len(rows) == 48
    assert float(rows[0]["p(ill)"]) + float(rows[0]["p(well)"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,colour\n1,red\n", "lacks the column 'smoker'"),
        ("age,colour,smoker\n1,pink,no\n", "row 1: training had no value 'pink'"),
        ("age,colour,smoker\nold,red,no\n", "'age' holds text"),
    ],
)
def test_other_tables_are_errors(tmp_path, capsys, text, message):
    run_on_table(tmp_path)
    (tmp_path / "new.csv").write_text(text)
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new.csv")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_gap_is_an_error_where_training_dropped_such_rows(tmp_path):
    run_on_table(tmp_path, fill="drop")
    columns = {"age": [50.0, np.nan], "colour": ["red", "blue"], "smoker": ["yes", "no"]}
    with pytest.raises(BadInput, match=r"row 2 has a missing value"):
        flrce.load(tmp_path / "run").predict(columns)


def test_values_keep_their_unit(tmp_path):
    x = np.linspace(0, 1, 80, dtype=np.float32)[:, None]
    tables = {
        **SMALL,
        "rounds": 30,
        "data": {"partition": "iid"},
        "model": {"name": "linear"},
        "train": {"epochs": 3, "lr": 0.3, "batch": 8},
    }
    flrce.run(flrce.Experiment.from_tables(tables), tmp_path / "run", data=(x, 40 + 10 * x[:, 0]))
    predicted = flrce.load(tmp_path / "run").predict([[0.0], [1.0]])
    assert predicted.values == pytest.approx([40, 50], abs=1.5)
    assert predicted.probabilities is None


def test_images_of_another_size_are_fitted_only_where_training_did(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for label, level in (("dark", 20), ("light", 220)):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for i in range(12):
            image.new("L", (8, 8), level + i).save(folder / f"{i}.png")
    tables = {
        **SMALL,
        "rounds": 6,
        "data": {"path": str(tmp_path / "images"), "size": 8, "minimum": 2},
    }
    flrce.run(flrce.Experiment.from_tables(tables), tmp_path / "run")
    image.new("L", (30, 20), 225).save(tmp_path / "new.png")
    predicted = flrce.load(tmp_path / "run").predict(tmp_path / "new.png")
    assert predicted.rows == ("new.png",)
    folder = flrce.load(tmp_path / "run").predict(tmp_path / "images")
    assert (
        np.mean(
            [
                row.split("/")[0] == value
                for row, value in zip(folder.rows, folder.values, strict=True)
            ]
        )
        > 0.9
    )
    plain = {**tables, "data": {"path": str(tmp_path / "images"), "minimum": 2}}
    flrce.run(flrce.Experiment.from_tables(plain), tmp_path / "plain")
    with pytest.raises(BadInput, match="is 30x20 where 8x8 is expected"):
        flrce.load(tmp_path / "plain").predict(tmp_path / "new.png")


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.LazyLinear(10))


def test_a_network_from_python_must_be_passed_again(tmp_path):
    result = flrce.run(flrce.Experiment(**SMALL), tmp_path / "run", model=Net())
    with pytest.raises(BadInput, match=r"passed in Python \(Net\)"):
        flrce.load(tmp_path / "run")
    model = flrce.load(tmp_path / "run", model=Net())
    assert torch.equal(model.network[1].weight, result.model["1.weight"])
    with pytest.raises(BadInput, match="another network"):
        flrce.load(tmp_path / "run", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 9)))


def test_a_run_on_flower_can_be_loaded(tmp_path):
    tables = {**SMALL, "engine": {"name": "flower"}}
    result = flrce.run(flrce.Experiment.from_tables(tables), tmp_path / "run")
    model = flrce.load(tmp_path / "run")
    tensors = model.network.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in result.model.items())
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_runs_of_earlier_versions_can_be_loaded(tmp_path):
    model = flrce.load(unpack("now-flrce-done", tmp_path))
    assert len(model.predict(np.zeros((3, 1, 8, 8), np.uint8))) == 3
    with pytest.raises(BadInput, match=r"has no checksums\.json, so its weights cannot be checked"):
        flrce.load(unpack("v01-done", tmp_path))


def test_a_changed_model_file_is_an_error(tmp_path):
    flrce.run(flrce.Experiment(**SMALL), tmp_path / "run")
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    card["samples"]["scale"] = 2.0
    (tmp_path / "run" / "model.json").write_text(json.dumps(card))
    with pytest.raises(BadInput, match=r"model\.json"):
        flrce.load(tmp_path / "run")


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_an_exported_model_takes_raw_numbers(suffix, tmp_path):
    if suffix == ".onnx":
        onnx = pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
    run_on_table(tmp_path)
    file = tmp_path / f"model{suffix}"
    assert main(["export", str(tmp_path / "run"), "--out", str(file)]) == 0
    raw = np.array([[35, 1, 0, 0, 0], [np.nan, 0, 0, 1, 1], [64, 0, 1, 0, 1]], np.float32)
    if suffix == ".pt2":
        outputs = torch.export.load(file).module()(torch.from_numpy(raw)).detach()
    else:
        from onnx.reference import ReferenceEvaluator

        outputs = torch.tensor(ReferenceEvaluator(onnx.load(file)).run(None, {"x": raw})[0])
    columns = {
        "age": [35, np.nan, 64],
        "colour": ["blue", "red", "green"],
        "smoker": ["no", "yes", "yes"],
    }
    expected = flrce.load(tmp_path / "run").predict(columns).probabilities
    np.testing.assert_allclose(torch.softmax(outputs, 1), expected, rtol=1e-4)


def test_other_suffixes_are_errors(tmp_path, capsys):
    flrce.run(flrce.Experiment(**SMALL), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.h5")]) == 2
    assert ".pt2" in capsys.readouterr().err


def test_two_values_are_one_feature_and_three_are_three():
    two, three = FeatureColumn("s", ("no", "yes")), FeatureColumn("c", ("a", "b", "c"))
    assert two.encode(np.array(["yes", "no"]), "t").tolist() == [[1], [0]]
    assert three.encode(np.array(["c", "a"]), "t").tolist() == [[0, 0, 1], [1, 0, 0]]


def test_preprocessing_survives_json():
    prepared = Preprocessing(
        (FeatureColumn("a", ("x", "y")),), ("t",), (0.1,), (1 / 3,), (2.5,), resized=True
    )
    spec = SampleSpec((1,), "float32", 1.0, 0.0, "classes", ("n", "y"), 2, 0, False, prepared)
    assert SampleSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
