"""What Tab offers, asked for as a shell asks click."""

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from flrce.cli.commands import app
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce.methods.registry import PIECES


def complete(*words: str) -> list[str]:
    """The values offered for the last word of a command line."""
    shell = BashComplete(app, {}, "flrce", "_FLRCE_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("compare", "--recipes", "fedavg,flrce-n"), ["fedavg,flrce-no-stop"]),
        (("recipes", "show", "frug"), ["frugal"]),
        (("pieces", "list", "selec"), ["selector"]),
        (("data", "info", "fashion"), ["fashion-mnist"]),
        (("run", "--device", "c"), ["cpu", "cuda"]),
        (("whatif", "runs/a", "--preset", "frugal,b"), ["frugal,balanced"]),
        (("run", "--set", "data.ho"), ["data.holdout="]),
        (("run", "--set", "engine.device=c"), ["engine.device=cpu", "engine.device=cuda"]),
        (
            ("run", "--set", "train.optimizer=ada"),
            ["train.optimizer=adam", "train.optimizer=adamw"],
        ),
        (("run", "--set", "recipe.name=frug"), ["recipe.name=frugal"]),
        (("run", "--set", "train.lr="), []),
    ],
)
def test_values_are_offered(words: tuple[str, ...], offered: list[str]) -> None:
    assert complete(*words) == offered


def test_every_recipe_and_every_piece_of_a_role_is_offered() -> None:
    assert set(complete("recipes", "show", "")) == set(CATALOGUE)
    prefix = "recipe.compressor="
    assert complete("run", "--set", prefix) == [
        prefix + name for name in sorted(PIECES["compressor"])
    ]


def test_experiment_files_of_this_folder_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    assert complete("compare", "--recipes", "mi") == ["mine.toml"]


def test_run_directories_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/c/seed-0", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/a", "runs/c/seed-0"):
        (tmp_path / name / "rounds.jsonl").write_text("")
    assert complete("why", "") == ["runs/a", "runs/c/seed-0"]
    assert complete("report", "runs/c") == ["runs/c/seed-0"]
    assert complete("verify", "runs/a", "runs/") == ["runs/a", "runs/c/seed-0"]
