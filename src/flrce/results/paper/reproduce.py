"""From a request to its tables and figures: plan, train what is missing, keep the records, write."""

import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path

from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.results.paper import curves, figures, records, resources, results
from flrce.results.paper.claims import claims
from flrce.results.paper.execute import Executor, Watch, execute, facts_of, load
from flrce.results.paper.grid import Grid, provenance
from flrce.results.paper.plan import Cell, Facts, Request, cells
from flrce.results.paper.records import Run
from flrce.results.paper.tables import Provenance, Table
from flrce.store.disk import BY_UMASK, write_through

Draw = Callable[[Grid, Table, Path, Provenance], None]
TABLES: dict[str, Callable[[Grid], Table]] = {
    "table3": results.table3, "table4": results.table4, "fig-accuracy": curves.accuracy,
    "fig-energy": resources.energy, "fig-bandwidth": resources.bandwidth, "fig-efficiency": resources.efficiency,
    "fig-ablation": resources.ablation, "fig-motivation": curves.motivation, "claims": claims, "rates": curves.rates,
}  # fmt: skip
FIGURES: dict[str, Draw] = {
    "table4": figures.thresholds, "fig-accuracy": figures.accuracy,
    "fig-energy": partial(figures.bars, names=("kJ",)), "fig-bandwidth": partial(figures.bars, names=("GB",)),
    "fig-efficiency": partial(figures.bars, names=("acc/kJ", "acc/GB")), "fig-ablation": figures.ablation,
    "fig-motivation": figures.motivation,
}  # fmt: skip


def reproduce(
    request: Request, out: Path, data: Path | None = None, again: bool = False, train: bool = True,
    watch: Watch = lambda cell, done: None, begin: Callable[[int, int], None] = lambda todo, rounds: None,
    executor: Executor = execute,
) -> dict[str, str]:  # fmt: skip
    """Writes every table and figure of the request to `out`; returns the tables' Markdown by name.

    Finished cells, whether run directories or records, are not trained again unless `again`. Without `train`
    the tables are made of what there is. `begin` is told how many cells and rounds are left before they are trained.
    """
    if any(target in FIGURES for target in request.targets):
        figures.need()
    kept = out / "records"
    facts = _facts(request, data, kept, again, train)
    plan = cells(request, facts)
    if again and train:
        for cell in plan:
            shutil.rmtree(out / cell.folder, ignore_errors=True)
    runs = finished(plan, out, {} if again and train else records.stored(kept))
    todo = [cell for cell in plan if cell.name not in runs] if train else []
    if todo:
        begin(len(todo), sum(cell.experiment.rounds for cell in todo))
        executor(todo, out, _sources(data), watch)
        runs |= finished(todo, out, {})
    if runs:
        records.write((records.stored(kept) | runs).values(), kept)
        records.write_facts(facts, kept)
    return {name: text for regime in request.regimes for name, text in _write(request, regime, facts, runs, out)}


def finished(plan: list[Cell], out: Path, stored: Mapping[str, Run]) -> dict[str, Run]:
    """Every cell of the plan that ran to its end: from its run directory, or from the records."""
    runs: dict[str, Run] = {}
    for cell in plan:
        found = records.read(cell, out)
        if found is None and cell.name in stored:
            if why := records.same(stored[cell.name].experiment, cell.experiment):
                raise BadInput(
                    f"{out / 'records'} holds another experiment for {cell.name}: {why}; name another --out, "
                    "or run it anew with --again"
                )
            found = stored[cell.name]
        if found:
            runs[cell.name] = found
    return runs


def _facts(request: Request, data: Path | None, kept: Path, again: bool, train: bool) -> dict[str, Facts]:
    """What each data set holds; without its samples, what the records say it held."""
    known = records.read_facts(kept)
    facts: dict[str, Facts] = {}
    for name in request.datasets:
        try:
            facts[name] = facts_of(name, data)
        except BadInput:
            if name in known:
                facts[name] = known[name]
            elif train:
                raise
            continue
        if known.get(name, facts[name]) != facts[name] and not again:
            raise BadInput(
                f"{kept} was made with other data: {name} had {known[name]}, now {facts[name]}; name another --out, "
                "or run everything anew with --again"
            )
    return facts


def _sources(data: Path | None) -> Callable[[str], Source]:
    @lru_cache(maxsize=1)
    def source(name: str) -> Source:
        return load(name, data)

    return source


def _write(
    request: Request, regime: str, facts: Mapping[str, Facts], runs: Mapping[str, Run], out: Path
) -> list[tuple[str, str]]:
    mine = {name: run for name, run in runs.items() if name.split("/")[1] in (regime, "iid")}
    grid = Grid(request, regime, facts, mine)
    out.mkdir(parents=True, exist_ok=True)
    texts = []
    for target in request.targets:
        table = TABLES[target](grid)
        source = provenance(request.command(target, regime), mine)
        text = table.markdown(source)
        write_through(out / f"{table.name}.md", text.encode(), BY_UMASK)
        write_through(out / f"{table.name}.csv", table.csv(source).encode(), BY_UMASK)
        if table.long:
            write_through(out / f"{table.name}-rounds.csv", table.csv(source, long=True).encode(), BY_UMASK)
        if target in FIGURES:
            FIGURES[target](grid, table, out / table.name, source)
        texts.append((table.name, text))
    return texts
