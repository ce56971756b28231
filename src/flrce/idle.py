"""Settings of a recipe that change nothing beside the others: a price without the stop that asks for it."""

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flrce.bounds import shown
from flrce.errors import BadInput
from flrce.pieces import Recipe

Make = Callable[[Mapping[str, Any]], Recipe]
OTHERS = (0.5, 1, 2, 0.25, 3)  # values that may be tried in place of a given one


def refuse(
    name: str, given: Mapping[str, Any], keys: Mapping[str, inspect.Parameter], pieces: Mapping[str, Any], plain: Make
) -> None:
    """BadInput where one of the settings given could have any value and the recipe would be the same.

    Nobody has to say which settings go together: the recipe is made again with other values, and compared. `pieces`
    are those that the experiment puts in place of the recipe's.
    """

    def put(pieces: Mapping[str, Any], settings: Mapping[str, Any]) -> Recipe:
        return replace(plain(settings), **pieces)

    make = partial(put, pieces)
    for key in given:
        if _felt(key, given, keys, make):
            continue
        what = f"recipe.{key} = {shown(given[key])} changes nothing here"
        for role in pieces:
            rest = {other: piece for other, piece in pieces.items() if other != role}
            if _felt(key, given, keys, partial(put, rest)):
                raise BadInput(f"{what}: recipe.{role} takes the place of what it is about; drop one of them")
        for other, value in _switches(given, keys):
            if other != key and _felt(key, {**given, other: value}, keys, make):
                text = str(value).lower() if isinstance(value, bool) else shown(value)
                raise BadInput(f"{what}: it goes with recipe.{other} = {text}; set that, or drop {key}")
        for other in given:
            without = {name: value for name, value in given.items() if name != other}
            if other != key and _felt(key, without, keys, make):
                raise BadInput(f"{what}: recipe.{other} = {shown(given[other])} overrules it; drop one of them")
        raise BadInput(f"{what}; drop it, or see what it goes with: flrce recipes show {name}")


def _switches(given: Mapping[str, Any], keys: Mapping[str, inspect.Parameter]) -> Iterator[tuple[str, Any]]:
    """Every other value of the settings that have few: yes or no, or one of some names."""
    for key, p in keys.items():
        now = given.get(key, p.default)
        if isinstance(p.default, bool) or typing.get_origin(p.annotation) is typing.Literal:
            yield from ((key, other) for other in _others(now, p.annotation))


def _felt(key: str, given: Mapping[str, Any], keys: Mapping[str, inspect.Parameter], make: Make) -> bool:
    """Whether another value of this setting would make another recipe."""
    here = _made(given, make)
    if here is None:
        return True
    if others := _others(given[key], keys[key].annotation):
        tried = [made for other in others if (made := _made({**given, key: other}, make)) is not None]
        return any(other != here for other in tried) or not tried
    # a name: unfelt if it makes a difference by itself, but none beside the rest
    rest = {name: value for name, value in given.items() if name != key}
    return _made(rest, make) != here or _made({key: given[key]}, make) == _made({}, make)


def _others(value: Any, kind: Any) -> list[Any]:
    """Other values of the same kind; none of names and lists, of which any may be wrong."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    plain = {typing.get_args(each)[0] if typing.get_origin(each) is typing.Annotated else each for each in kinds}
    if bool in plain:
        return [not value]
    if float in plain:
        return [other for other in OTHERS if other != value]
    if int in plain:
        return [other for other in (1, 2, 3, 0) if other != value]
    if any(typing.get_origin(each) is typing.Literal for each in kinds):
        names = [name for each in kinds for name in typing.get_args(each)]
        return [name for name in names if name != value]
    return []


def _made(given: Mapping[str, Any], make: Make) -> Recipe | None:
    """The recipe of these settings; None where they do not go together."""
    try:
        return make(given)
    except (TypeError, ValueError, ArithmeticError):
        return None
