"""Many clients' local training at once on one device: clients and seeds stacked into one batched model.

Lanes are sorted by their number of steps, so that the running ones are always the first k; k shrinks through few
sizes, each with its own recorded step, and a client with thousands of steps costs only its own lane at the end.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.link import Local
from flrce.local.objective import Classification, Objective
from flrce.local.precision import exact
from flrce.local.stacked.layers import ChainNet, FunctionalNet, Samples
from flrce.local.stacked.steps import SEGMENT, Bench, Mode
from flrce.local.updates import Chain
from flrce.models.chain import chain
from flrce.models.flat import layout

Index = NDArray[np.int64]
Plan = NDArray[np.int32]
Rates = NDArray[np.float32]
CHUNK = 256  # samples of one model evaluated at once


def level(k: int, most: int) -> int:
    """k rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and at most `most`: few shapes, under a third of them idle."""
    size = 1
    while size < k:
        power = size & (size - 1) == 0
        size += max(1, size // 2 if power else size // 3)
    return min(size, most)


def lengths(steps: Index, begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """(lanes, steps) runs that cover steps begin..end of lanes sorted by falling `steps`."""
    running = (steps[None, :] > np.arange(begin, end)[:, None]).sum(1)
    sizes = [level(int(k), most) for k in running]
    at = 0
    while at < len(sizes):
        until = next((i for i in range(at, len(sizes)) if sizes[i] != sizes[at]), len(sizes))
        yield sizes[at], until - at
        at = until


def plan(orders: Sequence[Index], sizes: Sequence[Index], begin: int, end: int, batch: int) -> tuple[Plan, Plan]:
    """Steps begin..end of every lane: (indices (steps, lanes, batch), counts (steps, lanes)), padded with sample 0."""
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


def _rates(lr: float | Tensor | Sequence[Rates], lanes: int) -> Rates | list[Rates]:
    """(lanes,) one rate for each, or the rates of each lane's steps."""
    if isinstance(lr, float | int | Tensor):
        return np.broadcast_to(np.asarray(lr, np.float32), lanes)
    return [np.asarray(rate, np.float32) for rate in lr]


def _table(rates: Rates | list[Rates], group: Sequence[int], begin: int, end: int) -> Rates:
    """(steps, lanes) of a group; a lane that has finished stands still whatever its rate."""
    if isinstance(rates, np.ndarray):
        return np.broadcast_to(rates[list(group)], (end - begin, len(group))).copy()
    table = np.zeros((end - begin, len(group)), np.float32)
    for lane, i in enumerate(group):
        part = rates[i][begin:end]
        table[: len(part), lane] = part
    return table


