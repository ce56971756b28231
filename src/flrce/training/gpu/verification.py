"""Whether lanes together give what each gives alone: tried once for a network, before anything is
trained.

Lanes of different weights, each with a sample too many that does not count, against the module
itself on one lane after another: outputs, gradients and how statistics move. What could differ in
another batch is an error as well: draws, and buffers that a pass changes.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.drawing import get_rng_states, preserve_rng_states
from flrce.models.flat import list_model_tensors
from flrce.training.gpu.chain_net import DeviceSamples, SeedsAndStep, Tensors
from flrce.training.gpu.fused_block import supports_triton
from flrce.training.gpu.lane_functions import RANDOM_ERROR, DropNothing
from flrce.training.precision import use_precision

#: of a tensor's norm: rounding lies below, another function far above
RELATIVE_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
KERNEL_TOLERANCE = 5e-2  # of the float32 kernels, where ReLUs and pools may decide the other way
HALF_PRECISION_TOLERANCE = 5e-2  # where fixed weights are of half precision
# in float64: another function, whatever parts of a network compute in float32
WRONG_FUNCTION_DISTANCE = 1e-4
STATISTICS_SHARE = 0.01  # how far statistics move is little: of the other tensors' norm
VERIFIED_LANES = 2
MISMATCH_ERROR = "{} mixes samples, or uses its weights in a way that lanes do not follow"
#: what torch.vmap says, and what it means here
VMAP_ERRORS = {
    "random operation": RANDOM_ERROR,
    "data-dependent": "{} decides by numbers that it reads from its samples or weights",
    ".item()": "{} decides by numbers that it reads from its samples or weights",
}


class FunctionMismatch(BadInput):
    """What is computed is something else, and not only less exact."""


class LaneNetwork(Protocol):
    """A network of many lanes."""

    samples: DeviceSamples

    def compute_logits(
        self,
        t: Tensors,
        index: Tensor,
        count: Tensor,
        first: int,
        training: bool,
        draw: SeedsAndStep | None = None,
    ) -> Tensor: ...

    @property
    def bytes_per_sample(self) -> int: ...  # that a sample needs while a step is under way


class VerifiableLaneNetwork(LaneNetwork, Protocol):
    """One that takes inputs as well as places in the samples."""

    module: nn.Module

    @property
    def supports_float64(self) -> bool: ...

    def compute_outputs(self, t: Tensors, x: Tensor, count: Tensor, training: bool) -> Tensor: ...


def verify_network(net: VerifiableLaneNetwork, module: nn.Module) -> None:
    """BadInput where the network of many lanes fails, or does something else than the module.

    In float64, where nothing but another function makes a difference; in float32 for what does not
    run in float64, and for kernels.
    """
    device = net.samples.x.device
    has_kernels = supports_triton(device)
    with use_precision(), preserve_rng_states(device):
        if net.supports_float64:
            try:
                tolerance = RELATIVE_TOLERANCES[torch.float64]
                _verify_in_precision(net, module, torch.float64, tolerance)
                if not has_kernels:
                    return
            except FunctionMismatch:
                raise
            except BadInput:
                pass
        tolerance = KERNEL_TOLERANCE if has_kernels else RELATIVE_TOLERANCES[torch.float32]
        _verify_in_precision(net, module, torch.float32, tolerance)


def _verify_in_precision(
    net: VerifiableLaneNetwork, module: nn.Module, dtype: torch.dtype, tolerance: float
) -> None:
    x = _gather_trial_inputs(net, module, dtype)
    trained, others = _perturb_lanes(module, len(x), x.device, dtype)
    try:
        together = _run_lanes_together(net, trained, others, x)
        _verify_repeatable(net, type(module).__name__, trained, others, x, together[0])
        separately = _run_lanes_separately(module, trained, others, x)
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as why:  # torch and the module's own code raise many kinds
        raise _explain_failure(type(module).__name__, why) from why
    _compare_results(module, together, separately, len(others), dtype, tolerance)


def _gather_trial_inputs(
    net: VerifiableLaneNetwork, module: nn.Module, dtype: torch.dtype
) -> Tensor:
    """(lanes, batch, ...)"""
    lanes, samples = VERIFIED_LANES, net.samples
    batch = choose_trial_batch_size(module, samples)
    index = torch.arange(lanes * batch, dtype=torch.int32, device=samples.x.device)
    x = samples.gather_inputs(index.reshape(lanes, batch) % len(samples.x))
    return x.to(dtype) if x.is_floating_point() else x


def _explain_failure(name: str, why: Exception) -> BadInput:
    line = str(why).splitlines()[0] if str(why) else type(why).__name__
    for part, meaning in VMAP_ERRORS.items():
        if part in str(why):
            return FunctionMismatch(meaning.format(name))
    return BadInput(f"torch cannot run {name} for several clients at once ({line[:120]})")


def _verify_repeatable(
    net: VerifiableLaneNetwork,
    name: str,
    trained: Tensors,
    others: Tensors,
    x: Tensor,
    before: Tensor,
) -> None:
    """FunctionMismatch where a pass leaves something behind that the next one reads."""
    drawn, snapshot = get_rng_states(x.device), BufferSnapshot(net.module, others)
    net.compute_outputs({**trained, **_clone_tensors(others)}, x, _count_real(x), training=False)
    again = net.compute_outputs(
        {**trained, **_clone_tensors(others)}, x, _count_real(x), training=True
    )[:, :-1]
    if drawn != get_rng_states(x.device):
        raise FunctionMismatch(RANDOM_ERROR.format(name))
    if snapshot.has_changed:
        raise FunctionMismatch(
            f"{name} changes a buffer of its own as it runs, such as a counter, which lanes do not"
            " follow"
        )
    if not torch.allclose(again, before, rtol=1e-4, atol=1e-6):
        raise FunctionMismatch(f"{name} remembers what it was given before, which is no lane's own")


def _compare_results(
    module: nn.Module,
    together: Sequence[Tensor],
    separately: Sequence[Tensor],
    statistics: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """The last so many tensors are how far statistics moved."""
    has_half = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
    tolerance = HALF_PRECISION_TOLERANCE if has_half else tolerance
    numbers = len(separately) - statistics
    total = sum(float(x.norm()) for x in separately[:numbers])
    for i, (a, b) in enumerate(zip(together, separately, strict=True)):
        scale = float(b.norm()) + (STATISTICS_SHARE * total if i < numbers else 0.0)
        distance = float((a - b).norm()) if a.shape == b.shape else math.inf
        if not distance <= tolerance * scale + 1e-12:
            wrong = dtype == torch.float64 and not has_half
            wrong = wrong and not distance <= WRONG_FUNCTION_DISTANCE * scale
            kind = FunctionMismatch if wrong else BadInput
            raise kind(MISMATCH_ERROR.format(type(module).__name__))


def choose_trial_batch_size(module: nn.Module, samples: DeviceSamples) -> int:
    """Samples of a lane that are no dimension of data or weights: a dropout's inputs are told apart
    by it.
    """
    sizes = {n for tensor in (*module.parameters(), samples.x[0]) for n in tensor.shape}
    return next(batch for batch in range(4, 1000) if batch not in sizes)


def _perturb_lanes(
    module: nn.Module, lanes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """What trains, and statistics: the module's own values, a little different in each lane."""
    rng = torch.Generator().manual_seed(0)
    trained: Tensors = {}
    others: Tensors = {}
    for name, tensor, learns in list_model_tensors(module):
        noise = 0.1 * torch.randn(lanes, *tensor.shape, generator=rng).to(device, dtype)
        value = tensor.detach().to(device, dtype) * (1 + noise.clamp(-0.5, 0.5)) + (
            0.05 * noise if learns else 0
        )
        (trained if learns else others)[name] = value
    return trained, others


