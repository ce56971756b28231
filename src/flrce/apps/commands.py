"""Every command with its options and help. What a command does stands in a module of its own, loaded when it is run."""

from pathlib import Path
from typing import Any

import click

from flrce.apps import complete, flags, groups, options
from flrce.apps.options import PATH, Group, option

LIST = "A,B,..."


@click.group("flrce", cls=Group, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@flags.version
@flags.install_completion
@flags.show_completion
def app() -> None:
    """Federated learning that counts every joule and byte."""


@app.command()
@options.file
@options.sets
@option("--out", type=PATH, shell_complete=complete.runs, help="Run directory; default runs/RECIPE-DATE.")
@option("--no-save", is_flag=True, help="Keep nothing.")
@options.seed_list
@options.resume
@options.device
@options.trust
@options.as_json
def run(**given: Any) -> None:
    """Run one experiment; several seeds give means with 95 % intervals.

    FILE is an experiment (TOML); without one, FLrce on the embedded digits. With --out and --resume alone a run goes on
    as it was begun; --set rounds=N then extends it.
    """
    from flrce.apps.run import run

    run(**given)


@app.command()
@options.file
@option("--recipes", "names", default="fedavg,flrce", show_default=True, metavar=LIST, shell_complete=complete.recipes,
        help="Names from `flrce recipes list`, or all.")  # fmt: skip
@option("--out", type=PATH, required=True, shell_complete=complete.runs,
        help="Folder for all runs, the table and the report.")  # fmt: skip
@options.sets
@option(
    "--seeds", "seed_list", default="0", show_default=True, metavar="0-4", help="Several seeds, such as 0,1,2 or 0-4."
)
@options.resume
@options.device
@options.on
@options.trust
@options.as_json
def compare(**given: Any) -> None:
    """Run several recipes on the same data, seeds and costs; one table, one report."""
    from flrce.apps.compare import compare

    compare(**given)


@app.command()
@click.argument("folder", type=PATH, required=False, metavar="[FOLDER]")
@options.as_json
def runs(**given: Any) -> None:
    """List the runs there are, finished or not.

    FOLDER is where to look; without one, runs.
    """
    from flrce.apps.runs import runs

    runs(**given)


@app.command()
@click.argument("runs", type=PATH, nargs=-1, metavar="[RUN|DIR]...", shell_complete=complete.runs)
@option("--page", is_flag=True, help="Serve a page on this machine instead of the terminal.")
@option("--port", type=click.IntRange(0, 65535), default=0, help="The page's port; 0 takes any that is free.")
@option("--once", is_flag=True, help="Look once and end.")
@options.as_json
def watch(**given: Any) -> None:
    """Follow runs under way: who trains, the metric, refused replies, the price of a point, time and budget left.

    RUN is a run directory, DIR a folder that holds some, now or later; without any, runs. Folders are only read, so it
    works beside whatever trains in them, Flower included. The page answers on 127.0.0.1 alone.
    """
    from flrce.apps.watch import watch

    watch(**given)


@app.command()
@click.argument("target", shell_complete=complete.words(
    "table3", "table4", "fig-accuracy", "fig-energy", "fig-bandwidth", "fig-efficiency", "fig-ablation",
    "fig-motivation", "claims", "rates", "all"))  # fmt: skip
@option("--out", type=PATH, required=True, help="Folder for cells, records, tables and figures.")
@option("--data", type=PATH, help="Folder of prepared data sets.")
@option("--regime", help="dirichlet or quantity; without it, both.")
@option("--seeds", "seed_list", metavar="0-4", help="Several seeds, such as 0,1,2 or 0-4 (the default).")
@option("--datasets", help="Default: the paper's four.")
@option("--quick", is_flag=True, help="Small, on the embedded digits: seconds.")
@option("--again", is_flag=True, help="Run finished cells anew.")
@option("--tables-only", is_flag=True, help="Train nothing; write what is there.")
@option("--lr", help="Other rates than the paper's: femnist=0.02,...")
@option("--network", help="Other networks than the released ones, such as cifar100=cnn-cifar.")
@option("--rates", help="Learning rates to search, for `rates`.")
@option("--page", type=PATH, help="Markdown file to put the tables into.")
@options.device
@options.on
@options.as_json
def reproduce(**given: Any) -> None:
    """The paper's tables and figures, beside its numbers; goes on where it was interrupted.

    TARGET is table3, table4, fig-accuracy, fig-energy, fig-bandwidth, fig-efficiency, fig-ablation, fig-motivation, or
    all; claims judges what the paper claims, and rates searches learning rates by its rule.
    """
    from flrce.apps.reproduce import reproduce

    reproduce(**given)


@app.command()
@options.runs("RUNS...", many=True)
@option("--out", type=PATH, help="Where the page goes; default report.html.")
@option("--figures", type=PATH, help="Folder for the paper's figures, svg and pdf.")
@options.as_json
def report(runs: tuple[Path, ...], **given: Any) -> None:
    """Write one self-contained page about any number of runs; with --figures, static figures too.

    RUNS are run directories, or folders of seeds or of recipes.
    """
    from flrce.apps.report import report

    report(list(runs), **given)


@app.command()
@options.runs("RUNS...", many=True)
@option("--target", type=float, required=True, help="Of the headline metric; accuracy as a share, such as 0.8.")
@options.as_json
def reach(runs: tuple[Path, ...], **given: Any) -> None:
    """What it took to reach a target: rounds, time, energy, traffic and CO2 by then, with intervals over seeds.

    RUNS are run directories, or folders of seeds or of recipes.
    """
    from flrce.apps.reach import reach

    reach(list(runs), **given)


@app.command()
@options.runs("RUN")
@option("--psi", metavar=LIST, help="Thresholds of the paper's rule, numbers or percentages of P.")
@option("--patience", metavar=LIST, help="Evaluations without progress.")
@option("--joules", metavar=LIST, help="Budgets of energy.")
@option("--bytes", "nbytes", metavar=LIST, help="Budgets of traffic.")
@option("--seconds", metavar=LIST, help="Budgets of time.")
@option("--rounds", metavar=LIST, help="Numbers of rounds.")
@option("--preset", metavar=LIST, help="FLrce's own stop: frugal, balanced or accurate.")
@option("--points", metavar=LIST, help="Prices: points that twice the rounds must bring.")
@option("--start", metavar=LIST, help="Moments (UTC) to begin at instead: what the run would have emitted.")
@options.as_json
def whatif(**given: Any) -> None:
    """Replay stop rules on a recorded run: where each would have ended it, and what that would have saved.

    RUN is a run directory, or a folder of seeds. Every value is a rule of its own; without any, the paper's thresholds
    psi. Selection changes need a new run.
    """
    from flrce.apps.whatif import whatif

    whatif(**given)


@app.command()
@options.runs("RUN")
@option("--round", "t", type=int, help="How this round chose, and what came of it.")
@option("--client", help="A client's part; with --round, in that round.")
@option("--stop", is_flag=True, help="Why the run ended when it did.")
@options.as_json
def why(**given: Any) -> None:
    """Say in sentences why a round, a client or the end of a run came out as it did."""
    from flrce.apps.why import why

    why(**given)


@app.command()
@click.argument("plan", type=PATH)
@option("--out", type=PATH, required=True, help="Folder for records, leaderboards and the page.")
@option("--against", type=PATH,
        help="An arena that was run: its methods are not run again, and PLAN needs new methods only.")  # fmt: skip
@option("--tasks", metavar=LIST, help="Of the plan's; all, unless given.")
@options.on
@options.trust
@options.as_json
def arena(**given: Any) -> None:
    """Run many methods on many tasks and rank them at equal joules, bytes, seconds and rounds.

    PLAN is a TOML file with methods, tasks, seeds and one rule for tuning. The same command goes on where it was
    interrupted; only what is not recorded is run.
    """
    from flrce.apps.arena import arena

    arena(**given)


@app.command()
@options.file
@options.sets
@option("--out", type=PATH, help="Experiment file to write the advice into.")
@option("--joules", type=float, help="Energy that may be spent in all, the search included.")
@option("--bytes", "nbytes", type=float, help="Traffic, likewise.")
@option("--seconds", type=float, help="Time, likewise.")
@option("--work", type=PATH, help="Folder to keep the search in; the same command goes on there after an interruption.")
@options.device
@options.on
@options.trust
@options.as_json
def advise(**given: Any) -> None:
    """Find the recipe for an experiment and a budget, by a race in two heats; say when plain FedAvg is enough."""
    from flrce.apps.advise import advise

    advise(**given)


@app.command()
@option("--out", type=PATH, help="Profile to write; then fleet.profile = that file.")
@option("--model", multiple=True, help="Network to train; may be repeated.")
@option("--for", "experiment", type=PATH, help="Experiment whose own network to train: what its joules follow from.")
@options.sets
@option("--watts", type=float, help="Power while training, where none is measured.")
@option("--idle-watts", type=float, help="Power while idle, likewise.")
@option("--seconds", type=float, default=3.0, help="How long to measure power, each of idle and busy.")
@options.trust
@options.as_json
def profile(**given: Any) -> None:
    """Measure how fast this machine trains and, where it can tell, what it draws."""
    from flrce.apps.profile import profile

    profile(**given)


@app.command()
@options.file
@options.sets
@options.out
@option("--tls", type=PATH, help="Folder with a deployment's certificates and keys.")
@option("--peer-clock", "peer", type=float, help="Seconds since 1970 on a node, now.")
@options.trust
@options.as_json
def doctor(**given: Any) -> None:
    """Look at this machine before a run: versions, memory, disk, clock, certificates. Exit 2 if a run would fail."""
    from flrce.apps.doctor import doctor

    doctor(**given)


@app.command()
@options.runs("RUN", name="a")
@click.argument("b", type=options.PATH, required=False, metavar="[RUN]", shell_complete=complete.runs)
@options.as_json
def verify(**given: Any) -> None:
    """Check the files of a run against their hashes, or compare two runs bit by bit. Exit code 1: something differs."""
    from flrce.apps.verify import verify

    verify(**given)


@app.command()
@options.runs("RUN", name="run")
@option("--out", type=PATH, required=True, help="Folder for adapter_config.json and adapter_model.safetensors.")
@option("--last", is_flag=True, help="The last model, where an average was handed back.")
@options.as_json
def export(**given: Any) -> None:
    """Write a language model's adapters as HuggingFace's peft reads them: PeftModel.from_pretrained(base, FOLDER)."""
    from flrce.apps.export import export

    export(**given)


for group in (groups.recipes, groups.data, groups.deploy):
    app.add_command(group)
