"""From names to pieces: the catalogue's recipes with pieces exchanged or tuned, as an experiment file writes them."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from flrce.bounds import Settings, settings, settings_of, shown
from flrce.errors import BadInput, brief, nearest
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
    chosen = dict(table)
    name = chosen.pop("name", "flrce")
    if not isinstance(name, str) or name not in CATALOGUE:
        raise BadInput(f"recipe.name = {shown(name)}: {nearest(brief(name, 60), CATALOGUE)}")
    pieces = {role: chosen.pop(role) for role in ROLES if role in chosen}
    minimum = chosen.pop("minimum", None)
    make = CATALOGUE[name]
    _known(chosen, name)
    try:
        recipe = make(**chosen, **local)
    except (TypeError, ValueError, ArithmeticError) as why:
        raise BadInput(f"recipe.{name}: {why}") from why
    recipe = replace(recipe, **{role: piece(role, wanted, local) for role, wanted in pieces.items()})
    minimum = recipe.minimum if minimum is None else minimum
    if type(minimum) is not int or not 1 <= minimum <= recipe.P:
        raise BadInput(f"recipe.minimum = {shown(minimum)}: must be an integer from 1 to per_round = {recipe.P}")
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
        raise BadInput(f'recipe.{role} = {shown(wanted)}: give a name, or a table with piece = "name"')
    if ":" in name:
        make = imported(name, f"recipe.{role}")
    elif name in PIECES[role]:
        make = PIECES[role][name]
    else:
        raise BadInput(f'recipe.{role} = {shown(name)}: {nearest(name[:60], PIECES[role])}, or "package.module:Class"')
    if role == "trainer":
        table = {key: local[key] for key in ("epochs", "batch", "lr") if key in local} | table
    wrapped = {f.name: piece(role, table[f.name]) for f in _fields(make) if f.metadata.get("piece") and f.name in table}
    try:
        why, values = settings_of(make).checked({**table, **wrapped})
        made = None if why else make(**values)
    except Exception as problem:  # a class of the user's may raise anything
        raise BadInput(f"recipe.{role} = {name!r}: {problem or type(problem).__name__}") from problem
    if why:
        raise BadInput(f"recipe.{role} = {name!r}: {why}")
    if not hasattr(made, SURFACE[role]):
        raise BadInput(f"recipe.{role} = {name!r} has no {SURFACE[role]!r}, so it is no {role}; see docs/extending.md")
    return made


def imported(path: str, where: str) -> Any:
    """The object that "package.module:name" names."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise BadInput(f'{where} = {shown(path)}: write "package.module:Class"')
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as why:
        raise BadInput(f"{where} = {path!r} cannot be imported: {why}; is it installed, or on PYTHONPATH?") from why
    except AttributeError as why:
        raise BadInput(f"{where} = {path!r}: {module} has no {name!r}") from why
    except Exception as why:  # a relative name, or a module that raises as it is read
        raise BadInput(f"{where} = {path!r} cannot be imported: {type(why).__name__}: {why}") from why


def _fields(make: Any) -> tuple[Any, ...]:
    return fields(make) if hasattr(make, "__dataclass_fields__") else ()


def _known(given: Mapping[str, Any], name: str) -> None:
    """BadInput unless these are settings of the recipe, each of its type."""
    valid = keys_of(CATALOGUE[name])
    for key in given:
        if key not in valid:
            hint = nearest(key[:60], [*valid, *ROLES, "minimum"])
            raise BadInput(f"recipe.{key[:60]} is no setting of {name}; {hint}")
    why, _ = _settings(name).checked(given)
    if why:
        raise BadInput(f"recipe.{why}")


@lru_cache
def _settings(name: str) -> Settings:
    return settings(name, {key: (p.annotation, p.default) for key, p in keys_of(CATALOGUE[name]).items()})
