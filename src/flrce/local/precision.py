"""In what precision products are computed; full float32 and repeatable kernels unless an experiment says otherwise.

float32   products in full float32 (TF32 off: signs of small updates decide)
tf32      factors of products and convolutions rounded to 10 bits of mantissa, on GPUs that have it
bf16      products and convolutions in bfloat16 (torch.autocast); weights, their gradients and all sums over clients
          stay float32

What the server does with updates is float32 or float64 in any case.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def exact(precision: Precision = "float32") -> Iterator[None]:
    """Products in this precision and repeatable convolutions."""
    before, rough = torch.get_float32_matmul_precision(), precision == "tf32"
    torch.set_float32_matmul_precision("high" if rough else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=rough):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def repeatable(device: torch.device, precision: Precision = "float32") -> Iterator[None]:
    """As `exact`, for any network's own layers: what has no repeatable kernel on a GPU says so once and runs."""
    if device.type != "cuda":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with exact(precision), warnings.catch_warnings():
            warnings.filterwarnings("once", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def lowered(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """Around a forward pass and its loss: torch's autocast for bf16, else nothing."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
