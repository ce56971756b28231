"""Which method and rate for this data, fleet and budget?

search.py trains many of them for a small part of the budget. What the search spent is counted: the
run that is advised gets the rest. It and FedAvg with an average, the plainest of good answers, are
then run on further seeds, so that the answer has an interval; those runs are simulated for the
answer's sake and not counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.simulation.executors import RemoteExecutor, run_experiments_remotely
from flrce_arena.plan import ArenaCell
from flrce_arena.prior import METHODS, PLAIN_METHOD
from flrce_arena.records import CellRecord, build_cell_record
from flrce_arena.search import (
    RATE_STEP,
    Job,
    RunFunction,
    Trial,
    TrialSearch,
    choose_bit_widths,
    import_optuna,
    score_course,
)

FURTHER_SEEDS = 5  # for the interval
LineCallback = Callable[[str], None]


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
class TrialSummary:
    """What the search saw of a method at a rate."""

    label: str
    rounds: int
    score: float | None  # of the metric, at the end of these rounds; None: it diverged
    joules: float  # that these rounds took


@dataclass(frozen=True)
class Advice:
    """What to run, what to expect of it, and what finding out has cost."""

    label: str
    method: str
    experiment: Experiment  # with as many rounds as the rest of the budget pays for
    metric: str
    lower: bool
    expected: ConfidenceInterval
    plain_label: str
    plain: ConfidenceInterval  # of FedAvg with an average at the experiment's own rate, same joules
    gain: ConfidenceInterval  # of the advised over the plain, seed by seed, so that more is better
    spent: Mapping[str, float]  # by the search
    tried: tuple[TrialSummary, ...]
    untried: tuple[str, ...]  # methods that the search did not come to
    edge: str  # "highest" or "lowest" where the advised rate is at an end of those tried, or ""

    @property
    def is_plain(self) -> bool:
        return self.label == self.plain_label

    @property
    def is_fedavg_enough(self) -> bool:
        """Whether FedAvg with an average is better, or cannot be told from what is advised."""
        if self.is_plain or self.gain.mean is None or self.gain.half is None:
            return True
        return self.gain.mean - self.gain.half <= 0

    @property
    def is_fedavg_better(self) -> bool:
        gain = self.gain
        return gain.mean is not None and gain.half is not None and gain.mean + gain.half < 0


def advise_recipe(
    experiment: Experiment,
    budget: SearchBudget,
    work: Path,
    told: LineCallback = lambda line: None,
    methods: Mapping[str, Mapping[str, Any]] = METHODS,
    data: Any = None,
    seeds: int = FURTHER_SEEDS,
    send: RemoteExecutor | None = None,
) -> Advice:
    """The recipe for this experiment and budget; `data` replaces what the experiment names.

    The expected metric comes from so many further `seeds`. With `send`, runs are made elsewhere
    (executors.py), and `work` is a folder that all machines see.
    """
    import_optuna()
    run = partial(_run_histories, work, data, send)
    limits = budget.limits
    scarce = limits or {"rounds": float(experiment.rounds)}
    search = TrialSearch(experiment, choose_bit_widths(methods, limits), scarce, work, run)
    search.train_all(told)
    best = search.choose_best()
    rounds = count_affordable_rounds(best, search.total_costs, scarce, experiment.rounds)
    if not rounds:
        axis = max(scarce, key=lambda each: best.estimate_cost(each, 1, 1) / scarce[each])
        raise BadInput(
            f"--{axis} {scarce[axis]:g} does not pay for the search and one round"
            f" ({best.estimate_cost(axis, 1, 1):.3g} a round); raise it, or give an experiment with"
            " smaller rounds"
        )
    return _measure_advice(search, best, rounds, told, run, seeds)


def count_affordable_rounds(
    trial: Trial, spent: Mapping[str, float], limits: Mapping[str, float], most: int
) -> int:
    """Rounds that the rest of the budget pays for."""
    often = 1 / trial.experiment.engine.eval_every
    costs = {axis: trial.estimate_cost(axis, 1, often) for axis in limits}
    rounds = [(limit - spent[axis]) / costs[axis] for axis, limit in limits.items() if costs[axis]]
    return max(0, min([most, *(math.floor(r + 1e-9) for r in rounds)]))


def _run_histories(
    work: Path, data: Any, send: RemoteExecutor | None, jobs: Sequence[Job]
) -> list[tuple[RoundRecord, ...]]:
    """Of every experiment, on from what is in its folder."""
    if send is None:
        return [
            runs.run(experiment, folder, resume=True, data=data, allow_divergence=True).history
            for experiment, folder in jobs
        ]
    found = dict(run_experiments_remotely(send, jobs, work, [data] * len(jobs)))
    return [found[i] for i in range(len(jobs))]


def _measure_advice(
    search: TrialSearch, best: Trial, rounds: int, told: LineCallback, run: RunFunction, seeds: int
) -> Advice:
    """The best trial's run, and FedAvg's with an average at the own rate, on further seeds."""
    advised = best.experiment.with_tables({"rounds": rounds})
    plain = _make_plain_trial(search)
    told(f"{best.label}: {rounds} rounds on each of {seeds} further seeds")
    further = [search.experiment.seed + 1 + i for i in range(seeds)]
    jobs = [(advised.with_seed(seed), search.work / f"advised-{seed}") for seed in further]
    if best.label != plain.label:
        jobs += [
            (plain.experiment.with_seed(seed), search.work / f"plain-{seed}") for seed in further
        ]
    records = [
        build_cell_record(ArenaCell("", "", each.seed, {}, each), history)
        for (each, _), history in zip(jobs, run(jobs), strict=True)
    ]
    ends, plains = records[:seeds], records[seeds:]
    values = [r.final_value for r in ends if r.final_value is not None]
    others = _read_values_at_cost(plains, ends) or values
    sign = -1.0 if ends[0].lower else 1.0
    paired = len(values) == len(others)
    gains = [sign * (a - b) for a, b in zip(values, others, strict=True)] if paired else []
    return Advice(
        label=best.label,
        method=best.method,
        experiment=advised,
        metric=ends[0].metric,
        lower=ends[0].lower,
        expected=confidence_interval(values),
        plain_label=plain.label,
        plain=confidence_interval(others),
        gain=confidence_interval(gains),
        spent=search.total_costs,
        tried=tuple(_summarize_trial(t, ends[0].lower) for t in search.trials),
        untried=tuple(
            name
            for name in search.methods
            if name not in {*search.variants, *(t.method for t in search.trials)}
        ),
        edge=find_rate_edge(best, search.trials),
    )


def _make_plain_trial(search: TrialSearch) -> Trial:
    """FedAvg with an average at the experiment's own rate."""
    tables = search.methods.get(PLAIN_METHOD, METHODS[PLAIN_METHOD])
    experiment = search.build_experiment(tables, search.experiment.train.lr)
    return Trial(-1, PLAIN_METHOD, 1.0, experiment, search.work / "plain")


def _read_values_at_cost(plains: Sequence[CellRecord], ends: Sequence[CellRecord]) -> list[float]:
    """The metric of plain runs once they have spent the joules of the advised ones."""
    values = [
        plain.get_value_within("joules", end.cumulative_cost("joules")[-1] * (1 + 1e-9))
        for plain, end in zip(plains, ends, strict=False)
    ]
    return [value for value in values if value is not None]


def _summarize_trial(trial: Trial, lower: bool) -> TrialSummary:
    assert trial.record is not None
    score = score_course(trial.record)
    value = -score if lower else score
    known = value if math.isfinite(value) else None
    return TrialSummary(trial.label, trial.rounds, known, trial.total_cost("joules"))


def find_rate_edge(best: Trial, trials: Sequence[Trial]) -> str:
    """Whether the best trial's rate is the highest or lowest that was tried with its method."""
    tried = [t.multiple for t in trials if t.method == best.method]
    step = RATE_STEP**0.5
    if not any(multiple > best.multiple * step for multiple in tried):
        return "highest"
    return "" if any(multiple < best.multiple / step for multiple in tried) else "lowest"
