"""LEAF's json of any task: files with users, num_samples and user_data {user: {x, y}}.

Texts in x (Shakespeare: 80 characters) with one character in y become token ids; numbers stay numbers. Files in train/
and test/ are the data's own split.
"""

from pathlib import Path
from typing import Any

import numpy as np

from flrce.data.own.arrays import from_arrays, refuse_columns
from flrce.data.readers.leaf import pooled
from flrce.data.readers.text import windows_of
from flrce.data.sources import Source
from flrce.reading import shown


def from_leaf(path: Path | str, **how: Any) -> Source:
    """A source from one LEAF file, or a folder of them."""
    path = Path(path)
    refuse_columns(how, "LEAF's json names its users itself")
    rows = pooled(path)
    given = {"name": path.stem, "where": shown(path), **how}
    texts = [isinstance(x[0], str) for _, x, _, _ in rows]
    if all(texts):
        return windows_of(rows, str(given["name"]), shown(path))
    x = [sample for _, samples, _, _ in rows for sample in samples]
    y = [label for _, _, labels, _ in rows for label in labels]
    group = np.repeat(np.array([user for user, *_ in rows], object), [len(x) for _, x, _, _ in rows])
    test = np.repeat([held for *_, held in rows], [len(x) for _, x, _, _ in rows])
    return from_arrays(x, y, group, test if test.any() else None, **given)
