"""In what precision products are computed; full float32 and repeatable kernels unless an experiment
says otherwise.

float32   products in full float32 (TF32 off: signs of small updates decide)
tf32      factors of products and convolutions rounded to 10 bits of mantissa, on GPUs that have it
bf16      products and convolutions in bfloat16 (torch.autocast); weights, their gradients and
          all sums over clients stay float32

What the server does with updates is float32 or float64 in any case.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

log = logging.getLogger("flrce")
Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def use_precision(precision: Precision = "float32") -> Iterator[None]:
    """Products in this precision and repeatable convolutions."""
    before, rough = torch.get_float32_matmul_precision(), precision == "tf32"
    torch.set_float32_matmul_precision("high" if rough else "highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=rough
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def use_deterministic_kernels(
    device: torch.device, precision: Precision = "float32"
) -> Iterator[None]:
    """As `use_precision`, for any network's own layers: what has no repeatable kernel on a GPU says
    so once and runs.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with use_precision(precision), warnings.catch_warnings():
            missing = ".*does not have a deterministic implementation.*"
            warnings.filterwarnings("once", message=missing)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def resolve_cpu_precision(precision: Precision) -> Precision:
    """What a CPU can do of it; it says so in one line where that is something else."""
    if precision == "tf32":
        log.warning("engine.precision = 'tf32' is a GPU's; on this CPU products are float32")
        return "float32"
    return precision


def autocast_network(net: nn.Module, device: torch.device, precision: Precision) -> nn.Module:
    """The net with a forward pass in this precision, in place; what it gives is float32 again."""
    if precision == "bf16":
        inner = net.forward

        def forward(*args: Any, **more: Any) -> Any:
            with make_autocast_context(device, precision):
                out = inner(*args, **more)
            return pytree.tree_map(_to_float32, out)

        net.forward = forward
    return net


def _to_float32(out: Any) -> Any:
    return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out


def make_autocast_context(
    device: torch.device, precision: Precision
) -> AbstractContextManager[object]:
    """Around a forward pass and its loss: torch's autocast for bf16, else nothing."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def cast_like_autocast(*tensors: Tensor | None) -> list[Any]:
    """Under autocast the tensors in its dtype, as torch's own layers would have them."""
    kind = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [None if x is None else x.to(torch.get_autocast_dtype(kind)) for x in tensors]
