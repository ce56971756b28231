"""flrce run cifar10.toml --set recipe.psi=5 --out runs/a"""

import json
from pathlib import Path
from typing import Any

from flrce import runs
from flrce.apps.options import experiment, seeds
from flrce.apps.show import Progress, figure, table
from flrce.errors import BadInput, Unfinished

COLUMNS = ("recipe", "accuracy %", "rounds", "MB", "joules", "acc/kJ", "acc/GB")


def run(
    file: Path | None, overrides: tuple[str, ...], out: Path | None, seed_list: str | None, resume: bool,
    device: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run one experiment; several seeds give means with 95 % intervals."""
    exp = experiment(file, overrides, device)
    many, name = seeds(seed_list), exp.recipe.get("name", "flrce")
    if resume and out is None:
        raise BadInput("--resume needs --out: which run shall go on?")
    with Progress(name, exp.rounds, exp.build_recipe().stop) as progress:
        if many is None:
            summary = runs.run(exp, out, resume, watch=progress).summary
            aggregate = runs.intervals([summary])
        else:
            if out is None:
                raise BadInput("--seeds needs --out: several runs need a folder to live in")
            summary = aggregate = runs.run_seeds(exp, many, out, resume, lambda s, d: progress(d, f"{name} seed {s}"))
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        table(f"{name} on {exp.data.path or exp.data.name}", COLUMNS, [row(name, aggregate)])
        if out:
            print(f"run directory: {out}")
    if str(summary.get("stopped", "")).startswith("abandoned"):
        remedy = "go on with --resume" if out else "nothing was kept without --out"
        raise Unfinished(f"{summary['stopped']}; {remedy}")


def row(name: str, aggregate: dict[str, Any]) -> list[str]:
    """One recipe's line of the headline table."""
    up, down = aggregate["bytes_up"], aggregate["bytes_down"]
    half = None if up["half"] is None else up["half"] + down["half"]
    return [
        name, figure(aggregate["accuracy"], 100), figure(aggregate["rounds"]),
        figure({"mean": up["mean"] + down["mean"], "half": half}, 1e-6, 2), figure(aggregate["joules"]),
        figure(aggregate["computation_efficiency"], 1, 2), figure(aggregate["communication_efficiency"], 1, 2),
    ]  # fmt: skip
