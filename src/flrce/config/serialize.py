"""A recipe made in Python as tables of an experiment file, which can be stored and resumed."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from flrce.config.compose import RECIPE_FLAGS, build_local_settings, compose_recipe
from flrce.core.pieces import Recipe
from flrce.core.roles import ROLES
from flrce.errors import BadInput
from flrce.methods.own_pieces import find_inner_role
from flrce.methods.registry import PIECES
from flrce.training.update_chain import UpdateChain

#: class -> its name in run directories, which a renaming must not change: a resumed run compares
#: them
STORED_CLASSES = ("AnyOf",)  # had no short name when run directories first named them
STORED_NAMES = {"WrappedSelector": "Theirs", "WrappedAggregator": "TheirSum"}


def serialize_recipe(recipe: Recipe) -> dict[str, Any]:
    """`per_round`, `recipe`, `train` and `model.kept`; BadInput if they do not make it again."""
    recipe = recipe if recipe.update is not None else replace(recipe, update=UpdateChain())
    name = recipe.name or "custom"
    table: dict[str, Any] = {"name": name, "base": "fedavg", "minimum": recipe.minimum}
    for role in list_roles(recipe):
        table[role] = serialize_piece(role, getattr(recipe, role), True)
    table |= {flag: True for flag in RECIPE_FLAGS if getattr(recipe, flag)}
    work = {"epochs": recipe.work.epochs, "batch": recipe.work.batch, "steps": recipe.work.steps}
    train: dict[str, Any] = {key: value for key, value in work.items() if value is not None}
    train |= {"update": [serialize_piece("link", link, own=True) for link in recipe.update.links]}
    if recipe.augment:
        train["augment"] = [serialize_piece("augment", each, own=True) for each in recipe.augment]
    tables: dict[str, Any] = {"per_round": recipe.P, "recipe": table, "train": train}
    patterns = {"kept": recipe.personal, "fixed": recipe.frozen}
    model = {key: list(value) for key, value in patterns.items() if value}
    _verify_round_trip(recipe, tables, model)
    return tables | ({"model": model} if model else {})


def list_roles(recipe: Recipe) -> tuple[str, ...]:
    """The roles that a run directory names. A dense downlink is left out, as before."""
    return tuple(role for role in ROLES if role != "downlink" or not recipe.downlink.is_dense)


def serialize_piece(role: str, piece: Any, own: bool = False) -> dict[str, Any]:
    """A piece as an experiment file writes it: its short name and its fields.

    One that has no short name goes by its class; with `own`, by "package.module:Class", which can
    be read again.
    """
    kind = type(piece)
    stored = STORED_NAMES.get(kind.__name__, kind.__name__)
    there = f"{kind.__module__}:{kind.__qualname__}" if own else stored
    names = (name for name, make in PIECES[role].items() if make is kind)
    name = there if kind.__name__ in STORED_CLASSES else next(names, there)
    table: dict[str, Any] = {"piece": name}
    for f in fields(piece) if is_dataclass(piece) else ():
        value = getattr(piece, f.name)
        inside = (find_inner_role(role, kind, f) or role) if own else role
        if is_dataclass(value):
            table[f.name] = serialize_piece(inside, value, own)
        elif isinstance(value, tuple):
            table[f.name] = [
                serialize_piece(inside, item, own) if is_dataclass(item) else item for item in value
            ]
        elif isinstance(value, str | int | float | bool):
            table[f.name] = value
    return table


def _verify_round_trip(recipe: Recipe, tables: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """BadInput unless the tables make the same recipe."""
    remedy = (
        "pieces are frozen dataclasses of numbers, names and pieces, in a module that can be"
        " imported"
    )
    try:
        local = {"P": recipe.P, **build_local_settings(tables["train"])}
        personal, frozen = tuple(model.get("kept", ())), tuple(model.get("fixed", ()))
        again = compose_recipe(tables["recipe"], local, {}, personal, frozen)
    except BadInput as why:
        raise BadInput(f"this recipe cannot be written down: {why}; {remedy}") from why
    again = replace(again, name=recipe.name)
    if again != recipe:
        names = [f.name for f in fields(recipe)]
        changed = ", ".join(n for n in names if getattr(again, n) != getattr(recipe, n))
        raise BadInput(
            f"this recipe cannot be written down: {changed} would not be the same; {remedy}"
        )
