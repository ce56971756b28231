"""LEAF's json of any task: files with users, num_samples and user_data {user: {x, y}}.

Texts in x (Shakespeare: 80 characters) with one character in y become token ids; numbers stay numbers. Files in train/
and test/ are the data's own split.
"""

from pathlib import Path
from typing import Any

import numpy as np

from flrce.data.own.arrays import from_arrays
from flrce.data.own.pool import joined, owned
from flrce.data.readers.files import shown
from flrce.data.readers.leaf import files, users
from flrce.data.readers.text import encoded, symbols
from flrce.data.sources import Source
from flrce.errors import BadInput

REMEDY = "make it afresh with LEAF's preprocess.sh"


def from_leaf(path: Path | str, **how: Any) -> Source:
    """A source from one LEAF file, or a folder of them."""
    path = Path(path)
    found = [path] if path.is_file() else files(path)
    if not found:
        raise BadInput(f"{shown(path)} holds no json files; {REMEDY}")
    rows = [(user, x, y, file.parent.name == "test") for file in found for user, x, y in users(file)]
    rows = [row for row in rows if row[1]]
    if not rows:
        raise BadInput(f"{shown(path)} holds no samples; {REMEDY}")
    given = {"name": path.stem, "where": shown(path), **how}
    texts = [isinstance(x[0], str) for _, x, _, _ in rows]
    if all(texts):
        return _texts(rows, str(given["name"]), shown(path))
    x = [sample for _, samples, _, _ in rows for sample in samples]
    y = [label for _, _, labels, _ in rows for label in labels]
    group = np.repeat(np.array([user for user, *_ in rows], object), [len(x) for _, x, _, _ in rows])
    test = np.repeat([held for *_, held in rows], [len(x) for _, x, _, _ in rows])
    return from_arrays(x, y, group, test if test.any() else None, **given)


def _texts(rows: list[tuple[str, list[Any], list[Any], bool]], name: str, where: str) -> Source:
    """Windows of characters and the character after each."""
    vocabulary = symbols(text for _, x, y, _ in rows for text in (*x, *y))
    parts, held = [], []
    for user, x, y, test in rows:
        if len({len(text) for text in x}) > 1 or len(x[0]) != len(rows[0][1][0]) or any(len(c) != 1 for c in y):
            raise BadInput(f"{where} user {user!a:.80} has texts of several lengths, or more than one next character")
        ids = encoded("".join(x), vocabulary).reshape(len(x), -1)
        parts.append(owned(Source(name, ids, encoded("".join(y), vocabulary), vocabulary, kind="tokens"), user))
        held.append(test)
    return joined(parts, held if any(held) else ())
