"""From names to pieces: the catalogue's recipes with pieces exchanged or tuned, as an experiment file writes them."""

import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from flrce.errors import BadInput, nearest
from flrce.names import PIECES
from flrce.pieces import ROLES, Recipe
from flrce.recipes import CATALOGUE
from flrce.stops.budget import AnyOf, Budget

SURFACE = {
    "selector": "select", "trainer": "assign", "submodel": "assign", "compressor": "encode",
    "aggregator": "__call__", "stop": "__call__", "average": "model",
}  # fmt: skip


def compose(table: Mapping[str, Any], local: Mapping[str, Any], budget: Mapping[str, Any]) -> Recipe:
    """A recipe from `[recipe]`: `name`, that recipe's own settings, pieces by role; plus the budgets of `[stop]`."""
    settings = dict(table)
    name = settings.pop("name", "flrce")
    if name not in CATALOGUE:
        raise BadInput(f"recipe.name = {name!r}: {nearest(str(name), CATALOGUE)}")
    pieces = {role: settings.pop(role) for role in ROLES if role in settings}
    minimum = settings.pop("minimum", None)
    make = CATALOGUE[name]
    _known(settings, keys_of(make), name)
    try:
        recipe = make(**settings, **local)
    except (TypeError, ValueError) as why:
        raise BadInput(f"recipe.{name}: {why}") from why
    recipe = replace(recipe, **{role: piece(role, wanted, local) for role, wanted in pieces.items()})
    minimum = recipe.minimum if minimum is None else minimum
    if type(minimum) is not int or not 1 <= minimum <= recipe.P:
        raise BadInput(f"recipe.minimum = {minimum!r}: must be an integer from 1 to per_round = {recipe.P}")
    if budget:
        recipe = replace(recipe, stop=AnyOf((recipe.stop, Budget(**budget))))
    return replace(recipe, minimum=minimum)


def keys_of(make: Any) -> dict[str, inspect.Parameter]:
    """A catalogue function's own settings, by name; what [train] and per_round set is not among them."""
    taken = {"P", "epochs", "batch", "lr", "local", "kw"}
    found: dict[str, inspect.Parameter] = {}
    for base in (make, *getattr(make, "bases", ())):
        found |= {k: p for k, p in inspect.signature(base).parameters.items() if k not in taken and k not in found}
    return found


def piece(role: str, wanted: Any, local: Mapping[str, Any] = {}) -> Any:
    """One piece from a name ("topk", "package.module:Class") or a table {piece = name, field = value, ...}."""
    table = {"piece": wanted} if isinstance(wanted, str) else dict(wanted) if isinstance(wanted, Mapping) else {}
    name = table.pop("piece", None)
    if not isinstance(name, str):
        raise BadInput(f'recipe.{role} = {wanted!r}: give a name, or a table with piece = "name"')
    if ":" in name:
        make = imported(name, f"recipe.{role}")
    elif name in PIECES[role]:
        make = PIECES[role][name]
    else:
        raise BadInput(f'recipe.{role} = {name!r}: {nearest(name, PIECES[role])}, or "package.module:Class"')
    if role == "trainer":
        table = {key: local[key] for key in ("epochs", "batch", "lr") if key in local} | table
    wrapped = {f.name: piece(role, table[f.name]) for f in _fields(make) if f.metadata.get("piece") and f.name in table}
    try:
        made = make(**{**table, **wrapped})
    except (TypeError, ValueError) as why:
        raise BadInput(f"recipe.{role} = {name!r}: {why}") from why
    if not hasattr(made, SURFACE[role]):
        raise BadInput(f"recipe.{role} = {name!r} has no {SURFACE[role]!r}, so it is no {role}; see docs/extending.md")
    return made


def imported(path: str, where: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as why:
        raise BadInput(f"{where} = {path!r} cannot be imported: {why}; is it installed, or on PYTHONPATH?") from why
    except AttributeError as why:
        raise BadInput(f"{where} = {path!r}: {module} has no {name!r}") from why


def _fields(make: Any) -> tuple[Any, ...]:
    return fields(make) if hasattr(make, "__dataclass_fields__") else ()


def _known(settings: Mapping[str, Any], valid: Mapping[str, inspect.Parameter], name: str) -> None:
    for key, value in settings.items():
        if key not in valid:
            raise BadInput(f"recipe.{key} is no setting of {name}; {nearest(key, [*valid, *ROLES, 'minimum'])}")
        kinds = typing.get_args(valid[key].annotation) or (valid[key].annotation,)
        kinds = tuple(k for k in kinds if k is not type(None))  # "not given", which a file cannot say
        kinds = (*kinds, int) if float in kinds else kinds
        if not (type(value) in kinds or any(k not in (int, float, str, bool) for k in kinds)):
            names = " or ".join(sorted({k.__name__ for k in kinds}))
            raise BadInput(f"recipe.{key} = {value!r}: must be {names}")
