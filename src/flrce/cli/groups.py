"""Commands that come in groups: the catalogue of methods, data sets, deployments. As commands.py in
all else.
"""

from typing import Any

import click

from flrce.cli import options
from flrce.cli.options import PATH_TYPE, OrderedGroup, add_option


@click.group("recipes", cls=OrderedGroup)
def recipes_group() -> None:
    """The catalogue of methods."""


@recipes_group.command("list")
@options.json_option
def recipes_list_command(**given: Any) -> None:
    """Every recipe with its family and a summary."""
    from flrce.cli.recipes import list_recipes

    list_recipes(**given)


@recipes_group.command("show")
@click.argument("name")
@options.set_option
@options.json_option
def recipes_show_command(**given: Any) -> None:
    """One recipe's pieces, presets and settings.

    NAME is one from `flrce recipes list`; `--set recipe.preset=paper` shows it changed.
    """
    from flrce.cli.recipes import show_recipe

    show_recipe(**given)


@click.group("pieces", cls=OrderedGroup)
def pieces_group() -> None:
    """The pieces that recipes are composed of."""


@pieces_group.command("list")
@click.argument("role", required=False, metavar="[ROLE]")
@options.json_option
def pieces_list_command(**given: Any) -> None:
    """Every piece with its settings and its file.

    ROLE shows one role only, such as selector, compressor or stop.
    """
    from flrce.cli.pieces import list_pieces

    list_pieces(**given)


@pieces_group.command("show")
@click.argument("name")
@options.json_option
def pieces_show_command(**given: Any) -> None:
    """One piece: settings with types and defaults, documentation, file.

    NAME is one from `flrce pieces list`.
    """
    from flrce.cli.pieces import show_piece

    show_piece(**given)


@click.group("data", cls=OrderedGroup)
def data_group() -> None:
    """Data sets: which there are, how they are shared out."""


@data_group.command("list")
@options.json_option
def data_list_command(**given: Any) -> None:
    """Every data set by name, and whether it is ready to use."""
    from flrce.cli.data import list_datasets

    list_datasets(**given)


@data_group.command("info")
@click.argument("name", required=False, metavar="[NAME]")
@options.file_argument
@options.set_option
@options.json_option
@add_option("--svg", type=PATH_TYPE, help="Also draw it into this file (extra: report).")
@options.trust_option
def data_info_command(**given: Any) -> None:
    """How an experiment shares its samples out: sizes and labels per client.

    NAME is a data set; FILE, an experiment (TOML), may stand alone.
    """
    from flrce.cli.data import show_partition

    show_partition(**given)


@data_group.command("prepare")
@click.argument("name")
@add_option(
    "--from", "folder", type=PATH_TYPE, required=True, help="Folder with the set's public files."
)
@add_option("--as", "own", help="Another name for it: the data.name of experiments.")
def data_prepare_command(**given: Any) -> None:
    """Convert a data set's public files once into a checked, memory-mapped cache."""
    from flrce.cli.data import prepare_dataset

    prepare_dataset(**given)


@click.group("deploy", cls=OrderedGroup)
def deploy_group() -> None:
    """Run an experiment on real devices, through Flower."""


@deploy_group.command("init")
@click.argument("folder", type=PATH_TYPE)
@options.file_argument
@options.set_option
@add_option("--own", is_flag=True, help="With a network and samples of your own, to be filled in.")
@add_option(
    "--publisher",
    default="flrce",
    show_default=True,
    help="Flower's name for who publishes the app.",
)
def deploy_init_command(**given: Any) -> None:
    """Write a Flower app (`flwr run` works) that trains an experiment's recipe, data and model.

    FOLDER is where it goes; its last part becomes its name.
    """
    from flrce.cli.deploy import write_flower_app

    write_flower_app(**given)


@deploy_group.command("monitor")
@click.argument("folder", type=PATH_TYPE)
@add_option(
    "--target",
    default="127.0.0.1:9464",
    show_default=True,
    metavar="HOST:PORT",
    help="Where `flrce watch RUN --metrics [HOST:]PORT` answers.",
)
def deploy_monitor_command(**given: Any) -> None:
    """Write Prometheus' settings, alert rules and a Grafana dashboard for runs under way."""
    from flrce.cli.monitoring import write_monitoring

    write_monitoring(**given)


def add_machine_options(command: Any) -> Any:
    """Where things lie on the machine that files are written for."""
    for option in (
        add_option("--user", default="flrce", show_default=True, help="User of the services."),
        add_option(
            "--prefix",
            default="/opt/flrce",
            show_default=True,
            help="Python environment there; its bin/ holds the commands.",
        ),
        add_option(
            "--place",
            default="/etc/flrce",
            show_default=True,
            help="Where the folder will lie there.",
        ),
    ):
        command = option(command)
    return command


@deploy_group.command("server")
@click.argument("folder", type=PATH_TYPE)
@add_option("--address", required=True, help="Address or host name that devices dial.")
@add_option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port that devices dial.",
)
@add_option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="How long the certificates are valid.",
)
@add_machine_options
def deploy_server_command(**given: Any) -> None:
    """Write a server's files: certificates, systemd units, enrolment, container and compose files.

    FOLDER is where they go; copy it to the server.
    """
    from flrce.cli.deploy_machines import write_server_files

    write_server_files(**given)


@deploy_group.command("device")
@click.argument("folder", type=PATH_TYPE)
@add_option(
    "--server", type=PATH_TYPE, required=True, help="Folder that flrce deploy server wrote."
)
@add_option("--node", type=click.IntRange(0), required=True, help="The device's partition-id.")
@add_option("--name", help="The device's name; default device-NODE.")
@add_machine_options
def deploy_device_command(**given: Any) -> None:
    """Write a device's files: a key of its own, the authority's certificate, a systemd unit,
    container and compose files. Its public key is added to the server's folder for enrolment.

    FOLDER is where they go; copy it to the device.
    """
    from flrce.cli.deploy_machines import write_device_files

    write_device_files(**given)
