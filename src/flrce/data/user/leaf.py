"""LEAF's json of any task: files with users, num_samples and user_data {user: {x, y}}.

Texts in x (Shakespeare: 80 characters) with one character in y become token ids; numbers stay
numbers. Files in train/ and test/ are the data's own split.
"""

from pathlib import Path
from typing import Any

import numpy as np

from flrce.core.files import format_path
from flrce.data.readers.leaf import read_leaf_users
from flrce.data.readers.text import build_character_source
from flrce.data.sources import Source
from flrce.data.user.arrays import from_arrays, refuse_columns


def from_leaf(path: Path | str, **how: Any) -> Source:
    """A source from one LEAF file, or a folder of them."""
    path = Path(path)
    refuse_columns(how, "LEAF's json names its users itself")
    rows = read_leaf_users(path)
    given = {"name": path.stem, "where": format_path(path), **how}
    texts = [isinstance(x[0], str) for _, x, _, _ in rows]
    if all(texts):
        return build_character_source(rows, str(given["name"]), format_path(path))
    x = [sample for _, samples, _, _ in rows for sample in samples]
    y = [label for _, _, labels, _ in rows for label in labels]
    group = np.repeat(
        np.array([user for user, *_ in rows], object), [len(x) for _, x, _, _ in rows]
    )
    test = np.repeat([held for *_, held in rows], [len(x) for _, x, _, _ in rows])
    return from_arrays(x, y, group, test if test.any() else None, **given)
