"""Client pieces of the user's own that tasks may name on Flower.

A message never causes an import: a task names such a piece as "module:Class", and a client builds
it only if its own process has registered that class before. Two things register: the recipe of the
local experiment file, and installed packages with the entry point "flrce.pieces".
"""

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from flrce.core.pieces import Recipe
from flrce.core.roles import ROLE_CLASSES, Compressor
from flrce.core.user_code import ENTRY_POINTS
from flrce.methods.registry import PIECES
from flrce.training.links import Link

#: role -> "module:Class" -> class
OWN_PIECES: dict[str, dict[str, type]] = {}


def name_class(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def find_own_class(role: str, name: Any) -> type | None:
    """The class that a message names, if this process registered it."""
    return OWN_PIECES.get(role, {}).get(name) if isinstance(name, str) else None


def find_own_name(role: str, kind: type) -> str | None:
    """The name by which a task may refer to a class."""
    name = name_class(kind)
    return name if find_own_class(role, name) is kind else None


def register_recipe_pieces(recipe: Recipe) -> None:
    """Register what clients need of a recipe that this process has built from its own settings."""
    chain = recipe.chain.links if recipe.chain is not None else ()
    client = [("link", link) for link in chain]
    client += [("augment", transform) for transform in recipe.augment]
    for role, piece in (*client, ("compressor", recipe.compressor)):
        for inner_role, inner in _list_nested_pieces(role, piece):
            _register_class(inner_role, type(inner))


def _list_nested_pieces(role: str, piece: Any) -> Iterator[tuple[str, Any]]:
    """A piece and those that it is made of, each with its role."""
    yield role, piece
    for f in fields(piece) if is_dataclass(piece) else ():
        value = getattr(piece, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _list_nested_pieces(find_inner_role(role, type(piece), f) or role, value)


def _register_class(role: str, kind: type) -> None:
    if kind not in PIECES.get(role, {}).values():
        OWN_PIECES.setdefault(role, {})[name_class(kind)] = kind


@cache
def register_installed_pieces() -> None:
    """Register links and compressors of installed packages; once per process."""
    for point in entry_points(group=ENTRY_POINTS):
        loaded = point.load()
        kinds = vars(loaded).values() if isinstance(loaded, ModuleType) else (loaded,)
        for kind in kinds:
            if inspect.isclass(kind) and not inspect.isabstract(kind):
                if issubclass(kind, Link) and kind is not Link:
                    _register_class("link", kind)
                elif issubclass(kind, Compressor):
                    _register_class("compressor", kind)


_BASES: dict[str, type] = {**ROLE_CLASSES, "link": Link}


def find_inner_role(role: str, kind: Any, f: "Field[Any]") -> str:
    """The role of the pieces that a field of class `kind` holds; "" if it holds none.

    The field's metadata names it ("piece"; True: the role of the whole), or its annotation is a
    base class: `inner: flrce.Selector`, `rules: tuple[flrce.StopRule, ...]`.
    """
    named = f.metadata.get("piece")
    if named:
        return named if isinstance(named, str) else role
    return _find_annotated_roles(kind).get(f.name, "") if isinstance(kind, type) else ""


@cache
def _find_annotated_roles(kind: type) -> Mapping[str, str]:
    try:
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError, AttributeError):  # a name that is imported for type checks only
        return {}
    roles = {name: _find_role(hint) for name, hint in hints.items()}
    return {name: role for name, role in roles.items() if role}


def _find_role(hint: Any) -> str:
    """The role of a base class in an annotation; "" if there is none."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return next((role for role, base in _BASES.items() if issubclass(hint, base)), "")
    return next((role for part in typing.get_args(hint) if (role := _find_role(part))), "")
