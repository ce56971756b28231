"""flrce compare cifar10.toml --recipes fedavg,flrce --seeds 0-4 --out runs/all"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flrce import runs
from flrce.apps.options import experiment, place, seeds
from flrce.apps.run import headline
from flrce.apps.show import Progress, table
from flrce.apps.targets import prepare_folder
from flrce.arena.away import away, run_all
from flrce.config import Experiment
from flrce.errors import BadInput, nearest
from flrce.recipes import CATALOGUE
from flrce.results import page
from flrce.store.disk import write_through
from flrce.store.ledger import refuse_unless_new
from flrce.tuning import TUNING
from flrce.types import Round


def compare(
    file: Path | None, overrides: tuple[str, ...], out: Path, names: str, seed_list: str | None, resume: bool,
    device: str | None, where: str, as_json: bool, trust: bool = False,
) -> None:  # fmt: skip
    """Run several recipes on the same data, seeds and costs; one table, one report."""
    exp = experiment(file, overrides, device, trust)
    if where == "here":
        runs.device_of(exp)
    every = [name for name in CATALOGUE if name not in TUNING]  # those want adapters
    wanted = every if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in CATALOGUE:
            raise BadInput(f"--recipes {name!r} is unknown; {nearest(name, CATALOGUE)}")
    aggregates: dict[str, dict[str, Any]] = {}
    experiments = {name: exp.changed({"recipe": settings(exp.recipe, name)}) for name in wanted}
    prepare_folder(out, "--out")
    read = runs.reader()
    if where != "here":
        _elsewhere(experiments, seeds(seed_list) or [0], out, resume, where)
        resume = True
    with Progress("", exp.rounds, again="the same command and --resume") as progress:
        for name, each in experiments.items():
            progress.restart(name, each.build_recipe().stop)
            aggregates[name] = runs.run_seeds(
                each,
                seeds(seed_list) or [0],
                out / name,
                resume,
                partial(_told, progress, name),
                read,
            )
    write_through(out / "compare.json", json.dumps(aggregates, indent=1).encode())
    page.write([out / name for name in wanted], out / "report.html")
    if as_json:
        print(json.dumps(aggregates, indent=1))
    else:
        count = len(seeds(seed_list) or [0])
        spread = f"{count} seeds, {'95 % intervals' if count > 2 else 'least to most'}" if count > 1 else "one seed"
        title = f"{exp.data.path or exp.data.name}, {exp.data.partition}, {spread}"
        table(title, *headline(aggregates))
        print(f"report: {out / 'report.html'}")


def _elsewhere(experiments: Mapping[str, Experiment], wanted: list[int], out: Path, resume: bool, where: str) -> None:
    """Every run on other machines; what follows finds them finished."""
    send = away(*place(where))
    jobs = []
    for name, each in experiments.items():
        for seed in wanted:
            folder = out / name / f"seed-{seed}"
            refuse_unless_new(folder, resume)
            jobs.append((each.with_seed(seed), folder))
    for done, (i, history) in enumerate(run_all(send, jobs, out), 1):
        last = f"{len(history)} rounds" + (f", {history[-1].stop}" if history and history[-1].stop else "")
        print(f"{done} of {len(jobs)}: {jobs[i][1].relative_to(out)}: {last}", file=sys.stderr, flush=True)


def _told(progress: Progress, name: str, seed: int, done: Round) -> None:
    progress(done, f"{name} seed {seed}")


def settings(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """The experiment's own settings for the recipe it names; the others run as the catalogue has them."""
    return {**recipe, "name": name} if recipe.get("name", "flrce") == name else {"name": name}
