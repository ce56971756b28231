"""Commands that come in groups: the catalogue of methods, data sets, deployments. As commands.py in all else."""

from typing import Any

import click

from flrce.apps import complete, options
from flrce.apps.options import PATH, Group, option


@click.group(cls=Group)
def recipes() -> None:
    """The catalogue of methods."""


@recipes.command("list")
@options.as_json
def recipes_list(**given: Any) -> None:
    """Every recipe with one line about it."""
    from flrce.apps.recipes import list_

    list_(**given)


@recipes.command("show")
@click.argument("name", shell_complete=complete.recipe)
@options.sets
@options.as_json
def recipes_show(**given: Any) -> None:
    """One recipe's pieces, presets and settings.

    NAME is one from `flrce recipes list`; `--set recipe.preset=paper` shows it changed.
    """
    from flrce.apps.recipes import show

    show(**given)


@click.group(cls=Group)
def data() -> None:
    """Data sets: which there are, how they are shared out."""


@data.command("list")
@options.as_json
def data_list(**given: Any) -> None:
    """Every data set by name, and whether it is ready to use."""
    from flrce.apps.data import list_

    list_(**given)


@data.command("info")
@click.argument("name", required=False, metavar="[NAME]", shell_complete=complete.described)
@options.file
@options.sets
@options.as_json
@option("--svg", type=PATH, help="Also draw it into this file (extra: report).")
@options.trust
def data_info(**given: Any) -> None:
    """How an experiment shares its samples out: sizes and labels per client.

    NAME is a data set; FILE, an experiment (TOML), may stand alone.
    """
    from flrce.apps.data import info

    info(**given)


@data.command("prepare")
@click.argument("name", shell_complete=complete.data)
@option("--from", "folder", type=PATH, required=True, help="Folder with the set's public files.")
@option("--as", "own", help="Another name for it: the data.name of experiments.")
def data_prepare(**given: Any) -> None:
    """Convert a data set's public files once into a checked, memory-mapped cache."""
    from flrce.apps.data import prepare

    prepare(**given)


@click.group(cls=Group)
def deploy() -> None:
    """Run an experiment on real devices, through Flower."""


@deploy.command("init")
@click.argument("folder", type=PATH)
@options.file
@options.sets
@option("--own", is_flag=True, help="With a network and samples of your own, to be filled in.")
@option("--publisher", default="flrce", show_default=True, help="Flower's name for who publishes the app.")
def deploy_init(**given: Any) -> None:
    """Write a Flower app (`flwr run` works) that trains an experiment's recipe, data and model.

    FOLDER is where it goes; its last part becomes its name.
    """
    from flrce.apps.deploy import init

    init(**given)
