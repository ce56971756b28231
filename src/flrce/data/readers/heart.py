"""UCI's heart disease from four hospitals, as in FLamby (Ogier du Terrail et al. 2022).

Files processed.HOSPITAL.data: 14 comma-separated columns without a header, "?" where a value is
missing. As FLamby: slope, ca and thal are left out, then rows with gaps; chest pain and ECG become
columns of 0 and 1, the first of each left out (13 features in all); any grade of disease is class
1; a third of each hospital's patients is its test split; each hospital's features are standardised
by its own training patients.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited
from flrce.data.readers.columns import read_csv_columns
from flrce.data.sources import Source
from flrce.errors import BadInput

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
USED_COLUMNS = 10  # the columns before slope
CP, ECG = 2, 6  # become columns of 0 and 1 of these values:
DUMMY_VALUES = {CP: (2.0, 3.0, 4.0), ECG: (1.0, 2.0)}
MAX_FILE_BYTES = 16 << 20
FILE_REMEDY = (
    "give UCI's processed.cleveland.data, processed.hungarian.data, processed.switzerland.data,"
    " processed.va.data"
)

FloatTable = NDArray[np.float64]


def read_heart_disease(folder: Path, progress: bool = False) -> Source:
    """740 patients with 13 features and whether they are ill, by hospital, with FLamby's split."""
    return build_heart_source(
        {name: _read_table(folder / f"processed.{name}.data") for name in HOSPITALS}
    )


def build_heart_source(tables: dict[str, FloatTable]) -> Source:
    """tables: hospital -> (n, 14) as in the files, NaN where missing."""
    x, y, group, held = [], [], [], []
    for code, name in enumerate(HOSPITALS):
        table = tables[name]
        table = table[~np.isnan(table[:, [*range(USED_COLUMNS), -1]]).any(1)]
        ill = (table[:, -1] > 0).astype(np.int64)
        test = _draw_test_split(ill)
        x.append(_standardize_features(_encode_features(table), test))
        y.append(ill)
        held.append(test)
        group.append(np.full(len(ill), code))
    return Source(
        "fed-heart",
        np.concatenate(x).astype(np.float32),
        np.concatenate(y),
        ("healthy", "ill"),
        np.concatenate(group).astype(np.int64),
        HOSPITALS,
        held=np.concatenate(held),
    )


def _encode_features(table: FloatTable) -> FloatTable:
    plain = [table[:, i] for i in range(USED_COLUMNS) if i not in DUMMY_VALUES]
    dummies = [table[:, i] == value for i, values in DUMMY_VALUES.items() for value in values]
    return np.stack([*plain, *dummies], 1).astype(np.float64)


def _draw_test_split(ill: NDArray[np.int64]) -> NDArray[np.bool_]:
    """FLamby's split: 34 % by its seed, stratified where both classes have over two patients."""
    from sklearn.model_selection import train_test_split

    counts = np.bincount(ill, minlength=2)
    stratify = ill if (counts > 2).all() else None
    _, test = train_test_split(
        np.arange(len(ill)),
        test_size=1.0 - 0.66,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=stratify,
    )
    held = np.zeros(len(ill), bool)
    held[test] = True
    return held


def _standardize_features(x: FloatTable, test: NDArray[np.bool_]) -> FloatTable:
    known = x[~test]
    deviation = known.std(0, ddof=1)
    scaled: FloatTable = (x - known.mean(0)) / np.where(deviation > 0, deviation, 1)
    return scaled


def _read_table(path: Path) -> FloatTable:
    text = read_text_limited(path, MAX_FILE_BYTES, FILE_REMEDY)
    columns = read_csv_columns(text, format_path(path), COLUMNS)
    for name, values in columns.items():
        if values.dtype.kind not in "iuf":
            raise BadInput(
                f"{format_path(path)} column {name} holds text where numbers are expected;"
                f" {FILE_REMEDY}"
            )
    table = np.stack([columns[name].astype(np.float64) for name in COLUMNS], 1)
    if (~np.isnan(table[:, [*range(USED_COLUMNS), -1]]).any(1)).sum() < 4:
        raise BadInput(f"{format_path(path)} has fewer than 4 patients without gaps; {FILE_REMEDY}")
    return table
