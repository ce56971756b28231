"""One data set per client, in every form that people have it; groups are the clients."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flrce
from flrce.cli.cli import main
from flrce.data.user import to_source
from flrce.errors import BadInput

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
PLACES = {"north": slice(0, 30), "south": slice(30, 45), "coast": slice(45, 60)}
SMALL = {"rounds": 1, "recipe": {"name": "fedavg"}}


def list_rows(part):
    town = {"north": "Oslo", "south": "Bonn", "coast": "Bari"}
    return [
        {"a": a, "b": b, "c": c, "town": town[part], "label": y}
        for (a, b, c), y in zip(X[PLACES[part]].tolist(), Y[PLACES[part]].tolist(), strict=True)
    ]


def write_csv(path, rows):
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("form", ["pairs", "datasets", "frames", "paths", "texts", "folders"])
def test_each_client_keeps_its_samples_and_its_name(form, tmp_path):
    pandas = pytest.importorskip("pandas") if form == "frames" else None
    make = {
        "pairs": lambda p: (X[PLACES[p]], Y[PLACES[p]]),
        "datasets": lambda p: TensorDataset(torch.tensor(X[PLACES[p]]), torch.tensor(Y[PLACES[p]])),
        "frames": lambda p: pandas.DataFrame(list_rows(p)),
        "paths": lambda p: write_csv(tmp_path / f"{p}.csv", list_rows(p)),
        "texts": lambda p: str(write_csv(tmp_path / f"{p}.csv", list_rows(p))),
        "folders": lambda p: (
            np.savez(tmp_path / p, x=X[PLACES[p]], y=Y[PLACES[p]]) or tmp_path / f"{p}.npz"
        ),
    }[form]
    data = {place: make(place) for place in PLACES}
    source = to_source(data)
    assert set(source.groups) == set(PLACES)
    sizes = {source.groups[g]: n for g, n in enumerate(np.bincount(source.group))}
    assert sizes == {"north": 30, "south": 15, "coast": 15}
    north = source.x[source.group == source.groups.index("north")]
    np.testing.assert_allclose(north[:, :3], X[:30], rtol=1e-6)
    if form in ("frames", "paths", "texts"):  # a town that a client lacks is a feature for all
        assert source.shape == (6,)
        assert source.preprocessing is not None  # so the model can be used
    result = flrce.run(flrce.Experiment(**SMALL), data=data)
    assert set(result.history[0].chosen) <= set(PLACES)
    assert len(result.history[0].chosen) == 3  # as many as there are, not 10 of 100


def test_a_list_of_clients_is_numbered(tmp_path):
    paths = [write_csv(tmp_path / f"{p}.csv", list_rows(p)) for p in PLACES]
    assert to_source(paths).groups == ("0", "1", "2")


def test_tables_of_other_columns_are_told(tmp_path):
    one = write_csv(tmp_path / "a.csv", list_rows("north"))
    rows = [{key: value for key, value in row.items() if key != "b"} for row in list_rows("south")]
    other = write_csv(tmp_path / "b.csv", rows)
    with pytest.raises(BadInput, match="client 's' and client 'n' differ in column 'b'"):
        to_source({"n": one, "s": other})


def test_groups_of_a_table_are_the_clients(tmp_path, capsys):
    rows = [{**row, "place": place} for place in PLACES for row in list_rows(place)]
    path = write_csv(tmp_path / "all.csv", rows)
    args = [f"--set=data.path={path}", "--set=data.group=place"]
    assert main(["data", "info", *args]) == 0
    shown = capsys.readouterr().out
    assert all(place in shown for place in PLACES)
    run = [*args, "--set=rounds=1", "--set=recipe.name=fedavg"]
    assert main(["run", *run, f"--out={tmp_path / 'run'}"]) == 0
    kept = flrce.Experiment.load(tmp_path / "run" / "experiment.toml")
    assert (kept.clients, kept.per_round, kept.data.partition) == (3, 3, "given")
    assert main(["run", "--resume", f"--out={tmp_path / 'run'}"]) == 0
    both = ["compare", *run, "--recipes", "fedavg,fedprox", f"--out={tmp_path / 'both'}"]
    assert main(both) == 0
    kept = flrce.Experiment.load(tmp_path / "both" / "fedprox" / "seed-0" / "experiment.toml")
    assert (kept.clients, kept.data.partition) == (3, "given")


def test_what_the_user_says_about_clients_stands(tmp_path):
    rows = [{**row, "place": place} for place in PLACES for row in list_rows(place)]
    path = str(write_csv(tmp_path / "all.csv", rows))
    tables = {**SMALL, "clients": 4, "per_round": 4}
    shared = flrce.Experiment(**tables, data={"path": path, "group": "place", "partition": "iid"})
    assert set(flrce.run(shared).history[0].chosen) == {"0", "1", "2", "3"}
    with pytest.raises(BadInput, match=r"3 groups"):
        flrce.run(flrce.Experiment(**tables, data={"path": path, "group": "place"}))
    with pytest.raises(BadInput, match="per_round = 50, but the data have 3 clients"):
        flrce.run(flrce.Experiment(**SMALL, per_round=50, data={"path": path, "group": "place"}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data is empty; give"),
        ([], "data is empty; give"),
        ({"north": (X, Y, Y)}, "'north'] is a tuple of 3; give"),
        ([DataLoader(TensorDataset(torch.tensor(X)))], r"data\[0\] is a DataLoader"),
    ],
)
def test_collections_that_are_no_data_of_clients(data, message):
    with pytest.raises(BadInput, match=message):
        flrce.run(flrce.Experiment(**SMALL), data=data)


def test_runs_bear_the_name_of_data_from_python(tmp_path, capsys):
    data = {place: (X[PLACES[place]], Y[PLACES[place]]) for place in PLACES}
    flrce.run(flrce.Experiment(**SMALL), tmp_path / "run", data=data)
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "digits" not in shown
