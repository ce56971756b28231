"""Values that Tab offers, through click's own shell completion."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from click import Context, Parameter
from click.shell_completion import CompletionItem

RUN_FILE = "rounds.jsonl"
MAX_RUN_DEPTH = 3  # folders below the current one in which runs are looked for

Completer = Callable[[Context, Parameter, str], list[CompletionItem]]


def complete_names(list_names: Callable[[], Iterable[str]]) -> Completer:
    """Offer names; of a list with commas, for its last part."""

    def complete(_: Context, __: Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        names = sorted(name for name in list_names() if name.startswith(last))
        return [CompletionItem(f"{before}{comma}{name}") for name in names]

    return complete


def complete_runs(_: Context, __: Parameter, typed: str) -> list[CompletionItem]:
    """Offer run directories below what is typed, or else let the shell complete folders."""
    place = Path(typed).parent if typed and not typed.endswith("/") else Path(typed or ".")
    files = (
        path
        for depth in range(1, MAX_RUN_DEPTH + 1)
        for path in place.glob("*/" * depth + RUN_FILE)
    )
    folders = sorted({str(path.parent) for path in files})
    known = [CompletionItem(folder) for folder in folders if folder.startswith(typed)]
    return known or [CompletionItem(typed, type="dir")]


def complete_settings(_: Context, __: Parameter, typed: str) -> list[CompletionItem]:
    """Offer the keys of an experiment, and after `key=` the values that it may have."""
    key, equals, value = typed.partition("=")
    if equals:
        offered = [f"{key}={each}" for each in list_values(key) if each.startswith(value)]
    else:
        offered = [f"{each}=" for each in list_keys() if each.startswith(key)]
    return [CompletionItem(each) for each in offered]


def list_keys() -> list[str]:
    """Every key of an experiment file, in its order."""
    from flrce.config.experiment import Experiment
    from flrce.core.roles import ROLES

    keys = []
    for name, field in Experiment.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        keys += [f"{name}.{each}" for each in inner] or [name]
    return [*keys, "recipe.name", "recipe.preset", *(f"recipe.{role}" for role in ROLES)]


def list_values(key: str) -> list[str]:
    """The names that a key may have; nothing where it takes numbers or text of the user's own."""
    from flrce.config.experiment import Experiment
    from flrce.data.partition import PARTITION_SCHEMES
    from flrce.data.sources import DATASET_NAMES
    from flrce.methods.registry import PIECES
    from flrce.models.nets import NETWORK_NAMES

    named: dict[str, Iterable[str]] = {
        "data.name": DATASET_NAMES,
        "data.partition": PARTITION_SCHEMES,
        "model.name": NETWORK_NAMES,
        "recipe.name": list_recipe_names(),
    }
    table, _, name = key.partition(".")
    if table == "recipe" and name in PIECES:
        return sorted(PIECES[name])
    if key in named:
        return sorted(named[key])
    section = Experiment.model_fields.get(table)
    fields = getattr(section.annotation, "model_fields", {}) if section else {}
    return list_literals(fields[name].annotation) if name in fields else []


def list_literals(annotation: Any) -> list[str]:
    """The values of a Literal, also of one among several types."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for inner in get_args(annotation) for value in list_literals(inner)]


def list_recipe_names() -> list[str]:
    from flrce.methods.catalogue.families import FAMILIES

    return [name for names in FAMILIES.values() for name in names]


def list_recipes_and_files() -> list[str]:
    """What --recipes takes: names, `all`, and the experiment files of this folder."""
    files = [name for name in os.listdir() if name.endswith(".toml")]
    return [*list_recipe_names(), "all", *files]


def list_piece_names() -> list[str]:
    from flrce.methods.registry import PIECES

    return sorted({name for names in PIECES.values() for name in names})


def list_roles() -> list[str]:
    from flrce.methods.registry import PIECES

    return list(PIECES)


def list_datasets() -> list[str]:
    from flrce.data.sources import DATASET_NAMES

    return list(DATASET_NAMES)
