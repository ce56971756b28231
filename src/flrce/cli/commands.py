"""Every command with its options and help; its module is loaded when it is run."""

import click

from flrce.cli import groups, options
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
@options.add_path_option("--out", "Run directory; default runs/RECIPE-DATE.")
@click.option("--no-save", is_flag=True, help="Write no run directory.")
@options.seeds_option
@options.resume_option
@options.device_option
@options.trust_option
@options.json_option
@options.calls("flrce.cli.run:run_experiment")
def run_command() -> None:
    """Train one experiment; with several seeds, report means and 95 % intervals.

    FILE is an experiment file (TOML). Without FILE, the default recipe trains on the embedded
    digits. `--out RUN --resume` continues a run, and `--set rounds=N` extends it.
    """


@app.command("compare")
@options.file_argument
@click.option(
    "--recipes",
    "names",
    default="fedavg,flrce,frugal",
    show_default=True,
    metavar=LIST_METAVAR,
    help="Names from `flrce recipes list`, experiment files (.toml), or all.",
)
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=A,B,...",
    help="Train with every value, such as train.lr=0.01,0.03; repeat it for all combinations.",
)
@options.add_path_option("--out", "Folder for all runs, the table and the report.", required=True)
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
    """Train several recipes on the same data and seeds; write a table and a report.

    --recipes may list experiment files beside recipe names. --grid trains each of them with
    several settings, such as --grid data.partition=iid,dirichlet.
    """


@app.command("runs")
@click.argument("folder", type=PATH_TYPE, required=False, metavar="[FOLDER]")
@options.json_option
@options.calls("flrce.cli.run_folders:list_runs")
def runs_command() -> None:
    """List the runs in a folder, finished or not.

    FOLDER is where to look; default runs.
    """


@app.command("watch")
@click.argument("runs", type=PATH_TYPE, nargs=-1, metavar="[RUN|DIR]...")
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve metrics for Prometheus at /metrics; without HOST on 127.0.0.1.",
)
@options.json_option
@options.calls("flrce.cli.watch:watch_runs")
def watch_command() -> None:
    """Show runs while they train.

    For each run: who trained last, the metric, rejected replies, the cost of one more point, time
    left and budget left. RUN is a run directory, DIR a folder that contains runs or will; default
    runs. This command only reads files, so it disturbs no run. It waits for a folder that does
    not exist yet, except with --once or --json. For charts, use `flrce report`, also while a run
    trains.
    """


@app.command("report")
@options.add_runs_argument("RUNS...", many=True)
@options.add_path_option("--out", "The page to write; default report.html.")
@options.json_option
@options.calls("flrce.cli.report:report_runs")
def report_command() -> None:
    """Write one self-contained HTML page about one or more runs.

    RUNS are run directories, or folders of seeds or recipes. Each chart of the page can be saved
    as SVG, PNG or CSV. Runs on different data get separate pages.
    """


@app.command("reach")
@options.add_runs_argument("RUNS...", many=True)
@click.option(
    "--target",
    type=float,
    required=True,
    help="Value of the primary metric; accuracy is a share, such as 0.8.",
)
@options.json_option
@options.calls("flrce.cli.target_costs:show_target_costs")
def reach_command() -> None:
    """Show the cost of reaching a target: rounds, time, energy, traffic and CO2.

    RUNS are run directories, or folders of seeds or recipes; seeds give 95 % intervals.
    """


@app.command("whatif")
@options.add_runs_argument("RUN")
@options.add_list_option(
    "--psi", "Conflict thresholds of the paper: numbers, or percentages of the clients per round."
)
@options.add_list_option("--patience", "Numbers of evaluations without improvement.")
@options.add_budget_options
@options.add_list_option("--preset", "Stop rules of FLrce: frugal, balanced or accurate.")
@options.add_list_option(
    "--points", "Prices: the gain in points that doubling the rounds must promise."
)
@click.option(
    "--stop",
    "stops",
    metavar="RULE",
    multiple=True,
    help="A stop rule: its name, your class (module:Class), or a table; may be repeated.",
)
@click.option(
    "--budget",
    metavar="NAME=VALUE,...",
    help="Limits of costs, or of figures that pieces report, such as joules=50.",
)
@options.trust_option
@options.add_list_option(
    "--start", "Other start times (UTC): the CO2 that the run would have emitted."
)
@options.json_option
@options.calls("flrce.cli.whatif:show_whatif")
def whatif_command() -> None:
    """Replay other stop rules on a recorded run: where each would have stopped it, and the savings.

    RUN is a run directory, or a folder of seeds. Each value is a rule of its own. Without
    options, the thresholds psi of the paper are replayed. A different selection of clients needs
    a new run.
    """


