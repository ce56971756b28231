"""Whether lanes together give what each gives alone: tried once for a network, before anything is trained.

Lanes of different weights, each with a sample too many that does not count, against the module itself on one lane after
another: outputs, gradients and running statistics.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.precision import exact
from flrce.local.stacked.layers import Draw, Samples, Tensors
from flrce.local.stacked.triton_block import usable
from flrce.models.flat import tensors

#: of a tensor's norm: rounding lies below, another function far above
CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3}
HALF = 5e-2  # where fixed weights are of half precision


class Laned(Protocol):
    """A network of many lanes."""

    samples: Samples

    def logits(
        self, t: Tensors, index: Tensor, count: Tensor, first: int, training: bool, draw: Draw | None = None
    ) -> Tensor: ...

    def bytes(self) -> int: ...


class Tried(Laned, Protocol):
    """One that takes inputs as well as places in the samples."""

    def outputs(
        self, t: Tensors, x: Tensor, count: Tensor, training: bool, frozen: frozenset[str] = frozenset()
    ) -> Tensor: ...


def agrees(net: Tried, module: nn.Module, lanes: int = 2, double: bool = True) -> None:
    """BadInput where the network of many lanes fails, or does something else than the module.

    In float64, where nothing but another function makes a difference; in float32 for what does not run in float64.
    """
    device = net.samples.x.device
    with exact(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        near = CLOSE[torch.float32]
        if double:
            with suppress(BadInput):
                _agrees(net, module, lanes, torch.float64, CLOSE[torch.float64])
                if not usable(device):
                    return
                near = 0.05  # it is the right function; are the kernels of float32 sound?
        _agrees(net, module, lanes, torch.float32, near)


def _agrees(net: Tried, module: nn.Module, lanes: int, dtype: torch.dtype, close: float) -> None:
    what, device = type(module).__name__, net.samples.x.device
    batch = unlike(module, net.samples, lanes)
    index = torch.arange(lanes * batch, dtype=torch.int32, device=device).reshape(lanes, batch) % len(net.samples.x)
    x = net.samples.inputs(index)
    x = x.to(dtype) if x.is_floating_point() else x
    trained, others = _lanes(module, lanes, device, dtype)
    try:
        here = _together(net, trained, others, x)
        there = _alone(module, trained, others, x)
    except Exception as why:  # torch and the module's own code raise many kinds
        line = str(why).splitlines()[0][:120] if str(why) else type(why).__name__
        raise BadInput(f"torch cannot run {what} for several clients at once ({line})") from why
    total = sum(float(each.norm()) for each in there)
    for a, b in zip(here, there, strict=True):
        near = (HALF if _halved(module) else close) * (float(b.norm()) + 0.01 * total) + 1e-12
        if a.shape != b.shape or not float((a - b).norm()) <= near:
            raise BadInput(f"{what} mixes samples, or uses its weights in a way that lanes do not follow")


def unlike(module: nn.Module, samples: Samples, lanes: int) -> int:
    """Samples a lane such that those of all lanes are no dimension of data or weights: inputs are told apart by it."""
    sizes = {n for tensor in (*module.parameters(), samples.x[0]) for n in tensor.shape}
    return next(batch for batch in range(4, 1000) if lanes * batch not in sizes)


def _lanes(module: nn.Module, lanes: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """What trains, and statistics: the module's own values, a little different in each lane."""
    rng = torch.Generator().manual_seed(0)
    trained: Tensors = {}
    others: Tensors = {}
    for name, tensor, learns in tensors(module):
        noise = 0.1 * torch.randn(lanes, *tensor.shape, generator=rng).to(device, dtype)
        value = tensor.detach().to(dtype) * (1 + noise.clamp(-0.5, 0.5)) + (0.05 * noise if learns else 0)
        (trained if learns else others)[name] = value
    return trained, others


def _halved(module: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())


def _together(net: Tried, trained: Tensors, others: Tensors, x: Tensor) -> list[Tensor]:
    leaves = {name: each.clone().requires_grad_() for name, each in trained.items()}
    others = {name: each.clone() for name, each in others.items()}
    real = x.shape[1] - 1
    count = torch.full((len(x),), real, dtype=torch.int32, device=x.device)
    y = net.outputs({**leaves, **others}, x, count, training=True)
    return _found(y[:, :real], leaves, others)


def _alone(module: nn.Module, trained: Tensors, others: Tensors, x: Tensor) -> list[Tensor]:
    """One lane after another, each with its values in the module itself: a backward pass may run blocks once more."""
    others = {name: each.clone() for name, each in others.items()}
    module, dtype = copy.deepcopy(module).train(), next(iter((*trained.values(), *others.values()))).dtype
    if not _halved(module):  # a base in bfloat16 is computed with as it is
        module = module.to(dtype)
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0  # lanes count what they drop, and drop nothing here
    known = dict(module.named_parameters())
    pieces: list[list[Tensor]] = []
    for i in range(len(x)):
        for name, value in trained.items():
            known[name].data = value[i].clone()
        for name, value in others.items():
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent)._buffers[last] = value[i]
        y = module(x[i, :-1])
        push = _push((len(x), *y.shape), y)[i]
        grads = _gradients((y * push).sum(), [known[name] for name in trained])
        pieces.append([y.detach(), *grads])
    return [*(torch.stack(each) for each in zip(*pieces, strict=True)), *others.values()]


def _found(y: Tensor, leaves: Tensors, others: Tensors) -> list[Tensor]:
    """Outputs, gradients of a random sum of them, and statistics afterwards."""
    return [y.detach(), *_gradients((y * _push(y.shape, y)).sum(), list(leaves.values())), *others.values()]


def _push(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1)).to(like)


def _gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(total, list(leaves), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
