"""What an arena compares: methods x tasks x seeds, and one rule by which everybody's settings are chosen.

A plan is TOML. `[tasks.NAME]` and `[methods.NAME]` are pieces of an experiment file; a cell is a task with a method's
keys laid over it. A method named like a recipe need not say which one it is. `[tuning]` gives every method the same
settings to try, on seeds that are not among those it is judged by.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flrce.config import Experiment, read_toml
from flrce.errors import BadInput
from flrce.pieces import Never, StopRule
from flrce.recipes import CATALOGUE

ELSEWHERE = ("workers", "device", "kernel")  # engine settings that change no result
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,59}$")]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Tried = dict[str, Any]  # "train.lr" -> 0.1


class Tuning(BaseModel):
    """Every method tries every combination of `grid` on `seeds`; the best at the end is what it is judged with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: dict[str, Annotated[list[Any], Field(min_length=1, max_length=50)]] = Field(default_factory=dict)
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)
    share: Share = 1.0  # of a task's rounds

    def settings(self) -> list[Tried]:
        """Every combination; one empty one where nothing is tried."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


class Plan(BaseModel):
    """An arena, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (1, 2, 3, 4, 5)
    reference: Name = "fedavg"  # whose costs are the budgets' measure
    budgets: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.25, 0.5, 1.0)
    tuning: Tuning = Tuning()
    stops: dict[Name, dict[str, Any]] = Field(default_factory=dict)  # rules to replay on every run: see `rules`
    cluster: dict[str, str | int | float | bool] = Field(default_factory=dict)  # Ray's or submitit's own settings
    tasks: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    methods: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]

    @staticmethod
    def load(path: Path) -> "Plan":
        return Plan.of(read_toml(path, "give an arena's plan (TOML)"), str(path))

    @staticmethod
    def of(tables: Mapping[str, Any], where: str = "plan") -> "Plan":
        """BadInput naming the entry where something is wrong, before anything runs."""
        try:
            plan = Plan.model_validate(dict(tables))
        except ValidationError as why:
            first = why.errors()[0]
            place = ".".join(map(str, first["loc"])) or "plan"
            raise BadInput(f"{where}: {place}: {first['msg']}") from why
        if plan.reference not in plan.methods:
            raise BadInput(f"{where}: reference = {plan.reference!r} is not among the methods; add it or name another")
        if common := set(plan.seeds) & set(plan.tuning.seeds) if plan.tuning.grid else set():
            raise BadInput(f"{where}: seed {min(common)} is used for tuning and for judging; keep them apart")
        for task, method in itertools.product(plan.tasks, plan.methods):
            for tried in plan.tuning.settings():
                try:
                    plan.cell(task, method, plan.seeds[0], tried).experiment.build_recipe()
                except BadInput as why:
                    raise BadInput(f"{where}: methods.{method} on tasks.{task}: {why}") from why
        plan.rules(where)
        return plan

    def rules(self, where: str = "plan") -> dict[str, StopRule]:
        """`[stops.NAME]` is a piece of an experiment file too: what would end such a run."""
        found: dict[str, StopRule] = {}
        for name, tables in self.stops.items():
            try:
                found[name] = Experiment.of(tables).build_recipe().stop
            except BadInput as why:
                raise BadInput(f"{where}: stops.{name}: {why}") from why
            if isinstance(found[name], Never):
                raise BadInput(f"{where}: stops.{name} never stops; give it a [stop] table, or a recipe with a rule")
        return found

    def trials(self, task: str, method: str) -> list["Cell"]:
        """What is run to choose a method's settings; nothing where there is no choice."""
        settings = self.tuning.settings()
        if len(settings) < 2:
            return []
        return [
            self.cell(task, method, seed, tried, self.tuning.share) for tried in settings for seed in self.tuning.seeds
        ]

    def judged(self, task: str, method: str, tried: Tried) -> list["Cell"]:
        """What a method is judged by, with its settings chosen."""
        return [self.cell(task, method, seed, tried) for seed in self.seeds]

    def cell(self, task: str, method: str, seed: int, tried: Tried, share: float = 1.0) -> "Cell":
        own = self.methods[method]
        named = {"recipe": {"name": method}} if method in CATALOGUE and "name" not in own.get("recipe", {}) else {}
        tables = merged(self.tasks[task], named, own, *(_nested(key, value) for key, value in tried.items()))
        experiment = Experiment.of(tables).with_seed(seed)
        if share < 1:
            rounds = max(1, round(share * experiment.rounds))
            experiment = Experiment.of(experiment.model_dump() | {"rounds": rounds})
        return Cell(task, method, seed, tried, experiment)


@dataclass(frozen=True)
class Cell:
    """One run of the arena."""

    task: str
    method: str
    seed: int
    tried: Tried
    experiment: Experiment

    @property
    def fingerprint(self) -> str:
        """Of what decides the result."""
        tables = self.experiment.model_dump(mode="json")
        tables["engine"] = {key: value for key, value in tables["engine"].items() if key not in ELSEWHERE}
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        return f"{self.task}/{self.method}/{self.seed}-{self.fingerprint[:12]}"

    @property
    def label(self) -> str:
        settings = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.tried.items())
        return f"{self.method} on {self.task}, seed {self.seed}" + (f", {settings}" if settings else "")


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables laid over each other, the later on top.

    >>> merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            below = found.get(key)
            nested = isinstance(value, Mapping) and isinstance(below, Mapping)
            found[key] = merged(below, value) if nested else value  # type: ignore[arg-type]
    return found


def _nested(key: str, value: Any) -> dict[str, Any]:
    """ "train.lr" -> {"train": {"lr": value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def pairs(plan: Plan, methods: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(task, method), tasks in turn, so that what there is of an unfinished arena compares everybody."""
    yield from itertools.product(plan.tasks, methods or plan.methods)
