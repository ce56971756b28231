"""How a tokenizer spells a text before it merges: bytes as printable letters, or characters with ▁
for a space.

The first is GPT-2's; the second SentencePiece's (Kudo & Richardson 2018), as Llama 2, TinyLlama and
Mistral have it, with <0x00> to <0xFF> for the bytes of characters that are no tokens.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

SPACE_MARK = "\u2581"  # ▁
BYTE_TOKEN_PATTERN = re.compile("<0x([0-9A-F]{2})>")


class TokenSpelling(Protocol):
    def normalize_text(self, text: str) -> str: ...  # what is cut into words
    def split_word(self, word: str) -> list[str]: ...  # what is merged
    def to_fallback_tokens(self, part: str) -> list[str]: ...  # tokens for a part that is none
    def join_tokens(self, tokens: Sequence[str]) -> str: ...


@dataclass(frozen=True)
class ByteLevelSpelling:
    """A letter for every byte; all of them are tokens. `composed`: an accent and its letter are one
    character first.
    """

    composed: bool = False

    def normalize_text(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.composed else text

    def split_word(self, word: str) -> list[str]:
        alphabet = make_byte_alphabet()
        return [alphabet[byte] for byte in word.encode("utf-8", "surrogatepass")]

    def to_fallback_tokens(self, part: str) -> list[str]:
        return [part]

    def join_tokens(self, tokens: Sequence[str]) -> str:
        back = {letter: byte for byte, letter in enumerate(make_byte_alphabet())}
        return bytes(back[letter] for letter in "".join(tokens) if letter in back).decode(
            "utf-8", "replace"
        )


BYTE_LEVEL_SPELLING = ByteLevelSpelling()


@dataclass(frozen=True)
class MetaspaceSpelling:
    """▁ for a space, and one before the text: `always`, where it does not begin with one
    (`missing`), or `never`.
    """

    first: Literal["always", "missing", "never"] = "always"

    def normalize_text(self, text: str) -> str:
        text = text.replace(" ", SPACE_MARK)
        wanted = self.first == "always" or (
            self.first == "missing" and not text.startswith(SPACE_MARK)
        )
        return SPACE_MARK + text if text and wanted else text

    def split_word(self, word: str) -> list[str]:
        return list(word)

    def to_fallback_tokens(self, part: str) -> list[str]:
        return [f"<0x{byte:02X}>" for byte in part.encode("utf-8", "surrogatepass")]

    def join_tokens(self, tokens: Sequence[str]) -> str:
        raw = bytearray()
        for token in tokens:
            byte = BYTE_TOKEN_PATTERN.fullmatch(token)
            raw += (
                bytes([int(byte[1], 16)])
                if byte
                else token.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")
            )
        found = raw.decode("utf-8", "replace")
        return found.removeprefix(" ") if self.first != "never" else found


@dataclass(frozen=True)
class ScoreRanks(Mapping[tuple[str, str], float]):
    """Ranks of pairs as SentencePiece has them: any two neighbours that together are a token, the
    best score first.
    """

    scores: Mapping[str, float]

    def __getitem__(self, pair: tuple[str, str]) -> float:
        return -self.scores[pair[0] + pair[1]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((token[:i], token[i:]) for token in self.scores for i in range(1, len(token)))

    def __len__(self) -> int:
        return sum(len(token) - 1 for token in self.scores)


def make_split_patterns(tokens: Sequence[str]) -> tuple[str, ...]:
    """Where a spaced text may be cut so that no merge is lost: before a ▁ after a letter, unless a
    token spans one.
    """
    spans = any(SPACE_MARK in token.lstrip(SPACE_MARK) for token in tokens)
    return () if spans else (f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+",)


@lru_cache(maxsize=1)
def make_byte_alphabet() -> tuple[str, ...]:
    """256 letters, one a byte: printable ones stand for themselves, the rest for those from 256
    on.
    """
    plain = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    rest = [byte for byte in range(256) if byte not in plain]
    return tuple(chr(byte if byte in plain else 256 + rest.index(byte)) for byte in range(256))
