"""The ready app and `flrce deploy init`: what is written is what is shipped as an example, and it
runs.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flrce.cli.cli import main
from flrce.cli.deploy import render_app_files, to_package_name
from flrce.config.experiment import Experiment
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.flower import options
from flrce.flower.options import explain_untested_version
from flrce.simulation import runs
from flrce.storage import read

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower-app"


def test_the_example_is_what_deploy_init_writes():
    for path, text in render_app_files("flower-app", "flrce", own=False).items():
        assert (EXAMPLE / path).read_text() == text, (
            f"{path}: write examples/flower-app anew with deploy init"
        )
    kept = Experiment.load(EXAMPLE / "flower_app" / "experiment.toml")
    assert kept == Experiment.load(ROOT / "experiments" / "digits.toml", ['engine.name="flower"'])


def test_an_app_depends_on_what_an_index_has():
    """flrce itself is installed from its checkout or wheel, as the app's README says."""
    page = (ROOT / "docs" / "tutorial-flower.md").read_text()
    tutorial = page.partition("# pyproject.toml\n")[2].partition("```")[0]
    for text in (render_app_files("fleet", "me", own=True)["pyproject.toml"], tutorial):
        names = [
            re.match(r"[\w-]+", each)[0] for each in tomllib.loads(text)["project"]["dependencies"]
        ]
        assert names == ["flwr"]
    assert (
        "pip install './flrce-VERSION-py3-none-any.whl[flower]'"
        in render_app_files("fleet", "me", own=True)["README.md"]
    )


