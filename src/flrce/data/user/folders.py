"""Folders of one's own: a folder per class of images, a folder or a file per client.

FOLDER/CLASS/*.png                        images by class
FOLDER/train/CLASS/*.png  FOLDER/test/... the same with a split of its own
FOLDER/CLIENT/CLASS/*.png                 images by client and class; train and test may lie between
FOLDER/CLIENT/*.csv, FOLDER/CLIENT.csv
    tables or arrays (npz, parquet, jsonl) by client; test.csv is the test split
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flrce.core.files import format_path
from flrce.data.pool import assign_to_client, join_sources
from flrce.data.preprocessing import Preprocessing
from flrce.data.readers.images import IMAGE_FORMATS, list_class_images, load_images
from flrce.data.sources import Source
from flrce.data.user.arrays import from_arrays, refuse_columns, standardise_source
from flrce.data.user.tables import (
    ClientTable,
    from_csv,
    from_jsonl,
    from_parquet,
    join_tables,
    read_table_cells,
)
from flrce.errors import BadInput
from flrce.formats import npz

FOLDER_FORMS = (
    "one folder a class (FOLDER/CLASS/*.png), or one folder or file a client (FOLDER/CLIENT/...,"
    " FOLDER/CLIENT.csv)"
)
SPLIT_NAMES = {
    "train": False,
    "training": False,
    "test": True,
    "val": True,
    "valid": True,
    "validation": True,
}


def from_folder(path: Path | str, **how: Any) -> Source:
    """Images, one folder a class; with train and test folders above, the data's own split. Needs
    Pillow.
    """
    folder = _require_folder(path)
    _refuse_for_images(how, folder)
    parts = _read_splits(folder, partial(_read_images, size=how.get("size")))
    source = join_sources(
        [part for part, _ in parts], [held for _, held in parts] if len(parts) > 1 else ()
    )
    return replace(source, name=str(how.get("name", folder.name)))


def from_folders(path: Path | str, **how: Any) -> Source:
    """One folder or one file a client; each may bring its own test split."""
    folder = _require_folder(path)
    named = {"name": folder.name, **how}
    below = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    files = [(entry, file) for entry in below for file in _list_client_files(entry)]
    if files and all(file.suffix.lower() in (".csv", ".tsv") for _, file in files):
        if "size" in how:
            raise BadInput(
                f"data.size is about folders of images, {format_path(folder)} holds tables; drop it"
            )
        tables = [_read_client_table(entry, file) for entry, file in files]
        return join_tables(tables, **{"where": format_path(folder), **named})
    clients: list[Source] = []
    standardise = how.pop("standardise", False)
    for entry in below:
        if entry.is_dir():
            clients.append(assign_to_client(_read_client_folder(entry, how), entry.name))
        elif entry.suffix.lower() in FILE_READERS:
            clients.append(
                assign_to_client(FILE_READERS[entry.suffix.lower()](entry, how), entry.stem)
            )
    if not clients:
        raise BadInput(
            f"{format_path(folder)} holds neither folders nor tables; give {FOLDER_FORMS}"
        )
    joined = join_sources(clients, name=str(named["name"]))
    return standardise_source(joined, format_path(folder)) if standardise else joined


def _list_client_files(entry: Path) -> list[Path]:
    """The files with samples of one client, which has a file or a folder."""
    inside = sorted(entry.iterdir()) if entry.is_dir() else [entry]
    return [
        file
        for file in inside
        if file.suffix.lower() in (*FILE_READERS, *IMAGE_FORMATS) or file.is_dir()
    ]


def _read_client_table(entry: Path, file: Path) -> ClientTable:
    """One of a client's csv files; one that is named test is for judging."""
    held = entry.is_dir() and SPLIT_NAMES.get(file.stem.lower(), False)
    client = entry.name if entry.is_dir() else entry.stem
    return ClientTable(client, read_table_cells(file), format_path(file), held)


def choose_folder_reader(folder: Path) -> Callable[..., Source]:
    """Which of the forms above a folder has, by where its images or tables lie."""
    below = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".")
    ]
    named = all(entry.name.lower() in SPLIT_NAMES for entry in below) and below
    if named or any(_has_images(entry) for entry in below):
        return from_folder
    return from_folders


def _read_client_folder(folder: Path, how: Mapping[str, Any]) -> Source:
    """One client's folder: class folders of images, or tables, with or without a split."""
    files = [entry for entry in sorted(folder.iterdir()) if entry.suffix.lower() in FILE_READERS]
    if not files:
        _refuse_for_images(how, folder)
        parts = _read_splits(folder, partial(_read_images, size=how.get("size")))
        return join_sources(
            [part for part, _ in parts], [held for _, held in parts] if len(parts) > 1 else ()
        )
    read = [FILE_READERS[entry.suffix.lower()](entry, how) for entry in files]
    split = [SPLIT_NAMES.get(entry.stem.lower(), False) for entry in files]
    return join_sources(read, split if any(split) else ())


def _read_splits(folder: Path, read: Callable[[Path], Source]) -> list[tuple[Source, bool]]:
    below = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".")
    ]
    if (
        below
        and all(entry.name.lower() in SPLIT_NAMES for entry in below)
        and not any(map(_has_images, below))
    ):
        return [(read(entry), SPLIT_NAMES[entry.name.lower()]) for entry in below]
    return [(read(folder), False)]


def _read_images(folder: Path, size: int | None = None) -> Source:
    found = list_class_images(folder, depth=1)
    if not found:
        raise BadInput(f"{format_path(folder)} has no folders of images; give {FOLDER_FORMS}")
    x, y = load_images(found, False, folder.name, size=size)
    prepared = Preprocessing(resized=size is not None)
    return Source(folder.name, x, y, tuple(found), scale=1 / 255, preprocessing=prepared)


def _refuse_for_images(how: Mapping[str, Any], folder: Path) -> None:
    for key in how:
        if key not in ("size", "name"):
            raise BadInput(f"data.{key} is not for images, as {format_path(folder)} holds; drop it")


def _has_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in IMAGE_FORMATS for entry in folder.iterdir())


def _require_folder(path: Path | str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{format_path(folder)} is no folder; give {FOLDER_FORMS}")
    return folder


def from_npz(path: Path | str, **how: Any) -> Source:
    """An .npz with x, y, and optionally group, test and classes."""
    path = Path(path)
    where = f"data.path {str(path)!r}"
    if not os.path.exists(path):
        raise BadInput(f"{where} does not exist; give an .npz with x, y and optional group")
    refuse_columns(how, "an .npz has arrays called x, y, group and test instead")
    found = npz.load_npz(path, ("x", "y", "group", "test", "classes"), where)
    more = {"classes": [str(name) for name in found["classes"]]} if "classes" in found else {}
    return from_arrays(
        found.get("x"),
        found.get("y"),
        found.get("group"),
        found.get("test"),
        **{"name": path.stem, "where": where, **more, **how},
    )


FILE_READERS: dict[str, Callable[[Path, Mapping[str, Any]], Source]] = {
    ".csv": lambda path, how: from_csv(path, **how),
    ".tsv": lambda path, how: from_csv(path, **how),
    ".jsonl": lambda path, how: from_jsonl(path, **how),
    ".parquet": lambda path, how: from_parquet(path, **how),
    ".npz": lambda path, how: from_npz(path, **how),
}