class Stack:
    """K lanes (a lane = one client's local training in one run), all of one network, trained together on one device."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, scale: float, shift: float,
                 device: str, memory: int | None = None, objective: Objective = Classification()):  # fmt: skip
        if tuple(x.shape[1:]) != tuple(shape) or len(x) != len(y) or len(x) == 0:
            raise BadInput(f"samples {tuple(x.shape)} with {len(y)} labels do not fit a network for {tuple(shape)}")
        self.where, self.device, self.objective = layout(net), torch.device(device), objective
        samples = Samples(x.contiguous().to(device), y.to(device), float(scale), float(shift))
        self.net: ChainNet | FunctionalNet
        try:
            links = chain(net, shape)
        except BadInput as why:
            self.net = FunctionalNet(copy.deepcopy(net).to(device), samples, why)
        else:
            self.net = ChainNet(copy.deepcopy(net).to(device), links, samples)
        if memory is None:  # asked once: a split that followed the free memory would change bits from call to call
            memory = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else 2 << 30
        self.memory = memory
        self._benches: dict[Mode, Bench] = {}

    def train(
        self, w: Tensor, orders: Sequence[Index], sizes: Sequence[Index], lr: float | Tensor | Sequence[Rates],
        mu: float | Tensor = 0.0, first: int = 0, squared: bool = True, update: Chain | None = None,
        local: Local | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """Train lane i from w[i] on its batches; (w' (K, d), losses, squares), the last two per lane and step.

        orders[i] holds lane i's sample indices, batch after batch, and sizes[i] its batch sizes. SGD on the mean loss,
        at a rate for each lane, or for each step of each lane; mu pulls towards w[i] with mu/2 ||.||^2 (squared) or
        mu ||.|| per tensor. With `update`, every lane follows that chain of links instead. Blocks before
        chain.trained[first] are frozen. Losses and their squares are means over a batch, before its step.
        """
        K = len(w)
        sizes = [np.asarray(s, dtype=np.int64) for s in sizes]
        self._check(w, orders, sizes, first)
        rates = _rates(lr, K)
        pulls = torch.as_tensor(mu, dtype=torch.float32).expand(K)
        prox = (2 if squared else 1) if bool((pulls != 0).any()) else 0
        out, losses = w.clone(), [torch.zeros(2, 0)] * K
        ranked = np.argsort([-len(s) for s in sizes], kind="stable")
        busy = [int(i) for i in ranked if len(sizes[i])]
        most = self._lanes(max((int(s.max()) for s in sizes if len(s)), default=1))
        with exact():
            for at in range(0, len(busy), most):
                group = busy[at : at + most]
                batch = -(-max(int(sizes[i].max()) for i in group) // 16) * 16
                bench = self._bench(Mode(level(len(group), most), batch, first, prox, update))
                bench.load(w[group].to(self.device), pulls[group], local)
                few, lengths = [orders[i] for i in group], [sizes[i] for i in group]
                seen = self._drive(bench, few, lengths, partial(_table, rates, group))
                for lane, i in enumerate(group):
                    losses[i] = seen[:, : len(sizes[i]), lane].clone()
                out[group] = bench.store(len(group)).to(out.device)
        return out, [pair[0] for pair in losses], [pair[1] for pair in losses]

    def _drive(
        self, bench: Bench, orders: Sequence[Index], sizes: Sequence[Index], rates: Callable[[int, int], Rates]
    ) -> Tensor:
        """Run every step of a loaded group, a segment of the plan at a time; (2, steps, lanes) losses and squares."""
        steps = np.array([len(size) for size in sizes])
        seen = []
        for begin in range(0, int(steps[0]), SEGMENT):
            end = min(begin + SEGMENT, int(steps[0]))
            indices, counts = plan(orders, sizes, begin, end, bench.mode.batch)
            bench.lay(indices, counts, rates(begin, end))
            for k, many in lengths(steps, begin, end, bench.mode.lanes):
                bench.run(k, many)
            seen.append(bench.losses[:, : end - begin].to("cpu", copy=True))
        return torch.cat(seen, 1)

    def evaluate(self, w: Tensor, index: Index) -> dict[str, Tensor]:
        """w (S, d), index (N,) or (S, N): "loss" (S, N) and the metrics' numbers (S, N, ...) in eval mode."""
        S, N = len(w), index.shape[-1]
        found: dict[str, Tensor] = {}
        at = torch.from_numpy(np.broadcast_to(index, (S, N)).astype(np.int32)).to(self.device)
        most = self._lanes(CHUNK)
        with exact(), torch.no_grad():
            for lane in range(0, S, most):
                # copies, since a view into w would leave products with rows that are not aligned
                views = self.where.views(w[lane : lane + most].to(self.device, torch.float32))
                tensors = {name: view.contiguous() for name, view in views.items()}
                k = min(most, S - lane)
                for begin in range(0, N, CHUNK):
                    chunk = at[lane : lane + k, begin : begin + CHUNK].contiguous()
                    count = torch.full((k,), chunk.shape[1], dtype=torch.int32, device=self.device)
                    out = self.net.logits(tensors, chunk, count, 0, training=False).flatten(0, 1)
                    y = self.net.samples.targets(chunk)
                    numbers = {"loss": self.objective.losses(out, y)}
                    numbers |= {judge.name: judge.of(out, y) for judge in self.objective.judges}
                    for name, each in numbers.items():
                        each = each.reshape(*chunk.shape, *each.shape[1:])
                        if name not in found:
                            found[name] = each.new_zeros(S, N, *each.shape[2:])
                        found[name][lane : lane + k, begin : begin + CHUNK] = each
        return {name: each.to(w.device) for name, each in found.items()}

    def _bytes(self, lanes: int, batch: int) -> int:
        """Estimated memory of a step: per lane w, its start, its gradient and one spare, and per sample activations."""
        return lanes * (4 * 4 * self.where.size + batch * self.net.bytes())

    def _lanes(self, batch: int) -> int:
        """How many lanes fit into the memory budget."""
        return max(1, self.memory // self._bytes(1, batch))

    def _bench(self, mode: Mode) -> Bench:
        """Buffers that fit this mode, with room to spare from an earlier call or new; kept while they fit."""
        fits = [m for m in self._benches if m.holds(mode)]
        if fits:
            mode = min(fits, key=lambda m: (m.batch, m.lanes))
        else:
            while self._benches and sum(self._bytes(m.lanes, m.batch) for m in (mode, *self._benches)) > self.memory:
                self._benches.pop(next(iter(self._benches)))
            self._benches[mode] = Bench(self.net, self.where, mode, self._trained(mode.first), self.objective)
        self._benches[mode] = self._benches.pop(mode)  # the latest used last
        return self._benches[mode]

    def _trained(self, first: int) -> frozenset[str]:
        """Names of the tensors that train when the blocks before `first` are frozen."""
        names = {s.name for s in self.where.slots if s.trainable}
        if isinstance(self.net, ChainNet) and first:
            frozen = {layer.name for layer in self.net.links.layers[: self.net.cut(first)] if layer.name}
            names = {name for name in names if name.rpartition(".")[0] not in frozen}
        return frozenset(names)

    def _check(self, w: Tensor, orders: Sequence[Index], sizes: Sequence[Index], first: int) -> None:
        if w.shape != (len(orders), self.where.size) or len(orders) != len(sizes):
            raise BadInput(f"w of shape {tuple(w.shape)} does not fit {len(orders)} lanes of {self.where.size} floats")
        if first and not isinstance(self.net, ChainNet):
            raise BadInput(f"first={first}: only a network that is a plain chain of layers can freeze some of them")
        if isinstance(self.net, ChainNet) and not 0 <= first < max(1, len(self.net.links.trained)):
            raise BadInput(f"first={first} must lie in 0..{len(self.net.links.trained) - 1}: one block has to train")
        least = 1
        if isinstance(self.net, ChainNet):
            norms = [layer for layer in self.net.links.layers[self.net.cut(first) :] if layer.kind == "batchnorm"]
            least = 2 if any(torch.Size(layer.out[1:]).numel() == 1 for layer in norms) else 1
        N = len(self.net.samples.y)
        for lane, (order, size) in enumerate(zip(orders, sizes, strict=True)):
            if len(order) != size.sum() or (len(size) and size.min() < least):
                raise BadInput(f"lane {lane}: batch sizes must be {least} or more and add up to {len(order)} samples")
            if len(order) and (order.min() < 0 or order.max() >= N):
                raise BadInput(f"lane {lane}: sample indices must lie in 0..{N - 1}")
