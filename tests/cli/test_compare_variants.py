"""flrce compare: experiment files beside recipe names, grids of settings, several splits."""

import json

import pytest

import flrce
from flrce.cli.cli import main
from flrce.cli.variants import parse_grid
from flrce.errors import BadInput

SMALL = ["--set=rounds=1", "--set=clients=6", "--set=per_round=2", "--set=train.epochs=1"]


def test_points_of_a_grid():
    points = parse_grid(["train.lr=0.01, 0.03", "data.partition=iid,dirichlet"])
    assert points == [
        ("train.lr=0.01", "data.partition=iid"),
        ("train.lr=0.01", "data.partition=dirichlet"),
        ("train.lr=0.03", "data.partition=iid"),
        ("train.lr=0.03", "data.partition=dirichlet"),
    ]
    assert parse_grid([]) == [()]
    with pytest.raises(BadInput, match="is no KEY=A,B"):
        parse_grid(["train.lr"])


def test_a_grid_over_rates_and_splits(tmp_path, capsys):
    out = tmp_path / "all"
    grid = ["--grid=train.lr=0.01,0.03", "--grid=data.partition=iid,dirichlet"]
    assert main(["compare", *SMALL, "--recipes=fedavg", *grid, f"--out={out}", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert len(table) == 4
    label = "fedavg,train.lr=0.03,data.partition=iid"
    kept = flrce.Experiment.load(out / label / "seed-0" / "experiment.toml")
    assert (kept.train.lr, kept.data.partition, kept.recipe["name"]) == (0.03, "iid", "fedavg")
    assert (out / "report.html").stat().st_size > 1000


def test_a_file_beside_a_name(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('[recipe]\nname = "fedprox"\nmu = 0.5\n')
    names = f"--recipes=fedavg,{tmp_path / 'mine.toml'}"
    out = tmp_path / "all"
    assert main(["compare", *SMALL, names, f"--out={out}", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["fedavg", "mine"]
    kept = flrce.Experiment.load(out / "mine" / "seed-0" / "experiment.toml")
    assert kept.recipe == {"name": "fedprox", "mu": 0.5}
    assert kept.rounds == 1  # --set holds for files too


def test_groups_of_the_data_are_the_clients_of_every_recipe(tmp_path, capsys):
    rows = "".join(f"{'abc'[i % 3]},{i % 7},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(90))
    (tmp_path / "own.csv").write_text("site,dose,well\n" + rows)
    (tmp_path / "mine.toml").write_text('recipe.name = "fedprox"\n')
    names = f"--recipes=fedavg,{tmp_path / 'mine.toml'}"
    own = [f"data.path={tmp_path / 'own.csv'}", "data.target=well", "data.group=site", "rounds=1"]
    out = tmp_path / "all"
    assert main(["compare", names, *(f"--set={one}" for one in own), f"--out={out}"]) == 0
    for name in ("fedavg", "mine"):
        kept = flrce.Experiment.load(out / name / "seed-0" / "experiment.toml")
        assert (kept.clients, kept.data.partition) == (3, "given")


def test_files_of_other_data_are_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('[data]\npath = "other.csv"\n')
    names = f"--recipes=fedavg,{tmp_path / 'mine.toml'}"
    assert main(["compare", *SMALL, names, f"--out={tmp_path / 'all'}"]) == 2
    assert "fedavg and mine differ in data.path" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()
