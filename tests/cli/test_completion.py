"""What Tab offers, asked for as a shell asks click."""

import pytest
from click.shell_completion import BashComplete

from flrce.cli.commands import app
from flrce.methods.catalogue.recipes import CATALOGUE


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
        (("pieces", "show", "power-of"), ["power-of-choice"]),
        (("data", "info", "fashion"), ["fashion-mnist"]),
        (("run", "--set", "data.ho"), ["data.holdout="]),
    ],
)
def test_names_are_offered(words: tuple[str, ...], offered: list[str]) -> None:
    assert complete(*words) == offered


def test_every_recipe_is_offered() -> None:
    assert set(complete("recipes", "show", "")) == set(CATALOGUE)
