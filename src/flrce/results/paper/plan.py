"""Which cells a table needs: (data set, regime, method, seed), each an experiment with a run directory of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.config import Experiment
from flrce.errors import BadInput, nearest
from flrce.recipes import CATALOGUE
from flrce.results.paper import paper

#: trained; FLrce with its stop is cut from the record of flrce-no-stop, from which it does not differ until it stops
METHODS = ("fedavg", *paper.BASELINES, "flrce-no-stop")
SHOWN = (*paper.BASELINES, "flrce", "fedavg", "flrce-no-stop")
CURVES = ("table3", "fig-accuracy", "fig-energy", "fig-bandwidth", "fig-efficiency", "claims")  # need every method
STOPS = ("table4", "fig-ablation")  # need flrce-no-stop only
TARGETS = ("table3", "table4", "fig-accuracy", "fig-energy", "fig-bandwidth", "fig-efficiency", "fig-ablation",
           "fig-motivation")  # fmt: skip
REGIMES = ("dirichlet", "quantity")
ALPHA = 0.1


@dataclass(frozen=True)
class Scale:
    """How large the federation is."""

    clients: int = 100
    per_round: int = 10
    rounds: int = 100
    epochs: int = 5
    motivation: int = paper.MOTIVATION_ROUNDS

    def psi(self, value: float) -> float:
        """A threshold of the paper, which has P = 10, for this P."""
        return value * self.per_round / 10


PAPER, QUICK = Scale(), Scale(clients=20, per_round=4, rounds=12, epochs=2, motivation=4)


@dataclass(frozen=True)
class Facts:
    """What a data set holds here, which may be less than the paper's."""

    samples: int
    classes: int
    groups: int = 0


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    dataset: str
    regime: str
    method: str
    seed: int
    experiment: Experiment
    place: str  # dataset/regime/method, with the rate or number of rounds where they are not the usual ones

    @property
    def name(self) -> str:
        return f"{self.place}/seed-{self.seed}"

    @property
    def folder(self) -> Path:
        return Path("cells") / self.name


@dataclass(frozen=True)
class Request:
    """What is to be reproduced."""

    targets: tuple[str, ...]
    datasets: tuple[str, ...]
    regimes: tuple[str, ...]
    seeds: tuple[int, ...]
    scale: Scale = PAPER
    rates: Mapping[str, float] = field(default_factory=dict)  # learning rates other than the paper's
    search: tuple[float, ...] = ()  # rates to try, for the target `rates`; without any, decades around the paper's
    device: str = "auto"
    workers: int | str = "auto"
    networks: Mapping[str, str] = field(default_factory=dict)  # other than the released code's

    def __post_init__(self) -> None:
        known = (*paper.SETTINGS, "digits")
        for name in (*self.datasets, *self.rates, *self.networks):
            if name not in known:
                raise BadInput(
                    f"--datasets, --lr or --network {name!r} is not among the paper's; {nearest(name, known)}"
                )
        for regime in self.regimes:
            if regime not in REGIMES:
                raise BadInput(f"--regime {regime!r} is unknown; {nearest(regime, REGIMES)}")

    @property
    def motivating(self) -> str:
        """The data set of the motivation: CIFAR-10, or what there is."""
        return "cifar10" if "cifar10" in self.datasets else self.datasets[0]

    def rate(self, dataset: str) -> float:
        return self.rates.get(dataset, paper_rate(dataset))

    def network(self, dataset: str) -> str:
        return self.networks.get(dataset, released(dataset))

    def searched(self, dataset: str) -> tuple[float, ...]:
        """The learning rates to try on a data set."""
        return tuple(sorted(self.search)) or tuple(round(paper_rate(dataset) * 10.0**k, 12) for k in range(-1, 3))

    def command(self, target: str, regime: str) -> str:
        """The command line that makes one table again; DIR stands for folders of the user's."""
        words = ["flrce reproduce", target, "--regime", regime, "--data DIR --out DIR"]
        words += ["--seeds", spans(self.seeds)]
        words += ["--quick"] if self.scale == QUICK else ["--datasets", ",".join(self.datasets)]
        words += ["--lr", ",".join(f"{name}={lr:g}" for name, lr in self.rates.items())] if self.rates else []
        words += (
            ["--network", ",".join(f"{one}={name}" for one, name in self.networks.items())] if self.networks else []
        )
        words += ["--rates", ",".join(f"{lr:g}" for lr in self.search)] if self.search else []
        if self.scale not in (PAPER, QUICK):
            words.append(f"(from Python, with {self.scale})")
        return " ".join(words)

    def cell(
        self, dataset: str, regime: str, method: str, seed: int, facts: Facts,
        rounds: int | None = None, lr: float | None = None,
    ) -> Cell:  # fmt: skip
        """One cell; `rounds` and `lr` replace the usual ones and then show in its folder, as another network does."""
        lr = self.rate(dataset) if lr is None else lr
        T = rounds or self.scale.rounds
        scheme = "iid" if regime == "iid" else partition(dataset, regime, facts, self.scale.clients)
        tables: dict[str, Any] = {
            "seed": seed, "rounds": T, "clients": self.scale.clients, "per_round": self.scale.per_round,
            "data": {"name": dataset, "partition": scheme, "alpha": ALPHA},
            "model": {"name": self.network(dataset)},
            "train": {"batch": batch(dataset), "epochs": self.scale.epochs, "lr": lr},
            "recipe": recipe(method),
            "engine": {"device": self.device, "workers": self.workers},
        }  # fmt: skip
        experiment = Experiment.of(tables, f"{dataset}, {method}")
        other = "" if self.network(dataset) == released(dataset) else f"-{self.network(dataset)}"
        first = f"{dataset}{other}" if lr == paper_rate(dataset) else f"{dataset}{other}-lr-{lr:g}"
        last = method if self.scale.rounds == T else f"{method}-{T}-rounds"
        return Cell(dataset, regime, method, seed, experiment, f"{first}/{regime}/{last}")


