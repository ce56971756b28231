"""Which cells a table needs: (data set, regime, method, seed), each an experiment with a run
directory of its own.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.errors import BadInput, suggest_name
from flrce.methods.catalogue.recipes import CATALOGUE
from flrce_reproduction import paper

#: trained; FLrce with its stop is cut from the record of flrce-no-stop, from which it does not
#: differ until it stops
TRAINED_METHODS = ("fedavg", *paper.BASELINES, "flrce-no-stop")
SHOWN_METHODS = (*paper.BASELINES, "flrce", "fedavg", "flrce-no-stop")
# these need every method
ALL_METHOD_TARGETS = (
    *("table3", "fig-accuracy", "fig-energy", "fig-bandwidth", "fig-efficiency", "wide", "claims"),
)
STOP_ONLY_TARGETS = ("table4", "fig-ablation")  # these need flrce-no-stop only
TARGETS = (
    *("table3", "table4", "fig-accuracy", "fig-energy", "fig-bandwidth", "fig-efficiency"),
    *("fig-ablation", "fig-motivation", "wide"),
)
REGIMES = ("dirichlet", "quantity")
DIRICHLET_ALPHA = 0.1
#: rounds between two evaluations in runs of at least LONG_RUN_ROUNDS rounds; flrce-no-stop is
#: evaluated every round, because a replayed threshold may end it after any of them
EVALUATE_EVERY, LONG_RUN_ROUNDS = 5, 50


@dataclass(frozen=True)
class FederationScale:
    """How large the federation is."""

    clients: int = 100
    per_round: int = 10
    rounds: int = 100
    epochs: int = 5
    motivation: int = paper.MOTIVATION_ROUNDS

    def scale_psi(self, value: float) -> float:
        """A threshold of the paper, which has P = 10, for this P."""
        return value * self.per_round / 10


PAPER = FederationScale()
QUICK = FederationScale(clients=20, per_round=4, rounds=12, epochs=2, motivation=4)


@dataclass(frozen=True)
class DatasetSizes:
    """What a data set holds here, which may be less than the paper's."""

    samples: int
    classes: int
    groups: int = 0


@dataclass(frozen=True)
class PaperCell:
    """One run of the grid."""

    dataset: str
    regime: str
    method: str
    seed: int
    experiment: Experiment
    # dataset/regime/method, with the rate or number of rounds where they are not the usual ones
    place: str

    @property
    def name(self) -> str:
        return f"{self.place}/seed-{self.seed}"

    @property
    def folder(self) -> Path:
        return Path("cells") / self.name


