"""What y asks for: classes, values, labels or next symbols; detected unless the user says."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.sources import IGNORED_TARGET, TargetKind
from flrce.errors import BadInput

MAX_UNDOUBTED_CLASSES = 20  # different whole numbers of a table that are classes without a note
MIN_CLASS_SAMPLES = 5  # on average, of whole numbers that are classes rather than values
log = logging.getLogger("flrce")


def convert_targets(
    y: NDArray[Any], kind: str, layout: str, where: str, known: int = 0
) -> tuple[NDArray[Any], tuple[str, ...], TargetKind]:
    """y in the dtype of its kind, its classes' names, and the kind, found out where it is "auto".

    `layout` says what x is. With `known` classes, integers are their codes.
    """
    target_kind = _detect_kind(y, layout, where, known) if kind == "auto" else kind
    pooled = y.ndim == 2 and y.shape[1] > 1 and target_kind in ("values", "labels")
    if kind == "auto" and pooled and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        text = "%s: every row of y has a single 1 and is taken as %d %s; if they are classes give"
        log.warning(f"{text} y.argmax(1)", where, y.shape[1], target_kind)
    if target_kind == "values":
        return _convert_values(y, where), (), "values"
    if target_kind == "labels":
        return (*_convert_labels(y, where), "labels")
    if target_kind == "tokens":
        return (*_convert_symbols(y, where), "tokens")
    if target_kind == "classes":
        return (*_convert_classes(y, where, known), "classes")
    raise BadInput(
        f"{where} kind {target_kind!r} is unknown; use classes, values, tokens or labels"
    )


def _convert_labels(y: NDArray[Any], where: str) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    if y.ndim != 2 or not np.isin(y, (0, 1)).all():
        raise BadInput(
            f"{where} y must be (N, K) of 0 and 1 for several labels, got {y.dtype} {y.shape}"
        )
    return y.astype(np.uint8), tuple(map(str, range(y.shape[1])))


def _convert_symbols(y: NDArray[Any], where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    whole = y.dtype.kind in "iu" and y.ndim <= 2
    if not whole or (y[y < 0] != IGNORED_TARGET).any():
        raise BadInput(
            f"{where} y must hold next symbols as ids 0, 1, ... ({IGNORED_TARGET}: none), got"
            f" {y.dtype} {y.shape}"
        )
    return y.astype(np.int64), tuple(map(str, range(int(y.max()) + 1)))


def _convert_classes(
    y: NDArray[Any], where: str, known: int
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if y.ndim != 1:
        raise BadInput(
            f"{where} y must be one class a sample, got shape {y.shape}; for several at once give 0"
            " and 1"
        )
    if known and y.dtype.kind in "iu":
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < known:
            raise BadInput(
                f"{where} has labels {y.min()} to {y.max()}, but {known} classes are named; name"
                " them all"
            )
        return y.astype(np.int64), tuple(map(str, range(known)))
    if y.dtype.kind not in "biufOUS":
        raise BadInput(f"{where} y holds {y.dtype}; give classes as whole numbers or text")
    cells = y.tolist() if y.dtype.kind == "O" else []
    if lost := sum(value is None or value != value for value in cells):
        raise BadInput(f"{where} y lacks {lost} of {len(y)} labels; drop those samples first")
    return encode_classes(y, where)


def encode_classes(y: NDArray[Any], where: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Codes 0, 1, ... and their names. Text and scattered numbers are numbered in order; 0..max
    stays as it is where at least half of it occurs, so that a class that happens to be missing
    keeps its place.
    """
    if y.dtype.kind == "f":
        if not (np.isfinite(y).all() and (y == np.round(y)).all()):
            raise BadInput(
                f"{where} y holds numbers that are no classes; leave out kind='classes' to learn"
                " values"
            )
        y = y.astype(np.int64)
    if y.dtype.kind == "b":
        return y.astype(np.int64), ("False", "True")
    names, codes = np.unique(y.astype(str) if y.dtype.kind in "OUS" else y, return_inverse=True)
    if y.dtype.kind in "iu" and names[0] >= 0 and 2 * len(names) >= int(names[-1]) + 1:
        return y.astype(np.int64), tuple(str(c) for c in range(int(names[-1]) + 1))
    if y.dtype.kind in "iu":
        log.info("%s: labels %s are numbered 0..%d", where, format_examples(names), len(names) - 1)
    return codes.reshape(y.shape).astype(np.int64), tuple(str(c) for c in names)


def _detect_kind(y: NDArray[Any], layout: str, where: str, known: int) -> TargetKind:
    if y.ndim == 2 and y.dtype.kind in "iub":
        return "tokens" if layout == "tokens" else "labels"
    if y.ndim == 1 and y.dtype.kind in "iu" and layout == "table" and not known:
        return _detect_kind_of_integers(y, where)
    if y.dtype.kind != "f":
        return "classes"
    whole = y.ndim == 1 and np.isfinite(y).all() and (y == np.round(y)).all()
    if whole and len(np.unique(y)) <= 20:
        text = "%s: y holds whole numbers as floats and is taken as values (a regression); if they"
        log.warning(f"{text} are classes say kind='classes'", where)
    return "values"


def _detect_kind_of_integers(y: NDArray[Any], where: str) -> TargetKind:
    """Classes or values of a table: prices and counts have many numbers with few rows each."""
    count = len(np.unique(y))
    if count <= MAX_UNDOUBTED_CLASSES:
        return "classes"
    if len(y) < MIN_CLASS_SAMPLES * count:
        text = "%s: y holds %d different whole numbers in %d rows and is taken as values (a"
        text += " regression); if they are classes say kind='classes'"
        log.warning(text, where, count, len(y))
        return "values"
    text = "%s: y holds %d different whole numbers and is taken as classes; if they are values say"
    log.warning(f"{text} kind='values'", where, count)
    return "classes"


def _convert_values(y: NDArray[Any], where: str) -> NDArray[np.float32]:
    if y.dtype.kind not in "fiub" or y.ndim > 2:
        raise BadInput(
            f"{where} y must be (N,) or (N, K) numbers to learn values, got {y.dtype} {y.shape}"
        )
    with np.errstate(over="ignore"):  # what is too large is refused below
        numbers = y.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise BadInput(f"{where} y holds NaN or infinity; drop those samples first")
    return numbers


def resolve_class_names(
    found: tuple[str, ...], given: Sequence[str], where: str
) -> tuple[str, ...]:
    if not given:
        return found
    if len(given) < len(found):
        raise BadInput(f"{where} has {len(found)} classes, but {len(given)} names; name them all")
    return tuple(map(str, given))


def format_examples(values: NDArray[Any]) -> str:
    listed = [ascii(str(value))[1:-1] for value in values[:4]]
    return ", ".join([*listed, "..."] if len(values) > 4 else listed)