def spans(seeds: Sequence[int]) -> str:
    """0,1,2,3,4,7 as 0-4,7."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def paper_rate(dataset: str) -> float:
    return paper.SETTINGS[dataset].lr if dataset in paper.SETTINGS else 0.1


def released(dataset: str) -> str:
    """The released code's network: for CIFAR100 the one with a tanh, which shapes alone do not tell."""
    return paper.SETTINGS[dataset].model if dataset in paper.SETTINGS else "auto"


def batch(dataset: str) -> int:
    return paper.SETTINGS[dataset].batch if dataset in paper.SETTINGS else 16


#: settings with which a method is what the paper says of it, where the catalogue's default is not
AS_DESCRIBED: dict[str, dict[str, Any]] = {
    "pyramidfl": {"preset": "flrce", "overcommit": 1.0},  # slow clients train fewer epochs; P clients take part
    "flrce": {"preset": "paper"},  # Algorithm 1 as printed
    "flrce-no-stop": {"preset": "paper"},
}


def recipe(method: str) -> dict[str, Any]:
    """A method as the paper describes it."""
    return {"name": method, **AS_DESCRIBED.get(method, {})}


def partition(dataset: str, regime: str, facts: Facts, clients: int) -> str:
    """The scheme of a regime: writers or speakers are shared out where the data set names enough of them."""
    if regime == "dirichlet" and dataset in ("femnist", "speech") and facts.groups >= clients:
        return "by-group"
    return regime


def available(methods: Sequence[str]) -> tuple[str, ...]:
    return tuple(method for method in methods if method in CATALOGUE)


def missing() -> tuple[str, ...]:
    """Methods of the paper that the catalogue lacks."""
    return tuple(method for method in METHODS if method not in CATALOGUE)


def cells(request: Request, facts: Mapping[str, Facts]) -> list[Cell]:
    """Every cell that the request needs of the data sets that are there, each once, seeds of a method together."""
    found: dict[str, Cell] = {}
    for cell in _cells(request, facts):
        found.setdefault(cell.name, cell)
    return list(found.values())


def _cells(request: Request, facts: Mapping[str, Facts]) -> list[Cell]:
    here = [name for name in request.datasets if name in facts]
    grid: list[Cell] = []
    for dataset in here:
        for regime in request.regimes:
            for method in _methods(request.targets):
                grid += [request.cell(dataset, regime, method, seed, facts[dataset]) for seed in request.seeds]
            for lr in request.searched(dataset) if "rates" in request.targets else ():
                grid += [request.cell(dataset, regime, "fedavg", seed, facts[dataset], lr=lr) for seed in request.seeds]
    if {"fig-motivation", "claims"} & {*request.targets} and (dataset := request.motivating) in here:
        T = request.scale.motivation
        for regime in ("iid", *request.regimes):
            for method in available(tuple(paper.MOTIVATION)):
                grid += [request.cell(dataset, regime, method, seed, facts[dataset], T) for seed in request.seeds]
    return grid


def _methods(targets: Sequence[str]) -> tuple[str, ...]:
    if any(target in CURVES for target in targets):
        return available(METHODS)
    return ("flrce-no-stop",) if any(target in STOPS for target in targets) else ()


def notes(request: Request, dataset: str, regime: str, facts: Facts | None) -> tuple[str, ...]:
    """How this data set or its settings differ from the paper's."""
    setting = paper.SETTINGS.get(dataset)
    if facts is None or setting is None:
        return () if setting else ("not in the paper",)
    found = []
    if facts.samples != setting.samples:
        found.append(f"{facts.samples:,} samples, paper {setting.samples:,}")
    if facts.classes != setting.classes:
        found.append(f"{facts.classes} classes, paper {setting.classes}")
    if regime == "dirichlet" and setting.groups:
        if partition(dataset, regime, facts, request.scale.clients) != "by-group":
            found.append(f"only {facts.groups} groups: labels Dir({ALPHA:g}) instead of writers or speakers")
        elif facts.groups != setting.groups:
            found.append(f"{facts.groups:,} groups, paper {setting.groups:,}")
    if request.rate(dataset) != setting.lr:
        found.append(f"lr {request.rate(dataset):g}, paper {setting.lr:g}")
    if request.network(dataset) != setting.model:
        found.append(f"network {request.network(dataset)}, released {setting.model}")
    return tuple(found)