@dataclass(frozen=True)
class ReproductionRequest:
    """What is to be reproduced."""

    targets: tuple[str, ...]
    datasets: tuple[str, ...]
    regimes: tuple[str, ...]
    seeds: tuple[int, ...]
    scale: FederationScale = PAPER
    rates: Mapping[str, float] = field(default_factory=dict)  # other than the paper's
    # learning rates to try, for the target `rates`; without any, decades around the paper's
    search: tuple[float, ...] = ()
    device: str = "auto"
    workers: int | str = "auto"
    networks: Mapping[str, str] = field(default_factory=dict)  # other than the released code's

    def __post_init__(self) -> None:
        known = (*paper.PAPER_SETTINGS, "digits")
        for name in (*self.datasets, *self.rates, *self.networks):
            if name not in known:
                raise BadInput(
                    f"--datasets, --lr or --network {name!r} is not among the paper's;"
                    f" {suggest_name(name, known)}"
                )
        for regime in self.regimes:
            if regime not in REGIMES:
                raise BadInput(f"--regime {regime!r} is unknown; {suggest_name(regime, REGIMES)}")

    @property
    def motivation_dataset(self) -> str:
        """The data set of the motivation: CIFAR-10, or what there is."""
        return "cifar10" if "cifar10" in self.datasets else self.datasets[0]

    def get_learning_rate(self, dataset: str) -> float:
        return self.rates.get(dataset, get_paper_rate(dataset))

    def get_network(self, dataset: str) -> str:
        return self.networks.get(dataset, get_released_network(dataset))

    def list_search_rates(self, dataset: str) -> tuple[float, ...]:
        """The learning rates to try on a data set."""
        rate = get_paper_rate(dataset)
        return tuple(sorted(self.search)) or tuple(round(rate * 10.0**k, 12) for k in range(-1, 3))

    def format_command(self, target: str, regime: str = "") -> str:
        """The command line that makes one table again; DIR stands for folders of the user's. No
        regime: all of them.
        """
        words = ["flrce reproduce", target, *(["--regime", regime] if regime else [])]
        words += ["--data DIR --out DIR"]
        words += ["--seeds", format_seed_ranges(self.seeds)]
        words += ["--quick"] if self.scale == QUICK else ["--datasets", ",".join(self.datasets)]
        options = {
            "--lr": [f"{name}={lr:g}" for name, lr in self.rates.items()],
            "--network": [f"{dataset}={name}" for dataset, name in self.networks.items()],
            "--rates": [f"{lr:g}" for lr in self.search],
        }
        for option, values in options.items():
            words += [option, ",".join(values)] if values else []
        if self.scale not in (PAPER, QUICK):
            words.append(f"(from Python, with {self.scale})")
        return " ".join(words)

    def build_cell(
        self,
        dataset: str,
        regime: str,
        method: str,
        seed: int,
        facts: DatasetSizes,
        rounds: int | None = None,
        lr: float | None = None,
    ) -> PaperCell:
        """One cell; `rounds` and `lr` replace the usual ones and then show in its folder, as
        another network does.
        """
        lr = self.get_learning_rate(dataset) if lr is None else lr
        scale, network = self.scale, self.get_network(dataset)
        T, scheme = rounds or scale.rounds, regime
        if regime != "iid":
            scheme = choose_partition_scheme(dataset, regime, facts, scale.clients)
        tables: dict[str, Any] = {
            "seed": seed,
            "rounds": T,
            "clients": scale.clients,
            "per_round": scale.per_round,
            "data": {"name": dataset, "partition": scheme, "alpha": DIRICHLET_ALPHA},
            "model": {"name": network},
            "train": {"batch": get_batch_size(dataset), "epochs": scale.epochs, "lr": lr},
            "recipe": get_recipe_settings(method),
            "engine": {
                "device": self.device,
                "workers": self.workers,
                "eval_every": choose_evaluation_interval(method, T),
            },
        }
        experiment = Experiment.from_tables(tables, f"{dataset}, {method}")
        first = dataset if network == get_released_network(dataset) else f"{dataset}-{network}"
        first += "" if lr == get_paper_rate(dataset) else f"-lr-{lr:g}"
        last = method if scale.rounds == T else f"{method}-{T}-rounds"
        return PaperCell(dataset, regime, method, seed, experiment, f"{first}/{regime}/{last}")


