"""`flrce arena` and `flrce advise`, as the command line loads them: light imports only."""

from typing import Any

import click

from flrce.cli import options
from flrce.cli.options import PATH_TYPE, SummaryCommand

LIST_METAVAR = "A,B,..."


@click.command("arena", cls=SummaryCommand)
@click.argument("plan", type=PATH_TYPE)
@options.add_path_option("--out", "Folder for records, leaderboards and the page.", required=True)
@options.add_path_option(
    "--against",
    "An arena that was run: its methods are not run again, and PLAN needs new methods only.",
)
@click.option("--tasks", metavar=LIST_METAVAR, help="Of the plan's; all, unless given.")
@options.on_option
@options.trust_option
@options.json_option
def arena_command(**given: Any) -> None:
    """Run many methods on many tasks and rank them at equal joules, bytes, seconds and rounds.

    PLAN is a TOML file with methods, tasks, seeds and one rule for tuning. The same command goes on
    where it was interrupted; only what is not recorded is run.
    """
    from flrce_arena.cli import run_arena

    run_arena(**given)


@click.command("advise", cls=SummaryCommand)
@options.file_argument
@options.set_option
@options.add_path_option("--out", "Experiment file to write the advice into.")
@click.option("--joules", type=float, help="Energy that may be spent in all, the search included.")
@click.option("--bytes", "nbytes", type=float, help="Traffic, likewise.")
@click.option("--seconds", type=float, help="Time, likewise.")
@options.add_path_option(
    "--work", "Folder to keep the search in; the same command goes on there after an interruption."
)
@options.device_option
@options.on_option
@options.trust_option
@options.json_option
def advise_command(**given: Any) -> None:
    """Find the recipe and the learning rate for an experiment and a budget.

    The search tries methods and rates for up to a quarter of the budget. The answer has an
    interval and says when plain FedAvg is as good.
    """
    from flrce_arena.advise_cli import show_advice

    show_advice(**given)
