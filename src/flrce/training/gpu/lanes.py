"""Which lane takes which step when: lanes that shrink through few sizes, their batches and rates in
tables.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.errors import BadInput
from flrce.models.flat import ModelLayout
from flrce.models.graph import LayerChain
from flrce.training.gpu.chain_net import Tensors
from flrce.training.gpu.step_buffers import StepBuffers
from flrce.training.links import ClientContext

Index = NDArray[np.int64]
BatchPlan = NDArray[np.int32]
Rates = NDArray[np.float32]


def round_up_lanes(k: int, most: int) -> int:
    """k rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and at most `most`: few shapes, under a
    third of them idle.
    """
    size = 1
    while size < k:
        power = size & (size - 1) == 0
        size += max(1, size // 2 if power else size // 3)
    return min(size, most)


def iterate_lane_runs(steps: Index, begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(lanes, steps) runs that cover steps begin..end of lanes sorted by falling `steps`."""
    running = (steps[None, :] > np.arange(begin, end)[:, None]).sum(1)
    sizes = [round_up_lanes(int(k), most) for k in running]
    at = 0
    while at < len(sizes):
        until = next((i for i in range(at, len(sizes)) if sizes[i] != sizes[at]), len(sizes))
        yield sizes[at], until - at
        at = until


def plan_batches(
    orders: Sequence[Index], sizes: Sequence[Index], begin: int, end: int, batch: int
) -> tuple[BatchPlan, BatchPlan]:
    """Steps begin..end of every lane: (indices (steps, lanes, batch), counts (steps, lanes)),
    padded with sample 0.
    """
    K, parts = len(orders), [size[begin:end] for size in sizes]
    lengths = np.array([len(part) for part in parts])
    many = np.concatenate(parts)  # sizes of all batches, lane after lane
    step = np.arange(len(many)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slot = step * K + np.repeat(np.arange(K), lengths)
    counts = np.zeros((end - begin) * K, np.int32)
    counts[slot] = many
    at = np.repeat(slot * batch - (np.cumsum(many) - many), many) + np.arange(many.sum())
    if begin or end < max(len(size) for size in sizes):
        starts = [int(size[:begin].sum()) for size in sizes]
        orders = [o[s : s + int(p.sum())] for o, s, p in zip(orders, starts, parts, strict=True)]
    indices = np.zeros((end - begin) * K * batch, np.int32)
    indices[at] = np.concatenate(orders)
    return indices.reshape(end - begin, K, batch), counts.reshape(end - begin, K)


def broadcast_rates(lr: float | Tensor | Sequence[Rates], lanes: int) -> Rates | list[Rates]:
    """(lanes,) one rate for each, or the rates of each lane's steps."""
    if isinstance(lr, float | int | Tensor):
        return np.broadcast_to(np.asarray(lr, np.float32), lanes)
    return [np.asarray(rate, np.float32) for rate in lr]


def build_rate_table(
    rates: Rates | list[Rates], group: Sequence[int], begin: int, end: int
) -> Rates:
    """(steps, lanes) of a group; a lane that has finished stands still whatever its rate."""
    if isinstance(rates, np.ndarray):
        return np.broadcast_to(rates[list(group)], (end - begin, len(group))).copy()
    table = np.zeros((end - begin, len(group)), np.float32)
    for lane, i in enumerate(group):
        part = rates[i][begin:end]
        table[: len(part), lane] = part
    return table


@dataclass(frozen=True)
class ClientBatchResult:
    """What came of a call, lane by lane: new vectors (K, d), losses and squares of every step, and
    what links leave.
    """

    w: Tensor
    losses: list[Tensor]
    squares: list[Tensor]
    ends: list[tuple[Tensors, Tensors]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.w, self.losses, self.squares))

    def __getitem__(self, i: int) -> Any:
        return (self.w, self.losses, self.squares)[i]


@dataclass(frozen=True)
class LaneBatch:
    """All that a call trains, lane by lane."""

    w: Tensor
    orders: Sequence[Index]
    sizes: Sequence[Index]
    rates: Rates | list[Rates]
    pulls: Tensor
    locals: Sequence[ClientContext] = ()
    carries: Sequence[Tensors] = ()
    seeds: Sequence[int] = ()

    def copy_to_buffers(self, buffers: StepBuffers, group: Sequence[int]) -> None:
        locals = [self.locals[i] for i in group] if self.locals else ()
        carries = [self.carries[i] for i in group] if self.carries else ()
        seeds = [self.seeds[i] for i in group] if self.seeds else ()
        buffers.load_lanes(
            self.w[list(group)].to(buffers.plan.device),
            self.pulls[list(group)],
            locals,
            carries,
            seeds,
        )


def validate_lanes(
    w: Tensor,
    orders: Sequence[Index],
    sizes: Sequence[Index],
    d: int,
    N: int,
    first: int,
    links: LayerChain | None,
) -> None:
    """BadInput unless every lane has a vector of d floats and batches of the N samples that its
    layers can take.
    """
    if w.shape != (len(orders), d) or len(orders) != len(sizes):
        raise BadInput(
            f"w of shape {tuple(w.shape)} does not fit {len(orders)} lanes of {d} floats"
        )
    if first and links is None:
        raise BadInput(
            f"first={first}: only a network that is a plain chain of layers can freeze some of them"
        )
    least = 1
    if links is not None:
        if not 0 <= first < max(1, len(links.weight_layers)):
            raise BadInput(
                f"first={first} must lie in 0..{len(links.weight_layers) - 1}: one block has to"
                " train"
            )
        cut = links.layers.index(links.weight_layers[first]) if first else 0
        norms = [layer for layer in links.layers[cut:] if layer.kind == "batchnorm"]
        least = 2 if any(torch.Size(layer.out[1:]).numel() == 1 for layer in norms) else 1
    for lane, (order, size) in enumerate(zip(orders, sizes, strict=True)):
        if len(order) != size.sum() or (len(size) and size.min() < least):
            raise BadInput(
                f"lane {lane}: batch sizes must be {least} or more and add up to {len(order)}"
                " samples"
            )
        if len(order) and (order.min() < 0 or order.max() >= N):
            raise BadInput(f"lane {lane}: sample indices must lie in 0..{N - 1}")


def find_trained_names(where: ModelLayout, links: LayerChain | None, first: int) -> frozenset[str]:
    """Names of the tensors that train when the blocks of a chain before `first` are frozen."""
    names = {slot.name for slot in where.slots if slot.trainable}
    if links is not None and first:
        cut = links.layers.index(links.weight_layers[first])
        frozen = {layer.name for layer in links.layers[:cut] if layer.name}
        names = {name for name in names if name.rpartition(".")[0] not in frozen}
    return frozenset(names)
