"""Flags of `flrce` itself, which do their work and end: versions, and setting Tab up."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from flrce.apps import complete
from flrce.apps.options import F, option
from flrce.version import __version__


def _flag(name: str, said: Callable[[click.Command], str], help: str) -> Callable[[F], F]:
    """A flag that prints what is `said` of the application, before any command is looked at."""

    def callback(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted:
            print(said(context.command))
            context.exit()

    return option(name, is_flag=True, is_eager=True, expose_value=False, callback=callback, help=help)


def _versions(app: click.Command) -> str:
    return f"flrce {__version__}, torch {_installed('torch')}, flwr {_installed('flwr')}"


def _installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"


def _install(app: click.Command) -> str:
    return f"wrote {complete.install(app)}; Tab completes flrce in the next terminal"


def _script(app: click.Command) -> str:
    return complete.script(app)[1]


version = _flag("--version", _versions, "Show versions.")
install_completion = _flag("--install-completion", _install, "Set up Tab for this shell.")
show_completion = _flag("--show-completion", _script, "Print the script for Tab, to place it by hand.")
