"""Patterns by which a tokenizer cuts words: only those that Python's `re` can match without trying
for ever.

A backtracking matcher takes exponential time where a group is repeated, as in `(t+)+$` or
`(?:a|aa)*$`, and where many optional parts follow each other; a back reference is worse. Tokenizers
in use repeat single characters only and have few such parts in a row. What is left (`t+$`, `t*t*$`)
is polynomial: on a long text a time limit ends it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flrce.errors import BadInput, format_one_line

MAX_CHARACTERS = 10_000  # of a pattern
MAX_QUANTIFIERS = 6  # in one alternative of the pattern
MAX_UNBOUNDED = 2  # of those, without a small upper limit
MAX_CHOICES = 256  # of groups with alternatives inside one alternative: their numbers multiplied
SMALL_COUNT = 8  # {1,8} is small
SECONDS, SECONDS_PER_CHARACTER = 5.0, 1e-5  # that cutting one text may take


def validate_pattern(pattern: str) -> None:
    """BadInput where matching may take exponential time."""
    why = (
        f"more than {MAX_CHARACTERS} characters"
        if len(pattern) > MAX_CHARACTERS
        else _find_risk(pattern)
    )
    if why:
        raise BadInput(
            f"the tokenizer's pattern {format_one_line(pattern, 60)!r} is refused: it has {why};"
            " use another model"
        )


def _find_risk(pattern: str) -> str:
    """What makes a pattern slow; "" where nothing does."""
    depth, quantifiers, unbounded, choices = 0, 0, 0, 1
    inner: list[int] = []  # alternatives of each open group
    last = ""  # the kind of the atom before: "one" character, a "group", or nothing
    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            if pattern[at + 1 : at + 2].isdigit() and pattern[at + 1] != "0":
                return "a back reference"
            at, last = _escape_end(pattern, at), "one"
            continue
        if sign == "[":
            at, last = _class_end(pattern, at), "one"
            continue
        if sign == "(":
            if pattern.startswith(("(?P=", "(?("), at):
                return "a back reference"
            start, at = at, _group_start(pattern, at)
            if "x" in pattern[start:at].partition("<")[0]:
                # spaces in it mean nothing, so that a quantifier may hide behind them
                return "verbose mode"
            inner.append(1)
            depth, last = depth + 1, ""
            continue
        if sign == ")":
            choices *= inner.pop() if inner else 1
            depth, last = depth - 1, "group"
        elif sign == "|" and depth <= 0:
            quantifiers, unbounded, choices, last = 0, 0, 1, ""
        elif sign == "|":
            inner[-1] += 1
            last = ""
        elif sign in "*+?{" and last:
            end, most = _parse_quantifier(pattern, at)
            if end > at:
                if last == "group" and most > 1:
                    return "a group that is repeated"
                quantifiers, unbounded = quantifiers + 1, unbounded + (most > SMALL_COUNT)
                at, last = end, ""
                continue
            last = "one"
        else:
            last = "one"
        if choices > MAX_CHOICES or quantifiers > MAX_QUANTIFIERS or unbounded > MAX_UNBOUNDED:
            return "too many parts of any length in a row"
        at += 1
    many = choices > MAX_CHOICES or quantifiers > MAX_QUANTIFIERS or unbounded > MAX_UNBOUNDED
    return "too many parts of any length in a row" if many else ""


def _parse_quantifier(pattern: str, at: int) -> tuple[int, float]:
    """Where a quantifier ends, with its ? or +, and how many it allows; where it begins, if it is
    none.
    """
    sign = pattern[at]
    most = {"?": 1.0, "*": float("inf"), "+": float("inf")}.get(sign)
    end = at + 1
    if sign == "{":
        close = pattern.find("}", at)
        low, comma, high = pattern[at + 1 : close].partition(",") if close > 0 else ("x", "", "")
        if not all(
            part == "" or (part.isascii() and part.isdigit()) for part in (low, high)
        ) or not (low or high):
            return at, 0
        end = close + 1
        most = float(high if high else "inf") if comma else float(low)
    assert most is not None
    return end + (end < len(pattern) and pattern[end] in "?+"), most


def _escape_end(pattern: str, at: int) -> int:
    return (
        pattern.find("}", at) + 1 or at + 2
        if pattern.startswith((r"\p{", r"\P{", r"\N{"), at)
        else at + 2
    )


def _class_end(pattern: str, at: int) -> int:
    """Behind the bracket that closes a class of characters; a first ] belongs to it."""
    at += 2 if pattern.startswith("[^", at) else 1
    first = True
    while at < len(pattern) and (first or pattern[at] != "]"):
        at, first = _escape_end(pattern, at) if pattern[at] == "\\" else at + 1, False
    return at + 1


def _group_start(pattern: str, at: int) -> int:
    """Behind what opens a group: (, (?:, (?i:, (?=, (?<!, (?P<name>."""
    if not pattern.startswith("(?", at):
        return at + 1
    at += 2
    while at < len(pattern) and (pattern[at].isalnum() or pattern[at] in "_-<P"):
        at += 1
    return at + 1  # the sign that ends it: : = ! >


@contextmanager
def limit_time(characters: int) -> Iterator[None]:
    """End what takes longer than a text of so many characters may, by an alarm where this thread
    can have one.
    """
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not usable or signal.getitimer(signal.ITIMER_REAL)[0]:  # somebody else's alarm is left alone
        yield
        return
    seconds = SECONDS + SECONDS_PER_CHARACTER * characters

    def give_up(number: int, frame: FrameType | None) -> None:
        raise BadInput(
            f"the tokenizer's patterns take more than {seconds:.0f} s for one text; use another"
            " model"
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
