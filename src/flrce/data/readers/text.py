"""Text as token ids, one a character."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def symbols(texts: Iterable[str]) -> tuple[str, ...]:
    """Every character that occurs, in order; a character's place is its id."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return tuple(sorted(found))


def encoded(text: str, vocabulary: Sequence[str]) -> NDArray[np.int64]:
    """(len(text),) ids; a character outside the vocabulary becomes id 0."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.array([ord(symbol) for symbol in vocabulary], np.uint32)
    order = np.argsort(known)
    place = np.searchsorted(known[order], points).clip(max=len(known) - 1)
    ids = order[place]
    return np.where(known[ids] == points, ids, 0).astype(np.int64)
