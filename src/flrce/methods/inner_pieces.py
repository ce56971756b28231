"""Pieces within a piece: which fields hold some, and of which role."""

import typing
from collections.abc import Mapping
from dataclasses import Field
from functools import cache
from typing import Any

from flrce.core.roles import ROLE_CLASSES
from flrce.training.links import Link

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
    found = {name: _find_role(hint) for name, hint in hints.items()}
    return {name: role for name, role in found.items() if role}


def _find_role(hint: Any) -> str:
    """The role of a base class in an annotation; "" if there is none."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return next((role for role, base in _BASES.items() if issubclass(hint, base)), "")
    return next((role for part in typing.get_args(hint) if (role := _find_role(part))), "")
