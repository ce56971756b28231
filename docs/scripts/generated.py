"""Tables of the reference that are made from the code: commands, settings, pieces, base classes.

The hook of mkdocs puts each in the place of its mark, `<!-- generated: commands -->`. To read one:
python docs/scripts/generated.py commands
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from flrce.cli import cli
from flrce.cli.pieces import describe_settings, summarize_piece
from flrce.config import sections
from flrce.config.experiment import Experiment
from flrce.core.roles import ROLE_CLASSES, Piece
from flrce.devices.cost_models import CostModel
from flrce.methods.registry import PIECES
from flrce.training.links import Link

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
BASES = {"every piece": Piece, **ROLE_CLASSES, "link": Link, "cost model": CostModel}
#: keys of [model] as experiment files have them; the fields have the names of run directories
FILE_KEYS = {"kept": "personal", "fixed": "frozen"}
NO_LIMIT = 1e6  # larger ones only keep absurd values out
NUMBERS = {"int": "integer", "float": "number", "str": "text", "bool": "true or false"}


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; pipes in cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |"
        for line in lines
    )


# commands


def list_commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from list_commands(command, *path, name)
        elif command is not None:
            yield " ".join([*path, name]), command


def describe_command(name: str, command: click.Command) -> str:
    """A heading, what the command does, its arguments and its options."""
    context = click.Context(command, info_name=f"flrce {name}")
    usage = " ".join(context.command.collect_usage_pieces(context))
    about = " ".join((command.help or "").replace("\b", "").split())
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and record[1] and "--help" not in record[0]:
            rows.append([f"`{record[0]}`", " ".join(record[1].split())])
    options = "\n\n" + table(["option", "what it does"], rows) if rows else ""
    return f"### flrce {name}\n\n`flrce {name} {usage}`\n\n{about}{options}\n"


def write_commands() -> str:
    """All commands, those of installed packages among them."""
    return "\n".join(describe_command(*item) for item in list_commands(cli.app))


# settings


def read_comments(section: type) -> dict[str, str]:
    """What the source says about each field: the comment above it, or behind it."""
    source = inspect.getsource(section)
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        behind = lines[node.end_lineno - 1].partition("  # ")[2]
        above: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("# "):
                break
            above.insert(0, line.strip().removeprefix("# "))
        comments[node.target.id] = behind or " ".join(above)
    return comments


def describe_type(annotation: Any) -> str:
    """The values of a field, in words of an experiment file."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        kinds = [describe_type(kind) for kind in get_args(annotation) if kind is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if hasattr(annotation, "__metadata__"):  # Annotated
        limits = [limit for data in annotation.__metadata__ for limit in describe_limits(data)]
        return " ".join([describe_type(get_args(annotation)[0]), *limits])
    if get_origin(annotation) is list:
        return "list"
    if get_origin(annotation) is dict:
        return "table"
    return NUMBERS.get(getattr(annotation, "__name__", ""), "any")


def describe_limits(data: Any) -> Iterator[str]:
    """`>= 0` and its like, of the annotations of a number."""
    for item in getattr(data, "metadata", [data]):
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            limit = getattr(item, name, None)
            if limit is not None and limit < NO_LIMIT:
                yield f"{sign} {limit:g}"


def describe_field(key: str, field: FieldInfo, comment: str) -> list[str]:
    """A row: the key, its values, its default, what it is."""
    limits = [limit for data in field.metadata for limit in describe_limits(data)]
    default = field.get_default(call_default_factory=True)
    shown = "" if default is None else f"`{json.dumps(default)}`"
    return [f"`{key}`", " ".join([describe_type(field.annotation), *limits]), shown, comment]


def write_settings() -> str:
    """The keys of an experiment file, by table."""
    groups: dict[str, type] = {"": Experiment}
    for name, field in Experiment.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, sections.Section):
            groups[name] = field.annotation
    parts = []
    for group, section in groups.items():
        comments = read_comments(section)
        rows = [
            describe_field(FILE_KEYS.get(key, key), field, comments.get(key, ""))
            for key, field in section.model_fields.items()
            if key not in groups
        ]
        head = f"### [{group}]" if group else "### At the top of the file"
        parts.append(f"{head}\n\n" + table(["key", "values", "default", "what it is"], rows) + "\n")
    return "\n".join(parts)


# pieces


def write_pieces() -> str:
    """Every shipped piece, by role: its name in files, its settings, what it does."""
    parts = []
    for role, pieces in PIECES.items():
        rows = []
        for name, piece in pieces.items():
            settings = ", ".join(describe_settings(piece))
            rows.append([f"`{name}`", settings and f"`{settings}`", summarize_piece(piece)])
        parts.append(
            f"### {role.capitalize()}\n\n"
            + table(["piece", "settings", "what it does"], rows)
            + "\n"
        )
    return "\n".join(parts)


# base classes


def write_roles() -> str:
    """Every method and property of every base class of pieces."""
    return "\n".join(describe_base(role, base) for role, base in BASES.items())


def describe_base(role: str, base: type) -> str:
    """One section: what the base class says, and a row for each of its own members."""
    about = " ".join((inspect.getdoc(base) or "").split())
    rows = []
    for name, member in vars(base).items():
        text = summarize_member(member)
        if (name.startswith("_") and name != "__call__") or not text:
            continue
        must = ", required" if name in getattr(base, "__abstractmethods__", ()) else ""
        rows.append([f"`{format_member(name, member)}`{must}", text])
    head = f"### {role.capitalize()}\n\n`{base.__name__}`: {about}\n\n"
    return head + table(["name", "what it is"], rows) + "\n"


def summarize_member(member: Any) -> str:
    """The first sentence on a method or property; "" of anything else."""
    if not callable(member) and type(member).__name__ not in ("default_property", "property"):
        return ""
    text = " ".join((getattr(member, "__doc__", "") or "").split())
    return re.split(r"(?<=\w[.)])\s+(?=[A-Z`])", text)[0]


def format_member(name: str, member: Any) -> str:
    """A method with the names of its arguments, or a property."""
    if not inspect.isfunction(member):
        return name
    return f"{name}({', '.join(list(inspect.signature(member).parameters)[1:])})"


WRITERS = {
    "commands": write_commands,
    "settings": write_settings,
    "pieces": write_pieces,
    "roles": write_roles,
}


def fill_marks(text: str) -> str:
    """A page with its marks replaced; a mark of an unknown table is a KeyError."""
    return MARK.sub(lambda found: WRITERS[found[1]](), text)


if __name__ == "__main__":
    print(WRITERS[sys.argv[1]]())
