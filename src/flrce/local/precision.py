"""Full float32 and repeatable kernels on a GPU: the same runs give the same bits there too."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact() -> Iterator[None]:
    """Full float32 products and repeatable convolutions (TF32 stays off: signs of small updates decide)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """As `exact`, for any network's own layers: what has no repeatable kernel on a GPU says so once and runs."""
    if device.type != "cuda":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with exact(), warnings.catch_warnings():
            warnings.filterwarnings("once", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
