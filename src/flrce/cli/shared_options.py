"""The option `--version`, which prints versions and exits."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from flrce.cli.options import add_option
from flrce.version import __version__


def _print_versions(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        others = [f"{name} {_get_installed_version(name)}" for name in ("torch", "flwr")]
        print(", ".join((f"flrce {__version__}", *others)))
        context.exit()


def _get_installed_version(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"


version_flag = add_option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Show versions.",
)
