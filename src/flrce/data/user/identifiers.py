"""Columns that only tell rows apart (patient numbers, counters, names). They are no features.

A model that is given such a column learns the order of the file: with rows sorted by label it is
right about rows it has never seen, and about nothing else.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_ROWS, MIN_CLIENT_ROWS = 20, 8  # fewer say nothing
STRONG_ID_NAMES = {"id", "ids", "uuid", "guid"}  # last words of a name
WEAK_ID_NAMES = {*STRONG_ID_NAMES, "index", "idx", "row", "no", "nr", "number", "key", "code"}
REPEATED_SHARE, REPEATED_VALUES = 0.1, 20  # a number of a patient with several rows


def find_identifiers(
    columns: Mapping[str, NDArray[Any]], label: NDArray[Any] | None, owner: NDArray[Any] | None
) -> dict[str, str]:
    """Column -> why it is an identifier. `label` (N,) is the target, `owner` (N,) the client."""
    reasons = {
        name: _describe_identifier(name, values, label, owner) for name, values in columns.items()
    }
    return {name: why for name, why in reasons.items() if why}


def find_label_sorters(columns: Mapping[str, NDArray[Any]], label: NDArray[Any]) -> list[str]:
    """Columns of distinct numbers whose order is that of the labels: each alone gives the label."""
    return [
        name
        for name, values in columns.items()
        if values.dtype.kind in "iuf"
        and values.ndim == 1
        and len(np.unique(values)) == len(values)
        and _sorts_label(values, label)
    ]


def _describe_identifier(
    name: str, values: NDArray[Any], label: NDArray[Any] | None, owner: NDArray[Any] | None
) -> str:
    rows = len(values)
    if rows < MIN_ROWS or values.ndim != 1:
        return ""
    if values.dtype.kind in "OUS":
        return "a different text in every row" if len(np.unique(values.astype(str))) == rows else ""
    if not _is_whole(values):
        return ""
    word = _last_word(name)
    distinct = len(np.unique(values))
    if distinct == rows:
        if _is_running_number(values):
            return "it counts the rows"
        if word in WEAK_ID_NAMES:
            return "a different whole number in every row"
        if label is not None and _sorts_label(values, label):
            return "a different whole number in every row, which sorts the labels"
    elif owner is not None and _counts_by_client(values, owner):
        return "it counts the rows of each client"
    if word in STRONG_ID_NAMES and distinct >= max(REPEATED_VALUES, REPEATED_SHARE * rows):
        return f"{distinct} different whole numbers"
    return ""


def _is_whole(values: NDArray[Any]) -> bool:
    if values.dtype.kind in "iu":
        return True
    return values.dtype.kind == "f" and bool(
        np.isfinite(values).all() and (values == np.round(values)).all()
    )


def _is_running_number(values: NDArray[Any]) -> bool:
    """Whether distinct numbers are a range without gaps in any order, or only rise or fall."""
    steps = np.diff(values.astype(np.float64))
    return float(values.max()) - float(values.min()) == len(values) - 1 or bool(
        (steps > 0).all() or (steps < 0).all()
    )


def _counts_by_client(values: NDArray[Any], owner: NDArray[Any]) -> bool:
    order = np.argsort(owner, kind="stable")
    parts = np.split(values[order], np.flatnonzero(owner[order][1:] != owner[order][:-1]) + 1)
    large = [part for part in parts if len(part) >= MIN_CLIENT_ROWS]
    return len(large) > 0 and all(
        len(np.unique(part)) == len(part) and _is_running_number(part) for part in large
    )


def _sorts_label(values: NDArray[Any], label: NDArray[Any]) -> bool:
    """Whether rows in the order of the column have one label after the other, each in one run."""
    if label.ndim != 1 or label.dtype.kind == "f" or len(label) < MIN_ROWS:
        return False
    ordered = label[np.argsort(values, kind="stable")]
    runs = 1 + int((ordered[1:] != ordered[:-1]).sum())
    return 1 < runs == len(np.unique(label)) <= len(label) // MIN_CLIENT_ROWS


def _last_word(name: str) -> str:
    """`patient_id`, `patientId` and `Patient ID` end with "id"."""
    spaced = re.sub("([a-z])([A-Z])", r"\1 \2", name)
    return next(reversed(re.findall("[a-z]+", spaced.lower())), "")
