"""flrce run cifar10.toml --set recipe.psi=5 --out runs/a"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flrce.cli import run_folders
from flrce.cli.options import device_override, load_experiment, parse_seeds
from flrce.cli.terminal import ProgressDisplay, print_table
from flrce.config.experiment import Experiment
from flrce.config.recipe_names import DEFAULT_RECIPE
from flrce.core.cost_table import COSTS, Cost, describe_basis, describe_joules, list_spent_costs
from flrce.core.intervals import ConfidenceInterval
from flrce.core.metric_format import SHARES, metric_digits, metric_unit
from flrce.core.user_code import trust_record
from flrce.errors import BadInput, Diverged, UnfinishedRun
from flrce.simulation import runs

#: costs that stand in every result table -> scale and heading
BRIEF_COLUMNS = {"rounds": (1.0, "rounds"), "bytes": (1e6, "MB"), "joules": (1.0, "joules")}
EFFICIENCY_COLUMNS = {"computation_efficiency": "acc/kJ", "communication_efficiency": "acc/GB"}


def format_entry(entry: Mapping[str, Any], digits: int, unit: float = 1.0) -> str:
    """An entry of summary.json as every table shows an interval, in a unit."""
    return ConfidenceInterval(**entry).divide_by(unit).format_interval(digits)


@dataclass(frozen=True)
class ResultColumn:
    """A figure of the aggregate over seeds, how it is scaled, and its heading."""

    figure: str
    heading: str
    scale: float = 1.0
    digits: int = 2

    def format_cell(self, aggregate: Mapping[str, Any]) -> str:
        return format_entry(aggregate[self.figure], self.digits, 1 / self.scale)


@dataclass(frozen=True)
class FigureColumn:
    """A number that a piece reports, in the last round."""

    heading: str

    def format_cell(self, aggregate: Mapping[str, Any]) -> str:
        entry = aggregate.get("figures", {}).get(self.heading)
        return "--" if entry is None else format_entry(entry, 3)


def build_result_table(
    aggregates: Mapping[str, dict[str, Any]],
) -> tuple[tuple[str, ...], list[list[str]]]:
    """Headings, and a line per recipe: the metric of both models, and the costs."""
    metric = next(iter(aggregates.values()))["metric"]
    unit = " %" if metric in SHARES else ""
    largest = max(abs(entry["value"]["mean"] or 0.0) for entry in aggregates.values())
    scale, digits = 1 / metric_unit(metric), metric_digits(metric, largest)
    columns: list[ResultColumn | FigureColumn] = [
        ResultColumn("value", f"{metric}{unit}", scale, digits),
        ResultColumn("value_last", f"last model{unit}", scale, digits),
    ]
    for name, (per, heading) in BRIEF_COLUMNS.items():
        columns.append(ResultColumn(name, heading, 1 / per, COSTS[name].digits))
    if metric == "accuracy":
        columns += [ResultColumn(name, heading) for name, heading in EFFICIENCY_COLUMNS.items()]
    columns += list_further_costs(list(aggregates.values()))
    figures = (name for each in aggregates.values() for name in each.get("figures", ()))
    columns += map(FigureColumn, dict.fromkeys(figures))
    rows = [
        [name, *(column.format_cell(aggregate) for column in columns)]
        for name, aggregate in aggregates.items()
    ]
    return ("recipe", *(column.heading for column in columns)), rows


def list_further_costs(aggregates: Sequence[Mapping[str, Any]]) -> list[ResultColumn]:
    """The costs beyond the brief ones where an optional one was spent, in suitable units."""

    def find_largest(cost: Cost) -> float:
        means = [each[cost.name]["mean"] or 0.0 for each in aggregates if cost.name in each]
        return max(means, default=0.0)

    spent = list_spent_costs(find_largest)
    if not any(cost.optional for cost in spent):
        return []
    units = {cost: cost.choose_unit(find_largest(cost)) for cost in spent}
    columns = []
    for cost, (per, unit) in units.items():
        heading = f"{cost.label}, {unit}" if unit else cost.label
        columns.append(ResultColumn(cost.name, heading, 1 / per, cost.digits))
    return [column for column in columns if column.figure not in BRIEF_COLUMNS]


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
    many = parse_seeds(seed_list)
    _validate_run_options(out, resume, no_save, many)
    if resume and out is not None and file is None:
        file = run_folders.find_stored_experiment(out)
        many = run_folders.read_seeds(out) if many is None and file.parent != out else many
        record = trust_record(str(out.absolute()), trust)
        exp = Experiment.load(file, device_override(overrides, device), record)
    else:
        exp = load_experiment(file, overrides, device, trust)
    runs.choose_device(exp)  # before a folder is made
    name = str(exp.recipe.get("name", DEFAULT_RECIPE))
    place = None if no_save else out or run_folders.create_run_folder(name)
    notes: tuple[str, ...] = ()
    again = format_resume_command(place) if place else ""
    with ProgressDisplay(name, exp.rounds, exp.build_recipe().stop, again) as progress:
        if many is None or place is None:
            result = runs.run(exp, place, resume, watch=progress, allow_divergence=True)
            summary, notes, lost = result.summary, result.notes, result.diverged
            aggregate = runs.summarize_seeds([summary])
        else:
            watch = lambda s, d: progress(d, f"{name} seed {s}")  # noqa: E731
            summary = aggregate = runs.run_seeds(exp, many, place, resume, watch)
            diverged = summary.get("diverged", {})
            lost = "; ".join(f"seed {seed}: {why}" for seed, why in diverged.items())
    _print_result(exp, name, summary, aggregate, place, as_json)
    said = (lost, *runs.warn_about_experiment(exp))
    for note in notes:
        if note not in said:
            print(f"note: {note}", file=sys.stderr)
    if lost:
        raise Diverged(lost)
    if str(summary.get("stopped", "")).startswith("abandoned"):
        remedy = f"go on with: {again}" if place else "nothing was kept (--no-save)"
        raise UnfinishedRun(f"{summary['stopped']}; {remedy}")


def _validate_run_options(
    out: Path | None, resume: bool, no_save: bool, many: Sequence[int] | None
) -> None:
    """BadInput for options that exclude each other."""
    if resume and out is None:
        raise BadInput(
            "--resume needs the run to continue: name it with --out; `flrce runs` lists all runs"
        )
    if no_save and out is not None:
        raise BadInput("--no-save and --out exclude each other; drop one")
    if out is not None and out.is_file():
        raise BadInput(f"--out {out} is a file; name a folder for the run")
    if no_save and many is not None:
        raise BadInput(
            "--seeds and --no-save exclude each other: several seeds need a run folder; drop one"
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
    title = f"{name} on {exp.data.path or exp.data.name}"
    print_table(title, *build_result_table({name: aggregate}))
    if summary is not aggregate and describe_basis(summary):  # an aggregate has means
        print(f"energy: {describe_joules(summary)}")
    if place is None:
        print("nothing was kept (--no-save)")
    else:
        print(f"run directory: {place}    see it: flrce report {place}")
