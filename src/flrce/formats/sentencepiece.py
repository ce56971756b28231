"""A tokenizer.model of SentencePiece (Kudo & Richardson 2018): a protobuf message, of which a few
fields are read.
"""

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from flrce.core.files import read_limited
from flrce.errors import BadInput, format_one_line
from flrce.formats.bpe import Tokenizer
from flrce.formats.tokenizers import MAX_FILE_BYTES, MAX_TOKEN_IDS, make_sentencepiece_tokenizer

ProtobufValue = int | bytes
VARINT, EIGHT, SIZED, FOUR = 0, 1, 2, 5  # protobuf's kinds of values
PIECE, TRAINER, NORMALIZER = 1, 2, 3  # fields of a model; of a piece: text, score, kind
BPE, END = (
    (3, 2),
    42,
)  # of the trainer: the field of the model's kind and its value here; the field of the id that ends
CHARACTERS, PREFIX, SQUEEZED = (
    2,
    3,
    4,
)  # of the normalizer: a map of characters, a first space, runs of spaces as one


def load_sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file, or BadInput."""
    raw = read_limited(path, MAX_FILE_BYTES, "use another model", expansion=8)
    try:
        model = list(islice(parse_protobuf_fields(raw), MAX_TOKEN_IDS + 1))
        if len(model) > MAX_TOKEN_IDS:
            raise ValueError(f"more than {MAX_TOKEN_IDS} pieces")
        pieces = [
            dict(parse_protobuf_fields(_require_bytes(value)))
            for field, value in model
            if field == PIECE
        ]
        trainer, normalizer = (
            dict(
                pair
                for field, value in model
                if field == wanted
                for pair in parse_protobuf_fields(_require_bytes(value))
            )
            for wanted in (TRAINER, NORMALIZER)
        )
        if trainer.get(BPE[0], 1) != BPE[1]:
            raise ValueError("no BPE")
        if normalizer.get(CHARACTERS) or normalizer.get(SQUEEZED, 1):
            raise ValueError("it normalises texts first")
        tokens = [_require_bytes(piece[1]).decode() for piece in pieces]
        scores = [
            struct.unpack("<f", _require_bytes(piece.get(2, b"\0" * 4)))[0] for piece in pieces
        ]
        kinds = [int(piece.get(3, 1)) for piece in pieces]
        first: Literal["always", "never"] = "always" if normalizer.get(PREFIX, 1) else "never"
        return make_sentencepiece_tokenizer(tokens, kinds, scores, int(trainer.get(END, 2)), first)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as why:
        raise BadInput(
            f"{path} is no BPE of SentencePiece that is read: {format_one_line(why, 100)}; use"
            " another model"
        ) from why


def parse_protobuf_fields(data: bytes) -> Iterator[tuple[int, ProtobufValue]]:
    """(number, value) of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        size = {EIGHT: 8, FOUR: 4}.get(kind, 0)
        if kind == SIZED:
            size, at = _read_varint(data, at)
        if kind not in (EIGHT, FOUR, SIZED) or at + size > len(data):
            raise ValueError("it is cut short, or no protobuf")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where the next value begins."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _require_bytes(value: ProtobufValue) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message should be")
    return value
