"""Flags of `flrce` itself, which do their work and end: versions, and setting Tab up."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from flrce.cli import completion
from flrce.cli.options import F, add_option
from flrce.version import __version__


def _make_flag(name: str, said: Callable[[click.Command], str], help: str) -> Callable[[F], F]:
    """A flag that prints what is `said` of the application, before any command is looked at."""

    def print_and_exit(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            print(said(context.command))
            context.exit()

    return add_option(
        name, is_flag=True, is_eager=True, expose_value=False, callback=print_and_exit, help=help
    )


def _format_versions(app: click.Command) -> str:
    return (
        f"flrce {__version__}, torch {_get_installed_version('torch')}, flwr"
        f" {_get_installed_version('flwr')}"
    )


def _get_installed_version(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"


def _install_completion(app: click.Command) -> str:
    return (
        f"wrote {completion.install_completion_script(app)}; Tab completes flrce in the next"
        " terminal"
    )


def _format_completion_script(app: click.Command) -> str:
    return completion.build_completion_script(app)[1]


version_flag = _make_flag("--version", _format_versions, "Show versions.")
install_completion_flag = _make_flag(
    "--install-completion", _install_completion, "Set up Tab for this shell."
)
show_completion_flag = _make_flag(
    "--show-completion", _format_completion_script, "Print the script for Tab, to place it by hand."
)
