"""Every command with its options and help. What a command does stands in a module of its own,
loaded when it is run.
"""

from pathlib import Path
from typing import Any

import click

from flrce.cli import groups, options, shared_options
from flrce.cli.options import LIST_METAVAR, PATH_TYPE, add_option
from flrce.cli.registered import ExtensibleGroup


@click.group(
    "flrce",
    cls=ExtensibleGroup,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@shared_options.version_flag
def app() -> None:
    """Federated learning that counts every joule and byte."""


@app.command("run")
@options.file_argument
@options.set_option
@add_option("--out", type=PATH_TYPE, help="Run directory; default runs/RECIPE-DATE.")
@add_option("--no-save", is_flag=True, help="Keep nothing.")
@options.seeds_option
@options.resume_option
@options.device_option
@options.trust_option
@options.json_option
def run_command(**given: Any) -> None:
    """Run one experiment; several seeds give means with 95 % intervals.

    FILE is an experiment (TOML); without one, FLrce on the embedded digits. With --out and --resume
    alone a run goes on as it was begun; --set rounds=N then extends it.
    """
    from flrce.cli.run import run_experiment

    run_experiment(**given)


@app.command("compare")
@options.file_argument
@add_option(
    "--recipes",
    "names",
    default="fedavg,flrce,frugal",
    show_default=True,
    metavar=LIST_METAVAR,
    help="Names from `flrce recipes list`, experiment files (.toml), or all.",
)
@add_option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,...",
    help="Run every value, such as train.lr=0.01,0.03; repeated: every combination.",
)
@add_option(
    "--out", type=PATH_TYPE, required=True, help="Folder for all runs, the table and the report."
)
@options.set_option
@add_option(
    "--seeds",
    "seed_list",
    default="0",
    show_default=True,
    metavar="0-4",
    help="Several seeds, such as 0,1,2 or 0-4.",
)
@add_option("--verbose", is_flag=True, help="Print every round, not one line per run.")
@options.resume_option
@options.device_option
@options.on_option
@options.trust_option
@options.json_option
def compare_command(**given: Any) -> None:
    """Run several recipes on the same data, seeds and costs; one table, one report.

    Experiment files may stand beside the names, and --grid runs each with several settings, such as
    --grid data.partition=iid,dirichlet.
    """
    from flrce.cli.compare import compare_recipes

    compare_recipes(**given)


@app.command("runs")
@click.argument("folder", type=PATH_TYPE, required=False, metavar="[FOLDER]")
@options.json_option
def runs_command(**given: Any) -> None:
    """List the runs there are, finished or not.

    FOLDER is where to look; without one, runs.
    """
    from flrce.cli.runs import list_runs

    list_runs(**given)


@app.command("watch")
@click.argument("runs", type=PATH_TYPE, nargs=-1, metavar="[RUN|DIR]...")
@add_option("--page", is_flag=True, help="Serve a page on this machine instead of the terminal.")
@add_option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The page's port; 0 takes any that is free.",
)
@add_option("--once", is_flag=True, help="Look once and end.")
@add_option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve the figures to Prometheus under /metrics; on 127.0.0.1 unless HOST is given.",
)
@options.json_option
def watch_command(**given: Any) -> None:
    """Follow runs under way: who trains, the metric, refused replies, the price of a point, time
    and budget left.

    RUN is a run directory, DIR a folder that holds some, now or later; without any, runs. A folder
    that does not exist yet is waited for, except with --once or --json. Folders are only read, so
    it works beside whatever trains in them, Flower included. The page answers on 127.0.0.1 alone.
    """
    from flrce.cli.watch import watch_runs

    watch_runs(**given)


@app.command("report")
@options.add_runs_argument("RUNS...", many=True)
@add_option("--out", type=PATH_TYPE, help="Where the page goes; default report.html.")
@options.json_option
def report_command(runs: tuple[Path, ...], **given: Any) -> None:
    """Write one self-contained page about any number of runs.

    Each chart of the page can be saved as SVG, PNG or CSV.

    RUNS are run directories, or folders of seeds or of recipes.
    """
    from flrce.cli.report import report_runs

    report_runs(list(runs), **given)


@app.command("reach")
@options.add_runs_argument("RUNS...", many=True)
@add_option(
    "--target",
    type=float,
    required=True,
    help="Of the headline metric; accuracy as a share, such as 0.8.",
)
@options.json_option
def reach_command(runs: tuple[Path, ...], **given: Any) -> None:
    """What it took to reach a target: rounds, time, energy, traffic and CO2 by then, with intervals
    over seeds.

    RUNS are run directories, or folders of seeds or of recipes.
    """
    from flrce.cli.target_costs import show_target_costs

    show_target_costs(list(runs), **given)


