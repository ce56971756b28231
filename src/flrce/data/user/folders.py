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
from pathlib import Path
from typing import Any

import numpy as np

from flrce.core.files import format_path
from flrce.data.pool import assign_to_client, join_sources
from flrce.data.preprocessing import Preprocessing
from flrce.data.readers.images import IMAGE_FORMATS, list_class_images, load_images
from flrce.data.readers.leaf import build_character_source, read_leaf_users
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
#: whether a folder or file of this name is for tests
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), False),
    **dict.fromkeys(("test", "val", "valid", "validation"), True),
}


def from_folder(path: Path | str, **how: Any) -> Source:
    """Images, one folder per class; folders train and test above them are the data's own split."""
    folder = _require_folder(path)
    _refuse_for_images(how, folder)
    source = _read_image_splits(folder, how.get("size"))
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
        elif reader := FILE_READERS.get(entry.suffix.lower()):
            clients.append(assign_to_client(reader(entry, **how), entry.stem))
    if not clients:
        raise BadInput(
            f"{format_path(folder)} holds neither folders nor tables; give {FOLDER_FORMS}"
        )
    joined = join_sources(clients, name=str(named["name"]))
    return standardise_source(joined, format_path(folder)) if standardise else joined


def _list_client_files(entry: Path) -> list[Path]:
    """The files with samples of one client, which has a file or a folder."""
    inside = sorted(entry.iterdir()) if entry.is_dir() else [entry]
    suffixes = (*FILE_READERS, *IMAGE_FORMATS)
    return [file for file in inside if file.suffix.lower() in suffixes or file.is_dir()]


def _read_client_table(entry: Path, file: Path) -> ClientTable:
    """One of a client's csv files; one that is named test is for judging."""
    held = entry.is_dir() and SPLIT_NAMES.get(file.stem.lower(), False)
    client = entry.name if entry.is_dir() else entry.stem
    return ClientTable(client, read_table_cells(file), format_path(file), held)


def choose_folder_reader(folder: Path) -> Callable[..., Source]:
    """Which of the forms above a folder has, by where its images or tables lie."""
    below = _list_folders(folder)
    named = all(entry.name.lower() in SPLIT_NAMES for entry in below) and below
    return from_folder if named or any(map(_has_images, below)) else from_folders


def _list_folders(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _read_client_folder(folder: Path, how: Mapping[str, Any]) -> Source:
    """One client's folder: class folders of images, or tables, with or without a split."""
    files = [entry for entry in sorted(folder.iterdir()) if entry.suffix.lower() in FILE_READERS]
    if not files:
        _refuse_for_images(how, folder)
        return _read_image_splits(folder, how.get("size"))
    read = [FILE_READERS[entry.suffix.lower()](entry, **how) for entry in files]
    split = [SPLIT_NAMES.get(entry.stem.lower(), False) for entry in files]
    return join_sources(read, split if any(split) else ())


def _read_image_splits(folder: Path, size: int | None) -> Source:
    """Class folders of images, or train and test folders of them."""
    below = _list_folders(folder)
    held = [SPLIT_NAMES.get(entry.name.lower()) for entry in below]
    if not below or None in held or any(map(_has_images, below)):
        return _read_images(folder, size)
    parts = [_read_images(entry, size) for entry in below]
    return join_sources(parts, [bool(test) for test in held] if len(parts) > 1 else ())


def _read_images(folder: Path, size: int | None = None) -> Source:
    classes = list_class_images(folder)
    if not classes:
        raise BadInput(f"{format_path(folder)} has no folders of images; give {FOLDER_FORMS}")
    x, y = load_images(classes, False, folder.name, size=size)
    prepared = Preprocessing(resized=size is not None)
    return Source(folder.name, x, y, tuple(classes), scale=1 / 255, preprocessing=prepared)


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
    arrays = [found.get(name) for name in ("x", "y", "group", "test")]
    return from_arrays(*arrays, **{"name": path.stem, "where": where, **more, **how})


def from_leaf(path: Path | str, **how: Any) -> Source:
    """LEAF's json of any task, one file or a folder; files in train/ and test/ are its split.

    Texts in x with one character in y become token ids; numbers stay numbers.
    """
    path = Path(path)
    refuse_columns(how, "LEAF's json names its users itself")
    rows = read_leaf_users(path)
    given = {"name": path.stem, "where": format_path(path), **how}
    if all(isinstance(x[0], str) for _, x, _, _ in rows):
        return build_character_source(rows, str(given["name"]), format_path(path))
    x = [sample for _, samples, _, _ in rows for sample in samples]
    y = [label for _, _, labels, _ in rows for label in labels]
    sizes = [len(samples) for _, samples, _, _ in rows]
    group = np.repeat(np.array([user for user, *_ in rows], object), sizes)
    test = np.repeat([held for *_, held in rows], sizes)
    return from_arrays(x, y, group, test if test.any() else None, **given)


FILE_READERS: dict[str, Callable[..., Source]] = {
    ".csv": from_csv,
    ".tsv": from_csv,
    ".jsonl": from_jsonl,
    ".parquet": from_parquet,
    ".npz": from_npz,
}
