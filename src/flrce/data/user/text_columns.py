"""Columns of a table that hold texts to classify: which they are, and what features they become."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import validate_memory
from flrce.data.dates import holds_dates
from flrce.data.preprocessing import ColumnTable, FeatureColumn, Preprocessing
from flrce.data.text_features import DEFAULT_BUCKETS, DEFAULT_TOKENS, hash_texts, is_prose
from flrce.errors import BadInput, suggest_name

TEXT_COLUMN = "text"  # the column of texts that came without a name
log = logging.getLogger("flrce")


def require_columns(columns: ColumnTable, names: Sequence[str], purpose: str, where: str) -> None:
    """BadInput where the table lacks one of these columns."""
    for name in names:
        if name not in columns:
            hint = suggest_name(name, columns)
            raise BadInput(f"{where} has no column {name!a} {purpose}; {hint}")


def find_text_columns(
    columns: ColumnTable, named: str | Sequence[str], max_values: int, where: str
) -> list[str]:
    """The columns that hold texts to read: those named, or else those with sentences."""
    wanted = [named] if isinstance(named, str) else list(named)
    require_columns(columns, wanted, "for text", where)
    for key in wanted:
        if columns[key].dtype.kind in "biuf":
            raise BadInput(f"{where} column {key!a} holds numbers; drop it from data.text")
    if wanted:
        return wanted
    return [
        key
        for key, values in columns.items()
        if is_prose(key, values, max_values) and not holds_dates(values)
    ]


def describe_texts(
    columns: ColumnTable, texts: Sequence[str], buckets: int, tokenizer: str, length: int
) -> list[FeatureColumn]:
    """How text columns become features; token ids take one column alone."""
    if not tokenizer:
        rows = len(columns[texts[0]])
        needed = 4 * rows * (buckets or DEFAULT_BUCKETS) * len(texts)
        validate_memory(2 * needed, "the hashed text", "lower data.buckets")
        return [FeatureColumn(key, buckets=buckets or DEFAULT_BUCKETS) for key in texts]
    if len(texts) > 1:
        raise BadInput(
            f"data.tokenizer reads one text column, and there are {', '.join(map(ascii, texts))};"
            " name one in data.text"
        )
    return [FeatureColumn(texts[0], tokenizer=tokenizer, length=length or DEFAULT_TOKENS)]


def report_texts(described: Sequence[FeatureColumn], where: str) -> None:
    """One line for each text column: what it becomes, and the setting that changes it."""
    for column in described:
        if column.tokenizer:
            names = (ascii(column.name), column.length, ascii(column.tokenizer))
            log.info("%s: text column %s becomes %d ids of %s", where, *names)
        else:
            text = "%s: column %s is read as text: %d hashed n-grams; data.text names text columns,"
            text += " data.buckets sets the number"
            log.warning(text, where, ascii(column.name), column.buckets)


def mask_texts(prepared: Preprocessing) -> NDArray[np.bool_]:
    """(features,): True where a feature comes from a text and must not be standardised."""
    return np.concatenate(
        [np.full(_count_features(column), column.is_text) for column in prepared.columns]
    )


def _count_features(column: FeatureColumn) -> int:
    if column.is_text:
        return column.buckets or column.length
    return len(column.values) if len(column.values) > 2 else 1


def is_text_array(x: NDArray[Any]) -> bool:
    """Whether x (N,) holds one text per sample."""
    return x.ndim == 1 and (
        x.dtype.kind == "U" or (x.dtype.kind == "O" and all(isinstance(v, str) for v in x))
    )


def hash_text_array(x: NDArray[Any], where: str) -> tuple[NDArray[np.float32], Preprocessing]:
    """Texts (N,) that came without a table as features (N, DEFAULT_BUCKETS)."""
    described = describe_texts({TEXT_COLUMN: x}, [TEXT_COLUMN], 0, "", 0)
    report_texts(described, where)
    return hash_texts(x, DEFAULT_BUCKETS), Preprocessing(tuple(described))
