"""Every command with its options and help. What a command does stands in a module of its own,
loaded when it is run.
"""

import click

from flrce.cli import completion, groups, options
from flrce.cli.options import LIST_METAVAR, PATH_TYPE
from flrce.cli.registered import ExtensibleGroup


@click.group(
    "flrce",
    cls=ExtensibleGroup,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@options.version_flag
def app() -> None:
    """Federated learning that counts every joule and byte."""


@app.command("run")
@options.file_argument
@options.set_option
@click.option("--out", type=PATH_TYPE, help="Run directory; default runs/RECIPE-DATE.")
@click.option("--no-save", is_flag=True, help="Keep nothing.")
@options.seeds_option
@options.resume_option
@options.device_option
@options.trust_option
@options.json_option
@options.calls("flrce.cli.run:run_experiment")
def run_command() -> None:
    """Run one experiment; several seeds give means with 95 % intervals.

    FILE is an experiment (TOML); without one, FLrce on the embedded digits. With --out and --resume
    alone a run goes on as it was begun; --set rounds=N then extends it.
    """


@app.command("compare")
@options.file_argument
@click.option(
    "--recipes",
    "names",
    default="fedavg,flrce,frugal",
    show_default=True,
    metavar=LIST_METAVAR,
    shell_complete=completion.complete_names(completion.list_recipes_and_files),
    help="Names from `flrce recipes list`, experiment files (.toml), or all.",
)
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,...",
    shell_complete=completion.complete_settings,
    help="Run every value, such as train.lr=0.01,0.03; repeated: every combination.",
)
@click.option(
    "--out", type=PATH_TYPE, required=True, help="Folder for all runs, the table and the report."
)
@options.set_option
@click.option(
    "--seeds",
    "seed_list",
    default="0",
    show_default=True,
    metavar="0-4",
    help="Several seeds, such as 0,1,2 or 0-4.",
)
@click.option("--verbose", is_flag=True, help="Print every round, not one line per run.")
@options.resume_option
@options.device_option
@options.on_option
@options.trust_option
@options.json_option
@options.calls("flrce.cli.compare:compare_recipes")
def compare_command() -> None:
    """Run several recipes on the same data, seeds and costs; one table, one report.

    Experiment files may stand beside the names, and --grid runs each with several settings, such as
    --grid data.partition=iid,dirichlet.
    """


@app.command("runs")
@click.argument("folder", type=PATH_TYPE, required=False, metavar="[FOLDER]")
@options.json_option
@options.calls("flrce.cli.runs:list_runs")
def runs_command() -> None:
    """List the runs there are, finished or not.

    FOLDER is where to look; without one, runs.
    """


@app.command("watch")
@click.argument(
    "runs",
    type=PATH_TYPE,
    nargs=-1,
    metavar="[RUN|DIR]...",
    shell_complete=completion.complete_runs,
)
@click.option("--page", is_flag=True, help="Serve a page on this machine instead of the terminal.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The page's port; 0 takes any that is free.",
)
@click.option("--once", is_flag=True, help="Look once and end.")
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve the figures to Prometheus under /metrics; on 127.0.0.1 unless HOST is given.",
)
@options.json_option
@options.calls("flrce.cli.watch:watch_runs")
def watch_command() -> None:
    """Follow runs under way: who trains, the metric, refused replies, the price of a point, time
    and budget left.

    RUN is a run directory, DIR a folder that holds some, now or later; without any, runs. A folder
    that does not exist yet is waited for, except with --once or --json. Folders are only read, so
    it works beside whatever trains in them, Flower included. The page answers on 127.0.0.1 alone.
    """


@app.command("report")
@options.add_runs_argument("RUNS...", many=True)
@click.option("--out", type=PATH_TYPE, help="Where the page goes; default report.html.")
@options.json_option
@options.calls("flrce.cli.report:report_runs")
def report_command() -> None:
    """Write one self-contained page about any number of runs.

    Each chart of the page can be saved as SVG, PNG or CSV.

    RUNS are run directories, or folders of seeds or of recipes.
    """


@app.command("reach")
@options.add_runs_argument("RUNS...", many=True)
@click.option(
    "--target",
    type=float,
    required=True,
    help="Of the headline metric; accuracy as a share, such as 0.8.",
)
@options.json_option
@options.calls("flrce.cli.target_costs:show_target_costs")
def reach_command() -> None:
    """What it took to reach a target: rounds, time, energy, traffic and CO2 by then, with intervals
    over seeds.

    RUNS are run directories, or folders of seeds or of recipes.
    """


