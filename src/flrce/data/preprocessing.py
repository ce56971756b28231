"""What was done to raw samples before training, kept with a run so that its model can be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.dates import parse_date
from flrce.data.fields import InputField
from flrce.data.text_features import hash_texts, tokenize_texts
from flrce.errors import BadInput, format_one_line

MAX_LISTED_FEATURES = 40  # columns of a table that are named
ColumnTable = Mapping[str, NDArray[Any]]
MAX_NAMED_VALUES = 6  # values of a text column that a message lists


@dataclass(frozen=True)
class FeatureColumn:
    """A column of a table that became features.

    A number is one feature. A category has the given `values`: one feature of 0 and 1 for each, or
    for the second alone where there are two. A text has `buckets` features, its hashed n-grams, or
    `length` token ids of a `tokenizer`. A date is one feature, in years since 2000.
    """

    name: str
    values: tuple[str, ...] = ()
    buckets: int = 0
    tokenizer: str = ""
    length: int = 0
    date: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the column holds texts to read, not values of a category."""
        return bool(self.buckets or self.tokenizer)

    def encode(self, column: NDArray[Any], where: str) -> NDArray[Any]:
        """The features (N, K) of a column; BadInput where training did not know a value."""
        if self.tokenizer:
            return tokenize_texts(column, self.tokenizer, self.length)
        if self.buckets:
            return hash_texts(column, self.buckets)
        if self.date:
            return self._convert_dates(column, where)[:, None]
        if not self.values:
            return self._convert_numbers(column, where)[:, None]
        texts = column.astype(str)
        unknown = np.flatnonzero(~np.isin(texts, self.values))
        if len(unknown):
            known = ", ".join(map(ascii, self.values[:MAX_NAMED_VALUES]))
            raise BadInput(
                f"{where} column {self.name!a}, row {unknown[0] + 1}: training had no value"
                f" {format_one_line(texts[unknown[0]], 40)!a}, only {known}"
            )
        coded = self.values[1:] if len(self.values) == 2 else self.values
        return np.stack([(texts == value).astype(np.float32) for value in coded], 1)

    def _convert_dates(self, column: NDArray[Any], where: str) -> NDArray[np.float32]:
        years = [parse_date(text) for text in column.astype(str)]
        odd = next((i for i, year in enumerate(years) if year is None), None)
        if odd is not None:
            raise BadInput(
                f"{where} column {self.name!a}, row {odd + 1}:"
                f" {format_one_line(str(column[odd]), 40)!a} is no date; give dates as 2024-12-31"
            )
        return np.array(years, np.float32)

    def _convert_numbers(self, column: NDArray[Any], where: str) -> NDArray[np.float32]:
        if column.dtype.kind in "biuf":
            return column.astype(np.float32)
        raise BadInput(
            f"{where} column {self.name!a} holds text, and training had numbers there; give numbers"
        )


@dataclass(frozen=True)
class Preprocessing:
    """Raw samples to the x of a Source; per feature in the order of the flat sample.

    `columns` are those of a table, `targets` the names of what was learnt. `fill` replaces missing
    numbers, before x becomes (x - mean) / deviation; each is empty where nothing of the kind was
    done. Values to be learnt become (y - target_mean) / target_deviation likewise. `resized` says
    that images of any size were made as large as the network takes them.
    """

    columns: tuple[FeatureColumn, ...] = ()
    targets: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    resized: bool = False
    fields: tuple[InputField, ...] = ()  # the inputs of a network with several
    target_mean: tuple[float, ...] = ()
    target_deviation: tuple[float, ...] = ()

    def encode_table(self, table: ColumnTable, where: str = "table") -> NDArray[Any]:
        """x (N, features) of a table's columns; those that training did not use are ignored."""
        missing = [column.name for column in self.columns if column.name not in table]
        if missing:
            names = ", ".join(ascii(name) for name in missing[:8])
            noun = "column" if len(missing) == 1 else "columns"
            raise BadInput(f"{where} lacks the {noun} {names}, which the model was trained on")
        return np.concatenate(
            [column.encode(np.asarray(table[column.name]), where) for column in self.columns], 1
        )

    def transform(self, x: NDArray[Any], where: str = "x") -> NDArray[Any]:
        """Missing values filled, features standardised, as in training."""
        if x.dtype != np.float32:
            return x
        x = self._fill_missing(x, where)
        if not self.mean:
            return x
        mean, deviation = (_reshape(values, x) for values in (self.mean, self.deviation))
        return np.asarray((x - mean) / deviation, np.float32)

    def restore_targets(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values (N,) or (N, K) of a network in the unit of the raw targets."""
        if not self.target_mean:
            return values
        mean, deviation = np.array(self.target_mean), np.array(self.target_deviation)
        return np.asarray(values * deviation + mean, np.float32)

    def _fill_missing(self, x: NDArray[np.float32], where: str) -> NDArray[np.float32]:
        gaps = np.isnan(x)
        if not gaps.any():
            return x
        if not self.fill:
            row = int(np.flatnonzero(gaps.reshape(len(x), -1).any(1))[0]) + 1
            raise BadInput(
                f"{where} row {row} has a missing value, and training had none or dropped such"
                " rows; fill it in"
            )
        return np.where(gaps, _reshape(self.fill, x).astype(np.float32), x)


AS_GIVEN = Preprocessing()  # raw samples are x already


def format_features(names: Sequence[str]) -> str:
    """The names of a table's features, in one line."""
    listed = ", ".join(ascii(name)[1:-1] for name in names[:MAX_LISTED_FEATURES])
    more = len(names) - MAX_LISTED_FEATURES
    return f"{listed} and {more} more" if more > 0 else listed


def _reshape(values: Sequence[float], x: NDArray[Any]) -> NDArray[np.float64]:
    return np.array(values, np.float64).reshape(x.shape[1:])