def test_a_written_app_has_flowers_format_1(tmp_path):
    """`flwr build` accepts it, with its licence and the version that it was made for."""
    assert main(["deploy", "init", str(tmp_path / "fleet"), "--own"]) == 0
    flwr = Path(sys.executable).parent / "flwr"
    told = tomllib.loads((tmp_path / "fleet" / "pyproject.toml").read_text())
    assert told["tool"]["flwr"]["app"]["fab-format-version"] == 1
    target = told["tool"]["flwr"]["app"]["flwr-version-target"]
    assert explain_untested_version(target) == ""
    ran = subprocess.run(
        [flwr, "build"],
        cwd=tmp_path / "fleet",
        env={
            **os.environ,
            "FLWR_HOME": str(tmp_path / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (built,) = (tmp_path / "fleet").glob("*.fab")
    names = zipfile.ZipFile(built).namelist()
    assert {"LICENSE", "pyproject.toml", "fleet/server_app.py"} <= set(names)


@pytest.mark.parametrize("version", ["1.37.0", "1.43.0", "2.0"])
def test_an_untested_flower_is_named(version, monkeypatch, caplog):
    assert f"flwr {version} was not tested" in explain_untested_version(version)
    monkeypatch.setattr(options, "version", lambda name: version)
    with caplog.at_level("WARNING", logger="flwr"):
        options.warn_about_version()
    assert version in caplog.text


def test_a_written_app_that_cannot_run_says_so_in_one_line(tmp_path):
    assert main(["deploy", "init", str(tmp_path / "fleet")]) == 0
    command = [
        sys.executable,
        "-m",
        "fleet",
        "--state",
        "run",
        "--set",
        "data.path=nowhere.jsonl data.tokenizer=gone",
    ]
    done = subprocess.run(
        command, cwd=tmp_path / "fleet", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: data.path 'nowhere.jsonl' does not exist; give")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("own", [False, True], ids=["experiment", "own"])
def test_a_written_app_trains(tmp_path, own):
    """In this process, for two rounds; then resumed for none more, since it is done."""
    folder = tmp_path / "my-fleet"
    assert main(["deploy", "init", str(folder), *(["--own"] if own else [])]) == 0
    command = [
        sys.executable,
        "-m",
        "my_fleet",
        "--nodes",
        "4",
        "--state",
        "run",
        "--set",
        "clients=4 per_round=2 rounds=2 train.epochs=1 engine.kernel=torch recipe.points=1",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert "2 rounds; stopped early: no" in done.stdout, done.stdout + done.stderr
    assert len((folder / "run" / "rounds.jsonl").read_text().splitlines()) == 2
    assert (folder / "run" / "model.safetensors").exists()


def test_deploy_init_overwrites_nothing_and_checks_the_name(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("mine")
    assert main(["deploy", "init", str(tmp_path / "a")]) == 2
    assert "overwrites no file" in capsys.readouterr().err
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    assert to_package_name("My-Fleet 2") == "my_fleet_2"
    for bad in ("2fleet", "class", "flwr"):
        with pytest.raises(BadInput, match="not a valid name of a Python package"):
            to_package_name(bad)


def test_flrce_without_flwr_says_what_to_install():
    """The core imports without flwr; flrce.flower names the extra."""
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import flrce.config.experiment, flrce.simulation.runs, flrce.cli.cli\n"
        "from flrce.errors import BadInput\n"
        "try:\n    from flrce.flower import FLrce\nexcept BadInput as why:\n    print(why)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install " in done.stdout, done.stdout + done.stderr
    assert "'flwr<2,>=" in done.stdout


def test_the_same_command_runs_on_flower(tmp_path, capsys):
    """engine.name = "flower" and the simulator: same selections and bytes, and one kind of run
    directory.
    """
    small = [
        "--set",
        "rounds=3",
        "--set",
        "clients=6",
        "--set",
        "per_round=2",
        "--set",
        "engine.kernel=torch",
        "--set",
        "train.epochs=1",
    ]
    assert (
        main(["run", *small, "--set", "engine.name=flower", "--out", str(tmp_path / "flower")]) == 0
    )
    assert main(["run", *small, "--out", str(tmp_path / "simulator")]) == 0
    here, there = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("flower", "simulator")
    )
    for key in ("chosen", "bytes_up", "bytes_down"):
        assert [row[key] for row in here] == [row[key] for row in there]
    assert (
        main(["run", *small, "--set", "engine.name=flower", "--out", str(tmp_path / "flower")]) == 2
    )
    assert "--resume" in capsys.readouterr().err


FEW = {
    "rounds": 3,
    "clients": 6,
    "per_round": 2,
    "train": {"epochs": 1},
    "engine": {"kernel": "torch", "workers": 1},
}


def on_flower(**more):
    return Experiment.from_tables(FEW | {"engine": FEW["engine"] | {"name": "flower"}} | more)


@pytest.fixture
def grids(monkeypatch):
    """Every grid over which a run went."""
    from flrce.flower import server

    made, real = [], server.LocalGrid
    monkeypatch.setattr(server, "LocalGrid", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    return made


def test_python_honours_the_engine(tmp_path, grids):
    """flrce.run and one run per seed go over Flower's messages where the experiment says so."""
    seen = []
    there = runs.run(on_flower(), tmp_path / "a", watch=seen.append)
    here = runs.run(Experiment.from_tables(FEW))
    assert [done.record.t for done in seen] == [1, 2, 3]
    assert [grid.sent > 6 for grid in grids] == [
        True
    ]  # three rounds of two clients, and evaluations
    assert [h.chosen for h in there.history] == [h.chosen for h in here.history]
    assert there.model.keys() == here.model.keys()
    assert there.summary["rounds"] == 3
    with pytest.raises(BadInput, match="--resume"):
        runs.run(on_flower(), tmp_path / "a")
    table = runs.run_seeds(on_flower(rounds=1), [0, 1], tmp_path / "b")
    assert table["rounds"]["mean"] == 1
    with pytest.raises(BadInput, match="flower"):
        next(runs.rounds(on_flower()))


def test_each_client_s_accuracy_is_kept_as_in_the_simulator(tmp_path):
    """final.json of the two engines: the same clients, the same figures."""
    import json

    torch_s = {"engine": {"name": "simulator", "kernel": "torch", "workers": 1}}
    runs.run(on_flower(), tmp_path / "a")
    runs.run(Experiment.from_tables(FEW | torch_s), tmp_path / "b")
    there, here = (json.loads((tmp_path / name / "final.json").read_text()) for name in ("a", "b"))
    names = [
        json.loads((tmp_path / name / "partition.json").read_text())["clients"]
        for name in ("a", "b")
    ]
    assert there["metric"] == here["metric"] == "accuracy"
    assert dict(zip(names[0], there["clients"], strict=True)) == pytest.approx(
        dict(zip(names[1], here["clients"], strict=True)), abs=1e-6
    )
    assert there["held"] == here["held"]  # samples of each class
    assert there["classes"] == pytest.approx(here["classes"], abs=1e-6)


def test_own_samples_and_network_travel_over_flower():
    import torch

    torch.manual_seed(0)
    x, net = torch.randn(120, 5).numpy(), torch.nn.Linear(5, 2)
    own = Source("own", x, (x[:, 0] > 0).astype("int64"), ("no", "yes"))
    result = runs.run(on_flower(rounds=2, recipe={"name": "fedavg"}), data=own, model=net)
    assert result.model.keys() == {"weight", "bias"}
    assert result.summary["accuracy"] > 0.6


def test_a_flower_run_keeps_its_experiment_and_partition(tmp_path):
    """What the report shows of a simulated run, it shows of one on Flower: data, model, clients and
    their labels.
    """
    runs.run(on_flower(), tmp_path / "flower")
    runs.run(Experiment.from_tables(FEW), tmp_path / "simulator")
    there, here = (
        read.read_single_run(tmp_path / "flower"),
        read.read_single_run(tmp_path / "simulator"),
    )
    assert there.partition == here.partition
    assert there.experiment | {"engine": 0} == here.experiment | {"engine": 0}
    assert there.experiment["engine"]["name"] == "flower"
    assert there.roster == here.roster


def test_compare_honours_the_engine(tmp_path, grids):
    out = tmp_path / "both"
    sets = ["rounds=1", "clients=4", "per_round=2", "engine.kernel=torch", "engine.name=flower"]
    assert (
        main(
            [
                "compare",
                *(w for s in sets for w in ("--set", s)),
                "--seeds",
                "0-1",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert [run.experiment["engine"]["name"] for run in read.read_runs([out])] == ["flower"] * 6
    assert len(grids) == 6  # three recipes, two seeds


def test_what_may_be_installed_begins_with_the_oldest_tested():
    """The newest is open: whoever installs an untested one is warned."""
    oldest = options.SUPPORTED_VERSIONS.partition(" to ")[0]
    for path, extras in (
        ("pyproject.toml", ("flower", "ray")),
        ("client/pyproject.toml", ("flower",)),
    ):
        table = tomllib.loads((ROOT / path).read_text())["project"]["optional-dependencies"]
        for extra in extras:
            assert re.fullmatch(rf"flwr(\[\w+\])?>={oldest},<2", table[extra][0])
    assert f"Tested with flwr {options.SUPPORTED_VERSIONS}" in (ROOT / "docs/flower.md").read_text()
