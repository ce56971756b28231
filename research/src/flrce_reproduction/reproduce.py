"""From a request to its tables and figures: plan, train what is missing, keep the records,
write.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.storage.disk import BY_UMASK, write_atomically
from flrce_reproduction import curves, figures, records, resources, results
from flrce_reproduction.claims import build_claims_table, build_summary_table
from flrce_reproduction.execute import (
    CellCallback,
    CellExecutor,
    execute_cells,
    load_dataset,
    read_dataset_sizes,
)
from flrce_reproduction.grid import FinishedRuns, build_provenance
from flrce_reproduction.plan import DatasetSizes, PaperCell, ReproductionRequest, plan_cells
from flrce_reproduction.records import PaperRun
from flrce_reproduction.tables import PaperTable, Provenance
from flrce_reproduction.wide import build_wide_table

DrawFunction = Callable[[FinishedRuns, PaperTable, Path, Provenance], None]
TABLE_BUILDERS: dict[str, Callable[[FinishedRuns], PaperTable]] = {
    "table3": results.build_table3,
    "table4": results.build_table4,
    "fig-accuracy": curves.build_accuracy_table,
    "fig-energy": resources.build_energy_table,
    "fig-bandwidth": resources.build_bandwidth_table,
    "fig-efficiency": resources.build_efficiency_table,
    "fig-ablation": resources.build_ablation_table,
    "fig-motivation": curves.build_motivation_table,
    "wide": build_wide_table,
    "claims": build_claims_table,
    "rates": curves.build_rates_table,
}
FIGURE_DRAWERS: dict[str, DrawFunction] = {
    "table4": figures.draw_thresholds,
    "fig-accuracy": figures.draw_accuracy,
    "fig-energy": partial(figures.draw_method_bars, names=("kJ",)),
    "fig-bandwidth": partial(figures.draw_method_bars, names=("GB",)),
    "fig-efficiency": partial(figures.draw_method_bars, names=("acc/kJ", "acc/GB")),
    "fig-ablation": figures.draw_ablation,
    "fig-motivation": figures.draw_motivation,
}


def reproduce_paper(
    request: ReproductionRequest,
    out: Path,
    data: Path | None = None,
    again: bool = False,
    train: bool = True,
    watch: CellCallback = lambda cell, done: None,
    begin: Callable[[int, int], None] = lambda todo, rounds: None,
    executor: CellExecutor = execute_cells,
) -> dict[str, str]:
    """Writes every table and figure of the request to `out`; returns the tables' Markdown by name.

    Finished cells, whether run directories or records, are not trained again unless `again`.
    Without `train` the tables are made of what there is. `begin` is told how many cells and rounds
    are left before they are trained.
    """
    if any(target in FIGURE_DRAWERS for target in request.targets):
        figures.import_pyplot()
    kept = out / "records"
    facts = _collect_dataset_sizes(request, data, kept, again, train)
    plan = plan_cells(request, facts)
    if again and train:
        for cell in plan:
            shutil.rmtree(out / cell.folder, ignore_errors=True)
    runs = collect_finished_runs(plan, out, {} if again and train else records.read_records(kept))
    todo = [cell for cell in plan if cell.name not in runs] if train else []
    if todo:
        begin(len(todo), sum(cell.experiment.rounds for cell in todo))
        executor(todo, out, _build_dataset_loader(data), watch)
        runs |= collect_finished_runs(todo, out, {})
    if runs:
        records.write_records((records.read_records(kept) | runs).values(), kept)
        records.write_dataset_sizes(facts, kept)
    texts = {
        name: text
        for regime in request.regimes
        for name, text in _write_tables(request, regime, facts, runs, out)
    }
    if "claims" in request.targets and len(request.regimes) > 1:
        grids = [_select_regime(request, regime, facts, runs) for regime in request.regimes]
        source = build_provenance(request.format_command("claims"), runs)
        table = build_summary_table(grids)
        texts[table.name] = _write_table(table, source, out)
    return texts


def collect_finished_runs(
    plan: list[PaperCell], out: Path, stored: Mapping[str, PaperRun]
) -> dict[str, PaperRun]:
    """Every cell of the plan that ran to its end: from its run directory, or from the records."""
    runs: dict[str, PaperRun] = {}
    for cell in plan:
        found = records.read_cell_run(cell, out)
        if found is None and cell.name in stored:
            if why := records.explain_difference(stored[cell.name].experiment, cell.experiment):
                raise BadInput(
                    f"{out / 'records'} holds another experiment for {cell.name}: {why}; name"
                    " another --out, or run it anew with --again"
                )
            found = stored[cell.name]
        if found:
            runs[cell.name] = found
    return runs


def _collect_dataset_sizes(
    request: ReproductionRequest, data: Path | None, kept: Path, again: bool, train: bool
) -> dict[str, DatasetSizes]:
    """What each data set holds; without its samples, what the records say it held."""
    known = records.read_stored_sizes(kept)
    facts: dict[str, DatasetSizes] = {}
    for name in request.datasets:
        try:
            facts[name] = read_dataset_sizes(name, data)
        except BadInput:
            if name in known:
                facts[name] = known[name]
            elif train:
                raise
            continue
        if known.get(name, facts[name]) != facts[name] and not again:
            raise BadInput(
                f"{kept} was made with other data: {name} had {known[name]}, now {facts[name]};"
                " name another --out, or run everything anew with --again"
            )
    return facts


def _build_dataset_loader(data: Path | None) -> Callable[[str], Source]:
    @lru_cache(maxsize=1)
    def load_cached(name: str) -> Source:
        return load_dataset(name, data)

    return load_cached


def _write_tables(
    request: ReproductionRequest,
    regime: str,
    facts: Mapping[str, DatasetSizes],
    runs: Mapping[str, PaperRun],
    out: Path,
) -> list[tuple[str, str]]:
    grid = replace(
        _select_regime(request, regime, facts, runs), stored=records.read_records(out / "records")
    )
    out.mkdir(parents=True, exist_ok=True)
    texts = []
    for target in request.targets:
        table = TABLE_BUILDERS[target](grid)
        shown = dict(grid.runs)
        if target == "wide":
            shown |= _collect_other_runs(grid)
        source = build_provenance(request.format_command(target, regime), shown)
        texts.append((table.name, _write_table(table, source, out)))
        if target in FIGURE_DRAWERS:
            FIGURE_DRAWERS[target](grid, table, out / table.name, source)
    return texts


def _collect_other_runs(grid: FinishedRuns) -> dict[str, PaperRun]:
    return {
        run.cell: run
        for dataset in grid.request.datasets
        for runs in grid.get_other_methods(dataset).values()
        for run in runs.values()
    }


def _select_regime(
    request: ReproductionRequest,
    regime: str,
    facts: Mapping[str, DatasetSizes],
    runs: Mapping[str, PaperRun],
) -> FinishedRuns:
    mine = {name: run for name, run in runs.items() if name.split("/")[1] in (regime, "iid")}
    return FinishedRuns(request, regime, facts, mine)


def _write_table(table: PaperTable, source: Provenance, out: Path) -> str:
    text = table.to_markdown(source)
    write_atomically(out / f"{table.name}.md", text.encode(), BY_UMASK)
    write_atomically(out / f"{table.name}.csv", table.to_csv(source).encode(), BY_UMASK)
    if table.long:
        write_atomically(
            out / f"{table.name}-rounds.csv", table.to_csv(source, long=True).encode(), BY_UMASK
        )
    return text
