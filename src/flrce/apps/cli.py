"""The command line. Exit codes: 0 done, 2 bad input (one line), 130 interrupted and resumable, 1 a defect."""

import signal
import sys
from typing import Annotated

import click
import typer

from flrce.apps import compare, data, deploy, doctor, profile, recipes, report, reproduce, run, verify, whatif, why
from flrce.errors import BadInput, Unfinished
from flrce.version import __version__

app = typer.Typer(
    name="flrce", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Federated learning that counts every joule and byte.",
)  # fmt: skip
app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("whatif")(whatif.whatif)
app.command("why")(why.why)
app.command("profile")(profile.profile)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        print(f"flrce {__version__}, torch {torch.__version__}, flwr {_installed('flwr')}")
        raise typer.Exit


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(arguments, standalone_mode=False)
        if code == 130:  # typer makes an exit code of Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (BadInput, click.ClickException) as why:
        text = why.format_message() if isinstance(why, click.ClickException) else str(why)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except Unfinished as why:
        print(f"stopped: {' '.join(str(why).split())}", file=sys.stderr)
        return 130
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; the last committed round is kept, go on with --resume", file=sys.stderr)
        return 130
    except _Terminated:
        print("terminated; the last committed round is kept, go on with --resume", file=sys.stderr)
        return 143


class _Terminated(BaseException):
    pass


def _terminate(*_: object) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
