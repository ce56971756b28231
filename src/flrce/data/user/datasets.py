"""Data sets of other libraries as sources: torch.utils.data and HuggingFace's datasets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.pool import join_sources
from flrce.data.readers.columns import convert_column
from flrce.data.sources import Source
from flrce.data.user.arrays import from_arrays, standardise_source
from flrce.data.user.tables import GROUPS, SPLITS, TARGETS, find_column, from_columns
from flrce.errors import BadInput


def from_dataset(data: Any, test: Any = None, group: Any = None, **how: Any) -> Source:
    """A source from a torch Dataset of (x, y) pairs with its transforms; `test`: a test set.

    One of dicts is read as HuggingFace's are: by `target` and `group`, or the usual names. A random
    transform (augmentation) is drawn once: the samples stay what they are then.
    """
    given = {"where": type(data).__name__, "name": type(data).__name__.lower(), **how}
    if has_named_items(data):
        both = [data] if test is None or isinstance(test, str) else [data, test]
        given |= {"group": group or "", **({"test": test} if isinstance(test, str) else {})}
        standardise = given.pop("standardise", False)
        parts = [from_huggingface(_ItemTable(each), **given) for each in both]
        joined = parts[0] if len(parts) == 1 else join_sources(parts, [False, True])
        return standardise_source(joined, given["where"]) if standardise else joined
    x, y = _read_pairs(data, given["where"])
    if test is None:
        return from_arrays(x, y, group, **_add_class_names(data, y, given))
    more_x, more_y = _read_pairs(test, given["where"])
    split = np.repeat([False, True], [len(x), len(more_x)])
    return from_arrays(
        [*x, *more_x], [*y, *more_y], group, split, **_add_class_names(data, y, given)
    )


def from_huggingface(
    data: Any, target: str = "", group: str = "", columns: Iterable[str] = (), **how: Any
) -> Source:
    """A source from a HuggingFace Dataset, or a DatasetDict with train and test.

    One column of images, arrays or lists is x; several columns of numbers are a table's features.
    """
    if isinstance(data, dict):  # DatasetDict
        return _pool_splits(data, target, group, columns, how)
    where = how.pop("where", "Dataset")
    if not hasattr(data, "__len__"):
        raise BadInput(
            f"{where} is a {type(data).__name__}, which streams samples; load it without"
            " streaming=True"
        )
    label, owner, split = _find_special_columns(data, target, group, how.pop("test", ""), where)
    chosen = _list_chosen(data, columns, how.pop("features", ()), where)
    left_out = how.pop("ignore", ())
    left_out = [left_out] if isinstance(left_out, str) else left_out
    others = [k for k in data.column_names if k not in (label, owner, split, *left_out)]
    wanted = chosen or others
    feature: Any = getattr(data, "features", {}).get(label)
    names = {"classes": feature.names} if hasattr(feature, "names") else {}
    how = {"name": "mine", "where": where, **names, **how}
    formatted = getattr(data, "format", {"type": None})["type"] is not None
    loose = data.with_format(None) if formatted else data
    x = _read_inputs(loose, wanted, where)
    if x is None:
        used = [key for key in (*wanted, label, owner, split) if key]
        table = {key: convert_column(list(loose[key]), key) for key in used}
        return from_columns(table, label, owner, split, features=chosen, **how)
    y = [_to_plain_array(value) for value in loose[label]]
    clients, test = (list(loose[key]) if key else None for key in (owner, split))
    return from_arrays(x, y, clients, test, **how)


def _find_special_columns(
    data: Any, target: str, group: str, test: str, where: str
) -> tuple[str, str, str]:
    """The columns of the label, the client and the split; "" where there is none."""
    names: Any = dict.fromkeys(data.column_names)
    label = find_column(names, target, TARGETS, "target", where)
    owner = find_column(names, group, GROUPS, "group", where)
    split = find_column(names, test, SPLITS, "test", where)
    if not label:
        raise BadInput(
            f"{where} has no label column; name it with target = one of {', '.join(names)}"
        )
    return label, owner, split


def _list_chosen(
    data: Any, columns: Iterable[str], features: str | Sequence[str], where: str
) -> list[str]:
    """The columns that the user names as features."""
    chosen = list(columns) or (
        [features] if isinstance(features, str) and features else list(features)
    )
    for key in chosen:
        find_column(dict.fromkeys(data.column_names), key, (), "features", where)  # type: ignore[arg-type]
    return chosen


def _read_inputs(data: Any, names: Sequence[str], where: str) -> Any:
    """x of one column of arrays, or of several with arrays among them; None: a table's columns."""
    if len(names) == 1:
        x = [_to_plain_array(value) for value in data[names[0]]]
        return None if x and isinstance(x[0], str) else _stack_samples(x, where)
    if names and _have_fields(data, names):
        return {key: _stack_inputs(list(data[key]), where) for key in names}
    deep = [key for key in names if len(data[key]) and np.ndim(_to_plain_array(data[key][0]))]
    if deep:
        other = next(key for key in names if key != deep[0])
        raise BadInput(
            f"{where} has lists or images ({deep[0]!a}) beside other columns ({other!a}); name the"
            " clients' column in data.group, others in data.ignore"
        )
    return None


