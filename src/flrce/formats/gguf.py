"""GGUF, the file form of llama.cpp: a header of named values, a table of tensors, then their bytes.

Nothing in a file is believed before it was measured: every length is held against what is left of
the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core.files import open_regular, validate_regular
from flrce.errors import BadInput, format_one_line
from flrce.formats.quants import QUANT_FORMATS, QuantFormat, dequantise_weights

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 20  # named values, or tensors: far above any model
ITEMS, HEADER_BYTES = (
    1 << 24,
    1 << 29,
)  # of one array; of all values and the table, whatever the file's size
#: number of a value's type -> how struct reads it; 8 is a string, 9 an array
SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor lies in the file, and as what."""

    kind: QuantFormat
    shape: tuple[int, ...]  # as torch has it: rows first
    start: int
    size: int


class GgufFile:
    """A file opened: its values by name, its tensors on demand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        validate_regular(self.path, "give a GGUF file")
        try:
            self.raw = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as why:
            raise BadInput(f"{self.path} cannot be read: {why}; give a GGUF file") from why
        try:
            self.values, self.places = _read_contents(_FileCursor(self.raw))
        except _CorruptFile as why:
            raise BadInput(f"{self.path} is no usable GGUF file: {why}; download it again") from why

    def read_tensor(self, name: str) -> Tensor:
        """One tensor in float32."""
        place = self.places[name]
        raw = np.asarray(self.raw[place.start : place.start + place.size])
        return torch.from_numpy(dequantise_weights(place.kind, raw).copy()).reshape(place.shape)


class _CorruptFile(ValueError):
    """What is wrong with a file."""


class _FileCursor:
    """A place in the file that only moves forward, and never past its end."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.at = raw, 0

    def read_bytes(self, n: int) -> bytes:
        if self.at + n > HEADER_BYTES:
            raise _CorruptFile(f"its values and table take more than {HEADER_BYTES} bytes")
        if n > len(self.raw) - self.at:
            raise _CorruptFile(f"it ends at byte {len(self.raw)}, within what starts at {self.at}")
        found: bytes = self.raw[self.at : self.at + n].tobytes()
        self.at += n
        return found

    def read_number(self, how: str) -> Any:
        return struct.unpack("<" + how, self.read_bytes(struct.calcsize("<" + how)))[0]

    def read_text(self) -> str:
        return self.read_bytes(self.read_number("Q")).decode("utf-8", "surrogateescape")

    def read_value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALAR_FORMATS:
            return self.read_number(SCALAR_FORMATS[kind])
        if kind == STRING:
            return self.read_text()
        if kind != ARRAY or depth > 2:
            raise _CorruptFile(f"a value of unknown type {kind}")
        inner, n = self.read_number("I"), self.read_number("Q")
        if n > ITEMS:
            raise _CorruptFile(f"an array of {n} values")
        if inner in SCALAR_FORMATS:
            width = struct.calcsize("<" + SCALAR_FORMATS[inner])
            return list(
                struct.unpack(
                    f"<{n}{SCALAR_FORMATS[inner]}", self.read_bytes(min(n, len(self.raw)) * width)
                )
            )
        if n > len(self.raw) // 8:  # each string or array has its length in 8 bytes or more
            raise _CorruptFile(f"an array of {n} values in {len(self.raw)} bytes")
        return [self.read_value(inner, depth + 1) for _ in range(n)]


def _read_contents(file: _FileCursor) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    if file.read_bytes(4) != GGUF_MAGIC:
        raise _CorruptFile("it does not start with GGUF")
    version = file.read_number("I")
    if version not in SUPPORTED_VERSIONS:
        raise _CorruptFile(f"version {version}, known are 2 and 3")
    tensors, pairs = file.read_number("Q"), file.read_number("Q")
    if max(tensors, pairs) > MAX_ENTRIES:
        raise _CorruptFile(f"{tensors} tensors and {pairs} values")
    values: dict[str, Any] = {}
    for _ in range(pairs):
        name = file.read_text()
        values[name] = file.read_value(file.read_number("I"))
    table = [_read_tensor_entry(file) for _ in range(tensors)]
    step = values.get("general.alignment", 32)
    if type(step) is not int or not 1 <= step <= 1 << 16:
        raise _CorruptFile(f"alignment {format_one_line(step, 20)}")
    base = -(-file.at // step) * step
    end = len(file.raw)
    return values, {
        name: _locate_tensor(name, shape, kind, base + offset, end)
        for name, shape, kind, offset in table
    }


def _read_tensor_entry(file: _FileCursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, kind, offset)."""
    name, n = file.read_text(), file.read_number("I")
    if n > 4:
        raise _CorruptFile(f"tensor {format_one_line(name, 60)!r} has {n} dimensions")
    shape = tuple(file.read_number("Q") for _ in range(n))[::-1]
    return name, shape, file.read_number("I"), file.read_number("Q")


def _locate_tensor(
    name: str, shape: tuple[int, ...], kind: int, start: int, end: int
) -> TensorLocation:
    if kind not in QUANT_FORMATS:
        known = ", ".join(quant.name for quant in QUANT_FORMATS.values())
        raise _CorruptFile(
            f"tensor {format_one_line(name, 60)!r} is of kind {kind}, read are {known}"
        )
    quant, count = QUANT_FORMATS[kind], 1
    for side in shape:
        count *= side  # Python's integers do not overflow
    if not shape or shape[-1] % quant.weights:
        raise _CorruptFile(
            f"tensor {format_one_line(name, 60)!r} of shape {shape} is not made of blocks of"
            f" {quant.weights}"
        )
    size = count // quant.weights * quant.size
    if not 0 < size <= end - start:
        raise _CorruptFile(
            f"tensor {format_one_line(name, 60)!r} lies beyond its end, at byte {start}"
        )
    return TensorLocation(quant, shape, start, size)


def is_gguf(path: Path) -> bool:
    """Whether a file starts as GGUF does."""
    with open_regular(path, "give a GGUF file") as file:
        return file.read(4) == GGUF_MAGIC
