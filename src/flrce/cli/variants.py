"""What `flrce compare` runs: recipes by name, experiment files, and a grid of settings."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flrce.config.experiment import Experiment
from flrce.errors import BadInput
from flrce.methods.catalogue.families import CONTRIBUTED_METHODS, FORMER_NAMES, suggest_replacement
from flrce.methods.catalogue.lora import LORA_RECIPES
from flrce.methods.catalogue.recipes import CATALOGUE

MAX_VARIANTS = 200  # recipes and files times points of the grid


def list_variants(names: str) -> list[str]:
    """The recipes and experiment files that --recipes lists."""
    every = [name for name in CATALOGUE if name not in LORA_RECIPES]  # those want adapters
    wanted = every if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name.endswith(".toml"):
            continue
        if FORMER_NAMES.get(name, name) not in CATALOGUE:
            hint = suggest_replacement(name, CATALOGUE, CONTRIBUTED_METHODS)
            raise BadInput(f"--recipes {name!r} is unknown; {hint}")
    return wanted


def parse_grid(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """The points of a grid as overrides: `train.lr=0.01,0.03` gives two, two keys every pair."""
    axes = []
    for axis in grid:
        key, equals, values = axis.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not key.strip() or not equals or not all(listed):
            raise BadInput(f"--grid {axis!a} is no KEY=A,B; write for example train.lr=0.01,0.03")
        axes.append([f"{key.strip()}={value}" for value in listed])
    return list(itertools.product(*axes))


def load_variants(
    file: Path | None,
    names: str,
    grid: Sequence[str],
    load: Callable[[Path | None, tuple[str, ...]], Experiment],
) -> dict[str, Experiment]:
    """Label -> experiment, for every recipe or file at every point of the grid."""
    variants: dict[str, Experiment] = {}
    points = parse_grid(grid)
    for name in list_variants(names):
        for point in points:
            own = name.endswith(".toml")
            exp = load(Path(name) if own else file, point)
            if not own:
                exp = with_recipe(exp, name)
            label = ",".join([Path(name).stem if own else name, *point])
            label = re.sub(r"[^\w.=,+-]+", "_", label)
            if label in variants:
                raise BadInput(f"--recipes has {name!r} twice under one name; rename a file")
            variants[label] = exp
    if len(variants) > MAX_VARIANTS:
        raise BadInput(f"--grid makes {len(variants)} variants, {MAX_VARIANTS} at most; drop some")
    return variants


def with_recipe(experiment: Experiment, name: str) -> Experiment:
    """The experiment with a recipe of the catalogue."""
    settings = get_recipe_settings(experiment.recipe, name)
    return experiment.with_tables({"recipe": settings})


def get_recipe_settings(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """The experiment's own settings for the recipe that it names, else only the name."""
    return {**recipe, "name": name} if recipe.get("name", "flrce") == name else {"name": name}


def require_same_data(experiments: dict[str, Experiment]) -> None:
    """BadInput where files name different samples, whose scores say nothing about one another."""
    first = next(iter(experiments))
    for label, experiment in experiments.items():
        for key in ("name", "path"):
            ours, theirs = (getattr(e.data, key) for e in (experiments[first], experiment))
            if ours != theirs:
                raise BadInput(
                    f"--recipes: {first} and {label} differ in data.{key} ({ours!r}, {theirs!r});"
                    " compare runs of the same data"
                )
