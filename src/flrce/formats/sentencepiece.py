"""A tokenizer.model of SentencePiece (Kudo & Richardson 2018): a protobuf message, of which a few fields are read."""

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from flrce.errors import BadInput, brief
from flrce.formats.bpe import Tokenizer
from flrce.formats.tokenizers import IDS, MOST, scored
from flrce.reading import read_limited

Value = int | bytes
VARINT, EIGHT, SIZED, FOUR = 0, 1, 2, 5  # protobuf's kinds of values
PIECE, TRAINER, NORMALIZER = 1, 2, 3  # fields of a model; of a piece: text, score, kind
BPE, END = (3, 2), 42  # of the trainer: the field of the model's kind and its value here; the field of the id that ends
CHARACTERS, PREFIX, SQUEEZED = 2, 3, 4  # of the normalizer: a map of characters, a first space, runs of spaces as one


def from_model(path: Path) -> Tokenizer:
    """The tokenizer of a file, or BadInput."""
    raw = read_limited(path, MOST, "use another model", expansion=8)
    try:
        model = list(islice(fields(raw), IDS + 1))
        if len(model) > IDS:
            raise ValueError(f"more than {IDS} pieces")
        pieces = [dict(fields(_sized(value))) for field, value in model if field == PIECE]
        trainer, normalizer = (
            dict(pair for field, value in model if field == wanted for pair in fields(_sized(value)))
            for wanted in (TRAINER, NORMALIZER)
        )
        if trainer.get(BPE[0], 1) != BPE[1]:
            raise ValueError("no BPE")
        if normalizer.get(CHARACTERS) or normalizer.get(SQUEEZED, 1):
            raise ValueError("it normalises texts first")
        tokens = [_sized(piece[1]).decode() for piece in pieces]
        scores = [struct.unpack("<f", _sized(piece.get(2, b"\0" * 4)))[0] for piece in pieces]
        kinds = [int(piece.get(3, 1)) for piece in pieces]
        first: Literal["always", "never"] = "always" if normalizer.get(PREFIX, 1) else "never"
        return scored(tokens, kinds, scores, int(trainer.get(END, 2)), first)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as why:
        raise BadInput(f"{path} is no BPE of SentencePiece that is read: {brief(why, 100)}; use another model") from why


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {EIGHT: 8, FOUR: 4}.get(kind, 0)
        if kind == SIZED:
            size, at = _varint(data, at)
        if kind not in (EIGHT, FOUR, SIZED) or at + size > len(data):
            raise ValueError("it is cut short, or no protobuf")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where the next value begins."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _sized(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message should be")
    return value
