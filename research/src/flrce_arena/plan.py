"""What an arena compares: methods x tasks x seeds, and one rule by which everybody's settings are
chosen.

A plan is TOML. `[tasks.NAME]` and `[methods.NAME]` are pieces of an experiment file; a cell is a
task with a method's keys laid over it. A method named like a recipe need not say which one it is.
`[tuning]` gives every method the same settings to try, on seeds that are not among those it is
judged by. `[without.METHOD]` says on which tasks it is not run, and why.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from flrce.config.experiment import Experiment, read_toml
from flrce.config.recipe_names import PUBLISHED_RECIPES
from flrce.core.bounds import format_value
from flrce.core.pieces import NeverStop
from flrce.core.roles import StopRule
from flrce.core.user_code import Trust, apply_trust, current_trust, trust_file
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.methods.catalogue.recipes import CATALOGUE

EXAMPLE_NAMES = {"methods": "fedavg", "tasks": "digits"}  # an example of what is in a table
# engine settings in which the machines of one arena may differ
MACHINE_SETTINGS = ("workers", "device", "kernel", "updates")
#: younger than the first arenas: these had none
LATER_SETTINGS = (
    *(("data", "features"), ("data", "text"), ("data", "buckets"), ("model", "lowrank")),
    *(("fleet", "network"), ("fleet", "costs"), ("fleet", "interval")),
)
#: removed since: records of then had them, without a value
REMOVED_SETTINGS = (("fleet", "presence"),)
PlanEntryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,59}$")]
PositiveShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
SeedNumber = Annotated[int, Field(ge=0, lt=2**63)]
PositiveMultiple = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FEW_VALUES = Field(min_length=1, max_length=50)
TunedSettings = dict[str, Any]  # "train.lr" -> 0.1
MAX_SETTINGS = 1000  # combinations that a method may try on a task
MAX_CELLS = 100_000  # runs of one arena


class TuningGrid(BaseModel):
    """Every method tries every combination of `grid` and `times` on `seeds`, and is judged with the
    best at the end.

    `grid` has values, `times` multiples of what the task and the method say themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: dict[str, Annotated[list[Any], FEW_VALUES]] = Field(default_factory=dict)
    times: dict[str, Annotated[list[PositiveMultiple], FEW_VALUES]] = Field(default_factory=dict)
    seeds: Annotated[tuple[SeedNumber, ...], Field(min_length=1)] = (0,)
    share: PositiveShare = 1.0  # of a task's rounds

    def list_settings(self, own: Mapping[str, Any]) -> list[TunedSettings]:
        """Every combination for an experiment with such tables; one empty one where nothing is
        tried.
        """
        tried: dict[str, list[Any]] = dict(self.grid)
        for key, multiples in self.times.items():
            value = _look_up_key(own, key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise BadInput(
                    f"tuning.times: {format_one_line(key, 60)} is no number here"
                    f" ({format_value(value)}); use tuning.grid, or set it"
                )
            tried[key] = [float(f"{multiple * value:.3g}") for multiple in multiples]
        points = itertools.product(*tried.values())
        return [dict(zip(tried, values, strict=True)) for values in points]

    @property
    def count_settings(self) -> int:
        """How many settings a method tries; nothing is expanded to count them."""
        return math.prod(len(values) for values in {**self.grid, **self.times}.values())

    @model_validator(mode="after")
    def _few_combinations(self) -> "TuningGrid":
        if self.count_settings > MAX_SETTINGS:
            raise ValueError(
                f"{format_one_line(self.count_settings, 40)} combinations of settings for each"
                f" method and task, at most {MAX_SETTINGS} are tried; give fewer keys or values"
            )
        return self

    @property
    def has_choice(self) -> bool:
        return any(len(values) > 1 for values in (*self.grid.values(), *self.times.values()))


def _explain_plan_error(error: ValidationError) -> str:
    """The first problem, as `key = value: rule`."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "plan"
    rule = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        place = place.removesuffix(".[key]")
        rule = (
            "a name has letters, digits, spaces and . _ + -, begins with a letter or digit and has"
            " at most 60 characters; rename it"
        )
    if first["type"] == "dict_type":
        example = f"[{place}.{EXAMPLE_NAMES.get(place, 'name')}]"
        rule = f"is a table, with one for each, such as {example}"
    given = "" if first["type"] == "missing" else f" = {format_value(first['input'])}"
    return f"{place}{given}: {rule}"


class ArenaPlan(BaseModel):
    """An arena, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: Annotated[tuple[SeedNumber, ...], Field(min_length=1)] = (1, 2, 3, 4, 5)
    reference: PlanEntryName = "fedavg"  # whose costs are the budgets' measure
    budgets: Annotated[tuple[PositiveShare, ...], Field(min_length=1)] = (0.25, 0.5, 1.0)
    tuning: TuningGrid = TuningGrid()
    # rules to replay on every run: see `build_stop_rules`
    stops: dict[PlanEntryName, dict[str, Any]] = Field(default_factory=dict)
    # Ray's or submitit's own settings
    cluster: dict[str, str | int | float | bool] = Field(default_factory=dict)
    tasks: Annotated[dict[PlanEntryName, dict[str, Any]], Field(min_length=1)]
    methods: Annotated[dict[PlanEntryName, dict[str, Any]], Field(min_length=1)]
    # method -> task -> why it is not run there
    without: dict[PlanEntryName, dict[PlanEntryName, str]] = Field(default_factory=dict)
    _trust: Trust = PrivateAttr(default_factory=current_trust)

    @property
    def get_trust(self) -> Trust:
        """Where modules that it names may be imported from."""
        return self._trust

    @staticmethod
    def load(path: Path) -> "ArenaPlan":
        tables = read_toml(path, "give an arena's plan (TOML)")
        return ArenaPlan.from_tables(tables, str(path), trust_file(str(path.parent.absolute())))

    @staticmethod
    def from_tables(
        tables: Mapping[str, Any], where: str = "plan", trust: Trust | None = None
    ) -> "ArenaPlan":
        """BadInput naming the entry where something is wrong, before anything runs."""
        try:
            with apply_trust(trust or current_trust()):
                plan = ArenaPlan.model_validate(dict(tables))
        except ValidationError as why:
            raise BadInput(f"{where}: {_explain_plan_error(why)}") from why
        if plan.reference not in plan.methods:
            raise BadInput(
                f"{where}: reference = {plan.reference!r} is not among the methods; add it or name"
                " another"
            )
        if common := set(plan.seeds) & set(plan.tuning.seeds) if plan.tuning.has_choice else set():
            raise BadInput(
                f"{where}: seed {min(common)} is used for tuning and for judging; keep them apart"
            )
        plan.validate_excluded_tasks(where)
        plan.check_size(where)
        for task, method in iterate_task_methods(plan):
            try:
                for tried in plan.list_settings(task, method):
                    plan.build_cell(task, method, plan.seeds[0], tried).experiment.build_recipe()
            except BadInput as why:
                raise BadInput(f"{where}: methods.{method} on tasks.{task}: {why}") from why
        plan.build_stop_rules(where)
        return plan

    def check_size(self, where: str) -> None:
        """BadInput where the plan has more runs than anybody can make, before any is looked at."""
        tuning = self.tuning
        trials = tuning.count_settings * len(tuning.seeds) if tuning.has_choice else 0
        cells = len(self.tasks) * len(self.methods) * (len(self.seeds) + trials)
        if cells > MAX_CELLS:
            raise BadInput(
                f"{where}: {cells} runs, at most {MAX_CELLS}; name fewer tasks, methods, seeds or"
                " settings"
            )

    def validate_excluded_tasks(self, where: str) -> None:
        for method, tasks in self.without.items():
            if method not in self.methods:
                hint = suggest_name(method, self.methods)
                raise BadInput(f"{where}: without.{method} is no method of this plan; {hint}")
            for task in tasks:
                if task not in self.tasks:
                    hint = suggest_name(task, self.tasks)
                    raise BadInput(f"{where}: without.{method}.{task} is no task; {hint}")
        if self.reference in self.without:
            raise BadInput(
                f"{where}: without.{self.reference}: the reference must run on every task"
            )

    def build_stop_rules(self, where: str = "plan") -> dict[str, StopRule]:
        """`[stops.NAME]` is a piece of an experiment file too: what would end such a run."""
        found: dict[str, StopRule] = {}
        for name, tables in self.stops.items():
            try:
                found[name] = Experiment.from_tables(tables, trust=self._trust).build_recipe().stop
            except BadInput as why:
                raise BadInput(f"{where}: stops.{name}: {why}") from why
            if isinstance(found[name], NeverStop):
                raise BadInput(
                    f"{where}: stops.{name} never stops; give it a [stop] table, or a recipe with a"
                    " rule"
                )
        return found

    def list_settings(self, task: str, method: str) -> list[TunedSettings]:
        """What a method may be judged with on a task."""
        tables = self._merge_method_tables(task, method)
        experiment = Experiment.from_tables(tables, trust=self._trust)
        return self.tuning.list_settings(experiment.model_dump())

    def list_tuning_cells(self, task: str, method: str) -> list["ArenaCell"]:
        """What is run to choose a method's settings; nothing where there is no choice."""
        settings = self.list_settings(task, method)
        if len(settings) < 2:
            return []
        return [
            self.build_cell(task, method, seed, tried, self.tuning.share)
            for tried in settings
            for seed in self.tuning.seeds
        ]

    def list_evaluation_cells(
        self, task: str, method: str, tried: TunedSettings
    ) -> list["ArenaCell"]:
        """What a method is judged by, with its settings chosen."""
        return [self.build_cell(task, method, seed, tried) for seed in self.seeds]

    def build_cell(
        self, task: str, method: str, seed: int, tried: TunedSettings, share: float = 1.0
    ) -> "ArenaCell":
        settings = (_nest_value(key, value) for key, value in tried.items())
        tables = merge_tables(self._merge_method_tables(task, method), *settings)
        experiment = Experiment.from_tables(tables, trust=self._trust).with_seed(seed)
        if share < 1:
            rounds = max(1, round(share * experiment.rounds))
            experiment = experiment.with_tables({"rounds": rounds})
        return ArenaCell(task, method, seed, tried, experiment)

    def _merge_method_tables(self, task: str, method: str) -> dict[str, Any]:
        own, named = self.methods[method], {}
        if method in CATALOGUE and "name" not in own.get("recipe", {}):
            named = {"recipe": {"name": method}}
        return merge_tables(self.tasks[task], named, own)


@dataclass(frozen=True)
class ArenaCell:
    """One run of the arena."""

    task: str
    method: str
    seed: int
    tried: TunedSettings
    experiment: Experiment

    @property
    def fingerprint(self) -> str:
        """Of what decides the result."""
        tables = self.experiment.model_dump(mode="json")
        for key in MACHINE_SETTINGS:
            tables["engine"].pop(key, None)
        for section, key in LATER_SETTINGS:
            if tables[section][key] is None:
                del tables[section][key]
        for section, key in REMOVED_SETTINGS:
            tables[section][key] = None
        recipe = tables["recipe"]
        if recipe["name"] in PUBLISHED_RECIPES and recipe.get("preset") == "default":
            del recipe["preset"]  # records of before the preset was written down
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        return f"{self.task}/{self.method}/{self.seed}-{self.fingerprint[:12]}"

    @property
    def label(self) -> str:
        settings = [f"{key.rpartition('.')[2]} {value}" for key, value in self.tried.items()]
        return ", ".join([f"{self.method} on {self.task}", f"seed {self.seed}", *settings])


def merge_tables(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables laid over each other, the later on top.

    >>> merge_tables({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            below = found.get(key)
            nested = isinstance(value, Mapping) and isinstance(below, Mapping)
            found[key] = merge_tables(below, value) if nested else value  # type: ignore[arg-type]
    return found


def _nest_value(key: str, value: Any) -> dict[str, Any]:
    """ "train.lr" -> {"train": {"lr": value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def _look_up_key(tables: Mapping[str, Any], key: str) -> Any:
    """What _nested would lay something over; None: nothing."""
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def iterate_task_methods(plan: ArenaPlan) -> Iterator[tuple[str, str]]:
    """(task, method) of what is run, tasks in turn."""
    for task, method in itertools.product(plan.tasks, plan.methods):
        if task not in plan.without.get(method, {}):
            yield task, method