@app.command("whatif")
@options.add_runs_argument("RUN")
@click.option(
    "--psi",
    metavar=LIST_METAVAR,
    help="Thresholds of the paper's rule, numbers or percentages of P.",
)
@click.option("--patience", metavar=LIST_METAVAR, help="Evaluations without progress.")
@options.add_budget_options
@click.option(
    "--preset",
    metavar=LIST_METAVAR,
    shell_complete=completion.complete_names(lambda: ("frugal", "balanced", "accurate")),
    help="FLrce's own stop: frugal, balanced or accurate.",
)
@click.option(
    "--points", metavar=LIST_METAVAR, help="Prices: points that twice the rounds must bring."
)
@click.option(
    "--stop",
    "stops",
    metavar="RULE",
    multiple=True,
    help="A rule by its name, a class of yours (module:Class), or a table; may be repeated.",
)
@click.option(
    "--budget", metavar="NAME=VALUE,...", help="Limits of costs, or of figures that pieces report."
)
@options.trust_option
@click.option(
    "--start",
    metavar=LIST_METAVAR,
    help="Moments (UTC) to begin at instead: what the run would have emitted.",
)
@options.json_option
@options.calls("flrce.cli.whatif:show_whatif")
def whatif_command() -> None:
    """Replay stop rules on a recorded run: where each would have ended it, and what that would have
    saved.

    RUN is a run directory, or a folder of seeds. Every value is a rule of its own; without any, the
    paper's thresholds psi. Selection changes need a new run.
    """


@app.command("why")
@options.add_runs_argument("RUN")
@click.option("--round", "t", type=int, help="How this round chose, and what came of it.")
@click.option("--client", help="A client's part; with --round, in that round.")
@click.option("--stop", is_flag=True, help="Why the run ended when it did.")
@options.json_option
@options.calls("flrce.cli.why:explain_run")
def why_command() -> None:
    """Say in sentences why a round, a client or the end of a run came out as it did."""


@app.command("profile")
@click.option("--out", type=PATH_TYPE, help="Profile to write; then fleet.profile = that file.")
@click.option("--model", multiple=True, help="Network to train; may be repeated.")
@click.option(
    "--for",
    "experiment",
    type=PATH_TYPE,
    help="Experiment whose own network to train: what its joules follow from.",
)
@options.set_option
@click.option("--watts", type=float, help="Power while training, where none is measured.")
@click.option("--idle-watts", type=float, help="Power while idle, likewise.")
@click.option(
    "--seconds", type=float, default=3.0, help="How long to measure power, each of idle and busy."
)
@options.trust_option
@options.json_option
@options.calls("flrce.cli.profile:profile_machine")
def profile_command() -> None:
    """Measure how fast this machine trains and, where it can tell, what it draws."""


@app.command("doctor")
@options.file_argument
@options.set_option
@options.out_option
@click.option("--tls", type=PATH_TYPE, help="Folder with a deployment's certificates and keys.")
@click.option("--peer-clock", "peer", type=float, help="Seconds since 1970 on a node, now.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.doctor:check_machine")
def doctor_command() -> None:
    """Look at this machine before a run: versions, memory, disk, clock, certificates. Exit 2 if a
    run would fail.
    """


@app.command("verify")
@options.add_runs_argument("RUN", name="a")
@click.argument(
    "b",
    type=options.PATH_TYPE,
    required=False,
    metavar="[RUN]",
    shell_complete=completion.complete_runs,
)
@options.json_option
@options.calls("flrce.cli.verify:verify_runs")
def verify_command() -> None:
    """Check the files of a run against their hashes, or compare two runs bit by bit. Exit code 1:
    something differs.
    """


@app.command("predict")
@options.add_runs_argument("RUN", name="run")
@click.argument("file", type=PATH_TYPE)
@click.option("--out", type=PATH_TYPE, help="Write all predictions to this csv file.")
@click.option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.predict:predict_file")
def predict_command() -> None:
    """Predict the samples of a file with the model of a run.

    RUN is a run directory. FILE is a csv, tsv, jsonl, parquet or npz file, an image, or a folder of
    images; it is prepared as the training data were.
    """


@app.command("export")
@options.add_runs_argument("RUN", name="run")
@click.option(
    "--out",
    type=PATH_TYPE,
    required=True,
    help="FILE.pt2 (torch.export), FILE.onnx, or a folder for peft adapters.",
)
@click.option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.export:export_run")
def export_command() -> None:
    """Write the model of a run for other programs.

    FILE.pt2 and FILE.onnx take raw numbers and include the preprocessing. Adapters of a language
    model go into a folder that peft reads: PeftModel.from_pretrained(base, FOLDER).
    """


for group in (groups.recipes_group, groups.pieces_group, groups.data_group, groups.deploy_group):
    app.add_command(group)
