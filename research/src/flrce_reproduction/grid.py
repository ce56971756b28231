"""The finished runs of a request, by data set, method and seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flrce_reproduction import paper
from flrce_reproduction.plan import (
    PAPER,
    DatasetSizes,
    ReproductionRequest,
    list_deviations,
    list_missing_methods,
)
from flrce_reproduction.records import PaperRun
from flrce_reproduction.tables import NOT_RUN_TEXT, Provenance, SeedInterval

RunsBySeed = Mapping[int, PaperRun]
EFFICIENCY_KEYS = ("computation_efficiency", "communication_efficiency")  # of a run's summary


@dataclass(frozen=True)
class FinishedRuns:
    """What a table is made from; a cell that is not finished is simply not there."""

    request: ReproductionRequest
    regime: str
    facts: Mapping[str, DatasetSizes]
    runs: Mapping[str, PaperRun]  # by the cell's name
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
        count = len(self.get_runs(dataset, method)) if count is None else count
        if count < len(self.request.seeds):
            found.append(f"{count} of {len(self.request.seeds)} seeds" if count else NOT_RUN_TEXT)
        return "; ".join(found)


def get_values_by_seed(runs: RunsBySeed, name: str, scale: float = 1.0) -> dict[int, float]:
    """One figure of the summaries by seed; "bytes" is up and down."""
    if name == "bytes":
        return {
            s: scale * (run.summary["bytes_up"] + run.summary["bytes_down"])
            for s, run in runs.items()
        }
    return {
        s: scale * run.summary[name] for s, run in runs.items() if run.summary[name] is not None
    }


def compute_seed_ratios(
    ours: RunsBySeed, theirs: RunsBySeed, figure: Callable[[PaperRun], float]
) -> dict[int, float]:
    """ours / theirs, seed by seed."""
    both = sorted({*ours} & {*theirs})
    return {s: figure(ours[s]) / figure(theirs[s]) for s in both if figure(theirs[s])}


def subtract_paper_value(ours: SeedInterval | None, theirs: float | int | None) -> float | None:
    return None if ours is None or theirs is None else ours.mean - theirs


def build_provenance(command: str, runs: Mapping[str, PaperRun]) -> Provenance:
    """The command and what the cells ran on."""
    versions = sorted({run.versions for run in runs.values()})
    return Provenance(
        command, tuple(versions), tuple(sorted({run.hardware for run in runs.values()}))
    )
