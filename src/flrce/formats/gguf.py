"""GGUF, the file form of llama.cpp: a header of named values, a table of tensors, then their bytes.

Nothing in a file is believed before it was measured: every length is held against what is left of the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.errors import BadInput, brief
from flrce.formats.quants import QUANTS, Quant, dequantised
from flrce.reading import open_regular, validate_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST = 1 << 20  # named values, or tensors: far above any model
ITEMS, HEADER_BYTES = 1 << 24, 1 << 29  # of one array; of all values and the table, whatever the file's size
#: number of a value's type -> how struct reads it; 8 is a string, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the file, and as what."""

    kind: Quant
    shape: tuple[int, ...]  # as torch has it: rows first
    start: int
    size: int


class Gguf:
    """A file opened: its values by name, its tensors on demand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        validate_regular(self.path, "give a GGUF file")
        try:
            self.raw = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as why:
            raise BadInput(f"{self.path} cannot be read: {why}; give a GGUF file") from why
        try:
            self.values, self.places = _read(_Cursor(self.raw))
        except _Broken as why:
            raise BadInput(f"{self.path} is no usable GGUF file: {why}; download it again") from why

    def tensor(self, name: str) -> Tensor:
        """One tensor in float32."""
        place = self.places[name]
        raw = np.asarray(self.raw[place.start : place.start + place.size])
        return torch.from_numpy(dequantised(place.kind, raw).copy()).reshape(place.shape)


class _Broken(ValueError):
    """What is wrong with a file."""


class _Cursor:
    """A place in the file that only moves forward, and never past its end."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.at = raw, 0

    def bytes(self, n: int) -> bytes:
        if self.at + n > HEADER_BYTES:
            raise _Broken(f"its values and table take more than {HEADER_BYTES} bytes")
        if n > len(self.raw) - self.at:
            raise _Broken(f"it ends at byte {len(self.raw)}, within what starts at {self.at}")
        found: bytes = self.raw[self.at : self.at + n].tobytes()
        self.at += n
        return found

    def number(self, how: str) -> Any:
        return struct.unpack("<" + how, self.bytes(struct.calcsize("<" + how)))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth > 2:
            raise _Broken(f"a value of unknown type {kind}")
        inner, n = self.number("I"), self.number("Q")
        if n > ITEMS:
            raise _Broken(f"an array of {n} values")
        if inner in SCALARS:
            width = struct.calcsize("<" + SCALARS[inner])
            return list(struct.unpack(f"<{n}{SCALARS[inner]}", self.bytes(min(n, len(self.raw)) * width)))
        if n > len(self.raw) // 8:  # each string or array has its length in 8 bytes or more
            raise _Broken(f"an array of {n} values in {len(self.raw)} bytes")
        return [self.value(inner, depth + 1) for _ in range(n)]


def _read(file: _Cursor) -> tuple[dict[str, Any], dict[str, Place]]:
    if file.bytes(4) != MAGIC:
        raise _Broken("it does not start with GGUF")
    version = file.number("I")
    if version not in VERSIONS:
        raise _Broken(f"version {version}, known are 2 and 3")
    tensors, pairs = file.number("Q"), file.number("Q")
    if max(tensors, pairs) > MOST:
        raise _Broken(f"{tensors} tensors and {pairs} values")
    values: dict[str, Any] = {}
    for _ in range(pairs):
        name = file.text()
        values[name] = file.value(file.number("I"))
    table = [_entry(file) for _ in range(tensors)]
    step = values.get("general.alignment", 32)
    if type(step) is not int or not 1 <= step <= 1 << 16:
        raise _Broken(f"alignment {brief(step, 20)}")
    base = -(-file.at // step) * step
    end = len(file.raw)
    return values, {name: _place(name, shape, kind, base + offset, end) for name, shape, kind, offset in table}


def _entry(file: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, kind, offset)."""
    name, n = file.text(), file.number("I")
    if n > 4:
        raise _Broken(f"tensor {brief(name, 60)!r} has {n} dimensions")
    shape = tuple(file.number("Q") for _ in range(n))[::-1]
    return name, shape, file.number("I"), file.number("Q")


def _place(name: str, shape: tuple[int, ...], kind: int, start: int, end: int) -> Place:
    if kind not in QUANTS:
        known = ", ".join(quant.name for quant in QUANTS.values())
        raise _Broken(f"tensor {brief(name, 60)!r} is of kind {kind}, read are {known}")
    quant, count = QUANTS[kind], 1
    for side in shape:
        count *= side  # Python's integers do not overflow
    if not shape or shape[-1] % quant.weights:
        raise _Broken(f"tensor {brief(name, 60)!r} of shape {shape} is not made of blocks of {quant.weights}")
    size = count // quant.weights * quant.size
    if not 0 < size <= end - start:
        raise _Broken(f"tensor {brief(name, 60)!r} lies beyond its end, at byte {start}")
    return Place(quant, shape, start, size)


def looks_like(path: Path) -> bool:
    """Whether a file starts as GGUF does."""
    with open_regular(path, "give a GGUF file") as file:
        return file.read(4) == MAGIC
