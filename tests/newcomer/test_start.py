"""The first minutes at the command line: quick help, whole sentences, one-line errors, Tab."""

import json
import os
import resource
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from flrce.cli import registered
from flrce.cli.cli import main
from flrce.cli.commands import app
from flrce.cli.options import first_paragraph
from flrce.cli.registered import HELP_SECTIONS

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
LISTS = ("[ARGS]...", "RUNS...", "[RUN|DIR]...", "A,B,...", "0.02,...", "NAME=VALUE,...")


def seconds(code: str, times: int = 3) -> float:
    """Processor time of the quickest of a few starts of Python with this code; other work does not
    count.
    """
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENV)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.parametrize(
    "asked", [["--help"], ["run", "--help"], ["data", "info", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(asked):
    code = (
        "import sys\nfrom flrce.cli.cli import main\n"
        f"assert main({asked!r}) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=ENV)


def test_help_is_quick():
    """Against what the same machine needs for an empty program, and for torch alone."""
    nothing, torch = seconds("pass"), seconds("import torch", 1)
    helped = seconds("from flrce.cli.cli import main; main(['--help'])")
    assert helped - nothing < 0.25 * (torch - nothing), (nothing, helped, torch)
    assert helped < 0.3, helped


def commands(here: click.Command, *path: str):
    yield path, here
    if isinstance(here, click.Group):
        for name, child in here.commands.items():
            yield from commands(child, *path, name)


@pytest.mark.parametrize("path", [path for path, _ in commands(app)], ids=" ".join)
def test_help_is_whole(path, capsys):
    """No cut summary, no stray backslash, every command and option with a sentence."""
    assert main([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\\[" not in shown
    whole = shown
    for word in LISTS:
        whole = whole.replace(word, "")
    assert "..." not in whole
    here = dict(commands(app))[path]
    flat = "".join(shown.split())  # a line may break inside a word
    assert "".join(first_paragraph(here.help).split()) in flat
    if isinstance(here, click.Group):
        for child in here.commands.values():
            assert "".join(first_paragraph(child.help).split()) in flat
    for parameter in here.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


WRONG = {
    ("run", "--nonsense"): "No such option",
    ("nonsense",): "No such command",
    ("compare", "--recipes"): "requires an argument",
    ("compare",): "Missing option '--out'",
    ("recipes", "show"): "Missing argument",
    ("whatif",): "Missing argument",
    ("profile", "--watts", "many"): "not a valid float",
    ("run", "--set", "train.lr=-1"): "train.lr = -1",
}


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_a_usage_error_is_one_line(wrong, capsys):
    assert main(list(wrong)) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("error: ")
    assert WRONG[wrong] in said


@pytest.mark.parametrize("words", [["arena", "p.toml", "--out", "o"], ["advise", "--help"]])
def test_a_command_whose_package_is_missing_names_it(words, monkeypatch, capsys):
    monkeypatch.setattr(registered, "entry_points", lambda **_: ())
    assert main(words) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"flrce {words[0]} is part of flrce-research" in said
    assert "pip install ./research" in said


def test_a_registered_command_that_cannot_be_loaded_leaves_the_others(monkeypatch, capsys):
    broken = EntryPoint("mine", "no_such_module_at_all:command", registered.ENTRY_POINT_GROUP)

    def find_entry_points(**asked: str) -> list[EntryPoint]:
        return [broken] if asked.get("name", "mine") == "mine" else []

    monkeypatch.setattr(registered, "entry_points", find_entry_points)
    assert main(["--help"]) == 0
    assert "no_such_module_at_all" in capsys.readouterr().out
    assert main(["mine", "--any"]) == 2
    assert "No module named 'no_such_module_at_all'" in capsys.readouterr().err


def test_alone_it_helps(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "Train:" in shown
    sections = [name for names in HELP_SECTIONS.values() for name in names]
    assert len(sections) == len(set(sections))
    assert set(app.commands) <= set(sections)
    assert main(["recipes"]) == 0
    assert "list" in capsys.readouterr().out


def tab(line: str, folder: Path, shell: str = "bash") -> list[str]:
    """What a shell gets to hear when Tab is pressed at the end of the line."""
    asked = {
        "_FLRCE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    code = "import sys; from flrce.cli.cli import main; sys.exit(main())"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=ENV | asked, capture_output=True, text=True
    )
    return [part.split(",", 1)[1] for part in told.stdout.splitlines()]


def test_tab_offers_commands_options_and_paths(tmp_path):
    assert tab("flrce what", tmp_path) == ["whatif"]
    assert "--resume" in tab("flrce run --re", tmp_path)
    assert tab("flrce run sm", tmp_path) == ["sm"]  # click leaves paths to the shell


def test_a_module_of_the_working_directory_is_found(tmp_path):
    (tmp_path / "beside.py").write_text(
        "from flrce.methods.stopping.budget import CostBudget\n\ntwice = lambda: CostBudget(rounds=2)\n"
    )
    code = "import sys; from flrce.cli.cli import main; sys.exit(main(sys.argv[1:]))"
    sets = ["rounds=5", "clients=6", "per_round=2", "recipe.stop=beside:twice", "engine.workers=1"]
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        "run",
        "--json",
        *(word for s in sets for word in ("--set", s)),
    ]
    told = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["rounds"] == 2


def test_a_recipe_is_shown_as_it_would_run(capsys):
    assert main(["recipes", "show", "flrce"]) == 0
    told = capsys.readouterr().out
    assert "`authors` their released code" in told
    assert "under [recipe]: psi = None, preset = 'paper'." in told
    assert (
        main(
            [
                "recipes",
                "show",
                "flrce",
                "--set",
                "recipe.preset=headway",
                "--set",
                "per_round=4",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["stop"]["piece"] == "NoHeadway"
    assert main(["recipes", "show", "flrce", "--set", "recipe.preset=thrifty"]) == 2
    assert "recipe.preset = 'thrifty'" in capsys.readouterr().err
