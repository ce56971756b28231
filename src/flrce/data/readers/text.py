"""Text as token ids, one a character."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.data.pool import assign_to_client, join_sources
from flrce.data.sources import Source
from flrce.errors import BadInput

#: LEAF's 80 symbols of Shakespeare, in its order; a text within them has them for its vocabulary,
#: whatever it uses
SHAKESPEARE_SYMBOLS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)


def build_vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    """The symbols of these texts, in order; a symbol's place is its id."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return tuple(SHAKESPEARE_SYMBOLS) if found <= set(SHAKESPEARE_SYMBOLS) else tuple(sorted(found))


def encode_characters(text: str, symbols: Sequence[str]) -> NDArray[np.int64]:
    """(len(text),) ids; every character must be among the symbols."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    known = np.array([ord(symbol) for symbol in symbols], np.uint32)
    order = np.argsort(known)
    return order[np.searchsorted(known[order], points)].astype(np.int64)


def build_character_source(
    rows: list[tuple[str, list[Any], list[Any], bool]], name: str, where: str
) -> Source:
    """Users' windows of characters and the character after each, some for judging."""
    for user, x, y, _ in rows:
        if not all(isinstance(text, str) for text in (*x, *y)):
            raise BadInput(f"{where} user {user!a:.80} mixes texts and numbers; give texts only")
    symbols = build_vocabulary(text for _, x, y, _ in rows for text in (*x, *y))
    parts, held = [], []
    for user, x, y, test in rows:
        if (
            len({len(text) for text in x}) > 1
            or len(x[0]) != len(rows[0][1][0])
            or any(len(c) != 1 for c in y)
        ):
            raise BadInput(
                f"{where} user {user!a:.80} has texts of several lengths, or more than one next"
                " character"
            )
        ids = encode_characters("".join(x), symbols).reshape(len(x), -1)
        parts.append(
            assign_to_client(
                Source(name, ids, encode_characters("".join(y), symbols), symbols, kind="tokens"),
                user,
            )
        )
        held.append(test)
    return join_sources(parts, held if any(held) else ())
