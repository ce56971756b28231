"""The finished runs of a request, by data set, method and seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.plan import (
    PAPER,
    TRAINED_METHODS,
    DatasetSizes,
    ReproductionRequest,
    list_deviations,
    list_missing_methods,
)
from flrce_reproduction.records import PaperRun
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    Provenance,
    SeedInterval,
    parse_columns,
)

RunsBySeed = Mapping[int, PaperRun]
OLD_VERSIONS = {"flrce 0.1.0"}  # whose runs may differ from today's
EFFICIENCY_KEYS = ("computation_efficiency", "communication_efficiency")  # of a run's summary


@dataclass(frozen=True)
class FinishedRuns:
    """What a table is made from; a cell that is not finished is simply not there."""

    request: ReproductionRequest
    regime: str
    facts: Mapping[str, DatasetSizes]
    runs: Mapping[str, PaperRun]  # by the cell's name
    stored: Mapping[str, PaperRun] = field(default_factory=dict)  # all records, by cell
    psi: float | None = None  # FLrce's threshold on every data set, if not the paper's choice

    def get_runs(
        self, dataset: str, method: str, regime: str = "", rounds: int | None = None
    ) -> dict[int, PaperRun]:
        """A method's runs by seed; FLrce's are those of flrce-no-stop, cut where its rule stops
        them.
        """
        if method == "flrce":
            return self.get_stopped_runs(dataset, self.get_psi(dataset))
        return self._find_runs(dataset, method, regime or self.regime, rounds)

    def get_stopped_runs(self, dataset: str, psi: float) -> dict[int, PaperRun]:
        """FLrce's runs with the paper's threshold psi, replayed."""
        cut = self.request.scale.scale_psi(psi)
        return {
            seed: run.cut_at_threshold(cut)
            for seed, run in self._find_runs(dataset, "flrce-no-stop", self.regime).items()
        }

    def get_runs_at_rate(self, dataset: str, lr: float) -> dict[int, PaperRun]:
        """FedAvg's runs with one learning rate of a search."""
        return self._find_runs(dataset, "fedavg", self.regime, lr=lr)

    def _find_runs(
        self,
        dataset: str,
        method: str,
        regime: str,
        rounds: int | None = None,
        lr: float | None = None,
    ) -> dict[int, PaperRun]:
        if dataset not in self.facts or method in list_missing_methods():
            return {}
        make, facts = self.request.build_cell, self.facts[dataset]
        names = {
            seed: make(dataset, regime, method, seed, facts, rounds, lr).name
            for seed in sorted(self.request.seeds)
        }
        return {seed: self.runs[name] for seed, name in names.items() if name in self.runs}

    def get_psi(self, dataset: str) -> float:
        if self.psi is not None:
            return self.psi
        return paper.PAPER_SETTINGS[dataset].psi if dataset in paper.PAPER_SETTINGS else 5.0

    @property
    def has_paper_scale(self) -> bool:
        """Whether the federation has the paper's size, so that its absolute numbers compare."""
        return self.request.scale == PAPER

    def describe_row(self, dataset: str, method: str, count: int | None = None) -> str:
        """What a row's reader must know; `count` seeds went into it."""
        if method in list_missing_methods():
            return "method not in the catalogue"
        found = list(list_deviations(self.request, dataset, self.regime, self.facts.get(dataset)))
        runs = self.get_runs(dataset, method)
        count = len(runs) if count is None else count
        if count < len(self.request.seeds):
            found.append(f"{count} of {len(self.request.seeds)} seeds" if count else NOT_RUN_TEXT)
        return "; ".join([*found, *_list_old_versions(runs)])

    def describe_runs(self, dataset: str, runs: RunsBySeed) -> str:
        """The same of runs that no plan names."""
        found = list(list_deviations(self.request, dataset, self.regime, self.facts.get(dataset)))
        if len(runs) < len(self.request.seeds):
            found.append(f"{len(runs)} of {len(self.request.seeds)} seeds")
        return "; ".join([*found, *_list_old_versions(runs)])

    def get_other_methods(self, dataset: str) -> dict[str, dict[int, PaperRun]]:
        """Runs by method and seed that are in the records, but not in the plan: other methods with
        the same data, network, learning rate and rounds.
        """
        if dataset not in self.facts:
            return {}
        facts, seeds = self.facts[dataset], sorted(self.request.seeds)
        cell = self.request.build_cell(dataset, self.regime, "fedavg", seeds[0], facts)
        found: dict[str, dict[int, PaperRun]] = {}
        for name, run in sorted(self.stored.items()):
            place, _, seed = name.rpartition("/seed-")
            folder, _, method = place.rpartition("/")
            same = folder == cell.place.rpartition("/")[0] and method not in TRAINED_METHODS
            whole = run.experiment.get("rounds") == self.request.scale.rounds
            if same and whole and int(seed) in seeds:
                found.setdefault(method, {})[int(seed)] = run
        return found

    def format_title(self, subject: str) -> str:
        scale, seeds = self.request.scale, len(self.request.seeds)
        size = f"M={scale.clients}, P={scale.per_round}, T={scale.rounds}, E={scale.epochs}"
        return f"{subject}, regime {self.regime} ({size}, {seeds} seed{'s' if seeds > 1 else ''})"

    def make_table(
        self, name: str, subject: str, columns: str, rows: Sequence[tuple[Any, ...]], *notes: str
    ) -> PaperTable:
        """A table of this regime; `columns` as in parse_columns."""
        title = self.format_title(subject)
        return PaperTable(
            f"{name}-{self.regime}", title, parse_columns(columns), tuple(rows), notes
        )


