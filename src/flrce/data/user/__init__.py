"""Data of one's own, whatever it comes as: a path, arrays, a table, another library's data set."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, validate_regular
from flrce.data.readers.leaf import list_leaf_files
from flrce.data.sources import Source
from flrce.data.user.arrays import COLUMNS, from_arrays, refuse_columns
from flrce.data.user.clients import from_clients, from_split, holds_clients
from flrce.data.user.datasets import from_dataset, from_huggingface, has_named_items
from flrce.data.user.folders import (
    FILE_READERS,
    choose_folder_reader,
    from_folder,
    from_folders,
    from_leaf,
    from_npz,
)
from flrce.data.user.tables import from_columns, from_csv, from_jsonl, from_pandas, from_parquet
from flrce.data.user.text import from_text
from flrce.errors import BadInput, format_one_line

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
SUPPORTED_FORMS = (
    "an .npz, .csv, .parquet, .jsonl or LEAF .json file, a folder of images by class, or a folder"
    " by client"
)


def from_path(path: Path | str, **how: Any) -> Source:
    """A file or folder of any known form; its suffix, or where its images lie, says which."""
    path = Path(path)
    if not os.path.exists(path):
        raise BadInput(f"data.path {str(path)!r} does not exist; give {SUPPORTED_FORMS}")
    try:
        return _from_existing(path, how)
    except OSError as why:
        reason = why.strerror or format_one_line(why, 80)
        raise BadInput(
            f"data.path {str(path)!r} cannot be read ({reason}); give {SUPPORTED_FORMS}"
        ) from why


def _from_existing(path: Path, how: dict[str, Any]) -> Source:
    if not path.is_dir():
        validate_regular(path, f"give {SUPPORTED_FORMS}", f"data.path {str(path)!r}")
    if "tokenizer" in how and "text" not in how:
        return from_text(path, **how)
    _refuse_misplaced(path, how)
    if path.is_dir():
        return _from_known_folder(path, how)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return from_leaf(path, **how)
    if suffix in FILE_READERS:
        return FILE_READERS[suffix](path, **how)
    raise BadInput(f"data.path {format_path(path)!r} is of no known form; give {SUPPORTED_FORMS}")


def _refuse_misplaced(path: Path, how: dict[str, Any]) -> None:
    """BadInput where settings are about another form of data than the path's."""
    where = f"data.path {format_path(path)!r}"
    for key in ("length", "most", "least"):
        if key in how and not (key == "length" and "tokenizer" in how):
            raise BadInput(
                f"data.{key} is about text; set data.tokenizer to a language model, or drop it"
            )
    if not (path.is_dir() or path.suffix.lower() in TABLE_SUFFIXES):
        refuse_columns(how, f"{where} is none")
    if "size" in how and path.is_file():
        raise BadInput(f"data.size is about folders of images, {where} is none; drop it")


def _from_known_folder(path: Path, how: dict[str, Any]) -> Source:
    if (path / "meta.json").is_file():
        from flrce.data import cache

        for key in how:
            raise BadInput(
                f"data.{key} is not for a prepared data set, as data.path {format_path(path)!r} is;"
                " drop it"
            )
        return cache.load_prepared(path)
    reader = from_leaf if list_leaf_files(path) else choose_folder_reader(path)
    return reader(path, **how)


def to_source(data: Any, **how: Any) -> Source:
    """Whatever was handed over as `data`, as a source."""
    if isinstance(data, Source):
        return data
    if isinstance(data, (str, Path)):
        return from_path(data, **how)
    if "size" in how:
        raise BadInput(
            "data.size is about folders of images; resize what you hand over, or drop it"
        )
    _refuse_odd_collection(data)
    if hasattr(data, "column_names"):
        return from_huggingface(data, **how)
    if isinstance(data, dict) and "train" in data:
        theirs = hasattr(data["train"], "column_names")
        return from_huggingface(data, **how) if theirs else from_split(data, to_source, **how)
    if holds_clients(data):
        return from_clients(data, to_source, **how)
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return from_pandas(data, **how)
    if isinstance(data, dict) and not {"x", "y"} <= data.keys():
        columns = {str(key): get_column(value, str(key)) for key, value in data.items()}
        return from_columns(columns, **how)
    return _from_samples(data, how)


def _from_samples(data: Any, how: dict[str, Any]) -> Source:
    """Arrays by name or in order, or a data set of items."""
    _refuse_loader(data, "data")
    items = hasattr(data, "__getitem__") and not isinstance(data, (dict, tuple, list))
    if items and has_named_items(data):
        return from_dataset(data, **how)
    refuse_columns(how, f"a {type(data).__name__} has none")
    if isinstance(data, dict):
        return from_arrays(**{**data, **how})
    if isinstance(data, (tuple, list)) and 2 <= len(data) <= 4:
        return from_arrays(*data, **how)
    if hasattr(data, "__getitem__"):
        return from_dataset(data, **how)
    raise BadInput(
        f"data is a {type(data).__name__}; give (x, y), a torch or HuggingFace Dataset, a"
        " DataFrame, a path, a Source, or a list or dict with one of these per client"
    )


def _refuse_odd_collection(data: Any) -> None:
    """BadInput where a dict, list or tuple is empty, or holds no data sets of clients."""
    if not isinstance(data, dict | list | tuple):
        return
    if not len(data):
        raise BadInput("data is empty; give (x, y), or a list or dict with one data set per client")
    named = data if isinstance(data, dict) else dict(enumerate(data))
    for name, value in named.items():
        _refuse_loader(value, f"data[{name!a}]")
        if isinstance(data, dict) and isinstance(value, tuple) and len(value) != 2:
            what = f"data[{name!a}] is a tuple of {len(value)}"
            raise BadInput(f"{what}; give (x, y) for each client")


def _refuse_loader(value: Any, where: str) -> None:
    if hasattr(value, "batch_sampler") and hasattr(value, "dataset"):
        raise BadInput(
            f"{where} is a DataLoader; clients make their own batches: give its data set,"
            " loader.dataset"
        )


def get_column(value: Any, name: str) -> NDArray[Any]:
    """One column of a dict of columns."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as why:
        raise BadInput(f"data[{name!a}] is no column: {COLUMNS}") from why


__all__ = [
    "from_arrays",
    "from_clients",
    "from_columns",
    "from_csv",
    "from_dataset",
    "from_folder",
    "from_folders",
    "from_huggingface",
    "from_jsonl",
    "from_leaf",
    "from_npz",
    "from_pandas",
    "from_parquet",
    "from_path",
    "from_text",
    "holds_clients",
    "to_source",
]
