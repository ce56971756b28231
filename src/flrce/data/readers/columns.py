"""Columns of a csv text in the dtype that their cells have, and objects of json lines."""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, parse_csv, read_lines
from flrce.errors import BadInput, format_one_line

DECIMAL_COMMA_PATTERN = re.compile(r"[+-]?\d*,?\d+([eE][+-]?\d+)?")
MAX_FIXED_WIDTH = 64  # characters
NESTED_TYPES = (dict, list, tuple, set, bytes, np.ndarray)  # that are no cell of a table
MISSING_MARKS = ("", "na", "nan", "?", "null", "none")


def read_csv_columns(
    text: str, where: str, header: Sequence[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Columns of a csv text, each in its dtype."""
    return {
        key: convert_column(values, key)
        for key, values in parse_csv_cells(text, where, header).items()
    }


def parse_csv_cells(
    text: str, where: str, header: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """The cells of each column; the separator is the one that the first line has most of.

    Where that is no comma, numbers may have decimal commas.
    """
    separator = max(",;\t", key=re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0].count)
    try:
        rows = list(parse_csv(text, separator))
    except csv.Error as why:
        raise BadInput(
            f"{where} is no csv that can be read: {format_one_line(why, 80)}; is a quotation mark"
            " not closed?"
        ) from why
    if not rows:
        raise BadInput(f"{where} is empty; give a header line and one line a sample")
    names = list(header) if header is not None else [cell.strip() for cell in rows.pop(0)[1]]
    if header is None and (all(map(_is_number, names)) or len(set(names)) < len(names)):
        raise BadInput(f"{where} has no header line with a different name for each column; add one")
    for number, row in rows:
        if len(row) != len(names):
            raise BadInput(
                f"{where} line {number} has {len(row)} cells where {len(names)} are expected;"
                " mend it"
            )
    if not rows:
        raise BadInput(f"{where} holds no samples below its header; add one line a sample")
    columns = {key: [row[i].strip() for _, row in rows] for i, key in enumerate(names)}
    if separator == ",":
        return columns
    return {key: _convert_decimal_commas(values) for key, values in columns.items()}


def _convert_decimal_commas(values: list[str]) -> list[str]:
    """Numbers with decimal commas, with points instead; other columns unchanged."""
    known = [value for value in values if value.lower() not in MISSING_MARKS]
    commas = any("," in value for value in known) and all(
        DECIMAL_COMMA_PATTERN.fullmatch(value) for value in known
    )
    return [value.replace(",", ".") for value in values] if commas else values


def convert_column(values: list[Any], name: str = "") -> NDArray[Any]:
    """Integers, else floats (NaN where missing), else text."""
    odd = next((value for value in values if isinstance(value, NESTED_TYPES)), None)
    if odd is not None:
        raise BadInput(
            f"column {name!a} holds {type(odd).__name__} values, neither numbers nor text; drop it,"
            " or give (x, y) arrays"
        )
    known = [
        None if value is None or str(value).strip().lower() in MISSING_MARKS else value
        for value in values
    ]
    if all(isinstance(value, (bool, np.bool_)) for value in known):
        return np.array(known, bool)
    if None not in known:
        try:
            return np.array([_to_integer(value) for value in known], np.int64)
        except (ValueError, TypeError, OverflowError):
            pass
    try:
        return np.array([np.nan if value is None else float(value) for value in known], np.float64)
    except (ValueError, TypeError):
        texts = [_to_text(value) for value in values]
        # an array of fixed width takes as many bytes for every text as for the longest
        return np.array(texts, object if max(map(len, texts)) > MAX_FIXED_WIDTH else None)


def _to_text(value: Any) -> str:
    """A cell of a text column; "none" is a word there, and may be a class."""
    gap = value is None or str(value).strip().lower() in MISSING_MARKS[:-1]
    return "" if gap else str(value)


def _to_integer(value: Any) -> int:
    if isinstance(value, float):
        raise ValueError(value)
    return int(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_json_objects(
    path: Path, limit: int, remedy: str, expansion: float = 4.0
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number, object) of each line of json, also of a .gz; empty lines are left out."""
    for number, raw in read_lines(path, limit, remedy, expansion):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as why:
            raise BadInput(f"{format_path(path)} is no UTF-8 text; save it as UTF-8") from why
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as why:
            raise BadInput(f"{format_path(path)} line {number} is no json; {remedy}") from why
        if not isinstance(row, dict):
            raise BadInput(f"{format_path(path)} line {number} is no object; {remedy}")
        yield number, row