def _list_old_versions(runs: RunsBySeed) -> list[str]:
    """A word on runs that another version made; nothing if it is of the current ones."""
    old = sorted({run.versions.split(",")[0] for run in runs.values()} & OLD_VERSIONS)
    return [f"measured with {' and '.join(old)}"] if old else []


def get_values_by_seed(runs: RunsBySeed, name: str, scale: float = 1.0) -> dict[int, float]:
    """One figure of the summaries by seed; "bytes" is up and down."""
    parts = ("bytes_up", "bytes_down") if name == "bytes" else (name,)
    figures = {seed: [run.summary[part] for part in parts] for seed, run in runs.items()}
    return {seed: scale * sum(x) for seed, x in figures.items() if None not in x}


def compute_interval(runs: RunsBySeed, name: str, scale: float = 1.0) -> SeedInterval | None:
    """The mean of one figure over the seeds."""
    return SeedInterval.from_values(get_values_by_seed(runs, name, scale).values())


def compute_seed_ratios(
    ours: RunsBySeed, theirs: RunsBySeed, figure: Callable[[PaperRun], float]
) -> dict[int, float]:
    """ours / theirs, seed by seed."""
    both = sorted({*ours} & {*theirs})
    return {s: figure(ours[s]) / figure(theirs[s]) for s in both if figure(theirs[s])}


def compute_mean_ratio(
    ours: RunsBySeed, theirs: RunsBySeed, name: str, scale: float = 1.0
) -> SeedInterval | None:
    """The mean of one figure's ratio, ours / theirs, over the seeds that both have."""

    def read_figure(run: PaperRun) -> float:
        return get_values_by_seed({0: run}, name).get(0, 0.0)

    ratios = compute_seed_ratios(ours, theirs, read_figure)
    return SeedInterval.from_values(scale * ratio for ratio in ratios.values())


def subtract_paper_value(ours: SeedInterval | None, theirs: float | int | None) -> float | None:
    return None if ours is None or theirs is None else ours.mean - theirs


def build_provenance(command: str, runs: Mapping[str, PaperRun]) -> Provenance:
    """The command and what the cells ran on."""
    versions = tuple(sorted({run.versions for run in runs.values()}))
    return Provenance(command, versions, tuple(sorted({run.hardware for run in runs.values()})))