def _run_lanes_together(
    net: VerifiableLaneNetwork, trained: Tensors, others: Tensors, x: Tensor
) -> list[Tensor]:
    """Outputs, gradients of a random sum of them, and how far statistics moved."""
    leaves = {name: each.clone().requires_grad_() for name, each in trained.items()}
    moving = _clone_tensors(others)
    y = net.compute_outputs({**leaves, **moving}, x, _count_real(x), training=True)
    if any(not torch.equal(leaf, trained[name]) for name, leaf in leaves.items()):
        raise FunctionMismatch(
            f"{type(net.module).__name__} changes its weights as it runs, which lanes do not follow"
        )
    y = y[:, :-1]
    push = _draw_output_gradient(y.shape, y)
    grads = _compute_gradients((y * push).sum(), list(leaves.values()))
    return [y.detach(), *grads, *(moving[name] - others[name] for name in others)]


def _clone_tensors(tensors: Tensors) -> Tensors:
    return {name: each.clone() for name, each in tensors.items()}


def _count_real(x: Tensor) -> Tensor:
    """(k,) samples that count: all but the last of each lane."""
    return torch.full((len(x),), x.shape[1] - 1, dtype=torch.int32, device=x.device)


def _run_lanes_separately(
    module: nn.Module, trained: Tensors, others: Tensors, x: Tensor
) -> list[Tensor]:
    """One lane after another, each with its values in the module itself: a backward pass may run
    blocks once more.
    """
    moving = _clone_tensors(others)
    module = _prepare_plain_module(module, x, (*trained.values(), *others.values()))
    known = dict(module.named_parameters())
    pieces: list[list[Tensor]] = []
    for i in range(len(x)):
        for name, value in trained.items():
            known[name].data = value[i].clone()
        for name, value in moving.items():
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent)._buffers[last] = value[i]
        with DropNothing():
            y = module(x[i, :-1])
        push = _draw_output_gradient((len(x), *y.shape), y)[i]
        grads = _compute_gradients((y * push).sum(), [known[name] for name in trained])
        pieces.append([y.detach(), *grads])
    moved = [moving[name] - others[name] for name in others]
    return [*(torch.stack(each) for each in zip(*pieces, strict=True)), *moved]


def _prepare_plain_module(module: nn.Module, x: Tensor, lanes: Iterable[Tensor]) -> nn.Module:
    """A copy in the lanes' precision that drops nothing, in training."""
    module = copy.deepcopy(module).to(x.device).train()
    if all(p.dtype not in (torch.bfloat16, torch.float16) for p in module.parameters()):
        module = module.to(next(iter(lanes)).dtype)  # a base in bfloat16 is computed with as it is
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0  # lanes count what they drop, and drop nothing here
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return module


def _draw_output_gradient(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1)).to(like)


def _compute_gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(total, list(leaves), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


class BufferSnapshot:
    """A module's buffers that are no lane's own, as they are now: counters, flags, masks."""

    def __init__(self, module: nn.Module, own: Iterable[str]) -> None:
        others = {name: b for name, b in module.named_buffers() if name not in set(own)}
        self.module = module
        self.before = {name: b.clone() for name, b in others.items()}

    @property
    def has_changed(self) -> bool:
        now = dict(self.module.named_buffers())
        return any(not _is_unchanged(now.get(name), b) for name, b in self.before.items())


def _is_unchanged(now: Tensor | None, before: Tensor) -> bool:
    if now is None or now.shape != before.shape:
        return False
    return bool(((now == before) | (now != now)).all())