@app.command("whatif")
@options.add_runs_argument("RUN")
@add_option(
    "--psi",
    metavar=LIST_METAVAR,
    help="Thresholds of the paper's rule, numbers or percentages of P.",
)
@add_option("--patience", metavar=LIST_METAVAR, help="Evaluations without progress.")
@options.add_budget_options
@add_option(
    "--preset", metavar=LIST_METAVAR, help="FLrce's own stop: frugal, balanced or accurate."
)
@add_option(
    "--points", metavar=LIST_METAVAR, help="Prices: points that twice the rounds must bring."
)
@add_option(
    "--stop",
    "stops",
    metavar="RULE",
    multiple=True,
    help="A rule by its name, a class of yours (module:Class), or a table; may be repeated.",
)
@add_option(
    "--budget", metavar="NAME=VALUE,...", help="Limits of costs, or of figures that pieces report."
)
@options.trust_option
@add_option(
    "--start",
    metavar=LIST_METAVAR,
    help="Moments (UTC) to begin at instead: what the run would have emitted.",
)
@options.json_option
def whatif_command(**given: Any) -> None:
    """Replay stop rules on a recorded run: where each would have ended it, and what that would have
    saved.

    RUN is a run directory, or a folder of seeds. Every value is a rule of its own; without any, the
    paper's thresholds psi. Selection changes need a new run.
    """
    from flrce.cli.whatif import show_whatif

    show_whatif(**given)


@app.command("why")
@options.add_runs_argument("RUN")
@add_option("--round", "t", type=int, help="How this round chose, and what came of it.")
@add_option("--client", help="A client's part; with --round, in that round.")
@add_option("--stop", is_flag=True, help="Why the run ended when it did.")
@options.json_option
def why_command(**given: Any) -> None:
    """Say in sentences why a round, a client or the end of a run came out as it did."""
    from flrce.cli.why import explain_run

    explain_run(**given)


@app.command("profile")
@add_option("--out", type=PATH_TYPE, help="Profile to write; then fleet.profile = that file.")
@add_option("--model", multiple=True, help="Network to train; may be repeated.")
@add_option(
    "--for",
    "experiment",
    type=PATH_TYPE,
    help="Experiment whose own network to train: what its joules follow from.",
)
@options.set_option
@add_option("--watts", type=float, help="Power while training, where none is measured.")
@add_option("--idle-watts", type=float, help="Power while idle, likewise.")
@add_option(
    "--seconds", type=float, default=3.0, help="How long to measure power, each of idle and busy."
)
@options.trust_option
@options.json_option
def profile_command(**given: Any) -> None:
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    from flrce.cli.profile import profile_machine

    profile_machine(**given)


@app.command("doctor")
@options.file_argument
@options.set_option
@options.out_option
@add_option("--tls", type=PATH_TYPE, help="Folder with a deployment's certificates and keys.")
@add_option("--peer-clock", "peer", type=float, help="Seconds since 1970 on a node, now.")
@options.trust_option
@options.json_option
def doctor_command(**given: Any) -> None:
    """Look at this machine before a run: versions, memory, disk, clock, certificates. Exit 2 if a
    run would fail.
    """
    from flrce.cli.doctor import check_machine

    check_machine(**given)


@app.command("verify")
@options.add_runs_argument("RUN", name="a")
@click.argument("b", type=options.PATH_TYPE, required=False, metavar="[RUN]")
@options.json_option
def verify_command(**given: Any) -> None:
    """Check the files of a run against their hashes, or compare two runs bit by bit. Exit code 1:
    something differs.
    """
    from flrce.cli.verify import verify_runs

    verify_runs(**given)


@app.command("predict")
@options.add_runs_argument("RUN", name="run")
@click.argument("file", type=PATH_TYPE)
@add_option("--out", type=PATH_TYPE, help="Write all predictions to this csv file.")
@add_option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
def predict_command(**given: Any) -> None:
    """Predict the samples of a file with the model of a run.

    RUN is a run directory. FILE is a csv, tsv, jsonl, parquet or npz file, an image, or a folder of
    images; it is prepared as the training data were.
    """
    from flrce.cli.predict import predict_file

    predict_file(**given)


@app.command("export")
@options.add_runs_argument("RUN", name="run")
@add_option(
    "--out",
    type=PATH_TYPE,
    required=True,
    help="FILE.pt2 (torch.export), FILE.onnx, or a folder for peft adapters.",
)
@add_option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
def export_command(**given: Any) -> None:
    """Write the model of a run for other programs.

    FILE.pt2 and FILE.onnx take raw numbers and include the preprocessing. Adapters of a language
    model go into a folder that peft reads: PeftModel.from_pretrained(base, FOLDER).
    """
    from flrce.cli.export import export_run

    export_run(**given)


for group in (groups.recipes_group, groups.pieces_group, groups.data_group, groups.deploy_group):
    app.add_command(group)
