"""Sources of one form made one: several files, or training and test samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flrce.data.sources import Source
from flrce.errors import BadInput


def join_sources(parts: Sequence[Source], held: Sequence[bool] = (), name: str = "") -> Source:
    """The samples of all parts. `held` marks parts for evaluation, else each keeps its split."""
    parts = _expand_grey_images(parts)
    first = parts[0]
    for part in parts:
        if (part.shape, part.kind, part.x.dtype) != (first.shape, first.kind, first.x.dtype):
            raise BadInput(
                f"{part.name} has {part.kind} of samples {part.shape} {part.x.dtype}, {first.name}"
                f" {first.kind} of {first.shape} {first.x.dtype}; make them alike"
            )
    y, classes = _join_targets(parts)
    groups = tuple(dict.fromkeys(name for part in parts for name in part.groups))
    codes = [
        _renumber_codes(part.group, part.groups, groups) for part in parts if part.group is not None
    ]
    split = _join_splits(parts)
    if held:
        split = np.repeat(held, [len(part.y) for part in parts]).astype(bool)
    alike = all(part.preprocessing == first.preprocessing for part in parts)
    return replace(
        first,
        name=name or first.name,
        x=np.concatenate([part.x for part in parts]),
        y=y,
        classes=classes,
        ids=max(part.ids for part in parts),
        group=np.concatenate(codes) if len(codes) == len(parts) else None,
        groups=groups if len(codes) == len(parts) else (),
        held=split,
        preprocessing=first.preprocessing if alike else None,
    )


def _expand_grey_images(parts: Sequence[Source]) -> Sequence[Source]:
    """Grey images among parts with colours as grey in three channels; all else as it is."""
    sizes = {part.shape[1:] for part in parts}
    pictures = all(part.x.dtype == np.uint8 and part.x.ndim == 4 for part in parts)
    if not pictures or len(sizes) > 1 or {part.shape[0] for part in parts} != {1, 3}:
        return parts
    return [
        replace(part, x=np.repeat(part.x, 3, 1)) if part.shape[0] == 1 else part for part in parts
    ]


def assign_to_client(part: Source, client: str) -> Source:
    """All samples of one client."""
    return replace(part, group=np.zeros(len(part.y), np.int64), groups=(client,))


def _join_targets(parts: Sequence[Source]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if parts[0].kind != "classes":
        longest = max((part.classes for part in parts), key=len)
        return np.concatenate([part.y for part in parts]), longest
    classes = tuple(sorted({name for part in parts for name in part.classes}, key=_class_sort_key))
    codes = [_renumber_codes(part.y, part.classes, classes) for part in parts]
    return np.concatenate(codes), classes


def _join_splits(parts: Sequence[Source]) -> NDArray[np.bool_] | None:
    if all(part.held is None for part in parts):
        return None
    return np.concatenate([np.zeros(len(p.y), bool) if p.held is None else p.held for p in parts])


def _renumber_codes(
    codes: NDArray[np.int64], old: Sequence[str], new: Sequence[str]
) -> NDArray[np.int64]:
    place = {name: i for i, name in enumerate(new)}
    return np.array([place[name] for name in old], np.int64)[codes]


def _class_sort_key(name: str) -> tuple[bool, int, str]:
    """Numbers by value, then words."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
