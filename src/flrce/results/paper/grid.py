"""The finished runs of a request, by data set, method and seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flrce.results.paper import paper
from flrce.results.paper.plan import PAPER, Facts, Request, missing, notes
from flrce.results.paper.records import Run
from flrce.results.paper.tables import ABSENT, Interval, Provenance

BySeed = Mapping[int, Run]


@dataclass(frozen=True)
class Grid:
    """What a table is made from; a cell that is not finished is simply not there."""

    request: Request
    regime: str
    facts: Mapping[str, Facts]
    runs: Mapping[str, Run]  # by the cell's name

    def of(self, dataset: str, method: str, regime: str = "", rounds: int | None = None) -> dict[int, Run]:
        """A method's runs by seed; FLrce's are those of flrce-no-stop, cut where its rule stops them."""
        if method == "flrce":
            return self.stopped(dataset, self.psi(dataset))
        return self._found(dataset, method, regime or self.regime, rounds)

    def stopped(self, dataset: str, psi: float) -> dict[int, Run]:
        """FLrce's runs with the paper's threshold psi, replayed."""
        cut = self.request.scale.psi(psi)
        return {seed: run.cut(cut) for seed, run in self._found(dataset, "flrce-no-stop", self.regime).items()}

    def rated(self, dataset: str, lr: float) -> dict[int, Run]:
        """FedAvg's runs with one learning rate of a search."""
        return self._found(dataset, "fedavg", self.regime, lr=lr)

    def _found(
        self, dataset: str, method: str, regime: str, rounds: int | None = None, lr: float | None = None
    ) -> dict[int, Run]:
        if dataset not in self.facts or method in missing():
            return {}
        make, facts = self.request.cell, self.facts[dataset]
        names = {
            seed: make(dataset, regime, method, seed, facts, rounds, lr).name for seed in sorted(self.request.seeds)
        }
        return {seed: self.runs[name] for seed, name in names.items() if name in self.runs}

    def psi(self, dataset: str) -> float:
        return paper.SETTINGS[dataset].psi if dataset in paper.SETTINGS else 5.0

    @property
    def whole(self) -> bool:
        """Whether the federation has the paper's size, so that its absolute numbers compare."""
        return self.request.scale == PAPER

    def note(self, dataset: str, method: str, count: int | None = None) -> str:
        """What a row's reader must know; `count` seeds went into it."""
        if method in missing():
            return "method not in the catalogue"
        found = list(notes(self.request, dataset, self.regime, self.facts.get(dataset)))
        count = len(self.of(dataset, method)) if count is None else count
        if count < len(self.request.seeds):
            found.append(f"{count} of {len(self.request.seeds)} seeds" if count else ABSENT)
        return "; ".join(found)


def figures(runs: BySeed, name: str, scale: float = 1.0) -> dict[int, float]:
    """One figure of the summaries by seed; "bytes" is up and down."""
    if name == "bytes":
        return {s: scale * (run.summary["bytes_up"] + run.summary["bytes_down"]) for s, run in runs.items()}
    return {s: scale * run.summary[name] for s, run in runs.items() if run.summary[name] is not None}


def ratios(ours: BySeed, theirs: BySeed, figure: Callable[[Run], float]) -> dict[int, float]:
    """ours / theirs, seed by seed."""
    both = sorted({*ours} & {*theirs})
    return {s: figure(ours[s]) / figure(theirs[s]) for s in both if figure(theirs[s])}


def difference(ours: Interval | None, theirs: float | int | None) -> float | None:
    return None if ours is None or theirs is None else ours.mean - theirs


def provenance(command: str, runs: Mapping[str, Run]) -> Provenance:
    """The command and what the cells ran on."""
    versions = sorted({run.versions for run in runs.values()})
    return Provenance(command, tuple(versions), tuple(sorted({run.hardware for run in runs.values()})))