def format_seed_ranges(seeds: Sequence[int]) -> str:
    """0,1,2,3,4,7 as 0-4,7."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def get_paper_rate(dataset: str) -> float:
    return paper.PAPER_SETTINGS[dataset].lr if dataset in paper.PAPER_SETTINGS else 0.1


def get_released_network(dataset: str) -> str:
    """The released code's network: for CIFAR100 the one with a tanh, which shapes alone do not
    tell.
    """
    return paper.PAPER_SETTINGS[dataset].model if dataset in paper.PAPER_SETTINGS else "auto"


def get_batch_size(dataset: str) -> int:
    return paper.PAPER_SETTINGS[dataset].batch if dataset in paper.PAPER_SETTINGS else 16


#: settings with which a method is what the paper says of it, where the catalogue's default is not
PAPER_RECIPE_SETTINGS: dict[str, dict[str, Any]] = {
    # slow clients train fewer epochs; P clients take part
    "pyramidfl": {"preset": "flrce", "overcommit": 1.0},
    "flrce": {"preset": "paper"},  # Algorithm 1 as printed
    "flrce-no-stop": {"preset": "paper"},
}


def get_recipe_settings(method: str) -> dict[str, Any]:
    """A method as the paper describes it."""
    return {"name": method, **PAPER_RECIPE_SETTINGS.get(method, {})}


def choose_partition_scheme(dataset: str, regime: str, facts: DatasetSizes, clients: int) -> str:
    """The scheme of a regime: writers or speakers are shared out where the data set names enough of
    them.
    """
    if regime == "dirichlet" and dataset in ("femnist", "speech") and facts.groups >= clients:
        return "by-group"
    return regime


def choose_evaluation_interval(method: str, T: int) -> int:
    """Rounds between evaluations; the round of a milestone is always evaluated."""
    stopping = method in ("flrce", "flrce-no-stop")
    return 1 if stopping or T < LONG_RUN_ROUNDS else EVALUATE_EVERY


def filter_available_methods(methods: Sequence[str]) -> tuple[str, ...]:
    return tuple(method for method in methods if method in CATALOGUE)


def list_missing_methods() -> tuple[str, ...]:
    """Methods of the paper that the catalogue lacks."""
    return tuple(method for method in TRAINED_METHODS if method not in CATALOGUE)


def plan_cells(request: ReproductionRequest, facts: Mapping[str, DatasetSizes]) -> list[PaperCell]:
    """Every cell that the request needs of the data sets that are there, each once, seeds of a
    method together.
    """
    cells: dict[str, PaperCell] = {}
    for cell in _list_needed_cells(request, facts):
        cells.setdefault(cell.name, cell)
    return list(cells.values())


def _list_needed_cells(
    request: ReproductionRequest, facts: Mapping[str, DatasetSizes]
) -> list[PaperCell]:
    datasets = [name for name in request.datasets if name in facts]
    targets, cells = {*request.targets}, []

    def add(dataset: str, regime: str, method: str, **changed: Any) -> None:
        sizes = facts[dataset]
        for seed in request.seeds:
            cells.append(request.build_cell(dataset, regime, method, seed, sizes, **changed))

    for dataset, regime in itertools.product(datasets, request.regimes):
        for method in _list_needed_methods(request.targets):
            add(dataset, regime, method)
        for lr in request.list_search_rates(dataset) if "rates" in targets else ():
            add(dataset, regime, "fedavg", lr=lr)
    motivated = request.motivation_dataset
    if {"fig-motivation", "claims"} & targets and motivated in datasets:
        for regime in ("iid", *request.regimes):
            for method in filter_available_methods(tuple(paper.MOTIVATION_RATIOS)):
                add(motivated, regime, method, rounds=request.scale.motivation)
    return cells


def _list_needed_methods(targets: Sequence[str]) -> tuple[str, ...]:
    if any(target in ALL_METHOD_TARGETS for target in targets):
        return filter_available_methods(TRAINED_METHODS)
    return ("flrce-no-stop",) if any(target in STOP_ONLY_TARGETS for target in targets) else ()


def list_deviations(
    request: ReproductionRequest, dataset: str, regime: str, facts: DatasetSizes | None
) -> tuple[str, ...]:
    """How this data set or its settings differ from the paper's."""
    setting = paper.PAPER_SETTINGS.get(dataset)
    if facts is None or setting is None:
        return () if setting else ("not in the paper",)
    found = []
    if facts.samples != setting.samples:
        found.append(f"{facts.samples:,} samples, paper {setting.samples:,}")
    if facts.classes != setting.classes:
        found.append(f"{facts.classes} classes, paper {setting.classes}")
    if regime == "dirichlet" and setting.groups:
        if choose_partition_scheme(dataset, regime, facts, request.scale.clients) != "by-group":
            found.append(
                f"only {facts.groups} groups: labels Dir({DIRICHLET_ALPHA:g}) instead of writers or"
                " speakers"
            )
        elif facts.groups != setting.groups:
            found.append(f"{facts.groups:,} groups, paper {setting.groups:,}")
    if request.get_learning_rate(dataset) != setting.lr:
        found.append(f"lr {request.get_learning_rate(dataset):g}, paper {setting.lr:g}")
    if request.get_network(dataset) != setting.model:
        found.append(f"network {request.get_network(dataset)}, released {setting.model}")
    return tuple(found)
