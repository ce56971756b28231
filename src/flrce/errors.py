"""What a user did wrong, in one line: what, where, remedy."""

from collections.abc import Iterable
from difflib import get_close_matches


class BadInput(ValueError):
    """Raised before any work is lost; the command line prints it and exits with 2."""


class Unfinished(RuntimeError):
    """A run that ended before its time but can be resumed; the command line exits with 130."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint naming the closest valid word, or all of them when none is close."""
    valid = sorted(valid)
    close = get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(valid)}"
