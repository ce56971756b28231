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
    """Run several recipes or experiment files, at every point of a grid of settings, on the same
    data and seeds; one table, one report.
    """
    read = runs.make_cached_reader()

    def load(path: Path | None, point: tuple[str, ...]) -> Experiment:
        return load_experiment(path, (*overrides, *point), device, trust)

    experiments = load_variants(file, names, grid, load)
    require_same_data(experiments)
    experiments = {
        name: with_given_clients(experiment, None, read)[0]
        for name, experiment in experiments.items()
    }
    wanted, exp = list(experiments), next(iter(experiments.values()))
    if where == "here":
        runs.choose_device(exp)
    aggregates: dict[str, dict[str, Any]] = {}
    prepare_folder(out, "--out")
    if where != "here":
        _run_remotely(experiments, parse_seeds(seed_list) or [0], out, resume, where)
        resume = True
    again = "the same command and --resume"
    with ProgressDisplay("", exp.rounds, again=again, per_run=not verbose) as progress:
        for name, each in experiments.items():
            progress.restart(name, each.build_recipe().stop)
            aggregates[name] = runs.run_seeds(
                each,
                parse_seeds(seed_list) or [0],
                out / name,
                resume,
                partial(_update_progress, progress, name),
                read,
            )
    write_atomically(out / "compare.json", json.dumps(aggregates, indent=1).encode())
    report = page.write_report([out / name for name in wanted], out / "report.html")
    if as_json:
        print(json.dumps(aggregates, indent=1))
    else:
        count = len(parse_seeds(seed_list) or [0])
        spread = (
            f"{count} seeds, {'95 % intervals' if count > 2 else 'least to most'}"
            if count > 1
            else "one seed"
        )
        splits = ", ".join(dict.fromkeys(each.data.partition for each in experiments.values()))
        title = f"{exp.data.path or exp.data.name}, {splits}, {spread}"
        print_table(title, *build_result_table(aggregates))
        found = read_runs([out / name for name in wanted])
        print(describe_groups(group_runs(found))[0])
        print(f"report: {report}")


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
        last = f"{len(history)} rounds" + (
            f", {history[-1].stop}" if history and history[-1].stop else ""
        )
        print(
            f"{done} of {len(jobs)}: {jobs[i][1].relative_to(out)}: {last}",
            file=sys.stderr,
            flush=True,
        )


def _update_progress(progress: ProgressDisplay, name: str, seed: int, done: Round) -> None:
    progress(done, f"{name} seed {seed}")
