"""Write tensors as a safetensors file in chunks, so that tables of gigabytes are not copied.

The format: 8 bytes with the length of the header (little-endian); the header in JSON, name ->
dtype, shape and offsets; the values.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flrce.core.tensor_bytes import count_value_bytes

# Smaller rows are gathered first: one write for each would be slower.
MIN_ROW_BYTES = 2**16
SAFETENSORS_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass(frozen=True)
class TableRows:
    """Some rows of a table (M, ...)."""

    table: Tensor
    k: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.k), *self.table.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def iter_bytes(self) -> Iterator[memoryview]:
        if self.table.stride(0) * self.table.element_size() < MIN_ROW_BYTES:
            yield _to_memoryview(self.table[list(self.k)])
        else:
            yield from (_to_memoryview(self.table[k]) for k in self.k)


def iter_safetensors_chunks(tensors: Mapping[str, Tensor | TableRows]) -> Iterator[memoryview]:
    """The chunks of the file. Wide numbers come first, so that all values are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in names:
        start, tensor = end, tensors[name]
        end += count_value_bytes(torch.Size(tensor.shape).numel(), tensor.dtype)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        tensor = tensors[name]
        yield from (
            tensor.iter_bytes() if isinstance(tensor, TableRows) else [_to_memoryview(tensor)]
        )


def _to_memoryview(x: Tensor) -> memoryview:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
