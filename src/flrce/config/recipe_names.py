"""Names of recipes whose meaning changed: what an experiment file means now, and what a stored run
meant.

Until `frugal` was the default, `flrce` without a preset was our default of then. Now it is the
published method, and an experiment says so: it always holds the preset. A run directory whose
recipe has no preset is therefore from before, and keeps its meaning.
"""

from collections.abc import Mapping
from typing import Any

from flrce.methods.catalogue.recipes import OLD_PRESETS

PUBLISHED_RECIPES = ("flrce", "flrce-no-stop")  # whose default was ours


def name_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's table with the preset that it means now."""
    return {**table, "preset": "paper"} if _lacks_preset(table) else dict(table)


def keep_stored_meaning(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a stored run with the preset that it meant."""
    return {**table, "preset": "default"} if _lacks_preset(table) else dict(table)


def explain_changed_name(table: Mapping[str, Any]) -> str:
    """One line where the name or preset of a recipe changed its meaning; "" elsewhere."""
    name, preset = table.get("base", table.get("name")), table.get("preset")
    if name not in PUBLISHED_RECIPES:
        return ""
    if preset is None:
        return (
            f'recipe.name = "{name}" is the published method (preset = "paper"); the default recipe'
            ' is now "frugal"; for the default of before, set preset = "default"'
        )
    if preset not in OLD_PRESETS or (preset == "hardened" and "psi" in table):
        return ""
    modern, points = OLD_PRESETS[preset]
    price = "" if points is None else f", points = {points:g}"
    return (
        f'recipe "{name}" with preset = "{preset}" keeps its pieces of before; with coded uploads'
        f' and downloads it is now {{name = "frugal", preset = "{modern}"{price}}}'
    )


def _lacks_preset(table: Mapping[str, Any]) -> bool:
    return table.get("base", table.get("name")) in PUBLISHED_RECIPES and "preset" not in table
