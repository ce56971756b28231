"""What a network sees of samples: numbers scaled, token ids as they are."""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from flrce.errors import BadInput, format_one_line

SOFTMAX_SUM_TOLERANCE = 1e-4  # of 1: what a softmax sums to
log = logging.getLogger("flrce")


def scale_inputs(x: Tensor, scale: float, shift: float) -> Tensor:
    """x * scale + shift in float32; int64 holds token ids and stays as it is."""
    if x.dtype == torch.int64:
        return x
    if x.dtype == torch.float32:
        return x.mul(scale).add_(shift)
    return x.float().mul_(scale).add_(shift)


def validate_network(
    net: nn.Module, x: Tensor, outputs: int | None = None, inputs: str = ""
) -> None:
    """Run a copy of the net on a few samples; BadInput where it cannot take them.

    With `outputs`, it must give at least so many scores. `inputs` describes several in one row.
    """
    shape = tuple(x.shape[1:])
    if x.dtype == torch.int64:
        what = f"token ids of shape {shape}"
    else:
        what = f"float32 samples of shape {shape}"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = copy.deepcopy(net).eval().to(x.device)(x)
    except Exception as why:  # whatever a network of the user's may raise
        raise BadInput(
            f"{type(net).__name__} cannot take {inputs or what}: {format_one_line(why, 160)};"
            f" {'adapt the network or the inputs' if inputs else _suggest_remedy(x, str(why))}"
        ) from why
    name, first = type(net).__name__, next(iter_output_tensors(out), None)
    if first is None:
        raise BadInput(
            f"{name} gives a {type(out).__name__}; let its forward return scores, a tensor"
        )
    if not any(p.requires_grad for p in net.parameters()):
        raise BadInput(
            f"{name} has no parameter that trains; let some require gradients, or fix fewer"
            " (model.frozen)"
        )
    if outputs is None or not first.ndim:
        return
    if first.shape[-1] < outputs:
        few = f"gives {first.shape[-1]} scores where the data has {outputs} classes"
        raise BadInput(f"{name} {few}; give one score a class")
    if outputs > 1 and first.min() >= 0 and (first.sum(-1) - 1).abs().max() < SOFTMAX_SUM_TOLERANCE:
        log.warning(
            "%s gives probabilities, but the loss takes plain scores and learns slowly from these:"
            " leave the softmax at its end out",
            name,
        )


def _suggest_remedy(x: Tensor, why: str) -> str:
    """What to do about a network that cannot take x."""
    if x.dtype != torch.int64 and "indices" in why:  # of an embedding
        return (
            "say data.layout = 'tokens' if x holds token ids, else cast them in the network, as in"
            " x.long()"
        )
    if "dtype" in why or "scalar type" in why:
        return (
            "what trains is float32 here: cast to a layer's own dtype, as in"
            " x.to(self.layer.weight.dtype)"
        )
    if x.dtype == torch.int64:
        return "adapt the network"
    if x.dim() == 4 and x.shape[1] == 1:  # three axes were taken as grey images
        return (
            "adapt the network, or say data.layout = 'series' if x holds series (channels, steps)"
        )
    return "adapt the network, or say data.layout if x is something else"


def validate_single_sample_batch(net: nn.Module, x: Tensor) -> None:
    """BadInput where a batch of one sample cannot be trained on, for want of a variance."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(net).train().to(x.device)(x[:1])
    except ValueError as why:
        if "more than 1 value per channel" in str(why):
            raise BadInput(
                f"{type(net).__name__}: a batch of one sample has no variance for BatchNorm; raise"
                " train.batch"
            ) from why
        raise


def initialize_lazy_layers(net: nn.Module, x: Tensor, seed: int) -> nn.Module:
    """The net with its lazy layers sized for these samples and drawn from the seed."""
    if not any(map(is_lazy, (*net.parameters(), *net.buffers()))):
        return net
    make_buffer: Any = UninitializedBuffer  # torch's stub knows no dtype
    unsized: dict[int, Any] = {
        id(b): make_buffer(dtype=b.dtype) for b in net.buffers() if is_lazy(b)
    }
    net = copy.deepcopy(net, unsized)  # torch does not copy such buffers
    known = [(b, b.clone()) for b in net.buffers() if not is_lazy(b)]
    norms = [layer for layer in net.modules() if any(map(is_lazy, layer.buffers(recurse=False)))]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            net(x)
        except Exception as why:  # whatever a network of the user's may raise
            name = type(net).__name__
            raise BadInput(
                f"{name} has lazy layers and cannot take the samples: {format_one_line(why, 160)}"
            ) from why
        for b, before in known:  # statistics begin with the first client, not with this look
            b.copy_(before)
        for layer in norms:
            layer.reset_running_stats()  # type: ignore[operator]
    return net


def iter_output_tensors(out: Any) -> Iterator[Tensor]:
    """All that a network gave: a tensor, or tuples, lists and dicts of them."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, Mapping | tuple | list):
        for part in out.values() if isinstance(out, Mapping) else out:
            yield from iter_output_tensors(part)


def find_scores(out: Any) -> Tensor:
    """The scores in a network's output: `logits` of a dict, else the first tensor."""
    if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
        return out["logits"]  # type: ignore[no-any-return]
    return next(iter_output_tensors(out))
