"""Which method for this data, fleet and budget? A race in two heats on the user's own experiment.

First every recipe trains at the experiment's own rate, then the best one at other rates too. How
long a heat is follows from the budget, of which the search may use up a share: a few rounds tell
who starts fast, not who ends well. All are compared at equal cost along the resource that is
scarcest. What the search spent is counted against the budget: the run that is advised gets what is
left. It and FedAvg with an average, the plainest of good answers, are then run on further seeds, so
that the answer has an interval; those runs are simulated for the answer's sake and not counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.simulation.executors import RemoteExecutor, run_experiments_remotely
from flrce_arena.plan import ArenaCell, merge_tables
from flrce_arena.records import CellRecord, build_cell_record, load_cell_record, save_cell_record

PLAIN_LABEL = "fedavg + average"
SERVER_AVERAGE = {"average": {"piece": "ema", "ease": 4, "level": 0.15}}
FOUR_BIT_SUFFIX = " + 4 bits"
FOUR_BIT_COMPRESSOR = {"compressor": {"piece": "quantize", "bits": 4}}
CANDIDATES: dict[str, dict[str, Any]] = {
    PLAIN_LABEL: {"recipe": {"name": "fedavg", **SERVER_AVERAGE}},
    "fedavg + average + 4 bits": {
        "recipe": {"name": "fedavg", **SERVER_AVERAGE, **FOUR_BIT_COMPRESSOR}
    },
    "flrce": {"recipe": {"name": "flrce-no-stop", "preset": "default"}},
    "flrce + 4 bits": {
        "recipe": {"name": "flrce-no-stop", "preset": "default", **FOUR_BIT_COMPRESSOR}
    },
    "scaffold + average": {"recipe": {"name": "scaffold", **SERVER_AVERAGE}},
    "fedadam": {"recipe": {"name": "fedadam"}},
}
RATE_MULTIPLES = (3.0, 1 / 3)  # of the experiment's own learning rate, which is tried first
INITIAL_ROUNDS = 4  # rounds after which costs are known
SEARCH_BUDGET_SHARE = 0.3  # share of the budget that the search may use up
# a candidate is judged by this part of its course: the last third, since single evaluations are
# noisy
SCORED_TAIL_DIVISOR = 3
MAX_EVAL_INTERVAL_ROUNDS = 2  # evaluations of candidates, in rounds at most
FURTHER_SEEDS = 5  # further ones, for the interval
BUDGET_AXES = ("joules", "bytes", "seconds")
LineCallback = Callable[[str], None]
RunFunction = Callable[[Sequence[tuple[Experiment, Path]]], list[tuple[RoundRecord, ...]]]


@dataclass(frozen=True)
class SearchBudget:
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
    played: CellRecord | None = None

    def total_cost(self, axis: str) -> float:
        return (
            float(self.played.cumulative_cost(axis)[-1])
            if self.played and len(self.played.rounds["t"])
            else 0.0
        )

    def cost_per_round(self, axis: str) -> float:
        """What a round costs it."""
        return self.total_cost(axis) / max(len(self.played.rounds["t"]) if self.played else 0, 1)


@dataclass(frozen=True)
class Advice:
    """What to run, what to expect of it, and what finding out has cost."""

    label: str
    experiment: Experiment  # with as many rounds as the rest of the budget pays for
    metric: str
    lower: bool
    expected: ConfidenceInterval
    plain: ConfidenceInterval  # the same of FedAvg with an average, at the same budget
    gain: ConfidenceInterval  # of the advised over the plain, seed by seed, so that more is better
    spent: Mapping[str, float]  # by the search
    rungs: tuple[tuple[int, tuple[str, ...]], ...] = field(
        default=()
    )  # rounds, and who was still in

    @property
    def is_fedavg_enough(self) -> bool:
        """Whether FedAvg with an average cannot be told from the best."""
        if self.label.startswith(f"{PLAIN_LABEL},"):
            return True
        return (
            self.gain.mean is None or self.gain.half is None or self.gain.mean - self.gain.half <= 0
        )


def advise_recipe(
    experiment: Experiment,
    budget: SearchBudget,
    work: Path,
    told: LineCallback = lambda line: None,
    candidates: Mapping[str, Mapping[str, Any]] = CANDIDATES,
    data: Any = None,
    seeds: int = FURTHER_SEEDS,
    send: RemoteExecutor | None = None,
) -> Advice:
    """The recipe for this experiment and budget; `data` replaces what the experiment names.

    The expected metric comes from so many further `seeds`. With `send`, runs are made elsewhere
    (away.py), and `work` is a folder that all machines see.
    """
    run = partial(_run_histories, work, data, send)
    limits = budget.limits
    recipes = build_candidates(experiment, choose_bit_widths(candidates, limits), work)
    rungs: list[tuple[int, tuple[str, ...]]] = []

    def train_heat(climbing: Sequence[Candidate], rounds: int) -> list[Candidate]:
        rungs.append((rounds, tuple(c.label for c in climbing)))
        told(f"{len(climbing)} candidates for {rounds} rounds")
        return _train_candidates(climbing, rounds, run)

    recipes = train_heat(recipes, min(INITIAL_ROUNDS, experiment.rounds))
    rounds = count_heat_rounds(recipes, limits, experiment.rounds)
    if rounds > INITIAL_ROUNDS:
        recipes = train_heat(recipes, rounds)
    ranked = _rank_candidates(recipes, find_scarcest_resource(recipes, limits))
    spent = {axis: sum(c.total_cost(axis) for c in recipes) for axis in BUDGET_AXES}
    if not any(spent[axis] > SEARCH_BUDGET_SHARE * limit for axis, limit in limits.items()):
        rates = train_heat(_vary_learning_rate(ranked[0], experiment.train.lr, work), rounds)
        spent = {axis: spent[axis] + sum(c.total_cost(axis) for c in rates) for axis in BUDGET_AXES}
        ranked = _rank_candidates(
            [*ranked, *rates], find_scarcest_resource([*ranked, *rates], limits)
        )
    return _build_advice(experiment, ranked, spent, limits, told, rungs, candidates, run, seeds)


def choose_bit_widths(
    candidates: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    """Candidates that send 4 bits race where bytes are limited, in the place of those that send
    32.
    """
    few = {label for label in candidates if label.endswith(FOUR_BIT_SUFFIX)}
    if "bytes" in limits:
        return {
            label: each
            for label, each in candidates.items()
            if f"{label}{FOUR_BIT_SUFFIX}" not in few
        }
    return {label: each for label, each in candidates.items() if label not in few}


def count_heat_rounds(recipes: Sequence[Candidate], limits: Mapping[str, float], most: int) -> int:
    """Rounds of a heat, so that both use up their share of the budget; of the run's own cost, where
    there is none.
    """
    dearest = {axis: max(c.cost_per_round(axis) for c in recipes) for axis in BUDGET_AXES}
    whole = limits or {"joules": dearest["joules"] * most}
    units = {
        axis: sum(c.cost_per_round(axis) for c in recipes) + len(RATE_MULTIPLES) * dearest[axis]
        for axis in whole
    }
    pays = [
        SEARCH_BUDGET_SHARE * limit / units[axis] for axis, limit in whole.items() if units[axis]
    ]
    return max(min(INITIAL_ROUNDS, most), min([most // 2, *map(math.floor, pays)]))


def build_candidates(
    experiment: Experiment, candidates: Mapping[str, Mapping[str, Any]], work: Path
) -> list[Candidate]:
    """Every candidate at the experiment's own rate; what the experiment cannot be trained with is
    left out.
    """
    found: list[Candidate] = []
    for label, tables in candidates.items():
        try:
            each = _override_experiment(experiment, tables, experiment.train.lr)
            each.build_recipe()
        except BadInput:
            continue
        folder = work / f"candidate-{len(found)}"
        found.append(
            Candidate(f"{label}, lr {each.train.lr:g}", label == PLAIN_LABEL, each, folder)
        )
    if not found:
        raise BadInput(
            "this experiment can be trained with none of the candidates; see flrce recipes list"
        )
    return found


def _vary_learning_rate(c: Candidate, lr: float, work: Path) -> list[Candidate]:
    """The same recipe at other rates."""
    found = []
    for i, rate in enumerate(RATE_MULTIPLES):
        other = float(f"{rate * lr:.3g}")
        tables = c.experiment.model_dump(exclude_none=True)
        each = c.experiment.with_tables(merge_tables(tables, {"train": {"lr": other}}))
        found.append(
            Candidate(
                f"{c.label.rpartition(', lr ')[0]}, lr {other:g}", c.plain, each, work / f"rate-{i}"
            )
        )
    return found


def _override_experiment(
    experiment: Experiment, tables: Mapping[str, Any], lr: float
) -> Experiment:
    base = experiment.model_dump(exclude_none=True)
    base.pop("recipe", None)
    return Experiment.from_tables(
        merge_tables(base, tables, {"train": {"lr": lr}}), trust=experiment.get_trust
    )


def _train_candidates(
    climbing: Sequence[Candidate], rounds: int, run: RunFunction
) -> list[Candidate]:
    """Up to so many rounds, on from where each stands. What a heat brought is kept beside the
    candidate's folder, which later heats take further: a search that goes on after an interruption
    decides by the same figures.
    """
    heats: list[tuple[Candidate, ArenaCell, Path]] = []
    for c in climbing:
        often = {
            "engine": {"eval_every": min(MAX_EVAL_INTERVAL_ROUNDS, c.experiment.engine.eval_every)},
            "rounds": rounds,
        }
        experiment = c.experiment.with_tables(
            merge_tables(c.experiment.model_dump(exclude_none=True), often)
        )
        kept = c.folder.with_name(f"{c.folder.name}-{rounds}.json")
        heats.append((c, ArenaCell("", c.label, experiment.seed, {}, experiment), kept))
    missing = [heat for heat in heats if not _is_recorded(heat[2], heat[1])]
    found = run([(cell.experiment, c.folder) for c, cell, _ in missing])
    for (_, cell, kept), history in zip(missing, found, strict=True):
        save_cell_record(build_cell_record(cell, history), kept)
    return [replace(c, played=load_cell_record(kept)) for c, _, kept in heats]


def _is_recorded(path: Path, cell: ArenaCell) -> bool:
    return path.exists() and load_cell_record(path).fingerprint == cell.fingerprint


def _run_histories(
    work: Path, data: Any, send: RemoteExecutor | None, jobs: Sequence[tuple[Experiment, Path]]
) -> list[tuple[RoundRecord, ...]]:
    """Of every experiment, on from what is in its folder."""
    if send is None:
        return [
            runs.run(experiment, folder, resume=True, data=data, allow_divergence=True).history
            for experiment, folder in jobs
        ]
    found = dict(run_experiments_remotely(send, jobs, work, [data] * len(jobs)))
    return [found[i] for i in range(len(jobs))]


def find_scarcest_resource(climbing: Sequence[Candidate], limits: Mapping[str, float]) -> str:
    """The resource of which a round takes the largest share of the budget; joules where there is no
    budget.
    """
    if not limits:
        return "joules"
    return max(
        limits, key=lambda axis: max(c.cost_per_round(axis) for c in climbing) / limits[axis]
    )


def _rank_candidates(climbing: Sequence[Candidate], axis: str) -> list[Candidate]:
    """The best first, of equals the one that came first."""
    shared = min(c.total_cost(axis) for c in climbing) * (1 + 1e-9)
    return sorted(climbing, key=lambda c: _score_candidate(c, axis, shared), reverse=True)


def _score_candidate(c: Candidate, axis: str, shared: float) -> float:
    """Its models on the last third of what everybody could have spent; more is better."""
    assert c.played is not None
    course = zip(c.played.rounds["value"], c.played.cumulative_cost(axis), strict=True)
    judged = [(value, cost) for value, cost in course if value is not None and cost <= shared]
    late = [value for value, cost in judged if cost > shared * (1 - 1 / SCORED_TAIL_DIVISOR)] or [
        value for value, _ in judged[-1:]
    ]
    if not late or not all(map(math.isfinite, late)):
        return -math.inf
    mean = float(sum(late) / len(late))
    return -mean if c.played.lower else mean


def count_affordable_rounds(
    c: Candidate, spent: Mapping[str, float], limits: Mapping[str, float], most: int
) -> int:
    """Rounds that the rest of the budget pays for; those that it has run already are paid."""
    rounds = [
        (limit - spent[axis] + c.total_cost(axis)) / c.cost_per_round(axis)
        for axis, limit in limits.items()
        if c.cost_per_round(axis)
    ]
    return max(0, min([most, *(math.floor(r + 1e-9) for r in rounds)]))


def _build_advice(
    experiment: Experiment,
    ranked: Sequence[Candidate],
    spent: Mapping[str, float],
    limits: Mapping[str, float],
    told: LineCallback,
    rungs: Sequence[tuple[int, tuple[str, ...]]],
    candidates: Mapping[str, Mapping[str, Any]],
    run: RunFunction,
    seeds: int,
) -> Advice:
    best = ranked[0]
    rounds = count_affordable_rounds(best, spent, limits, experiment.rounds)
    if not rounds:
        scarce = find_scarcest_resource(ranked, limits)
        raise BadInput(
            f"--{scarce} {limits[scarce]:g} does not pay for the search and one round"
            f" ({best.cost_per_round(scarce):.3g} a round); raise it, or give an experiment with"
            " smaller rounds"
        )
    advised = _with_rounds(best.experiment, rounds)
    plain = next((c.experiment for c in ranked if c.plain), None) or _override_experiment(
        experiment, candidates.get(PLAIN_LABEL, CANDIDATES[PLAIN_LABEL]), experiment.train.lr
    )
    told(f"{best.label} for {rounds} rounds on {seeds} further seeds")
    further = [experiment.seed + 1 + i for i in range(seeds)]
    jobs = [(advised.with_seed(seed), best.folder.with_name(f"advised-{seed}")) for seed in further]
    if not best.plain:
        whole = _with_rounds(plain, experiment.rounds)
        jobs += [
            (whole.with_seed(seed), best.folder.with_name(f"plain-{seed}")) for seed in further
        ]
    found = [
        build_cell_record(ArenaCell("", "", each.seed, {}, each), history)
        for (each, _), history in zip(jobs, run(jobs), strict=True)
    ]
    ends, costs = found[:seeds], [p.cumulative_cost("joules")[-1] for p in found[:seeds]]
    plains = list(zip(found[seeds:], costs, strict=False))
    values = [p.final_value for p in ends if p.final_value is not None]
    sign = -1.0 if ends[0].lower else 1.0
    others = [
        value
        for p, cost in plains
        if (value := p.get_value_within("joules", cost * (1 + 1e-9))) is not None
    ]
    gains = (
        [sign * (a - b) for a, b in zip(values, others, strict=False)]
        if len(values) == len(others)
        else []
    )
    return Advice(
        best.label,
        advised,
        ends[0].metric,
        ends[0].lower,
        confidence_interval(values),
        confidence_interval(others or values),
        confidence_interval(gains),
        spent,
        tuple(rungs),
    )


def _with_rounds(experiment: Experiment, rounds: int) -> Experiment:
    return experiment.with_tables({"rounds": rounds})
