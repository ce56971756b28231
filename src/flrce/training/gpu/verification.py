"""Whether lanes together give what each gives alone: tried once for a network, before anything is
trained.

Lanes of different weights, each with a sample too many that does not count, against the module
itself on one lane after another: outputs, gradients and how statistics move. What could differ in
another batch is refused as well: decisions by numbers of the samples or weights, draws, buffers
that a pass changes.
"""

import copy
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flrce.errors import BadInput
from flrce.models.chain import LayerChain
from flrce.models.drawing import get_rng_states, preserve_rng_states
from flrce.models.flat import list_model_tensors
from flrce.training.gpu.chain_net import ChainNet, DeviceSamples, SeedsAndStep, Tensors
from flrce.training.gpu.fused_block import supports_triton
from flrce.training.gpu.side_effects import BufferSnapshot, ReadDetector
from flrce.training.gpu.torch_functions import DeterministicMode
from flrce.training.precision import use_precision

#: of a tensor's norm: rounding lies below, another function far above
RELATIVE_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
HALF_PRECISION_TOLERANCE = 5e-2  # where fixed weights are of half precision
# in float64: another function, whatever parts of a network compute in float32
WRONG_FUNCTION_DISTANCE = 1e-4
VERIFIED_LANES = 2
MISMATCH_ERROR = "{} mixes samples, or uses its weights in a way that lanes do not follow"


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

    def compute_outputs(
        self,
        t: Tensors,
        x: Tensor,
        count: Tensor,
        training: bool,
        frozen: frozenset[str] = frozenset(),
    ) -> Tensor: ...


def verify_network(net: VerifiableLaneNetwork, module: nn.Module) -> None:
    """BadInput where the network of many lanes fails, or does something else than the module.

    In float64, where nothing but another function makes a difference; in float32 for what does not
    run in float64.
    """
    device = net.samples.x.device
    with use_precision(), preserve_rng_states(device):
        near = RELATIVE_TOLERANCES[torch.float32]
        try:
            _verify_in_precision(net, module, torch.float64, RELATIVE_TOLERANCES[torch.float64])
            if not supports_triton(device):
                return
            near = 0.05  # it is the right function; are the kernels of float32 sound?
        except FunctionMismatch:
            raise
        except BadInput:
            pass
        _verify_in_precision(net, module, torch.float32, near)


def _verify_in_precision(
    net: VerifiableLaneNetwork, module: nn.Module, dtype: torch.dtype, close: float
) -> None:
    what, device, lanes = type(module).__name__, net.samples.x.device, VERIFIED_LANES
    batch = choose_trial_batch_size(module, net.samples, lanes)
    index = torch.arange(lanes * batch, dtype=torch.int32, device=device).reshape(
        lanes, batch
    ) % len(net.samples.x)
    x = net.samples.gather_inputs(index)
    x = x.to(dtype) if x.is_floating_point() else x
    trained, others = _perturb_lanes(module, lanes, device, dtype)
    drawn, still = get_rng_states(device), BufferSnapshot(net.module, others)
    try:
        here = _run_lanes_together(net, trained, others, x)
        net.compute_outputs(
            {**trained, **_clone_tensors(others)}, x, _count_real_samples(x), training=False
        )
        if drawn == get_rng_states(device) and not still.has_changed:
            with ReadDetector((x, *trained.values(), *others.values())) as reading:
                again = net.compute_outputs(
                    {**trained, **_clone_tensors(others)}, x, _count_real_samples(x), training=True
                )[:, :-1]
            if not torch.allclose(again, here[0], rtol=1e-4, atol=1e-6):
                raise FunctionMismatch(
                    f"{what} remembers what it was given before, which is no lane's own"
                )
        else:
            raise FunctionMismatch(_explain_side_effect(what, still))
        _verify_finished_lanes(net, trained, others, x)
        there = _run_lanes_separately(module, trained, others, x)
    except (BadInput, torch.OutOfMemoryError):
        raise
    except Exception as why:  # torch and the module's own code raise many kinds
        line = str(why).splitlines()[0][:120] if str(why) else type(why).__name__
        raise BadInput(f"torch cannot run {what} for several clients at once ({line})") from why
    if reading.found:
        raise FunctionMismatch(
            f"{what} decides by numbers that it reads from its samples or weights, one lane for all"
        )
    total = sum(float(each.norm()) for each in there[: len(there) - len(others)])
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        # how far statistics moved is little
        floor = 0.0 if i >= len(there) - len(others) else 0.01 * total
        scale = float(b.norm()) + floor
        away = float((a - b).norm()) if a.shape == b.shape else math.inf
        if (
            not away
            <= (HALF_PRECISION_TOLERANCE if _has_half_precision(module) else close) * scale + 1e-12
        ):
            kind = (
                FunctionMismatch
                if dtype == torch.float64
                and not away <= WRONG_FUNCTION_DISTANCE * scale
                and not _has_half_precision(module)
                else BadInput
            )
            raise kind(MISMATCH_ERROR.format(what))


