"""Byte-pair encoding (Sennrich et al. 2016): text <-> token ids.

A text is cut into words by one or more patterns, a word becomes letters of its bytes, as in GPT-2,
or characters, as in SentencePiece (formats/spelling.py), and the pair of neighbours that was merged
first in training is merged first here, until none is left.
"""

import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from flrce.errors import BadInput, format_one_line
from flrce.formats.patterns import limit_time, validate_pattern
from flrce.formats.spelling import BYTE_LEVEL_SPELLING, ScoreRanks, TokenSpelling

#: GPT-2's words; and how other families cut before them, by the names that GGUF files use
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZER_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (GPT2_PATTERN,),
    "gpt-2": (GPT2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "llama-bpe": (LLAMA3_PATTERN,),
    "llama3": (LLAMA3_PATTERN,),
}
SHORT_TEXT_CHARACTERS = 200  # characters of a text that is cut without a time limit
WORDS, LONG = 65536, 256  # words whose pieces are remembered, and how long those are at most


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Token ids of one model; `specials` are marks such as the end of a text, which plain text
    never becomes.
    """

    tokens: tuple[str, ...]  # id -> token, as it is spelt
    merges: tuple[tuple[str, str], ...]
    patterns: tuple[str, ...] = (GPT2_PATTERN,)
    specials: Mapping[str, int] = field(default_factory=dict)
    end: int = 0  # the id that ends a text
    whole: bool = (
        False  # a word that is a token is taken as it stands, whatever its merges would give
    )
    spelling: TokenSpelling = BYTE_LEVEL_SPELLING
    scores: Mapping[str, float] = field(
        default_factory=dict
    )  # in place of merges: what any two that make a token rank

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def ranks(self) -> Mapping[tuple[str, str], float]:
        return (
            ScoreRanks(self.scores)
            if self.scores
            else {pair: i for i, pair in enumerate(self.merges)}
        )

    @cached_property
    def _word_cache(self) -> dict[str, tuple[int, ...]]:
        return {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without marks; what is written like a mark is text too."""
        found: list[int] = []
        for word in split_words(self.spelling.normalize_text(text), self.patterns):
            if len(word) > LONG:
                found += self._encode_word(word)
                continue
            if word not in self._word_cache:
                if len(self._word_cache) >= WORDS:
                    self._word_cache.clear()
                self._word_cache[word] = self._encode_word(word)
            found += self._word_cache[word]
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; marks are left out, bytes that are no UTF-8 replaced."""
        marks = set(self.specials.values())
        return self.spelling.join_tokens([self.tokens[i] for i in ids if i not in marks])

    def _encode_word(self, word: str) -> tuple[int, ...]:
        parts = self.spelling.split_word(word)
        if self.whole and "".join(parts) in self.ids:
            return (self.ids["".join(parts)],)
        known = self.ids
        parts = merge_pairs(parts, self.ranks)
        spelt = [
            each
            for part in parts
            for each in ([part] if part in known else self.spelling.to_fallback_tokens(part))
        ]
        try:
            return tuple(known[part] for part in spelt)
        except KeyError as why:
            raise BadInput(
                f"the tokenizer has no token for {format_one_line(word, 40)!r}: its vocabulary"
                f" lacks {why}"
            ) from why


def merge_pairs(parts: list[str], ranks: Mapping[tuple[str, str], float]) -> list[str]:
    """Neighbours merged, the pair of lowest rank first and of equal ones the leftmost, in n log n
    steps.

    A part that was merged into its left neighbour becomes "". The queue holds every pair that ever
    was; one whose parts have changed since is passed over.
    """
    left, right = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
    queue = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
    heapify(queue)
    while queue:
        rank, i = heappop(queue)
        j = right[i]
        if j == len(parts) or ranks.get((parts[i], parts[j])) != rank:
            continue
        parts[i], parts[j] = parts[i] + parts[j], ""
        right[i] = right[j]
        if right[i] < len(parts):
            left[right[i]] = i
        for a, b in ((left[i], i), (i, right[i])):
            if a >= 0 and b < len(parts) and (parts[a], parts[b]) in ranks:
                heappush(queue, (ranks[parts[a], parts[b]], a))
    return [part for part in parts if part]


def split_words(text: str, patterns: Sequence[str]) -> list[str]:
    """A text cut by each pattern in turn: what matches is a word, and so is what lies between
    matches.
    """
    if (
        len(text) <= SHORT_TEXT_CHARACTERS
    ):  # no polynomial that is left takes long on it, and an alarm would cost more
        return _split_text(text, patterns)
    with limit_time(len(text)):
        return _split_text(text, patterns)


def _split_text(text: str, patterns: Sequence[str]) -> list[str]:
    parts = [text] if text else []
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            at = 0
            for match in compile_pattern(pattern).finditer(part):
                if match.end() == match.start():
                    continue
                cut += [part[at : match.start()]] if match.start() > at else []
                cut.append(match.group())
                at = match.end()
            cut += [part[at:]] if at < len(part) else []
        parts = cut
    return parts


@lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern with \\p{L} and \\p{N}, which Python's re does not know, written out."""
    validate_pattern(pattern)
    found, inside, at = [], False, 0
    while at < len(pattern):
        if pattern.startswith((r"\p{L}", r"\p{N}"), at):
            span = format_unicode_ranges(pattern[at + 3])
            found.append(span if inside else f"[{span}]")
            at += 5
            continue
        if pattern.startswith((r"\p", r"\P"), at):
            raise BadInput(
                f"the tokenizer's pattern has {pattern[at : at + 6]!r}; known are \\p{{L}} and"
                " \\p{N}"
            )
        step = 2 if pattern[at] == "\\" else 1
        inside = {"[": True, "]": False}.get(pattern[at], inside)
        found.append(pattern[at : at + step])
        at += step
    try:
        return re.compile("".join(found))
    except re.error as why:
        raise BadInput(
            f"the tokenizer's pattern {format_one_line(pattern, 60)!r} cannot be used: {why}"
        ) from why


@lru_cache(maxsize=4)
def format_unicode_ranges(category: str) -> str:
    """All characters of a Unicode category (L: letters, N: numbers), as the inside of a character
    class.
    """
    spans: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] == category:
            if spans and spans[-1][1] == code - 1:
                spans[-1][1] = code
            else:
                spans.append([code, code])
    return "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in spans)
