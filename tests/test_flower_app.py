"""The ready app and `flrce deploy init`: what is written is what is shipped as an example, and it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flrce.apps.cli import main
from flrce.apps.deploy import package_of, render
from flrce.config import Experiment
from flrce.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "flower-app"


def test_the_example_is_what_deploy_init_writes():
    for path, text in render("flower-app", "flrce", own=False).items():
        assert (EXAMPLE / path).read_text() == text, f"{path}: write examples/flower-app anew with deploy init"
    kept = Experiment.load(EXAMPLE / "flower_app" / "experiment.toml")
    assert kept == Experiment.load(ROOT / "experiments" / "digits.toml", ['engine.name="flower"'])


@pytest.mark.parametrize("own", [False, True], ids=["experiment", "own"])
def test_a_written_app_trains(tmp_path, own):
    """In this process, for two rounds; then resumed for none more, since it is done."""
    folder = tmp_path / "my-fleet"
    assert main(["deploy", "init", str(folder), *(["--own"] if own else [])]) == 0
    command = [
        sys.executable, "-m", "my_fleet", "--nodes", "4", "--state", "run", "--set",
        "clients=4 per_round=2 rounds=2 train.epochs=1 engine.kernel=torch recipe.psi=1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert "2 rounds; stopped early: no" in done.stdout, done.stdout + done.stderr
    assert len((folder / "run" / "rounds.jsonl").read_text().splitlines()) == 2
    assert (folder / "run" / "model.safetensors").exists()


def test_deploy_init_overwrites_nothing_and_checks_the_name(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_text("mine")
    assert main(["deploy", "init", str(tmp_path / "a")]) == 2
    assert "overwrites nothing" in capsys.readouterr().err
    assert (tmp_path / "a" / "README.md").read_text() == "mine"
    assert package_of("My-Fleet 2") == "my_fleet_2"
    for bad in ("2fleet", "class", "flwr"):
        with pytest.raises(BadInput, match="no name for a Python package"):
            package_of(bad)


def test_flrce_without_flwr_says_what_to_install():
    """The core imports without flwr; flrce.flower names the extra."""
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import flrce.config, flrce.runs, flrce.apps.cli\n"
        "from flrce.errors import BadInput\n"
        "try:\n    from flrce.flower import FLrce\nexcept BadInput as why:\n    print(why)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "install flrce[flower]" in done.stdout, done.stdout + done.stderr


def test_the_same_command_runs_on_flower(tmp_path, capsys):
    """engine.name = "flower" and the simulator: same selections and bytes, and one kind of run directory."""
    small = ["--set", "rounds=3", "--set", "clients=6", "--set", "per_round=2", "--set", "engine.kernel=torch"]
    assert main(["run", *small, "--set", "engine.name=flower", "--out", str(tmp_path / "flower")]) == 0
    assert main(["run", *small, "--out", str(tmp_path / "simulator")]) == 0
    here, there = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("flower", "simulator")
    )
    for key in ("chosen", "bytes_up", "bytes_down"):
        assert [row[key] for row in here] == [row[key] for row in there]
    assert main(["run", *small, "--set", "engine.name=flower", "--out", str(tmp_path / "flower")]) == 2
    assert "--resume" in capsys.readouterr().err
