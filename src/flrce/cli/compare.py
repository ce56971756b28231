"""flrce compare cifar10.toml --recipes fedavg,flrce,frugal --seeds 0-4 --out runs/all"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flrce.cli.options import load_experiment, parse_on_option, parse_seeds
from flrce.cli.run import build_result_table
from flrce.cli.targets import prepare_folder
from flrce.cli.terminal import ProgressDisplay, print_table
from flrce.cli.variants import load_variants, require_same_data
from flrce.config.experiment import Experiment
from flrce.core.types import Round
from flrce.report import page
from flrce.report.tables import group_runs
from flrce.report.verdict import describe_groups
from flrce.simulation import runs
from flrce.simulation.build import with_given_clients
from flrce.simulation.executors import get_remote_executor, run_experiments_remotely
from flrce.storage.disk import write_atomically
from flrce.storage.ledger import refuse_unless_new
from flrce.storage.read import read_runs


def compare_recipes(
    file: Path | None,
    overrides: tuple[str, ...],
    out: Path,
    names: str,
    seed_list: str | None,
    resume: bool,
    device: str | None,
    where: str,
    as_json: bool,
    trust: bool = False,
    verbose: bool = False,
    grid: tuple[str, ...] = (),
) -> None:
    """Run recipes or files at every point of a grid on the same data and seeds; one report."""
    read = runs.make_cached_reader()

    def load(path: Path | None, point: tuple[str, ...]) -> Experiment:
        return load_experiment(path, (*overrides, *point), device, trust)

    experiments = load_variants(file, names, grid, load)
    require_same_data(experiments)
    for name, loaded in experiments.items():
        experiments[name] = with_given_clients(loaded, None, read)[0]
    exp = next(iter(experiments.values()))
    if where == "here":
        runs.choose_device(exp)
    seeds = parse_seeds(seed_list) or [0]
    prepare_folder(out, "--out")
    if where != "here":
        _run_remotely(experiments, seeds, out, resume, where)
        resume = True
    aggregates: dict[str, dict[str, Any]] = {}
    again = "the same command and --resume"
    with ProgressDisplay("", exp.rounds, again=again, per_run=not verbose) as progress:
        for name, each in experiments.items():
            progress.restart(name, each.build_recipe().stop)
            watch = partial(_update_progress, progress, name)
            aggregates[name] = runs.run_seeds(each, seeds, out / name, resume, watch, read)
    write_atomically(out / "compare.json", json.dumps(aggregates, indent=1).encode())
    report = page.write_report([out / name for name in experiments], out / "report.html")
    if as_json:
        return print(json.dumps(aggregates, indent=1))
    print_table(_describe_comparison(experiments, len(seeds)), *build_result_table(aggregates))
    print(describe_groups(group_runs(read_runs([out / name for name in experiments])))[0])
    print(f"report: {report}")


def _describe_comparison(experiments: Mapping[str, Experiment], seeds: int) -> str:
    """The title of the table: data, partitions, and what stands beside a mean."""
    first = next(iter(experiments.values()))
    splits = ", ".join(dict.fromkeys(each.data.partition for each in experiments.values()))
    spread = f"{seeds} seeds, {'95 % intervals' if seeds > 2 else 'least to most'}"
    if seeds == 1:
        spread = "one seed"
    return f"{first.data.path or first.data.name}, {splits}, {spread}"


def _run_remotely(
    experiments: Mapping[str, Experiment], wanted: list[int], out: Path, resume: bool, where: str
) -> None:
    """Every run on other machines; what follows finds them finished."""
    send = get_remote_executor(*parse_on_option(where))
    jobs = []
    for name, each in experiments.items():
        for seed in wanted:
            folder = out / name / f"seed-{seed}"
            refuse_unless_new(folder, resume)
            jobs.append((each.with_seed(seed), folder))
    for done, (i, history) in enumerate(run_experiments_remotely(send, jobs, out), 1):
        stop = f", {history[-1].stop}" if history and history[-1].stop else ""
        text = f"{done} of {len(jobs)}: {jobs[i][1].relative_to(out)}: {len(history)} rounds{stop}"
        print(text, file=sys.stderr, flush=True)


def _update_progress(progress: ProgressDisplay, name: str, seed: int, done: Round) -> None:
    progress(done, f"{name} seed {seed}")
