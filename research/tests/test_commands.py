"""The commands that flrce-research registers: whole help, one-line errors, no code of others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_output_paths
import tomli_w
from test_orphans import gone, processes_with, started
from test_user_code import NOISY, SMALL, attacks, with_recipe

from flrce.cli.cli import main
from flrce.cli.commands import app
from flrce.cli.options import first_paragraph
from flrce.cli.registered import RESEARCH_COMMANDS, load_registered_command
from flrce.version import __version__

SETS = test_output_paths.SETS
PLAN = "seeds = [1]\n[tasks.d]\nrounds = 1\nclients = 6\nper_round = 2\n[methods.fedavg]\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and the search path as it was afterwards."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    flat = "".join(capsys.readouterr().out.split())
    for name in RESEARCH_COMMANDS:
        assert "".join(first_paragraph(load_registered_command(name).help).split()) in flat


@pytest.mark.parametrize("name", RESEARCH_COMMANDS)
def test_help_is_whole(name, capsys):
    """Every option with a sentence, nothing cut, nothing heavy imported."""
    assert name not in app.commands
    code = (
        "import sys\nfrom flrce.cli.cli import main\n"
        f"assert main([{name!r}, '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    command = load_registered_command(name)
    flat = "".join(shown.stdout.split())
    assert "".join(first_paragraph(command.help).split()) in flat
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.help, parameter.name


def test_both_distributions_have_one_version():
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in text
    assert f'"flrce=={__version__}"' in text


@pytest.mark.parametrize(
    "words",
    [
        ["arena", "plan.toml", "--out"],
        ["advise", *SETS, "--work"],
        ["reproduce", "table3", "--quick", "--out"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_cannot_be_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "taken")
    for place in test_output_paths.NO_FOLDERS:
        test_output_paths.refused([*words, place], capsys)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ["advise", *SETS, "--out"],
        ["reproduce", "table3", "--quick", "--tables-only", "--out", "cells", "--page"],
    ],
    ids=lambda words: words[0],
)
def test_a_file_that_cannot_be_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder").mkdir()
    for place in test_output_paths.NO_FILES:
        test_output_paths.refused([*words, place], capsys)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_file_can_have(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text("[methods.fedavg]\n")
    test_output_paths.refused(["arena", name, "--out", "x"], capsys)
    test_output_paths.refused(["arena", "p", "--out", "o", "--against", name], capsys)


def test_a_missing_option_is_one_line(capsys):
    assert main(["reproduce", "table3"]) == 2
    assert "Missing option '--out'" in capsys.readouterr().err


def test_advise_refuses_a_gpu_that_is_not_there(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.chdir(tmp_path)
    for device in ("--device=cuda", "--set=engine.device=cuda"):
        assert main(["advise", "--joules=9", *SETS, device]) == 2
        said = capsys.readouterr()
        assert "no GPU" in said.err
        assert (said.out + said.err).count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_advise_calls_nothing_that_is_no_piece(tmp_path, capsys):
    marker = tmp_path / "called"
    (tmp_path / "evil.toml").write_text(tomli_w.dumps(attacks(marker)["aggregator"]))
    assert main(["advise", str(tmp_path / "evil.toml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "the module os belongs to Python's own library" in said
    assert not marker.exists()


def test_plans_of_others_are_data(here, capsys):
    tmp_path = here
    marker = tmp_path / "imported"
    (tmp_path / "here" / "noisy.py").write_text(NOISY.format(marker=str(marker)))
    (tmp_path / "theirs").mkdir()
    task = with_recipe() | {"model": {"name": "noisy:Net"}}
    plans = {
        "tasks": {"tasks": {"digits": task}},
        "grid": {
            "tasks": {"digits": SMALL},
            "tuning": {"grid": {"recipe.aggregator": ["noisy:Steady"]}},
        },
        "stops": {
            "tasks": {"digits": SMALL},
            "stops": {"late": {"recipe": {"stop": "noisy:Steady"}}},
        },
    }
    (tmp_path / "mine.toml").write_text("[methods.fedprox]\n")
    for plan in plans.values():
        (tmp_path / "theirs" / "plan.toml").write_text(
            tomli_w.dumps({**plan, "methods": {"fedavg": {}}})
        )
        for more in ([], ["--trust"]):
            words = [
                "arena",
                str(tmp_path / "mine.toml"),
                "--against",
                str(tmp_path / "theirs"),
                "--out",
                "o",
                *more,
            ]
            assert main(words) == 2
            assert "names code, and --against reads data alone" in capsys.readouterr().err
    assert not marker.exists()


LONG_PLAN = """
seeds = [0, 1]
reference = "fedavg"
[methods.fedavg]
[methods.flrce]
[tasks.digits]
rounds = 5000
clients = 8
per_round = 4
engine = {workers = 1}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("where", ["here", "processes"])
def test_an_arena_ends_with_its_killed_command(tmp_path, where):
    mark = f"orphans-{os.getpid()}-{tmp_path.name}"
    (tmp_path / "plan.toml").write_text(LONG_PLAN)
    asked = ["arena", "plan.toml", "--out", "out", "--on", where]
    parent = started(["-m", "flrce.cli.cli", *asked], mark, tmp_path)
    try:
        end = time.monotonic() + 60
        while (
            not list((tmp_path / "out").glob("running/**/rounds.jsonl")) and time.monotonic() < end
        ):
            assert parent.poll() is None
            time.sleep(0.2)
        assert len(processes_with(mark)) > 1
    finally:
        parent.kill()
        parent.wait()
    assert gone(mark)
