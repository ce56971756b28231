"""Which method for this data, fleet and budget? A race in two heats on the user's own experiment.

First every recipe trains at the experiment's own rate, then the best one at other rates too. How long a heat is follows
from the budget, of which the search may use up a share: a few rounds tell who starts fast, not who ends well. All are
compared at equal cost along the resource that is scarcest. What the search spent is counted against the budget: the run
that is advised gets what is left. It and FedAvg with an average, the plainest of good answers, are then run on further
seeds, so that the answer has an interval; those runs are simulated for the answer's sake and not counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flrce import runs
from flrce.arena.away import Away, run_all
from flrce.arena.plan import Cell, merged
from flrce.arena.records import Played, load, played, save
from flrce.config import Experiment
from flrce.errors import BadInput
from flrce.intervals import Interval, interval
from flrce.types import Record

PLAIN = "fedavg + average"
AVERAGE = {"average": {"piece": "ema", "ease": 4, "level": 0.15}}
BITS = " + 4 bits"
FOUR_BITS = {"compressor": {"piece": "quantize", "bits": 4}}
CANDIDATES: dict[str, dict[str, Any]] = {
    PLAIN: {"recipe": {"name": "fedavg", **AVERAGE}},
    "fedavg + average + 4 bits": {"recipe": {"name": "fedavg", **AVERAGE, **FOUR_BITS}},
    "flrce": {"recipe": {"name": "flrce-no-stop"}},
    "flrce + 4 bits": {"recipe": {"name": "flrce-no-stop", **FOUR_BITS}},
    "scaffold + average": {"recipe": {"name": "scaffold", **AVERAGE}},
    "fedadam": {"recipe": {"name": "fedadam"}},
}
RATES = (3.0, 1 / 3)  # of the experiment's own learning rate, which is tried first
FIRST = 4  # rounds after which costs are known
LOOKING = 0.3  # share of the budget that the search may use up
LAST = 3  # a candidate is judged by this part of its course: the last third, since single evaluations are noisy
OFTEN = 2  # evaluations of candidates, in rounds at most
SEEDS = 5  # further ones, for the interval
AXES = ("joules", "bytes", "seconds")
Told = Callable[[str], None]
Runs = Callable[[Sequence[tuple[Experiment, Path]]], list[tuple[Record, ...]]]


@dataclass(frozen=True)
class Budget:
    """What may be spent in all, the search included; None: no limit."""

    joules: float | None = None
    bytes: float | None = None
    seconds: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        given = {"joules": self.joules, "bytes": self.bytes, "seconds": self.seconds}
        for axis, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise BadInput(f"--{axis} {value}: must be above 0")
        return {axis: value for axis, value in given.items() if value is not None}


@dataclass(frozen=True)
class Candidate:
    """A way to train, and how it did so far."""

    label: str
    plain: bool
    experiment: Experiment
    folder: Path
    played: Played | None = None

    def spent(self, axis: str) -> float:
        return float(self.played.spent(axis)[-1]) if self.played and len(self.played.rounds["t"]) else 0.0

    def a_round(self, axis: str) -> float:
        """What a round costs it."""
        return self.spent(axis) / max(len(self.played.rounds["t"]) if self.played else 0, 1)


@dataclass(frozen=True)
class Advice:
    """What to run, what to expect of it, and what finding out has cost."""

    label: str
    experiment: Experiment  # with as many rounds as the rest of the budget pays for
    metric: str
    lower: bool
    expected: Interval
    plain: Interval  # the same of FedAvg with an average, at the same budget
    gain: Interval  # of the advised over the plain, seed by seed, so that more is better
    spent: Mapping[str, float]  # by the search
    rungs: tuple[tuple[int, tuple[str, ...]], ...] = field(default=())  # rounds, and who was still in

    @property
    def enough(self) -> bool:
        """Whether FedAvg with an average cannot be told from the best."""
        if self.label.startswith(f"{PLAIN},"):
            return True
        return self.gain.mean is None or self.gain.half is None or self.gain.mean - self.gain.half <= 0


def advise(
    experiment: Experiment, budget: Budget, work: Path, told: Told = lambda line: None,
    candidates: Mapping[str, Mapping[str, Any]] = CANDIDATES, data: Any = None, seeds: int = SEEDS,
    send: Away | None = None,
) -> Advice:  # fmt: skip
    """The recipe for this experiment and budget; `data` replaces what the experiment names.

    The expected metric comes from so many further `seeds`. With `send`, runs are made elsewhere (away.py), and `work`
    is a folder that all machines see.
    """
    run = partial(_histories, work, data, send)
    limits = budget.limits
    recipes = field_of(experiment, thrifty(candidates, limits), work)
    rungs: list[tuple[int, tuple[str, ...]]] = []

    def heat(climbing: Sequence[Candidate], rounds: int) -> list[Candidate]:
        rungs.append((rounds, tuple(c.label for c in climbing)))
        told(f"{len(climbing)} candidates for {rounds} rounds")
        return _climbed(climbing, rounds, run)

    recipes = heat(recipes, min(FIRST, experiment.rounds))
    rounds = heat_length(recipes, limits, experiment.rounds)
    if rounds > FIRST:
        recipes = heat(recipes, rounds)
    ranked = _ranked(recipes, scarcest(recipes, limits))
    spent = {axis: sum(c.spent(axis) for c in recipes) for axis in AXES}
    if not any(spent[axis] > LOOKING * limit for axis, limit in limits.items()):
        rates = heat(_at_rates(ranked[0], experiment.train.lr, work), rounds)
        spent = {axis: spent[axis] + sum(c.spent(axis) for c in rates) for axis in AXES}
        ranked = _ranked([*ranked, *rates], scarcest([*ranked, *rates], limits))
    return _answer(experiment, ranked, spent, limits, told, rungs, candidates, run, seeds)


def thrifty(
    candidates: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:  # fmt: skip
    """Candidates that send 4 bits race where bytes are limited, in the place of those that send 32."""
    few = {label for label in candidates if label.endswith(BITS)}
    if "bytes" in limits:
        return {label: each for label, each in candidates.items() if f"{label}{BITS}" not in few}
    return {label: each for label, each in candidates.items() if label not in few}


def heat_length(recipes: Sequence[Candidate], limits: Mapping[str, float], most: int) -> int:
    """Rounds of a heat, so that both use up their share of the budget; of the run's own cost, where there is none."""
    dearest = {axis: max(c.a_round(axis) for c in recipes) for axis in AXES}
    whole = limits or {"joules": dearest["joules"] * most}
    units = {axis: sum(c.a_round(axis) for c in recipes) + len(RATES) * dearest[axis] for axis in whole}
    pays = [LOOKING * limit / units[axis] for axis, limit in whole.items() if units[axis]]
    return max(min(FIRST, most), min([most // 2, *map(math.floor, pays)]))


def field_of(experiment: Experiment, candidates: Mapping[str, Mapping[str, Any]], work: Path) -> list[Candidate]:
    """Every candidate at the experiment's own rate; what the experiment cannot be trained with is left out."""
    found: list[Candidate] = []
    for label, tables in candidates.items():
        try:
            each = _with(experiment, tables, experiment.train.lr)
            each.build_recipe()
        except BadInput:
            continue
        folder = work / f"candidate-{len(found)}"
        found.append(Candidate(f"{label}, lr {each.train.lr:g}", label == PLAIN, each, folder))
    if not found:
        raise BadInput("this experiment can be trained with none of the candidates; see flrce recipes list")
    return found


def _at_rates(c: Candidate, lr: float, work: Path) -> list[Candidate]:
    """The same recipe at other rates."""
    found = []
    for i, rate in enumerate(RATES):
        other = float(f"{rate * lr:.3g}")
        tables = c.experiment.model_dump(exclude_none=True)
        each = c.experiment.changed(merged(tables, {"train": {"lr": other}}))
        found.append(Candidate(f"{c.label.rpartition(', lr ')[0]}, lr {other:g}", c.plain, each, work / f"rate-{i}"))
    return found


def _with(experiment: Experiment, tables: Mapping[str, Any], lr: float) -> Experiment:
    base = experiment.model_dump(exclude_none=True)
    base.pop("recipe", None)
    return Experiment.of(merged(base, tables, {"train": {"lr": lr}}), trust=experiment.trust)


def _climbed(climbing: Sequence[Candidate], rounds: int, run: Runs) -> list[Candidate]:
    """Up to so many rounds, on from where each stands. What a heat brought is kept beside the candidate's folder, which
    later heats take further: a search that goes on after an interruption decides by the same figures."""
    heats: list[tuple[Candidate, Cell, Path]] = []
    for c in climbing:
        often = {"engine": {"eval_every": min(OFTEN, c.experiment.engine.eval_every)}, "rounds": rounds}
        experiment = c.experiment.changed(merged(c.experiment.model_dump(exclude_none=True), often))
        kept = c.folder.with_name(f"{c.folder.name}-{rounds}.json")
        heats.append((c, Cell("", c.label, experiment.seed, {}, experiment), kept))
    missing = [heat for heat in heats if not _recorded(heat[2], heat[1])]
    found = run([(cell.experiment, c.folder) for c, cell, _ in missing])
    for (_, cell, kept), history in zip(missing, found, strict=True):
        save(played(cell, history), kept)
    return [replace(c, played=load(kept)) for c, _, kept in heats]


def _recorded(path: Path, cell: Cell) -> bool:
    return path.exists() and load(path).fingerprint == cell.fingerprint


def _histories(
    work: Path, data: Any, send: Away | None, jobs: Sequence[tuple[Experiment, Path]]
) -> list[tuple[Record, ...]]:
    """Of every experiment, on from what is in its folder."""
    if send is None:
        return [
            runs.run(experiment, folder, resume=True, data=data, allow_divergence=True).history
            for experiment, folder in jobs
        ]
    found = dict(run_all(send, jobs, work, [data] * len(jobs)))
    return [found[i] for i in range(len(jobs))]


def scarcest(climbing: Sequence[Candidate], limits: Mapping[str, float]) -> str:
    """The resource of which a round takes the largest share of the budget; joules where there is no budget."""
    if not limits:
        return "joules"
    return max(limits, key=lambda axis: max(c.a_round(axis) for c in climbing) / limits[axis])


def _ranked(climbing: Sequence[Candidate], axis: str) -> list[Candidate]:
    """The best first, of equals the one that came first."""
    shared = min(c.spent(axis) for c in climbing) * (1 + 1e-9)
    return sorted(climbing, key=lambda c: _merit(c, axis, shared), reverse=True)


def _merit(c: Candidate, axis: str, shared: float) -> float:
    """Its models on the last third of what everybody could have spent; more is better."""
    assert c.played is not None
    course = zip(c.played.rounds["value"], c.played.spent(axis), strict=True)
    judged = [(value, cost) for value, cost in course if value is not None and cost <= shared]
    late = [value for value, cost in judged if cost > shared * (1 - 1 / LAST)] or [value for value, _ in judged[-1:]]
    if not late or not all(map(math.isfinite, late)):
        return -math.inf
    mean = float(sum(late) / len(late))
    return -mean if c.played.lower else mean


def affordable(c: Candidate, spent: Mapping[str, float], limits: Mapping[str, float], most: int) -> int:
    """Rounds that the rest of the budget pays for; those that it has run already are paid."""
    rounds = [
        (limit - spent[axis] + c.spent(axis)) / c.a_round(axis) for axis, limit in limits.items() if c.a_round(axis)
    ]
    return max(0, min([most, *(math.floor(r + 1e-9) for r in rounds)]))


def _answer(
    experiment: Experiment, ranked: Sequence[Candidate], spent: Mapping[str, float], limits: Mapping[str, float],
    told: Told, rungs: Sequence[tuple[int, tuple[str, ...]]], candidates: Mapping[str, Mapping[str, Any]], run: Runs,
    seeds: int,
) -> Advice:  # fmt: skip
    best = ranked[0]
    rounds = affordable(best, spent, limits, experiment.rounds)
    if not rounds:
        scarce = scarcest(ranked, limits)
        raise BadInput(
            f"--{scarce} {limits[scarce]:g} does not pay for the search and one round ({best.a_round(scarce):.3g} "
            "a round); raise it, or give an experiment with smaller rounds"
        )
    advised = _whole(best.experiment, rounds)
    plain = next((c.experiment for c in ranked if c.plain), None) or _with(
        experiment, candidates.get(PLAIN, CANDIDATES[PLAIN]), experiment.train.lr
    )
    told(f"{best.label} for {rounds} rounds on {seeds} further seeds")
    further = [experiment.seed + 1 + i for i in range(seeds)]
    jobs = [(advised.with_seed(seed), best.folder.with_name(f"advised-{seed}")) for seed in further]
    if not best.plain:
        whole = _whole(plain, experiment.rounds)
        jobs += [(whole.with_seed(seed), best.folder.with_name(f"plain-{seed}")) for seed in further]
    found = [
        played(Cell("", "", each.seed, {}, each), history) for (each, _), history in zip(jobs, run(jobs), strict=True)
    ]
    ends, costs = found[:seeds], [p.spent("joules")[-1] for p in found[:seeds]]
    plains = list(zip(found[seeds:], costs, strict=False))
    values = [p.final for p in ends if p.final is not None]
    sign = -1.0 if ends[0].lower else 1.0
    others = [value for p, cost in plains if (value := p.within("joules", cost * (1 + 1e-9))) is not None]
    gains = [sign * (a - b) for a, b in zip(values, others, strict=False)] if len(values) == len(others) else []
    return Advice(
        best.label, advised, ends[0].metric, ends[0].lower, interval(values), interval(others or values),
        interval(gains), spent, tuple(rungs),
    )  # fmt: skip


def _whole(experiment: Experiment, rounds: int) -> Experiment:
    return experiment.changed({"rounds": rounds})
