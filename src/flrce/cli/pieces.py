"""flrce pieces list [ROLE] | show NAME"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flrce.cli.terminal import print_table
from flrce.errors import BadInput, suggest_name
from flrce.methods.registry import PIECES

#: role -> where an experiment file names a piece of this role
SETTING_OF_ROLE = {
    "link": "train.update",
    "schedule": "a link's rate",
    "augment": "train.augment",
    "availability": "fleet.availability",
    "battery": "fleet.battery",
    "costs": "fleet.costs",
    "trouble": "data.trouble",
}


def list_pieces(role: str | None, as_json: bool) -> None:
    """Every piece by role, with its settings and its file."""
    if role is not None and role not in PIECES:
        raise BadInput(f"role {role!r} is unknown; {suggest_name(role, PIECES)}")
    rows = []
    for each, name, piece in iter_pieces(role):
        settings = ", ".join(describe_settings(piece))
        rows.append([each, name, settings, summarize_piece(piece), find_source(piece)])
    print_table("pieces", ("role", "name", "settings", "summary", "file"), rows, as_json)


def show_piece(name: str, as_json: bool) -> None:
    """One piece: its settings with their types and defaults, its documentation and its file.

    Two roles may use the same name; both are shown.
    """
    matches = [(role, piece) for role, each, piece in iter_pieces() if each == name]
    if not matches:
        names = sorted({each for _, each, _ in iter_pieces()})
        raise BadInput(f"piece {name!r} is unknown; {suggest_name(name, names)}")
    described = [describe_piece_class(role, name, piece) for role, piece in matches]
    if as_json:
        return print(json.dumps(described, indent=1))
    for shown in described:
        print(f"{name}: {shown['class']}, a piece of the role {shown['role']}")
        print(f"named in an experiment file under {shown['setting']}; defined in {shown['file']}")
        print(f"\n{shown['documentation']}\n")
        rows = [[each["name"], each["type"], each["default"]] for each in shown["settings"]]
        if rows:
            print_table("settings", ("setting", "type", "default"), rows)


def iter_pieces(role: str | None = None) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(role, short name, class or function) of every registered piece."""
    for each, names in PIECES.items():
        if role in (None, each):
            for name, piece in names.items():
                yield each, name, piece


def describe_piece_class(role: str, name: str, piece: Callable[..., Any]) -> dict[str, Any]:
    """What `show` prints, as plain data."""
    return {
        "role": role,
        "name": name,
        "class": piece.__name__,
        "setting": SETTING_OF_ROLE.get(role, f"recipe.{role}"),
        "file": find_source(piece),
        "documentation": inspect.getdoc(piece) or "",
        "settings": [
            {"name": key, "type": format_type(field.annotation), "default": format_default(field)}
            for key, field in list_parameters(piece).items()
        ],
    }


def describe_settings(piece: Callable[..., Any]) -> list[str]:
    """Each setting of a piece with its default, such as "bits = 4"."""
    return [
        key if field.default is field.empty else f"{key} = {format_default(field)}"
        for key, field in list_parameters(piece).items()
    ]


def list_parameters(piece: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The settings of a piece: its fields, or its parameters where a function makes it."""
    if dataclasses.is_dataclass(piece):
        hidden = {f.name for f in dataclasses.fields(piece) if not f.init}
    else:
        hidden = set()
    return {key: p for key, p in inspect.signature(piece).parameters.items() if key not in hidden}


def format_default(parameter: inspect.Parameter) -> str:
    """The default as an experiment file would write it; "required" where there is none."""
    default = parameter.default
    if default is parameter.empty:
        return "required"
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "made for each piece"
    return f'"{default}"' if isinstance(default, str) else str(default)


def format_type(annotation: Any) -> str:
    """A type without its module and bounds."""
    if annotation is inspect.Parameter.empty:
        return ""
    if hasattr(annotation, "__metadata__"):
        plain = getattr(annotation, "__origin__", annotation)
    else:
        plain = annotation
    return getattr(plain, "__name__", None) or str(plain).replace("typing.", "")


def summarize_piece(piece: Callable[..., Any]) -> str:
    """The first sentence of a piece's documentation."""
    text = " ".join((inspect.getdoc(piece) or "").split("\n\n")[0].split())
    return re.split(r"(?<!et al)\. ", text)[0].rstrip(".:")


def find_source(piece: Callable[..., Any]) -> str:
    """The file that defines a piece, from the package's folder."""
    file = Path(inspect.getsourcefile(inspect.unwrap(piece)) or "")
    package = Path(__file__).parent.parent
    return str(file.relative_to(package)) if file.is_relative_to(package) else str(file)
