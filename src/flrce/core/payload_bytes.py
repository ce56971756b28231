"""How many bytes tensors weigh as they travel: the one place that knows, for every direction and
engine.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

HASH_BYTES = 16  # of a hash that names a model
SEED_BYTES = 8
Tensors = Tensor | Mapping[Any, Tensor] | Iterable[Tensor]


def count_bytes(tensors: Tensors) -> int:
    """Bytes of one tensor, of a mapping's values or of several tensors, each by its own type."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in values)


def count_value_bytes(count: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of so many values that do not exist yet: of a model to be sent, of a dense update to be
    awaited.
    """
    return count * dtype.itemsize
