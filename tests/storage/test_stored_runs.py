"""Run directories of earlier versions: those of finished runs still open, those of killed runs go
on.

`v01-*` were written by version 0.1, `now-*` by 0.2.0.dev0 before modules and classes got the names
that they have today. The recipe "flrce" has changed since 0.1, and a killed run of it goes on with
today's.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flrce.cli.cli import main
from flrce.config.experiment import Experiment
from flrce.methods.stopping.budget import AnyOf
from flrce.simulation import runs

ARCHIVES = Path(__file__).parents[1] / "fixtures" / "runs"
FINISHED = ("v01-done", "now-flrce-done")
KILLED = (
    "now-flrce-cut",
    "now-ditto-cut",
    "now-fedbuff-cut",
    "now-scaffold-cut",
)  # in round 4 of 6


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(ARCHIVES / f"{name}.tar.gz") as archive:
        archive.extractall(folder)  # of our own making
    return folder / name


def lines(run: Path) -> list[str]:
    return (run / "rounds.jsonl").read_text().splitlines()


def learned(run: Path) -> list[list[object]]:
    """Who trained in each round, and to what end; how costs are counted may have changed since."""
    records = map(json.loads, lines(run))
    return [
        [record[key] for key in ("chosen", "replied", "loss", "averaged")] for record in records
    ]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FINISHED)
def test_finished_runs_open(name, here, capsys):
    run = unpack(name, here)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for command, said in (
        (["report", name], "flrce"),
        (["why", name], "all 6 rounds"),
        (["whatif", name], "psi 1.8"),
        (["runs", "."], "6 of 6"),
    ):
        assert main(command) == 0, command
        assert said in capsys.readouterr().out, command
    assert before == {path: path.read_bytes() for path in before}  # they only look


@pytest.mark.parametrize("name", FINISHED)
def test_finished_runs_have_nothing_to_resume(name, here):
    run = unpack(name, here)
    before = lines(run)
    assert main(["run", "--out", name, "--resume"]) == 0
    assert lines(run) == before
    assert main(["run", "--out", name, "--resume", "--set", "rounds=7"]) == 0
    assert len(lines(run)) == 7


@pytest.mark.parametrize("name", KILLED)
def test_killed_runs_go_on_to_the_same_model(name, here):
    run = unpack(name, here)
    before = lines(run)
    assert len(before) == 3
    assert main(["run", "--out", name, "--resume"]) == 0
    assert lines(run)[:3] == before
    assert len(lines(run)) == 6
    runs.run(Experiment.load(run / "experiment.toml"), here / "whole")
    resumed, whole = (load_file(at / "model.safetensors") for at in (run, here / "whole"))
    assert resumed.keys() == whole.keys()
    if learned(here / "whole")[:3] == learned(run)[:3]:  # a processor that rounds as the first one
        assert all(torch.equal(resumed[key], whole[key]) for key in whole)
        assert learned(run) == learned(here / "whole")
    else:
        for key in whole:
            torch.testing.assert_close(resumed[key], whole[key], rtol=1e-3, atol=1e-3)


def test_a_killed_run_of_version_0_1_goes_on(here):
    run = unpack("v01-cut", here)
    before = lines(run)
    assert main(["run", "--out", "v01-cut", "--resume"]) == 0
    assert lines(run)[:3] == before
    assert len(lines(run)) == 6
    for command in ("report", "why", "whatif"):
        assert main([command, "v01-cut"]) == 0


def test_an_experiment_that_names_a_moved_class_loads(tmp_path):
    """A class without a short name goes by that of its module."""
    path = tmp_path / "old.toml"
    path.write_text(
        '[recipe]\nname = "fedavg"\nstop = {piece = "flrce.stops.budget:AnyOf", rules = []}\n'
    )
    assert Experiment.load(path).build_recipe().stop == AnyOf(())


def test_a_guarded_run_of_flower_goes_on(tmp_path):
    """Its directory names classes that have other names today."""
    flower = pytest.importorskip("flwr.serverapp.strategy", reason="needs flrce[flower]")
    import numpy as np
    from flwr.app import ArrayRecord

    from flower_helpers import plain_app, start
    from flrce.flower import Guarded, introduce
    from flrce.flower.grid import LocalGrid
    from flrce.methods.stopping.budget import Patience

    model = ArrayRecord(
        {name: array for name, array in start().items() if "num_batches" not in name}
    )

    def go(folder: Path):
        strategy = flower.FedAdam(min_available_nodes=5, min_train_nodes=2, fraction_train=0.5)
        grid = LocalGrid(introduce(plain_app(), compresses=False), 8)
        guarded = Guarded(strategy, state=folder, seed=2, stop=Patience(5), budget={"seconds": 1e6})
        return guarded.start(grid, model, num_rounds=6)

    run = unpack("now-guarded-cut", tmp_path)
    stored, before = (run / "experiment.toml").read_text(), lines(run)
    assert '"Theirs"' in stored
    assert '"TheirSum"' in stored
    assert len(before) == 3
    resumed, whole = go(run), go(tmp_path / "whole")
    assert lines(run)[:3] == before
    assert (tmp_path / "whole" / "experiment.toml").read_text() == stored
    assert [record.chosen for record in resumed.history] == [r.chosen for r in whole.history]
    assert len(resumed.history) == 6
    for name, array in whole.arrays.items():
        np.testing.assert_allclose(
            resumed.arrays[name].numpy(), array.numpy(), rtol=1e-5, atol=1e-6
        )
