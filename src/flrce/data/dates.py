"""Dates of a table as numbers."""

from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

SECONDS_OF_YEAR = 365.25 * 86400
START = datetime(2000, 1, 1)  # dates count years from here, so that they are small numbers


def parse_date(text: str) -> float | None:
    """Years since 2000 of a date or time in ISO's form; NaN of a gap, None of anything else."""
    if not text:
        return float("nan")
    try:
        moment = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None
    return (moment - START).total_seconds() / SECONDS_OF_YEAR


def holds_dates(values: NDArray[Any]) -> bool:
    """Whether a column of texts holds dates such as 2024-12-31, with or without a time."""
    if values.dtype.kind not in "OUS":
        return False
    texts = [text for text in np.unique(values.astype(str)) if text]
    return bool(texts) and all("-" in text and parse_date(text) is not None for text in texts)
