"""Click classes and options that commands share.

Only light modules are imported here: help must not wait for PyTorch.
"""

import errno
import os
import re
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from flrce.core.cost_table import COSTS
from flrce.errors import BadInput, format_one_line
from flrce.version import __version__

if TYPE_CHECKING:
    from flrce.config.experiment import Experiment

F = TypeVar("F", bound=Callable[..., Any])


class PathName(click.Path):
    """A path that the system can have a file at: no null characters, no name that is too long."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            os.lstat(value)
        except (OSError, ValueError) as why:
            if isinstance(why, ValueError) or why.errno == errno.ENAMETOOLONG:
                reason = getattr(why, "strerror", None) or why
                text = f"{format_one_line(value, 40)!r} can be no file or folder: {reason}"
                self.fail(text, param, ctx)
        return super().convert(value, param, ctx)


PATH_TYPE = PathName(path_type=Path)
MAX_SEEDS = 10_000  # seeds of one command
LIST_METAVAR = "A,B,..."


class SummaryCommand(click.Command):
    """A command whose summary is its first sentence, never cut."""

    def get_short_help_str(self, limit: int = 45) -> str:
        return first_paragraph(self.help or "")


class OrderedGroup(click.Group):
    """Commands in the order in which they were written; alone, it shows its help."""

    command_class = SummaryCommand
    group_class = type  # groups inside are of this class too

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"invoke_without_command": True, **kwargs})

    def get_short_help_str(self, limit: int = 45) -> str:
        return first_paragraph(self.help or "")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        result = super().invoke(ctx)
        if ctx.invoked_subcommand is None:
            click.echo(ctx.get_help())
        return result


def calls(target: str) -> Callable[[F], F]:
    """Make a command call "module:function", imported only then, because PyTorch loads slowly."""
    module, _, name = target.partition(":")

    def decorate(command: F) -> F:
        @wraps(command)
        def call(**given: Any) -> Any:
            return getattr(import_module(module), name)(**given)

        call.target = target  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def first_paragraph(text: str) -> str:
    """The first paragraph of a help text, on one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


def add_budget_options(command: F) -> F:
    """An option for each cost, in the order of their table: limits with commas."""
    for cost in reversed(COSTS.values()):
        text = "Numbers of rounds." if cost.name == "rounds" else f"Budgets of {cost.label}."
        command = add_list_option(f"--{cost.name}", text)(command)
    return command


def add_runs_argument(metavar: str, many: bool = False, name: str = "run") -> Callable[[F], F]:
    """An argument that names run directories."""
    name, count = (f"{name}s", -1) if many else (name, 1)
    return click.argument(name, type=PATH_TYPE, nargs=count, required=True, metavar=metavar)


def add_path_option(name: str, text: str, **more: Any) -> Callable[[F], F]:
    """An option that names a file or folder."""
    return click.option(name, type=PATH_TYPE, help=text, **more)


def add_list_option(name: str, text: str) -> Callable[[F], F]:
    """An option that takes values with commas between them."""
    return click.option(name, metavar=LIST_METAVAR, help=text)


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


version_flag = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Show versions.",
)
file_argument = click.argument("file", type=PATH_TYPE, required=False, metavar="[FILE]")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key of the experiment; may be repeated.",
)
out_option = add_path_option("--out", "Run directory.")
seeds_option = click.option(
    "--seeds", "seed_list", metavar="0-4", help="Several seeds, such as 0,1,2 or 0-4."
)
resume_option = click.option(
    "--resume", is_flag=True, help="Continue from the last committed round."
)
device_option = click.option("--device", metavar="auto|cpu|cuda", help="Where to train.")
on_option = click.option(
    "--on",
    "where",
    default="here",
    show_default=True,
    metavar="here|ray|slurm|processes",
    help="Where to run; settings of Ray or submitit may follow, such as slurm,slurm_partition=gpu.",
)
trust_option = click.option(
    "--trust",
    is_flag=True,
    help=(
        "Import code that the experiment names from anywhere, not only from its folder, the"
        " current folder and registered packages."
    ),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def load_experiment(
    file: Path | None,
    overrides: tuple[str, ...] | list[str],
    device: str | None = None,
    trust: bool = False,
) -> "Experiment":
    """The experiment that a command line names, to be run."""
    from flrce.config.experiment import Experiment

    return Experiment.load(file, device_override(overrides, device), trust)


def device_override(overrides: tuple[str, ...] | list[str], device: str | None) -> list[str]:
    """The overrides, with --device among them."""
    return [*overrides, *([f'engine.device="{device}"'] if device is not None else [])]


def look_at(
    file: Path | None, overrides: tuple[str, ...] | list[str], trust: bool = False
) -> "Experiment":
    """The experiment of a command that runs nothing: no code is imported, unless trusted."""
    from flrce.config.experiment import Experiment
    from flrce.core.user_code import NOTHING

    return Experiment.load(file, overrides, trust or NOTHING)


def parse_seeds(text: str | None) -> list[int] | None:
    """0,1,2 or 0-4 as a list."""
    if text is None:
        return None
    from flrce.config.experiment import MAX_SEED

    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,19})(?:-([0-9]{1,19}))?\s*", part)
        if match is None:
            raise BadInput(
                f"--seeds {text[:60]!r}: {part[:60]!r} is no seed; write for example 0,1,2 or 0-4"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if high - low >= MAX_SEEDS or len(seeds) >= MAX_SEEDS or high > MAX_SEED:
            raise BadInput(
                f"--seeds {text[:60]!r}: at most {MAX_SEEDS} seeds, each at most {MAX_SEED}; name"
                " fewer"
            )
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise BadInput(
            f"--seeds {text[:60]!r} names no seed, or one twice; write for example 0,1,2 or 0-4"
        )
    return seeds


def parse_on_option(where: str) -> tuple[str, dict[str, Any]]:
    """--on as a name and settings.

    >>> parse_on_option("slurm,slurm_partition=gpu,timeout_min=60")
    ('slurm', {'slurm_partition': 'gpu', 'timeout_min': 60})
    """
    name, *given = [word.strip() for word in where.split(",")]
    settings: dict[str, Any] = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not (key.isidentifier() and equals and value):
            raise BadInput(
                f"--on {where!r}: {word!r} is no setting; write for example --on"
                " slurm,slurm_partition=gpu"
            )
        settings[key] = int(value) if value.isdecimal() else value
    if name == "here" and settings:
        raise BadInput(f"--on {where!r}: here has no settings; drop them")
    return name, settings
