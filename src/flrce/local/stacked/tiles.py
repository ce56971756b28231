"""Which tensors the kernels for channels last take, and how they make products."""

import torch
from torch import Tensor

from flrce.local.stacked.triton_block import usable

BLOCK = 2048  # values that one program copies


def fits(x: Tensor) -> bool:
    return usable(x.device) and x.dtype in (torch.float32, torch.bfloat16)


def tile(n: int, least: int, most: int) -> int:
    """A power of two near n."""
    size = least
    while size < n and size < most:
        size *= 2
    return size


def mode(x: Tensor) -> str:
    """How products are made: bfloat16 under autocast, TF32 where it is allowed, else three TF32 products."""
    if x.dtype == torch.bfloat16:
        return "bf16"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"
