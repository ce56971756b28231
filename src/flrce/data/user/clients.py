"""One data set per client: a list or dict of (x, y) pairs, tables, data sets or paths."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.pool import assign_to_client, join_sources
from flrce.data.sources import Source
from flrce.data.user.arrays import IMAGE_CHANNELS, from_arrays, standardise_source
from flrce.data.user.tables import ClientTable, join_tables, read_table_cells, to_columns
from flrce.errors import BadInput

SPLITS = {"train": False, "test": True}
log = logging.getLogger("flrce")


def holds_clients(data: Any) -> bool:
    """Whether data is a list or dict of clients' data sets, not of samples or columns.

    A pair is a client's where x and y have one entry a sample: x of two axes or more and y as long
    as x. A list of pairs of one axis each is one of samples (token ids and those that follow),
    unless their lengths differ.
    """
    if isinstance(data, Mapping):
        if not data or {"x", "y"} <= data.keys() or ("train" in data and not is_split(data)):
            return False
        return not is_split(data) and _all_clients(list(data.values()))
    return isinstance(data, list | tuple) and _all_clients(data)


def is_split(data: Any) -> bool:
    """Whether data is a dict of a training and a test set."""
    named = isinstance(data, Mapping) and set(data) == set(SPLITS)
    return named and all(map(_is_pair, data.values()))


def _all_clients(values: Sequence[Any]) -> bool:
    if len(values) == 0:
        return False
    if all(_is_table(value) or _is_path(value) for value in values):
        return True
    if not all(map(_is_pair, values)):
        return False
    shapes = {tuple(getattr(x, "shape", ())) for x, _ in values}
    if len(shapes) == 1 and len(first := next(iter(shapes))) == 3 and first[0] in IMAGE_CHANNELS:
        return False  # images, each with as many labels as it has channels
    sizes = [len(x) for x, _ in values]
    deep = all(
        isinstance(x[0], str) or (np.ndim(x[0]) >= 1 if isinstance(x, list) else np.ndim(x) >= 2)
        for x, _ in values
        if len(x)
    )
    return deep or len(set(sizes)) > 1


def _is_pair(value: Any) -> bool:
    """Whether value is (x, y) with one entry a sample in both."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    return all(_has_axis(part) for part in value) and len(value[0]) == len(value[1])


def _has_axis(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping):
        return False
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return listed and getattr(value, "ndim", 1) >= 1


def _is_path(value: Any) -> bool:
    """Whether value names a file or folder; a text that names none is a sample."""
    return isinstance(value, Path) or (isinstance(value, str) and os.path.exists(value))


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _is_table(value: Any) -> bool:
    """Whether value is a source, a DataFrame or a data set with items of its own."""
    frame = _is_frame(value)
    plain = isinstance(value, str | bytes | Mapping | tuple | list | np.ndarray) or hasattr(
        value, "__array__"
    )
    items = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not plain
    return isinstance(value, Source) or frame or items


def from_clients(data: Any, read: Callable[..., Source], **how: Any) -> Source:
    """A source in which each client has the samples given for it; `read` reads one data set."""
    named = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    clients = {str(name): value for name, value in named.items()}
    if len(clients) < len(named):
        raise BadInput("data names a client twice; give each a name of its own")
    log.info("data: %d clients, each with samples of its own", len(clients))
    if all(_is_frame(v) or _is_table_file(v) for v in clients.values()):
        tables = []
        for name, value in clients.items():
            cells: Any = read_table_cells(Path(value)) if _is_path(value) else to_columns(value)
            tables.append(ClientTable(name, cells, f"client {name!a}"))
        return _in_order(join_tables(tables, **how), list(clients))
    if not all(_is_pair(value) for value in clients.values()):
        standardise = how.pop("standardise", False)
        joined = join_sources(
            [assign_to_client(read(value, **how), name) for name, value in clients.items()],
            name="mine",
        )
        return standardise_source(joined, "data") if standardise else joined
    x, y = (_concatenate([value[i] for value in clients.values()], "xy"[i]) for i in (0, 1))
    sizes = [len(value[1]) for value in clients.values()]
    group = np.repeat(np.array(list(clients), object), sizes)
    source = from_arrays(x, y, group.astype(str), where="data", **how)
    return _in_order(source, list(clients))


def _is_table_file(value: Any) -> bool:
    if not _is_path(value):
        return False
    return Path(value).suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet")


def from_split(data: Mapping[str, Any], read: Callable[..., Source], **how: Any) -> Source:
    """A source from {"train": ..., "test": ...}; `read` reads a part that is no (x, y) pair."""
    odd = next((key for key in data if key not in SPLITS), None)
    if odd is not None:
        raise BadInput(
            f"data has {odd!a} beside train; give train and test alone, or one entry a client"
        )
    if not is_split(data):
        standardise = how.pop("standardise", False)
        parts = [(read(data[key], **how), held) for key, held in SPLITS.items() if key in data]
        joined = join_sources(
            [part for part, _ in parts], [held for _, held in parts] if len(parts) > 1 else ()
        )
        return standardise_source(joined, "data") if standardise else joined
    x, y = (_concatenate([data[key][i] for key in SPLITS], "xy"[i]) for i in (0, 1))
    test = np.repeat(list(SPLITS.values()), [len(data[key][1]) for key in SPLITS])
    return from_arrays(x, y, None, test, where="data", **how)


def _concatenate(parts: list[Any], which: str) -> NDArray[Any]:
    try:
        arrays = [
            np.asarray(part.detach().cpu() if hasattr(part, "detach") else part) for part in parts
        ]
        arrays = [array for array in arrays if len(array)]
        kinds = {array.dtype.kind in "OUS" for array in arrays}
        if len(kinds) > 1 or len({array.shape[1:] for array in arrays}) > 1:
            raise ValueError("shapes")
        return np.concatenate(arrays)
    except (ValueError, TypeError) as why:
        raise BadInput(
            f"data: the clients' {which} have different shapes or kinds; make them alike"
        ) from why


def _in_order(source: Source, clients: list[str]) -> Source:
    """The source with its clients in the order in which they were given."""
    assert source.group is not None
    kept = [name for name in clients if name in set(source.groups)]
    place = np.array([kept.index(name) for name in source.groups])
    return replace(source, group=place[source.group], groups=tuple(kept))
