"""Commands that other packages register under the entry-point group `flrce.commands`.

An entry point is a click command. It is loaded when its help or the command itself is asked for.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from flrce.cli.options import OrderedGroup, SummaryCommand
from flrce.errors import BadInput

ENTRY_POINT_GROUP = "flrce.commands"
#: commands of the distribution flrce-research, whose names are known where it is not installed
RESEARCH_COMMANDS = ("arena", "advise", "reproduce")


#: headings of the list of commands; what is in none of them comes last
HELP_SECTIONS = {
    "Train": ("run", "compare"),
    "Look": ("runs", "watch", "report", "why", "verify"),
    "Decide": ("reach", "whatif", "advise", "recipes", "pieces"),
    "Use and deploy": ("predict", "export", "deploy"),
    "Prepare": ("data", "profile", "doctor"),
}


class ExtensibleGroup(OrderedGroup):
    """Commands that were written here, then those that installed packages register."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands under the headings of HELP_SECTIONS."""
        summaries = {
            name: command.get_short_help_str()
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None
        }
        for heading, names in HELP_SECTIONS.items():
            known = [(name, summaries.pop(name)) for name in names if name in summaries]
            with formatter.section(heading):
                formatter.write_dl(known)
        if summaries:
            with formatter.section("More"):
                formatter.write_dl(list(summaries.items()))

    def list_commands(self, ctx: click.Context) -> list[str]:
        registered = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
        return [*self.commands, *sorted(registered - set(self.commands))]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, name) or load_registered_command(name)


def load_registered_command(name: str) -> click.Command | None:
    """The command of an installed package, or one that says what is missing; None if unknown."""
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _load_entry_point(point)
    if name in RESEARCH_COMMANDS:
        return _build_failing_command(
            name,
            f"flrce {name} is part of flrce-research, which is not installed; in a checkout of"
            " flrce, run: pip install ./research",
        )
    return None


def _load_entry_point(point: EntryPoint) -> click.Command:
    try:
        command: click.Command = point.load()
    except (ImportError, AttributeError) as why:
        text = f"flrce {point.name} cannot be loaded from {point.value}: {why}"
        return _build_failing_command(point.name, f"{text}; install its package again")
    return command


def _build_failing_command(name: str, message: str) -> click.Command:
    """A command that takes any arguments and raises an error."""

    def fail(**_: Any) -> None:
        raise BadInput(message)

    return SummaryCommand(
        name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help=message,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
