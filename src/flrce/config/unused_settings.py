"""Settings of a recipe that change nothing beside the others: a price without the stop that asks
for it.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flrce.core.bounds import format_value
from flrce.core.pieces import Recipe
from flrce.errors import BadInput

RecipeFactory = Callable[[Mapping[str, Any]], Recipe]
TRIAL_VALUES = (0.5, 1, 2, 0.25, 3)  # values that may be tried in place of a given one


def refuse_unused_settings(
    name: str,
    given: Mapping[str, Any],
    keys: Mapping[str, inspect.Parameter],
    pieces: Mapping[str, Any],
    plain: RecipeFactory,
) -> None:
    """BadInput where one of the settings given could have any value and the recipe would be the
    same.

    Nobody has to say which settings go together: the recipe is made again with other values, and
    compared. `pieces` are those that the experiment puts in place of the recipe's.
    """

    def build_with_pieces(pieces: Mapping[str, Any], settings: Mapping[str, Any]) -> Recipe:
        return replace(plain(settings), **pieces)

    make = partial(build_with_pieces, pieces)
    for key in given:
        if _has_effect(key, given, keys, make):
            continue
        what = f"recipe.{key} = {format_value(given[key])} changes nothing here"
        for role in pieces:
            rest = {other: piece for other, piece in pieces.items() if other != role}
            if _has_effect(key, given, keys, partial(build_with_pieces, rest)):
                raise BadInput(
                    f"{what}: recipe.{role} takes the place of what it is about; drop one of them"
                )
        for other, value in _alternative_switches(given, keys):
            if other != key and _has_effect(key, {**given, other: value}, keys, make):
                text = str(value).lower() if isinstance(value, bool) else format_value(value)
                raise BadInput(
                    f"{what}: it goes with recipe.{other} = {text}; set that, or drop {key}"
                )
        for other in given:
            without = {name: value for name, value in given.items() if name != other}
            if other != key and _has_effect(key, without, keys, make):
                raise BadInput(
                    f"{what}: recipe.{other} = {format_value(given[other])} overrules it; drop one"
                    " of them"
                )
        raise BadInput(f"{what}; drop it, or see what it goes with: flrce recipes show {name}")


def _alternative_switches(
    given: Mapping[str, Any], keys: Mapping[str, inspect.Parameter]
) -> Iterator[tuple[str, Any]]:
    """Every other value of the settings that have few: yes or no, or one of some names."""
    for key, p in keys.items():
        now = given.get(key, p.default)
        if isinstance(p.default, bool) or typing.get_origin(p.annotation) is typing.Literal:
            yield from ((key, other) for other in _alternative_values(now, p.annotation))


def _has_effect(
    key: str, given: Mapping[str, Any], keys: Mapping[str, inspect.Parameter], make: RecipeFactory
) -> bool:
    """Whether another value of this setting would make another recipe."""
    here = _try_build(given, make)
    if here is None:
        return True
    if others := _alternative_values(given[key], keys[key].annotation):
        tried = [
            made
            for other in others
            if (made := _try_build({**given, key: other}, make)) is not None
        ]
        return any(other != here for other in tried) or not tried
    # a name: unfelt if it makes a difference by itself, but none beside the rest
    rest = {name: value for name, value in given.items() if name != key}
    return _try_build(rest, make) != here or _try_build({key: given[key]}, make) == _try_build(
        {}, make
    )


def _alternative_values(value: Any, kind: Any) -> list[Any]:
    """Other values of the same kind; none of names and lists, of which any may be wrong."""
    kinds = (
        typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, types.UnionType)
        else (kind,)
    )
    plain = {
        typing.get_args(each)[0] if typing.get_origin(each) is typing.Annotated else each
        for each in kinds
    }
    if bool in plain:
        return [not value]
    if float in plain:
        return [other for other in TRIAL_VALUES if other != value]
    if int in plain:
        return [other for other in (1, 2, 3, 0) if other != value]
    if any(typing.get_origin(each) is typing.Literal for each in kinds):
        names = [name for each in kinds for name in typing.get_args(each)]
        return [name for name in names if name != value]
    return []


def _try_build(given: Mapping[str, Any], make: RecipeFactory) -> Recipe | None:
    """The recipe of these settings; None where they do not go together."""
    try:
        return make(given)
    except (TypeError, ValueError, ArithmeticError):
        return None