@app.command("why")
@options.add_runs_argument("RUN")
@click.option(
    "--round", "t", type=int, help="Explain how this round selected clients, and what it changed."
)
@click.option("--client", help="Explain the part of this client; with --round, in that round.")
@click.option("--stop", is_flag=True, help="Explain why the run ended; the default.")
@options.json_option
@options.calls("flrce.cli.why:explain_run")
def why_command() -> None:
    """Explain a round, a client or the end of a run in sentences."""


@app.command("profile")
@options.add_path_option("--out", "Profile to write, for fleet.profile.")
@click.option("--model", multiple=True, help="Network to train; may be repeated.")
@click.option(
    "--for",
    "experiment",
    type=PATH_TYPE,
    help="Experiment whose network to train; its joules follow from this.",
)
@options.set_option
@click.option("--watts", type=float, help="Watts while training, if they cannot be measured.")
@click.option("--idle-watts", type=float, help="Watts while idle, if they cannot be measured.")
@click.option(
    "--seconds", type=float, default=3.0, help="Seconds for which idle and busy power are measured."
)
@click.option("--meter", help="Meter to read: module:function, or a file with the joules so far.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.profile:profile_machine")
def profile_command() -> None:
    """Measure how fast this machine trains and, if it can be measured, the power that it draws."""


@app.command("doctor")
@options.file_argument
@options.set_option
@options.out_option
@options.add_path_option("--tls", "Folder with a deployment's certificates and keys.")
@click.option(
    "--peer-clock", "peer", type=float, help="Current time on a node, in seconds since 1970."
)
@options.trust_option
@options.json_option
@options.calls("flrce.cli.doctor:check_machine")
def doctor_command() -> None:
    """Check this machine before a run: versions, memory, disk, clock, certificates.

    Exit code 2 means that a run would fail.
    """


@app.command("verify")
@options.add_runs_argument("RUN", name="a")
@click.argument("b", type=options.PATH_TYPE, required=False, metavar="[RUN]")
@options.json_option
@options.calls("flrce.cli.verify:verify_runs")
def verify_command() -> None:
    """Check a run's files against their hashes, or compare two runs bit by bit.

    Exit code 1 means that something differs.
    """


@app.command("predict")
@options.add_runs_argument("RUN", name="run")
@click.argument("file", type=PATH_TYPE)
@options.add_path_option("--out", "Write all predictions to this csv file.")
@click.option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.predict:predict_file")
def predict_command() -> None:
    """Predict the samples of a file with the model of a run.

    FILE is a csv, tsv, jsonl, parquet or npz file, an image, or a folder of images. It is
    preprocessed as the training data were.
    """


@app.command("export")
@options.add_runs_argument("RUN", name="run")
@options.add_path_option(
    "--out",
    "FILE.pt2 (torch.export), FILE.onnx, or a folder for the HuggingFace Hub.",
    required=True,
)
@click.option("--last", is_flag=True, help="Use the last model instead of the final one.")
@options.trust_option
@options.json_option
@options.calls("flrce.cli.export:export_run")
def export_command() -> None:
    """Write the model of a run for other programs.

    FILE.pt2 and FILE.onnx take raw numbers and include the preprocessing. A folder gets
    model.safetensors and a model card with the costs of training, ready for "hf upload"; of a
    language model it gets the adapters, for PeftModel.from_pretrained(base, FOLDER).
    """


for group in (groups.recipes_group, groups.pieces_group, groups.data_group, groups.deploy_group):
    app.add_command(group)