def _have_fields(data: Any, names: Sequence[str]) -> bool:
    """Whether all columns hold numbers or arrays of numbers, and one of them arrays."""
    first = [np.asarray(_to_plain_array(data[key][0])) for key in names]
    return all(a.dtype.kind in "biuf" for a in first) and any(a.ndim for a in first)


def has_named_items(data: Any) -> bool:
    """Whether a data set gives dicts."""
    return hasattr(data, "__len__") and len(data) > 0 and isinstance(data[0], Mapping)


class _ItemTable:
    """A data set of dicts as columns, each item asked for once."""

    def __init__(self, data: Any) -> None:
        items = [data[i] for i in range(len(data))]
        odd = next((i for i, item in enumerate(items) if item.keys() != items[0].keys()), None)
        if odd is not None:
            raise BadInput(
                f"{type(data).__name__} item {odd} has other keys than item 0; make them alike"
            )
        self.columns = {
            str(key): [_to_plain_array(item[key]) for item in items] for key in items[0]
        }
        self.column_names = list(self.columns)

    def __getitem__(self, key: str) -> list[Any]:
        return self.columns[key]

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])


def _pool_splits(
    data: dict[str, Any], target: str, group: str, columns: Iterable[str], how: dict[str, Any]
) -> Source:
    """Train and test of a DatasetDict, pooled, the second held out."""
    if "train" not in data:
        raise BadInput(
            f"the DatasetDict has {', '.join(data)}, but no train; hand one of them over"
        )
    standardise = how.pop("standardise", False)
    splits = [data[key] for key in ("train", "test") if key in data]
    parts = [from_huggingface(split, target, group, columns, **how) for split in splits]
    joined = parts[0] if len(parts) == 1 else join_sources(parts, [False, True])
    return standardise_source(joined, "DatasetDict") if standardise else joined


def _read_pairs(data: Any, where: str) -> tuple[Any, list[Any]]:
    x, y = [], []
    for i in range(len(data)) if hasattr(data, "__len__") else iter(data):
        item = data[i] if hasattr(data, "__len__") else i
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise BadInput(
                f"{where} gives {type(item).__name__} where a pair (x, y) is expected; wrap it"
            )
        x.append(item[0])
        y.append(_to_plain_array(item[1]))
    return _stack_inputs(x, where), y


def _stack_inputs(x: list[Any], where: str) -> Any:
    """Samples as one array, or as a dict or tuple of arrays where each has several inputs."""
    if x and isinstance(x[0], Mapping):
        return {key: _stack_inputs([item[key] for item in x], where) for key in x[0]}
    if x and isinstance(x[0], tuple) and all(hasattr(part, "shape") for part in x[0]):
        return tuple(_stack_inputs(list(part), where) for part in zip(*x, strict=True))
    return _stack_samples([_to_plain_array(value) for value in x], where)


def _to_plain_array(value: Any) -> Any:
    """Tensors and images as arrays."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    elif hasattr(value, "convert"):  # a Pillow image
        value = np.asarray(value)
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _stack_samples(x: list[Any], where: str) -> NDArray[Any]:
    shapes = {np.shape(value) for value in x}
    if len(shapes) > 1:
        few = ", ".join(map(str, sorted(shapes)[:3]))
        raise BadInput(
            f"{where} has samples of different shapes ({few}); resize or pad them to one"
        )
    return np.array(x)


def _add_class_names(data: Any, y: list[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The data set's own names of its classes, where y holds their codes."""
    names: Any = getattr(data, "classes", None) or ()
    coded = all(isinstance(value, int) for value in y)
    return {"classes": [str(name) for name in names], **given} if coded else given
