"""Every method of which there are records in the paper's setting, beside the paper's seven."""

from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import FinishedRuns, RunsBySeed, get_values_by_seed
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.tables import NOT_RUN_TEXT, PaperTable, SeedInterval, paired_difference

WIDE_COLUMNS = (
    "data set|method|accuracy %:2|minus FedAvg, points:+2|GB:3|kJ:2|bytes of replies that did not"
    " count, %:1|recipe|note"
)


def build_wide_table(grid: FinishedRuns) -> PaperTable:
    """Accuracy and costs of the paper's methods and of all others that were run like them."""
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        fedavg = get_values_by_seed(grid.get_runs(dataset, "fedavg"), "accuracy", 100)
        for method in SHOWN_METHODS:
            runs = grid.get_runs(dataset, method)
            note = grid.describe_row(dataset, method)
            rows.append((*_build_row(dataset, method, runs, fedavg), "", note))
        for method, runs in grid.get_other_methods(dataset).items():
            recipe = _describe_recipe(runs)
            note = grid.describe_runs(dataset, runs)
            rows.append((*_build_row(dataset, method, runs, fedavg), recipe, note))
    return grid.make_table(
        "wide",
        "The paper's methods and others",
        WIDE_COLUMNS,
        rows,
        "Methods outside the paper have their catalogue's defaults, or what the column `recipe`"
        " says; nothing was tuned for this table. `flrce` stops, all others run T rounds.",
    )


def _build_row(
    dataset: str, method: str, runs: RunsBySeed, fedavg: dict[int, float]
) -> tuple[Any, ...]:
    accuracy = get_values_by_seed(runs, "accuracy", 100)
    wasted = (
        100 * sum(h.costs.bytes_wasted for h in run.history) / total
        for run in runs.values()
        if (total := run.summary["bytes_up"] + run.summary["bytes_down"])
    )
    return (
        paper.get_dataset_label(dataset),
        method,
        SeedInterval.from_values(accuracy.values()) or NOT_RUN_TEXT,
        None if method == "fedavg" else paired_difference(accuracy, fedavg),
        SeedInterval.from_values(get_values_by_seed(runs, "bytes", 1e-9).values()),
        SeedInterval.from_values(get_values_by_seed(runs, "joules", 1e-3).values()),
        SeedInterval.from_values(wasted),
    )


def _describe_recipe(runs: RunsBySeed) -> str:
    """The recipe's settings where they are not the catalogue's defaults."""
    table = dict(next(iter(runs.values())).experiment["recipe"])
    name = table.pop("name")
    shown = [f"{key} = {value}" for key, value in table.items()]
    return ", ".join([f"`{name}`", *shown])
