"""The baseline folder: `flwr build` accepts it, and it runs as the simulator does."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flrce.config.experiment import Experiment
from flrce.flower import LocalGrid
from flrce.flower.options import explain_untested_version
from flrce.simulation import runs

BASELINE = Path(__file__).resolve().parents[2] / "examples" / "flower-baseline"
FLOWER = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
SMALL = ["num-clients=6", "clients-per-round=3", "num-server-rounds=3", "local-epochs=1", "psi=1.9"]


@pytest.fixture
def baseline(monkeypatch):
    monkeypatch.syspath_prepend(str(BASELINE))
    from flrce_baseline import __main__, client_app, server_app

    return __main__.read_config, client_app.app, server_app.run_rounds


def test_the_baseline_has_flowers_format(tmp_path):
    folder = tmp_path / "baseline"
    shutil.copytree(BASELINE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert explain_untested_version(app["flwr-version-target"]) == ""
    ran = subprocess.run(
        [Path(sys.executable).parent / "flwr", "build"],
        cwd=folder,
        env={**os.environ, **FLOWER, "FLWR_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (built,) = folder.glob("*.fab")
    modules = ("client_app", "server_app", "model", "dataset", "strategy")
    wanted = {"LICENSE", "README.md", *(f"flrce_baseline/{name}.py" for name in modules)}
    assert wanted <= set(zipfile.ZipFile(built).namelist())


def test_the_baseline_trains_as_the_simulator_does(baseline, tmp_path):
    """The same clients and the same model as the experiment file with the same settings."""
    read_config, app, run_rounds = baseline
    config = read_config([*SMALL, f"state={tmp_path / 'run'}"])
    with closing(LocalGrid(app, 6, config)) as grid:
        result = run_rounds(grid, config)
    simulated = runs.run(
        Experiment.from_tables(
            {
                "seed": 0,
                "rounds": 3,
                "clients": 6,
                "per_round": 3,
                "data": {"name": "digits", "partition": "dirichlet", "alpha": 0.1, "holdout": 0.3},
                "train": {"batch": 16, "epochs": 1, "lr": 0.05},
                "recipe": {"name": "flrce", "preset": "paper", "psi": 1.9},
                "engine": {"kernel": "torch"},
            }
        )
    )
    assert [r.chosen for r in result.history] == [r.chosen for r in simulated.history]
    assert [r.accuracy for r in result.history] == pytest.approx(
        [r.accuracy for r in simulated.history], rel=1e-6
    )
    assert simulated.model.keys() <= result.arrays.keys()
    for name, value in simulated.model.items():
        assert torch.equal(torch.from_numpy(result.arrays[name].numpy()), value), name
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_low_psi_stops_the_baseline_early(baseline):
    read_config, app, run_rounds = baseline
    config = read_config([*SMALL, "num-server-rounds=8", "psi=0.1", "seed=4"])
    with closing(LocalGrid(app, 6, config)) as grid:
        result = run_rounds(grid, config)
    assert len(result.history) < 8
    assert "conflict" in result.stopped


def test_a_wrong_key_or_value_of_the_baseline_is_named(baseline):
    read_config, *_ = baseline
    with pytest.raises(Exception, match="--set rounds=3: no such key; use one of dataset"):
        read_config(["rounds=3"])
    with pytest.raises(Exception, match=r"--set psi=x: use a value like 3\.0"):
        read_config(["psi=x"])
