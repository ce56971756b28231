"""Helpers of the readers of public data sets; files are opened by flrce.core.files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path
from flrce.errors import BadInput

T = TypeVar("T")


def find_first_file(folder: Path, roots: Sequence[str], names: Sequence[str]) -> Path | None:
    """The first of `names` that exists in the folder or in one that unpacking makes there."""
    return next(
        (path for root in roots for name in names if (path := folder / root / name).exists()), None
    )


def check_labels(path: Path, y: NDArray[np.int64], samples: int, classes: int, remedy: str) -> None:
    if y.shape != (samples,):
        raise BadInput(
            f"{format_path(path)} has {y.size:,} labels for {samples:,} samples; {remedy}"
        )
    if samples and not 0 <= int(y.min()) <= int(y.max()) < classes:
        wrong = int(y.max()) if int(y.max()) >= classes else int(y.min())
        raise BadInput(
            f"{format_path(path)} has label {wrong} where 0 to {classes - 1} are possible; {remedy}"
        )


def track_progress(items: Sequence[T], label: str, progress: bool) -> Iterable[T]:
    """The items, behind a progress bar when one is wanted."""
    if not progress:
        return items
    from rich.progress import track

    return track(items, description=label)
