"""flrce run cifar10.toml --set recipe.psi=5 --out runs/a"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flrce.cli import run_folders
from flrce.cli.options import device_override, load_experiment, parse_seeds
from flrce.cli.terminal import ProgressDisplay, format_aggregate, print_table
from flrce.config.experiment import Experiment
from flrce.core.user_code import trust_record
from flrce.errors import BadInput, Diverged, UnfinishedRun
from flrce.report import tables
from flrce.simulation import runs
from flrce.storage import metric_format as words

COST_COLUMNS = ("rounds", "MB", "joules")


def build_result_table(
    aggregates: Mapping[str, dict[str, Any]],
) -> tuple[tuple[str, ...], list[list[str]]]:
    """The table's heads and a line for each recipe: the metric of the model handed back and of the
    last one, and what they cost.

    Time and CO2 stand there where it is known what was emitted, in the unit that suits the largest
    of them.
    """
    metric = next(iter(aggregates.values()))["metric"]
    unit = " %" if metric in words.SHARES else ""
    units = {key: choose_mean_unit(key, aggregates.values()) for key in ("seconds", "grams")}
    units = (
        units
        if any(each["grams"]["mean"] for each in aggregates.values() if "grams" in each)
        else {}
    )
    more = [("time, " if key == "seconds" else "CO2, ") + name for key, (_, name) in units.items()]
    scales = {key: 1 / scale for key, (scale, _) in units.items()}
    gained = ("acc/kJ", "acc/GB") if metric == "accuracy" else ()
    heads = ("recipe", f"{metric}{unit}", f"last model{unit}", *COST_COLUMNS, *gained, *more)
    return heads, [
        build_result_row(name, aggregate, scales) for name, aggregate in aggregates.items()
    ]


def choose_mean_unit(key: str, aggregates: Iterable[Mapping[str, Any]]) -> tuple[float, str]:
    """The unit for the largest mean, as reports choose it: how many of ours it is, and its name."""
    return tables.choose_unit(
        key, max((each[key]["mean"] or 0.0 for each in aggregates if key in each), default=0.0)
    )


def run_experiment(
    file: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    seed_list: str | None,
    resume: bool,
    device: str | None,
    as_json: bool,
    no_save: bool = False,
    trust: bool = False,
) -> None:
    """Run one experiment; several seeds give means with 95 % intervals."""
    if resume and out is None:
        raise BadInput(
            "--resume: which run shall go on? Name it with --out; `flrce runs` lists those"
            " there are"
        )
    if no_save and out is not None:
        raise BadInput("--no-save and --out contradict each other; drop one")
    many = parse_seeds(seed_list)
    if resume and out is not None and file is None:
        file = run_folders.find_stored_experiment(out)
        many = run_folders.read_seeds(out) if many is None and file.parent != out else many
        exp = Experiment.load(
            file, device_override(overrides, device), trust_record(str(out.absolute()), trust)
        )
    else:
        exp = load_experiment(file, overrides, device, trust)
    runs.choose_device(exp)  # before a folder is made
    name = str(exp.recipe.get("name", "flrce"))
    if many is not None and no_save:
        raise BadInput("--seeds with --no-save: several runs need a folder to live in; drop one")
    place = None if no_save else out or run_folders.create_run_folder(name)
    notes: tuple[str, ...] = ()
    lost = ""
    with ProgressDisplay(
        name, exp.rounds, exp.build_recipe().stop, format_resume_command(place) if place else ""
    ) as progress:
        if many is None:
            result = runs.run(exp, place, resume, watch=progress, allow_divergence=True)
            summary, notes, lost = result.summary, result.notes, result.diverged
            aggregate = runs.summarize_seeds([summary])
        else:
            assert place is not None
            summary = aggregate = runs.run_seeds(
                exp, many, place, resume, lambda s, d: progress(d, f"{name} seed {s}")
            )
            lost = "; ".join(
                f"seed {seed}: {why}" for seed, why in summary.get("diverged", {}).items()
            )
    _print_result(exp, name, summary, aggregate, place, as_json)
    for note in (
        note for note in notes if note not in (lost, *runs.warn_about_experiment(exp))
    ):  # those are said elsewhere
        print(f"note: {note}", file=sys.stderr)
    if lost:
        raise Diverged(lost)
    if str(summary.get("stopped", "")).startswith("abandoned"):
        raise UnfinishedRun(f"{summary['stopped']}; {describe_remedy(place)}")


def describe_remedy(place: Path | None) -> str:
    """What helps after rounds were abandoned for other reasons than divergence."""
    return (
        f"go on with: {format_resume_command(place)}" if place else "nothing was kept (--no-save)"
    )


def format_resume_command(place: Path) -> str:
    return f"flrce run --out {place} --resume"


def _print_result(
    exp: Experiment,
    name: str,
    summary: dict[str, Any],
    aggregate: dict[str, Any],
    place: Path | None,
    as_json: bool,
) -> None:
    if as_json:
        print(json.dumps({**summary, "folder": None if place is None else str(place)}, indent=1))
        return
    print_table(
        f"{name} on {exp.data.path or exp.data.name}", *build_result_table({name: aggregate})
    )
    if place is None:
        print("nothing was kept (--no-save)")
    else:
        print(f"run directory: {place}    see it: flrce report {place}")


def build_result_row(
    name: str, aggregate: dict[str, Any], scales: Mapping[str, float]
) -> list[str]:
    """One recipe's line of the headline table; `scales`: of which further figures, and in which
    unit.
    """
    more = [format_aggregate(aggregate[key], scale, 2) for key, scale in scales.items()]
    unit, digits = words.metric_unit(aggregate["metric"]), words.metric_digits(aggregate["metric"])
    gained = (
        ("computation_efficiency", "communication_efficiency")
        if aggregate["metric"] == "accuracy"
        else ()
    )
    return [
        name,
        *(format_aggregate(aggregate[key], 1 / unit, digits) for key in ("value", "value_last")),
        format_aggregate(aggregate["rounds"], 1, 0),
        format_aggregate(aggregate["bytes"], 1e-6, 2),
        format_aggregate(aggregate["joules"]),
        *(format_aggregate(aggregate[key], 1, 2) for key in gained),
        *more,
    ]