def verify_chain(links: LayerChain, module: nn.Module, samples: DeviceSamples) -> None:
    """BadInput where a module does something else than its chain of layers, in training or in
    evaluation.

    A trace does not see a layer that stays in evaluation, or code that is not the same twice. On
    the host, where no kernel has to be compiled for it.
    """
    few = DeviceSamples(samples.x[:8].cpu(), samples.y[:8].cpu(), samples.scale, samples.shift)
    module, index = copy.deepcopy(module).cpu(), torch.arange(len(few.x), dtype=torch.int32)[None]
    trained, others = _perturb_lanes(module, 1, index.device, torch.float32)
    count = torch.full((1,), len(few.x), dtype=torch.int32)
    for training in (True, False) if len(few.x) > 1 else (False,):
        found = []
        for alone in (False, True):
            leaves = {name: each.clone().requires_grad_() for name, each in trained.items()}
            moving = _clone_tensors(others)
            if alone:
                own = {name: each[0] for name, each in (*leaves.items(), *moving.items())}
                y = functional_call(module.train(training), own, (few.gather_inputs(index)[0],))
            else:
                with torch.enable_grad():
                    y = ChainNet(module, links, few).compute_logits(
                        {**leaves, **moving}, index, count, 0, training
                    )[0]
            grads = (
                _compute_gradients(
                    (y * _draw_output_gradient(y.shape, y)).sum(), list(leaves.values())
                )
                if training
                else []
            )
            found.append([y.detach(), *grads, *moving.values()])
        for one, other in zip(*found, strict=True):
            if (
                one.shape != other.shape
                or not float((one - other).norm()) <= 0.03 * float(other.norm()) + 1e-4
            ):
                when = "training" if training else "evaluation"
                raise BadInput(
                    f"{type(module).__name__} does something in {when} that its layers do not say"
                )


def _explain_side_effect(what: str, still: BufferSnapshot) -> str:
    if still.has_changed:
        return (
            f"{what} changes a buffer of its own as it runs, such as a counter, which lanes do not"
            " follow"
        )
    return f"{what} draws at random without a layer that says so"


def choose_trial_batch_size(module: nn.Module, samples: DeviceSamples, lanes: int) -> int:
    """Samples a lane such that those of all lanes are no dimension of data or weights: inputs are
    told apart by it.
    """
    sizes = {n for tensor in (*module.parameters(), samples.x[0]) for n in tensor.shape}
    return next(batch for batch in range(4, 1000) if lanes * batch not in sizes)


def _perturb_lanes(
    module: nn.Module, lanes: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """What trains, and statistics: the module's own values, a little different in each lane."""
    rng = torch.Generator().manual_seed(0)
    trained: Tensors = {}
    others: Tensors = {}
    for name, tensor, learns in list_model_tensors(module):
        noise = 0.1 * torch.randn(lanes, *tensor.shape, generator=rng).to(device, dtype)
        value = tensor.detach().to(dtype) * (1 + noise.clamp(-0.5, 0.5)) + (
            0.05 * noise if learns else 0
        )
        (trained if learns else others)[name] = value
    return trained, others


def _has_half_precision(module: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())


def _run_lanes_together(
    net: VerifiableLaneNetwork, trained: Tensors, others: Tensors, x: Tensor
) -> list[Tensor]:
    """Outputs, gradients of a random sum of them, and how far statistics moved."""
    leaves = {name: each.clone().requires_grad_() for name, each in trained.items()}
    moving = _clone_tensors(others)
    y = net.compute_outputs({**leaves, **moving}, x, _count_real_samples(x), training=True)
    if any(not torch.equal(leaf, trained[name]) for name, leaf in leaves.items()):
        raise FunctionMismatch(
            f"{type(net.module).__name__} changes its weights as it runs, which lanes do not follow"
        )
    y = y[:, :-1]
    push = _draw_output_gradient(y.shape, y)
    grads = _compute_gradients((y * push).sum(), list(leaves.values()))
    return [y.detach(), *grads, *(moving[name] - others[name] for name in others)]


def _verify_finished_lanes(
    net: VerifiableLaneNetwork, trained: Tensors, others: Tensors, x: Tensor
) -> None:
    """BadInput where the statistics of a lane without samples move: one that has finished before
    the others.
    """
    if not others:
        return
    count, moving = _count_real_samples(x), _clone_tensors(others)
    count[-1] = 0
    net.compute_outputs({**trained, **moving}, x, count, training=True)
    if any(not torch.equal(moving[name][-1], others[name][-1]) for name in others):
        raise FunctionMismatch(
            f"{type(net.module).__name__} changes statistics whether there are samples or not"
        )


def _clone_tensors(tensors: Tensors) -> Tensors:
    return {name: each.clone() for name, each in tensors.items()}


def _count_real_samples(x: Tensor) -> Tensor:
    """(k,) samples that count: all but the last of each lane."""
    return torch.full((len(x),), x.shape[1] - 1, dtype=torch.int32, device=x.device)


def _run_lanes_separately(
    module: nn.Module, trained: Tensors, others: Tensors, x: Tensor
) -> list[Tensor]:
    """One lane after another, each with its values in the module itself: a backward pass may run
    blocks once more.
    """
    moving = _clone_tensors(others)
    module, dtype = (
        copy.deepcopy(module).train(),
        next(iter((*trained.values(), *others.values()))).dtype,
    )
    if not _has_half_precision(module):  # a base in bfloat16 is computed with as it is
        module = module.to(dtype)
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0  # lanes count what they drop, and drop nothing here
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    known = dict(module.named_parameters())
    pieces: list[list[Tensor]] = []
    for i in range(len(x)):
        for name, value in trained.items():
            known[name].data = value[i].clone()
        for name, value in moving.items():
            parent, _, last = name.rpartition(".")
            module.get_submodule(parent)._buffers[last] = value[i]
        with DeterministicMode():
            y = module(x[i, :-1])
        push = _draw_output_gradient((len(x), *y.shape), y)[i]
        grads = _compute_gradients((y * push).sum(), [known[name] for name in trained])
        pieces.append([y.detach(), *grads])
    moved = [moving[name] - others[name] for name in others]
    return [*(torch.stack(each) for each in zip(*pieces, strict=True)), *moved]


def _draw_output_gradient(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1)).to(like)


def _compute_gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(total, list(leaves), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
