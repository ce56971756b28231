"""Which tensors the kernels for channels last take, and how they make products."""

import torch
from torch import Tensor

from flrce.training.gpu.triton_block import supports_triton

COPY_BLOCK_VALUES = 2048  # values that one program copies


def supports_channels_last_kernels(x: Tensor) -> bool:
    return supports_triton(x.device) and x.dtype in (torch.float32, torch.bfloat16)


def choose_tile_size(n: int, least: int, most: int) -> int:
    """A power of two near n."""
    size = least
    while size < n and size < most:
        size *= 2
    return size


def choose_product_mode(x: Tensor) -> str:
    """How products are made: bfloat16 under autocast, TF32 where it is allowed, else three TF32
    products.
    """
    if x.dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"
