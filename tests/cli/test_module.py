"""`python -m flrce` is the command line."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from flrce.cli.commands import app
from flrce.version import __version__


def test_module_runs_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flrce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"flrce {__version__}")


def test_module_returns_exit_codes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flrce", "run", "missing.toml"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "missing.toml" in done.stderr


def iter_commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from iter_commands(command)
        else:
            yield command


@pytest.mark.parametrize("command", iter_commands(app), ids=lambda each: str(each.name))
def test_every_option_is_a_parameter_of_what_its_command_calls(command: click.Command) -> None:
    module, _, name = getattr(command.callback, "target").partition(":")  # noqa: B009
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    given = {str(each.name) for each in command.params if each.expose_value}
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert open_ended or given <= set(parameters)
    required = {key for key, each in parameters.items() if each.default is each.empty}
    assert required - {"budgets"} <= given
