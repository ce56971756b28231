"""Time series of a wearer's movements, one csv file a series: windows of 128 steps by 64.

FOLDER/SUBJECT/CLASS/*.csv, or FOLDER/*.csv named SUBJECT_CLASS_... (S1_E0_L.csv); a header line,
then one line a step with a number for each channel (smartwatch: ax, ay, az, wx, wy, wz at 50 Hz).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited
from flrce.data.readers.columns import read_csv_columns
from flrce.data.readers.files import track_progress
from flrce.data.sources import Source
from flrce.errors import BadInput

WINDOW_LENGTH, WINDOW_STRIDE = 128, 64
MAX_FILE_BYTES = 256 << 20
FILE_REMEDY = (
    "give one csv file a series, as FOLDER/SUBJECT/CLASS/*.csv or FOLDER/SUBJECT_CLASS_*.csv"
)

LabeledSeries = tuple[str, str, NDArray[np.float32]]  # subject, class, (steps, channels)


def read_smartwatch(folder: Path, progress: bool = False) -> Source:
    """Windows of every series, with the class of its exercise and its subject."""
    nested, flat = sorted(folder.glob("*/*/*.csv")), sorted(folder.glob("*.csv"))
    if not nested and not flat:
        raise BadInput(f"{format_path(folder)} holds no csv files; {FILE_REMEDY}")
    files = track_progress(nested or flat, "series", progress)
    return build_series_source((_read_series(path, bool(nested)) for path in files), folder)


def build_series_source(
    series: Iterable[LabeledSeries], folder: Path = Path("smartwatch")
) -> Source:
    """Standardised windows (N, channels, 128); a series shorter than one is left out."""
    x: list[NDArray[np.float32]] = []
    y: list[str] = []
    owner: list[str] = []
    for subject, label, values in series:
        if x and values.shape[1] != x[0].shape[1]:
            raise BadInput(
                f"{format_path(folder)} has series of {values.shape[1]} and of {x[0].shape[1]}"
                f" channels; {FILE_REMEDY}"
            )
        if len(values) < WINDOW_LENGTH:
            continue
        windows = sliding_window_view(values, WINDOW_LENGTH, axis=0)[
            ::WINDOW_STRIDE
        ]  # (n, channels, 128)
        x.append(windows)
        y += [label] * len(windows)
        owner += [subject] * len(windows)
    if not x:
        raise BadInput(
            f"{format_path(folder)} has no series of {WINDOW_LENGTH} steps; {FILE_REMEDY}"
        )
    pool = np.concatenate(x).astype(np.float32)
    mean, deviation = pool.mean((0, 2), keepdims=True), pool.std((0, 2), keepdims=True)
    classes, codes = np.unique(y, return_inverse=True)
    groups, group = np.unique(owner, return_inverse=True)
    return Source(
        "smartwatch",
        (pool - mean) / np.where(deviation > 0, deviation, 1),
        codes.astype(np.int64),
        tuple(map(str, classes)),
        group.astype(np.int64),
        tuple(map(str, groups)),
    )


def _read_series(path: Path, nested: bool) -> LabeledSeries:
    if nested:
        subject, label = path.parent.parent.name, path.parent.name
    elif path.stem.count("_") < 1:
        raise BadInput(f"{format_path(path)} names no subject and class; {FILE_REMEDY}")
    else:
        subject, label = path.stem.split("_")[:2]
    text = read_text_limited(path, MAX_FILE_BYTES, FILE_REMEDY, expansion=8)
    columns = read_csv_columns(text, format_path(path))
    for name, values in columns.items():
        if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise BadInput(f"{format_path(path)} column {name!a} has gaps or text; {FILE_REMEDY}")
    return subject, label, np.stack(list(columns.values()), 1).astype(np.float32)
