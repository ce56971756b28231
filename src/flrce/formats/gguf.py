"""GGUF, the file form of llama.cpp, read and dequantised by the library `gguf`."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core.files import open_regular, validate_regular
from flrce.formats.libraries import import_library, translate_errors

GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, eq=False)
class GgufFile:
    """An opened file: its values by name, its tensors on demand."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Any]  # gguf's ReaderTensor, whose data is mapped into memory

    def read_tensor(self, name: str) -> Tensor:
        """One tensor in float32, rows first."""
        tensor = self.tensors[name]
        with translate_errors(f"{self.path}: tensor {name}", "give another GGUF file"):
            weights = import_library("gguf").dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(side) for side in reversed(tensor.shape))
        return torch.from_numpy(np.array(weights, np.float32)).reshape(shape)


def open_gguf(path: Path) -> GgufFile:
    """The file's values and tensors, or BadInput; the last two files stay open in a process."""
    validate_regular(path, "give a GGUF file")
    return _read_gguf(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _read_gguf(path: Path, stamp: int) -> GgufFile:
    gguf = import_library("gguf")

    class BoundedReader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """Raises an error at the end of the file, where the library would read on forever."""

        data: Any

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if isinstance(self.data, np.memmap):  # slicing it takes three times as long
                self.data = self.data.view(np.ndarray)
            values = super()._get(offset, dtype, count, override_order)
            if len(values) < count:
                raise ValueError(f"it ends at byte {len(self.data)}, within a value at {offset}")
            return values

    with translate_errors(f"{path} is no usable GGUF file"):
        reader = BoundedReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        return GgufFile(path, values, {tensor.name: tensor for tensor in reader.tensors})


def is_gguf(path: Path) -> bool:
    """Whether a file starts as GGUF does."""
    with open_regular(path, "give a GGUF file") as file:
        return file.read(4) == GGUF_MAGIC
