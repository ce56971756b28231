"""Recipe names whose meaning changed: what a file means now, and what a stored run meant.

Until `frugal` was the default, a recipe without a name was `flrce`, and `flrce` without a preset
our default of then. Now `flrce` is the published method. An experiment says what it means: it
always holds the name, and the preset of `flrce`. A run directory that lacks them is from before,
and keeps its meaning.
"""

from collections.abc import Mapping
from typing import Any

from flrce.methods.catalogue.families import FORMER_NAMES
from flrce.methods.catalogue.recipes import OLD_PRESETS

DEFAULT_RECIPE = "frugal"
FLRCE_PRESETS = ("paper", "authors", "balanced", "frugal")  # that the default recipe has not
PUBLISHED_RECIPES = ("flrce", "flrce-no-stop")  # whose default was ours


def complete_recipe_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's table with the name and preset that it means now."""
    own = "psi" in table or table.get("preset") in FLRCE_PRESETS
    return _complete_table(table, "flrce" if own else DEFAULT_RECIPE, "paper")


def complete_stored_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a stored run with the name and the preset that it meant."""
    return _complete_table(table, "flrce", "default")


def explain_changed_name(table: Mapping[str, Any]) -> str:
    """One line where the name or preset of a recipe changed its meaning; "" elsewhere."""
    table = complete_recipe_table(table) | {"preset": table.get("preset")}
    name, preset = table.get("base", table["name"]), table["preset"]
    if isinstance(name, str) and name in FORMER_NAMES:
        return f'recipe "{name}" is now called "{FORMER_NAMES[name]}"; both names work'
    if name not in PUBLISHED_RECIPES:
        return ""
    if preset is None:
        return (
            f'recipe.name = "{name}" is the published method (preset = "paper"); the default recipe'
            f' is now "{DEFAULT_RECIPE}"; for the default of before, set preset = "default"'
        )
    if preset not in OLD_PRESETS or (preset == "hardened" and "psi" in table):
        return ""
    modern, points = OLD_PRESETS[preset]
    price = "" if points is None else f", points = {points:g}"
    return (
        f'recipe "{name}" with preset = "{preset}" keeps its pieces of before; with coded uploads'
        f' and downloads it is now {{name = "{DEFAULT_RECIPE}", preset = "{modern}"{price}}}'
    )


def _complete_table(table: Mapping[str, Any], name: str, preset: str) -> dict[str, Any]:
    table = {"name": name, **table}
    published = table.get("base", table["name"]) in PUBLISHED_RECIPES
    return {**table, "preset": preset} if published and "preset" not in table else table
