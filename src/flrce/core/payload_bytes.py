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
LOSS_BYTES = 4  # a loss that a client was asked for
REPLY_FIGURES_BYTES = 8  # beside an update: the samples and their loss
EVALUATION_FIGURES_BYTES = 8  # a client's metric of the model, and on how many samples


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


def count_download_bytes(
    model_bytes: int, held: Tensor | None, tensors: Mapping[str, Tensor]
) -> int:
    """Bytes that a client receives: the model, or the coordinates that it holds of it, and the
    further tensors of its task.
    """
    model = model_bytes if held is None else count_value_bytes(len(held))
    return model + count_bytes(tensors)


def count_upload_bytes(buffers: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> int:
    """Bytes that a client sends back: its encoded update, and what its links send beside it."""
    return count_bytes(buffers) + count_bytes(extras)


def limit_payload_bytes(size: int, tensors: int) -> int:
    """The most bytes that any encoding of `size` floats in so many tensors can need."""
    return count_value_bytes(size, torch.float64) + 64 * tensors + 4096
