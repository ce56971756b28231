"""Asynchronous successive halving over methods and learning rates.

A trial is a method at a rate. Every trial trains until it has spent the first rung, a small share
of the budget; of the trials on a rung the best third goes on to the next one, where its run
continues (Li et al., 2020). The trials of prior.py come first, then rates next to the best one;
where joules are limited, the best one with another batch, other epochs and fewer bits; then what
Optuna's tree-structured Parzen estimator proposes from all scores so far.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flrce.config.experiment import Experiment
from flrce.core.types import RoundRecord
from flrce.errors import BadInput
from flrce_arena.plan import ArenaCell, merge_tables
from flrce_arena.prior import FIRST_TRIALS, FOUR_BIT_COMPRESSOR
from flrce_arena.records import CellRecord, build_cell_record, load_cell_record, save_cell_record

BUDGET_AXES = ("joules", "bytes", "seconds")
SEARCH_BUDGET_SHARE = 0.24  # of the budget, at most
FIRST_RUNG_SHARE = (
    0.02  # of the budget, for one trial; each further rung is REDUCTION_FACTOR times that
)
MIN_RUNG_ROUNDS = 3  # of the first rung, where the budget pays for MIN_TRIALS such trials
MIN_TRIALS = 4
REDUCTION_FACTOR = 3  # one of so many trials of a rung climbs to the next
TIE_MARGIN = 0.015  # of the metric: scores that differ by less are equal
PROBE_ROUNDS = 2  # after which the costs of a round and of an evaluation are known
PARALLEL_TRIALS = 8  # that train at the same time, wherever they run
MAX_TRIALS = 40
PROPOSAL_DRAWS = 10  # of Optuna, for one that is not beside a rate that was tried
RATE_STEP = 3.0  # between neighbouring rates of a method
BATCH_STEP = 4  # times the experiment's own batch, for a trial that saves joules
Job = tuple[Experiment, Path]
RunFunction = Callable[[Sequence[Job]], list[tuple[RoundRecord, ...]]]


@dataclass(frozen=True)
class Trial:
    """A method at a rate, and how far it got."""

    number: int
    method: str
    multiple: float  # of the experiment's own rate
    experiment: Experiment
    folder: Path
    record: CellRecord | None = None
    scores: tuple[float, ...] = ()  # at each rung that it reached; more is better

    @property
    def label(self) -> str:
        return f"{self.method}, lr {self.experiment.train.lr:g}"

    @property
    def rounds(self) -> int:
        return len(self.record.rounds["t"]) if self.record else 0

    @property
    def last_score(self) -> float:
        return self.scores[-1] if self.scores else -math.inf

    @property
    def is_finite(self) -> bool:
        """Whether it has a model at all."""
        return math.isfinite(self.last_score)

    def total_cost(self, axis: str) -> float:
        if self.record is None or not self.rounds:
            return 0.0
        return float(self.record.cumulative_cost(axis)[-1])

    def estimate_cost(self, axis: str, rounds: int, evaluations: float) -> float:
        """What further rounds cost, from the rounds so far; evaluations are booked too."""
        assert self.record is not None
        each = np.diff(self.record.cumulative_cost(axis), prepend=0.0)
        evaluated = np.array([value is not None for value in self.record.rounds["value"]])
        if evaluated.all() or not evaluated.any():
            return float(rounds * each.mean())
        plain = float(each[~evaluated].mean())
        return rounds * plain + evaluations * max(float(each[evaluated].mean()) - plain, 0.0)


@dataclass(frozen=True)
class Step:
    """A trial that trains up to a rung."""

    trial: Trial
    rung: int
    rounds: int
    cost: Mapping[str, float]  # what it is expected to add


class TrialSearch:
    """The trials so far, and which of them train next."""

    def __init__(
        self,
        experiment: Experiment,
        methods: Mapping[str, Mapping[str, Any]],
        limits: Mapping[str, float],
        work: Path,
        run: RunFunction,
    ) -> None:
        self.experiment, self.limits, self.work, self.run = experiment, dict(limits), work, run
        self.methods = {name: tables for name, tables in methods.items() if self.can_train(tables)}
        if not self.methods:
            raise BadInput(
                "this experiment can be trained with none of the methods that advise tries;"
                " see flrce recipes list"
            )
        self.trials: list[Trial] = []
        # methods with another batch, other epochs or fewer bits -> multiple of the rate
        self.variants: dict[str, float] = {}

    @property
    def total_costs(self) -> dict[str, float]:
        return {
            axis: sum(t.total_cost(axis) for t in self.trials)
            for axis in dict.fromkeys((*BUDGET_AXES, *self.limits))
        }

    def can_train(self, tables: Mapping[str, Any]) -> bool:
        try:
            self.build_experiment(tables, self.experiment.train.lr).build_recipe()
        except BadInput:
            return False
        return True

    def build_experiment(self, tables: Mapping[str, Any], lr: float) -> Experiment:
        base = self.experiment.to_tables()
        base.pop("recipe", None)
        changed = merge_tables(base, tables, {"train": {"lr": lr}})
        return Experiment.from_tables(changed, trust=self.experiment.get_trust)

    def make_trial(self, number: int, method: str, multiple: float) -> Trial:
        lr = float(f"{multiple * self.experiment.train.lr:.3g}")
        experiment = self.build_experiment(self.methods[method], lr)
        return Trial(number, method, multiple, experiment, self.work / f"trial-{number}")

    def train_all(self, tell: Callable[[str], None]) -> None:
        """Train until no step fits into what the search may spend."""
        method, multiple = self._list_prior()[0]
        self._run_steps([Step(self.make_trial(0, method, multiple), -1, PROBE_ROUNDS, {})])
        while steps := self._choose_steps():
            for step in steps:
                tell(f"{step.trial.label}: to round {step.rounds}")
            self._run_steps(steps)

    def choose_best(self) -> Trial:
        """The best of those that got furthest.

        A rate above which none was tried gives way to the next lower one: it may be too high for a
        longer run.
        """
        best = self._find_leader()
        rates = sorted(
            (t for t in self.trials if t.method == best.method), key=lambda t: t.multiple
        )
        place = rates.index(best)
        return rates[place - 1] if place and place == len(rates) - 1 else best

    def _find_leader(self) -> Trial:
        top = max(len(t.scores) for t in self.trials)
        if not top:  # the budget paid for the first rounds of one trial only
            return self.trials[0]
        return self._rank_trials([t for t in self.trials if len(t.scores) == top], top - 1)[0]

    def _rank_trials(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """By their scores on a rung, the best first; of equals, the lowest rate and first method.

        A small difference is noise, and high rates learn fast first and overfit later.
        """
        order = list(self.methods)
        rest, ranked = list(trials), []
        while rest:
            best = max(t.scores[rung] for t in rest)
            margin = TIE_MARGIN * max(1.0, abs(best)) if math.isfinite(best) else 0.0
            equals = [t for t in rest if t.scores[rung] >= best - margin]
            ranked.append(min(equals, key=lambda t: (t.multiple, order.index(t.method))))
            rest.remove(ranked[-1])
        return ranked

    def _rung_share(self, rung: int) -> float:
        """The share of the budget, and of the rounds, that a trial may spend up to a rung."""
        known = self.trials[0]
        rounds = [
            limit / max(known.estimate_cost(axis, 1, 0), 1e-300)
            for axis, limit in self.limits.items()
        ]
        least = MIN_RUNG_ROUNDS / min([*rounds, self.experiment.rounds])
        first = min(max(least, FIRST_RUNG_SHARE), SEARCH_BUDGET_SHARE / MIN_TRIALS)
        return min(first * float(REDUCTION_FACTOR**rung), 1.0)

    def _choose_steps(self) -> list[Step]:
        """Up to PARALLEL_TRIALS steps that the rest of the search's budget pays for."""
        left = {
            axis: SEARCH_BUDGET_SHARE * limit - self.total_costs[axis]
            for axis, limit in self.limits.items()
        }
        for trials in (self._list_first_trials(), self._list_climbing(), self._list_proposed()):
            steps: list[Step] = []
            for trial in trials:
                step = self._plan_step(trial)
                if any(self._count_needed(step, axis) > left[axis] for axis in left):
                    break
                left = {axis: left[axis] - step.cost[axis] for axis in left}
                steps.append(step)
                if len(steps) == PARALLEL_TRIALS:
                    break
            if steps:
                return steps
        return []

    def _count_needed(self, step: Step, axis: str) -> float:
        """What must be left for a step to be taken.

        What one of three new trials climbs with is kept, once there are a few to compare. A variant
        has its first rung, where it is compared, paid for before its costs are tried.
        """
        is_variant = step.trial.method in self.variants
        if step.rung < 0:
            return step.cost[axis] + self._rung_share(0) * self.limits[axis]
        if step.rung == 0 and step.trial.number >= MIN_TRIALS and not is_variant:
            return step.cost[axis] * (1 + REDUCTION_FACTOR)
        return step.cost[axis]

    def _list_first_trials(self) -> list[Trial]:
        """What comes before any climb: the trials of prior.py, then rates next to the best one."""
        new = [entry for entry in self._list_prior() if self._is_new(*entry)]
        new = new or [entry for entry in self._list_neighbours() if self._is_new(*entry)]
        new = new or self._list_variants()
        unscored = [t for t in self.trials if not t.scores]
        room = MAX_TRIALS - len(self.trials)
        return unscored + [
            self.make_trial(len(self.trials) + i, *entry) for i, entry in enumerate(new[:room])
        ]

    def _list_climbing(self) -> list[Trial]:
        """The best third of every rung, the highest rung first."""
        climbing: list[Trial] = []
        top = max(len(t.scores) for t in self.trials)
        for rung in range(top - 1, -1, -1):
            if self._rung_share(rung) >= 1.0:
                continue
            on_rung = self._rank_trials([t for t in self.trials if len(t.scores) > rung], rung)
            best = on_rung[: len(on_rung) // REDUCTION_FACTOR]
            climbing += [t for t in best if len(t.scores) == rung + 1 and t.is_finite]
        return climbing

    def _list_proposed(self) -> list[Trial]:
        """One more, by Optuna."""
        number = len(self.trials)
        if number >= MAX_TRIALS:
            return []
        for draw in range(PROPOSAL_DRAWS):
            seed = self.experiment.seed + number + MAX_TRIALS * draw
            method, multiple = propose_with_optuna(self.trials, list(self.methods), seed)
            if self._is_new(method, multiple):
                return [self.make_trial(number, method, multiple)]
        return []

    def _list_prior(self) -> list[tuple[str, float]]:
        planned = [entry for entry in FIRST_TRIALS if entry[0] in self.methods]
        return planned or [(name, 1.0) for name in self.methods]

    def _list_neighbours(self) -> list[tuple[str, float]]:
        """The rates next to the best trial's, so that none at an edge is taken unseen."""
        best = self._find_leader()
        multiples = (best.multiple * RATE_STEP, best.multiple / RATE_STEP)
        return [(best.method, multiple) for multiple in multiples] if best.is_finite else []

    def _list_variants(self) -> list[tuple[str, float]]:
        """The best trial with what may save joules: a larger batch, fewer epochs, fewer bits.

        Rungs are shares of the joules, so that scores there compare by what joules bring.
        """
        if "joules" not in self.limits or any(not t.scores for t in self.trials):
            return []
        if not self.variants:
            self._make_variants(self._find_leader())
        tried = {t.method for t in self.trials}
        return [entry for entry in self.variants.items() if entry[0] not in tried]

    def _make_variants(self, best: Trial) -> None:
        own, tables = best.experiment.train, self.methods[best.method]
        changes: dict[str, dict[str, Any]] = {
            f"batch {BATCH_STEP * own.batch}": {"train": {"batch": BATCH_STEP * own.batch}}
        }
        if own.epochs > 1 and own.steps is None:
            changes[f"{own.epochs // 2} epochs"] = {"train": {"epochs": own.epochs // 2}}
        if not {"compressor", "preset"} & set(tables["recipe"]):
            changes["4-bit uploads"] = {"recipe": FOUR_BIT_COMPRESSOR}
        made = {
            f"{best.method}, {name}": merge_tables(tables, new) for name, new in changes.items()
        }
        made = {name: new for name, new in made.items() if self.can_train(new)}
        self.methods |= made
        self.variants = dict.fromkeys(made, best.multiple)

    def _is_new(self, method: str, multiple: float) -> bool:
        near = (t.multiple for t in self.trials if t.method == method)
        return all(abs(math.log(m / multiple)) > math.log(RATE_STEP) / 2 for m in near)

    def _plan_step(self, trial: Trial) -> Step:
        """The next rung of a trial, in rounds. What a round of a variant costs is tried first."""
        known = trial if trial.rounds else self.trials[0]
        if trial.method in self.variants and not trial.rounds:
            cost = {axis: known.estimate_cost(axis, PROBE_ROUNDS, 1) for axis in self.limits}
            return Step(trial, -1, PROBE_ROUNDS, cost)
        rung = len(trial.scores)
        share = self._rung_share(rung)
        affordable = [
            (share * limit - known.estimate_cost(axis, 0, rung + 1))
            / max(known.estimate_cost(axis, 1, 0), 1e-300)
            for axis, limit in self.limits.items()
        ]
        most = share * self.experiment.rounds
        if trial.method in self.variants:  # as many joules as the others have on this rung
            most *= self.trials[0].estimate_cost("joules", 1, 0)
            most /= max(known.estimate_cost("joules", 1, 0), 1e-300)
        wanted = math.floor(min([*affordable, most]) + 0.5)
        rounds = min(max(wanted, trial.rounds, 1), self.experiment.rounds)
        added = rounds - trial.rounds
        cost = {axis: known.estimate_cost(axis, added, min(added, 1)) for axis in self.limits}
        return Step(trial, rung, rounds, cost)

    def _run_steps(self, steps: Sequence[Step]) -> None:
        """Train every step's trial; what it brought is kept beside its folder.

        A search that goes on after an interruption decides by the same figures.
        """
        jobs: list[tuple[ArenaCell, Path, Path]] = []
        for step in steps:
            tables = step.trial.experiment.to_tables()
            once = {"engine": {"eval_every": max(self.experiment.rounds, 2)}, "rounds": step.rounds}
            experiment = step.trial.experiment.with_tables(merge_tables(tables, once))
            cell = ArenaCell("", step.trial.label, experiment.seed, {}, experiment)
            kept = self.work / f"{step.trial.folder.name}-{step.rounds}.json"
            jobs.append((cell, step.trial.folder, kept))
        missing = [job for job in jobs if not is_recorded(job[2], job[0])]
        histories = self.run([(cell.experiment, folder) for cell, folder, _ in missing])
        for (cell, _, kept), history in zip(missing, histories, strict=True):
            save_cell_record(build_cell_record(cell, history), kept)
        for step, (_, _, kept) in zip(steps, jobs, strict=True):
            record = load_cell_record(kept)
            scores = step.trial.scores
            if step.rung >= 0:
                scores = (*scores, score_course(record))
            trained = replace(step.trial, record=record, scores=scores)
            self.trials[step.trial.number : step.trial.number + 1] = [trained]


def is_recorded(path: Path, cell: ArenaCell) -> bool:
    return path.exists() and load_cell_record(path).fingerprint == cell.fingerprint


def score_course(record: CellRecord) -> float:
    """The metric of its last model; more is better, -inf where it diverged."""
    value = record.final_value
    if value is None or not math.isfinite(value):
        return -math.inf
    return -value if record.lower else value


def choose_bit_widths(
    methods: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    """Where bytes are limited, uploads of 4 bits for every method without a code of its own."""
    if "bytes" not in limits:
        return dict(methods)
    return {
        name: tables
        if {"compressor", "preset"} & set(tables["recipe"])
        else merge_tables(tables, {"recipe": FOUR_BIT_COMPRESSOR})
        for name, tables in methods.items()
    }


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as why:
        raise BadInput("flrce advise needs optuna; pip install 'optuna>=4.3'") from why
    return optuna


def propose_with_optuna(
    trials: Sequence[Trial], methods: Sequence[str], seed: int
) -> tuple[str, float]:
    """A method and a rate that TPE expects to do well, from the scores of all trials."""
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    multiples = [trial.multiple for trial in trials]
    low, high = min(multiples) / RATE_STEP, max(multiples) * RATE_STEP
    space: dict[str, Any] = {
        "method": optuna.distributions.CategoricalDistribution(list(methods)),
        "multiple": optuna.distributions.FloatDistribution(low, high, log=True),
    }
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED,
                params={"method": trial.method, "multiple": trial.multiple},
                distributions=space,
                intermediate_values={
                    rung: score if math.isfinite(score) else math.nan
                    for rung, score in enumerate(trial.scores)
                },
            )
        )
    asked = study.ask(space)
    return asked.params["method"], float(f"{asked.params['multiple']:.3g}")
