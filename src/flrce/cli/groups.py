"""Commands in groups: recipes, pieces, data, deploy."""

from typing import Any

import click

from flrce.cli import options
from flrce.cli.options import PATH_TYPE, OrderedGroup


@click.group("recipes", cls=OrderedGroup)
def recipes_group() -> None:
    """List the methods; show the pieces and settings of one."""


@recipes_group.command("list")
@options.json_option
@options.calls("flrce.cli.recipes:list_recipes")
def recipes_list_command() -> None:
    """List every recipe with its family and a summary."""


@recipes_group.command("show")
@click.argument("name")
@options.set_option
@options.json_option
@options.calls("flrce.cli.recipes:show_recipe")
def recipes_show_command() -> None:
    """Show one recipe's pieces, presets and settings.

    NAME is one from `flrce recipes list`. `--set recipe.preset=paper` shows it with that preset.
    """


@click.group("pieces", cls=OrderedGroup)
def pieces_group() -> None:
    """List the pieces that recipes are composed of; show one."""


@pieces_group.command("list")
@click.argument("role", required=False, metavar="[ROLE]")
@options.json_option
@options.calls("flrce.cli.pieces:list_pieces")
def pieces_list_command() -> None:
    """List every piece with its settings and its file.

    ROLE limits the list to one role, such as selector, compressor or stop.
    """


@pieces_group.command("show")
@click.argument("name")
@options.json_option
@options.calls("flrce.cli.pieces:show_piece")
def pieces_show_command() -> None:
    """Show one piece's documentation, settings with types and defaults, and file.

    NAME is one from `flrce pieces list`.
    """


@click.group("data", cls=OrderedGroup)
def data_group() -> None:
    """List data sets, show how clients share the samples, convert files."""


@data_group.command("list")
@options.json_option
@options.calls("flrce.cli.data:list_datasets")
def data_list_command() -> None:
    """List every data set and whether it is ready to use."""


@data_group.command("info")
@click.argument("name", required=False, metavar="[NAME]")
@options.file_argument
@options.set_option
@options.json_option
@options.trust_option
@options.calls("flrce.cli.data:show_partition")
def data_info_command() -> None:
    """Show how an experiment shares its samples out: sizes and labels per client.

    NAME is a data set. FILE is an experiment file (TOML) and may stand alone.
    """


@data_group.command("prepare")
@click.argument("name")
@click.option(
    "--from",
    "folder",
    type=PATH_TYPE,
    required=True,
    help="Folder with the public files of the data set.",
)
@click.option("--as", "own", help="Another name for it, to use as data.name.")
@options.calls("flrce.cli.data:prepare_dataset")
def data_prepare_command() -> None:
    """Convert the public files of a data set once into a checked, memory-mapped cache."""


@click.group("deploy", cls=OrderedGroup)
def deploy_group() -> None:
    """Write the files that run an experiment on real devices through Flower."""


@deploy_group.command("init")
@click.argument("folder", type=PATH_TYPE)
@options.file_argument
@options.set_option
@click.option("--own", is_flag=True, help="Add a template for a network and samples of your own.")
@click.option(
    "--publisher",
    default="flrce",
    show_default=True,
    help="Publisher of the app, as Flower names it.",
)
@options.calls("flrce.cli.deploy:write_flower_app")
def deploy_init_command() -> None:
    """Write a Flower app (`flwr run` works) that trains an experiment's recipe, data and model.

    FOLDER is where it goes; its last part becomes the name of the app.
    """


@deploy_group.command("monitor")
@click.argument("folder", type=PATH_TYPE)
@click.option(
    "--target",
    default="127.0.0.1:9464",
    show_default=True,
    metavar="HOST:PORT",
    help="Address at which `flrce watch RUN --metrics` answers.",
)
@options.calls("flrce.cli.deploy:write_monitoring")
def deploy_monitor_command() -> None:
    """Write Prometheus settings, alert rules and a Grafana dashboard for running experiments."""


def add_machine_options(command: Any) -> Any:
    """Where things lie on the machine that files are written for."""
    for name, default, text in (
        ("--user", "flrce", "User that runs the services."),
        ("--prefix", "/opt/flrce", "Python environment on the machine."),
        ("--place", "/etc/flrce", "Folder of these files on the machine."),
    ):
        command = click.option(name, default=default, show_default=True, help=text)(command)
    return command


@deploy_group.command("server")
@click.argument("folder", type=PATH_TYPE)
@click.option("--address", required=True, help="Address or host name that devices connect to.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port that devices connect to.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Days for which the certificates are valid.",
)
@add_machine_options
@options.calls("flrce.cli.deploy_machines:write_server_files")
def deploy_server_command() -> None:
    """Write the files of a server: certificates, systemd units, enrolment, container and compose
    files.

    FOLDER is where they go; copy it to the server.
    """


@deploy_group.command("device")
@click.argument("folder", type=PATH_TYPE)
@options.add_path_option("--server", "Folder that flrce deploy server wrote.", required=True)
@click.option("--node", type=click.IntRange(0), required=True, help="Partition id of the device.")
@click.option("--name", help="Name of the device; default device-NODE.")
@add_machine_options
@options.calls("flrce.cli.deploy_machines:write_device_files")
def deploy_device_command() -> None:
    """Write the files of a device: its key, the authority's certificate, a systemd unit, container
    and compose files.

    FOLDER is where they go; copy it to the device. The public key is added to the server's folder
    for enrolment.
    """
