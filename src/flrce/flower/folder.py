"""A run's folder on Flower: its settings, its clients, its model's arrays, and the ledger."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from flrce.config.compose import RECIPE_FLAGS
from flrce.config.experiment import read_toml
from flrce.config.serialize import list_roles, serialize_piece
from flrce.core.pieces import Recipe
from flrce.errors import BadInput
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.engine import FlowerEngine
from flrce.storage.disk import write_atomically
from flrce.storage.ledger import Ledger
from flrce.storage.seal import read_json_table, read_lines

FLOWER_PHRASES = {
    "another --out": "another state folder",
    "use --resume": "start again with the same state folder",
    "rounds = ": "num_rounds = ",
}


def open_ledger(
    folder: Path, experiment: str, partition: Mapping[str, Any] | None, engine: FlowerEngine
) -> Ledger:
    """The ledger; who the clients were at first stays as it was, and another model is refused."""
    old = folder / "partition.json"
    clients = list(engine.clients())
    found = {
        "data": "flower",
        "classes": list(engine.options.classes),
        "clients": clients,
        "train": [engine.count_samples(c) for c in clients],
    }
    before = read_json_table(old) if old.exists() else {}
    kept = (
        order_partition(partition, before.get("clients", clients))
        if partition is not None
        else before or found
    )
    _require_same_arrays(folder / "arrays.json", engine.template)
    ledger = Ledger(folder, experiment, kept, resume=True)
    try:
        write_atomically(
            folder / "arrays.json", json.dumps(_describe_arrays(engine.template), indent=1).encode()
        )
    except OSError as why:
        ledger.close()
        raise BadInput(
            f"{folder} cannot be written: {why.strerror or why}; make room, then start again"
        ) from why
    return ledger


@contextmanager
def translate_errors() -> Iterator[None]:
    """What the ledger says to users of the command line, as said to those of a strategy."""
    try:
        yield
    except BadInput as why:
        text = str(why)
        for ours, theirs in FLOWER_PHRASES.items():
            text = text.replace(ours, theirs)
        raise BadInput(text) from why


def _describe_arrays(template: ArrayTemplate) -> dict[str, list[Any]]:
    shapes = {slot.name: list(slot.shape) for slot in template.layout.slots}
    return {name: [dtype, shapes.get(name)] for name, dtype in template.dtypes.items()}


def _require_same_arrays(path: Path, template: ArrayTemplate) -> None:
    """BadInput where a folder was begun with arrays of other names, dtypes or shapes."""
    if not path.exists():
        return
    old, new = read_json_table(path), _describe_arrays(template)
    name = next((name for name in [*old, *new] if old.get(name) != new.get(name)), None)
    if name is not None:
        there, here = (" ".join(map(str, x[name])) if name in x else "missing" for x in (old, new))
        raise BadInput(
            f"{path.parent} holds another model: {name!r} is {there} there and {here} in"
            " initial_arrays; pass the same model, or another state folder"
        )


def order_partition(partition: Mapping[str, Any], clients: Sequence[str]) -> dict[str, Any]:
    """A partition's lists by client in the order of the run's rows; nodes connect in whatever order
    they like.
    """
    names = list(partition["clients"])
    place = {client: i for i, client in enumerate([*clients, *names])}
    rows = sorted(range(len(names)), key=lambda i: place[names[i]])
    by_client = ("clients", "train", "held", "labels")
    return {
        key: [value[i] for i in rows] if key in by_client else value
        for key, value in partition.items()
    }


def format_settings(recipe: Recipe, T: int, seed: int, **more: Any) -> str:
    """What decides a run's result, as the TOML of its state folder."""
    pieces = {role: serialize_piece(role, getattr(recipe, role)) for role in list_roles(recipe)}
    table = {"name": recipe.name or "custom", "minimum": recipe.minimum, **pieces}
    table |= {flag: True for flag in RECIPE_FLAGS if getattr(recipe, flag)}
    return tomli_w.dumps(
        {
            "seed": seed,
            "rounds": T,
            "per_round": recipe.P,
            **more,
            "recipe": table,
            "engine": {"name": "flower"},
        }
    )


def read_sample_counts(folder: Path) -> dict[str, int]:
    """Client -> the samples that it claimed last, in the rounds that are committed."""
    rows = (json.loads(line) for line in read_lines(folder / "clients.jsonl", {}))
    return {row["client"]: row["n"] for row in rows if row["n"]}


def read_setting(folder: Path | None, key: str) -> Any:
    """A setting of a run that is to go on, or None."""
    path = folder / "experiment.toml" if folder else None
    return read_toml(path).get(key) if path and path.exists() else None
