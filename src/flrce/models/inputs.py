"""What a network sees of samples: numbers scaled, token ids as they are."""

import copy

import torch
from torch import Tensor, nn

from flrce.errors import BadInput, brief


def inputs(x: Tensor, scale: float, shift: float) -> Tensor:
    """x * scale + shift in float32; int64 holds token ids, which are looked up and not computed with."""
    if x.dtype == torch.int64:
        return x
    if x.dtype == torch.float32:
        return x.mul(scale).add_(shift)
    return x.float().mul_(scale).add_(shift)


def tried(net: nn.Module, x: Tensor, outputs: int | None = None) -> None:
    """Runs a copy of the net on a few samples, as it will see them; BadInput where it cannot take them.

    With `outputs`, it must give at least so many scores.
    """
    shape = tuple(x.shape[1:])
    what = f"token ids of shape {shape}" if x.dtype == torch.int64 else f"float32 samples of shape {shape}"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = copy.deepcopy(net).eval().to(x.device)(x)
    except Exception as why:  # whatever a network of the user's may raise
        remedy = "adapt the network" + ("" if x.dtype == torch.int64 else ", or say data.layout if x is something else")
        raise BadInput(f"{type(net).__name__} cannot take {what}: {brief(why, 160)}; {remedy}") from why
    if outputs is not None and isinstance(out, Tensor) and out.ndim and out.shape[-1] < outputs:
        few = f"gives {out.shape[-1]} scores where the data has {outputs} classes"
        raise BadInput(f"{type(net).__name__} {few}; give one score a class")
