"""Many clients' local training at once on one device: clients and seeds stacked into one batched model.

Lanes are sorted by their number of steps, so that the running ones are always the first k; k shrinks through few
sizes, each with its own recorded step, and a client with thousands of steps costs only its own lane at the end.
"""

import copy
import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.local.link import Local
from flrce.local.objective import Classification, Objective
from flrce.local.precision import Precision, exact, lowered
from flrce.local.stacked.folded import FoldedNet
from flrce.local.stacked.functional import FunctionalNet
from flrce.local.stacked.lanes import (
    Index,
    Lot,
    Rates,
    Stacked,
    checked,
    in_turn,
    lengths,
    level,
    plan,
    rates_of,
    table,
    trained,
)
from flrce.local.stacked.layers import ChainNet, Samples, Tensors
from flrce.local.stacked.steps import SEGMENT, Bench, Mode
from flrce.local.stacked.trial import Laned, follows
from flrce.local.stacked.triton_block import usable
from flrce.local.stacked.ways import Way, candidates
from flrce.local.updates import Chain
from flrce.models.abilities import together
from flrce.models.chain import Chain as Layers
from flrce.models.chain import chain
from flrce.models.flat import Layout, layout
from flrce.models.kinds import KINDS
from flrce.models.tracing import told

NARROW = 64  # channels up to which fused kernels are tried
SMALL = 1_000_000  # floats of a network up to which its fused kernels are known to be fastest
FULL = 4  # lanes of a group that are worth a stream of their own
CHUNK = 256  # samples of one model evaluated at once


class Stack:
    """K lanes (a lane = one client's local training in one run), all of one network, trained together on one device."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], x: Tensor, y: Tensor, scale: float, shift: float,
                 device: str, memory: int | None = None, objective: Objective = Classification(),
                 where: Layout | None = None, precision: Precision = "float32"):  # fmt: skip
        if tuple(x.shape[1:]) != tuple(shape) or len(x) != len(y) or len(x) == 0:
            raise BadInput(f"samples {tuple(x.shape)} with {len(y)} labels do not fit a network for {tuple(shape)}")
        self.where, self.device, self.objective = where or layout(net), torch.device(device), objective
        self.precision: Precision = precision
        self.samples = Samples(x.contiguous().to(device), y.to(device), float(scale), float(shift))
        self.module = copy.deepcopy(net).to(device)
        self.links: Layers | None = None
        with suppress(BadInput):
            self.links = chain(net, shape)
        self.nets: dict[str, Laned | BadInput] = {}
        self.ways = candidates(net, self._chained(), usable(self.device))
        if memory is None:  # asked once: a split that followed the free memory would change bits from call to call
            memory = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else 2 << 30
        self.memory = memory
        self._benches: dict[tuple[Mode, int], Bench] = {}
        self.net = self.network(self.way)

    def _chained(self) -> bool:
        """Whether the chain's own way is worth a try: its fused kernels are for few channels, and compile long."""
        if self.links is None:
            return False
        if self.device.type != "cuda":
            return True
        return all(layer.out[0] <= NARROW for layer in self.links.layers if layer.kind == "conv")

    def network(self, way: Way) -> Laned:
        """The network of many lanes for this way; BadInput says why there is none."""
        key = str(replace(way, streams=1))  # streams share their network
        if key not in self.nets:
            try:
                self.nets[key] = self._network(way)
            except BadInput as why:
                self.nets[key] = why
        found = self.nets[key]
        if isinstance(found, BadInput):
            raise found
        return found

    def _network(self, way: Way) -> Laned:
        if way.kind == "chain":
            if self.links is None:
                raise BadInput(f"{type(self.module).__name__} is no chain of layers")
            made = ChainNet(self.module, self.links, self.samples)
            if not told(self.module, KINDS):
                follows(self.links, self.module, self.samples)
            return made
        if way.kind == "mapped":
            return FunctionalNet(self.module, self.samples)
        return FoldedNet(self.module, self.samples, self.links, way.convolving, 1 if way.kind == "single" else 2)

    @property
    def way(self) -> Way:
        """The first way that this network can go; BadInput where there is none."""
        reasons = []
        for way in self.ways:
            try:
                self.network(way)
                return way
            except BadInput as why:
                reasons.append(why)
        raise reasons[0]

    @property
    def settled(self) -> Way | None:
        """The way that needs no measurement: the only one on a CPU, and fused kernels where they cover a small CNN."""
        if self.device.type != "cuda":
            return self.way
        found = self.nets.get("chain")
        if isinstance(found, ChainNet) and found.fused and self.where.size < SMALL:
            return Way("chain")
        return None

    def worth(self, lanes: int) -> list[Way]:
        """The ways that a measurement tries: vmap only for what does not fold, streams only for several lanes."""
        folds = any(self.goes(way) for way in self.ways if way.kind == "folded")
        few = [way for way in self.ways if way.kind != "mapped" or not folds]
        few = [way for way in few if way.kind != "single" or (lanes == 1) == (way.streams == 1)]
        return [way for way in few if way.kind != "folded" or way.streams == 1 or lanes >= FULL * way.streams]

    def goes(self, way: Way) -> bool:
        """Whether this network can go that way."""
        try:
            self.network(way)
        except BadInput:
            return False
        return True

    def halve(self) -> bool:
        """Let go of all buffers and ask for half as much memory from now on; False where there is nothing to halve."""
        self._benches.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.memory < self._bytes(1, 1):
            return False
        self.memory //= 2
        return True

    def forget(self, but: str) -> None:
        """Let go of the buffers of all other ways."""
        for mode, slot in [key for key in self._benches if str(key[0].way) != but]:
            del self._benches[mode, slot]

    def train(
        self, w: Tensor, orders: Sequence[Index], sizes: Sequence[Index], lr: float | Tensor | Sequence[Rates],
        mu: float | Tensor = 0.0, first: int = 0, squared: bool = True, update: Chain | None = None,
        locals: Sequence[Local] = (), carries: Sequence[Tensors] = (), seeds: Sequence[int] = (),
        way: Way | None = None,
    ) -> Stacked:  # fmt: skip
        """Train lane i from w[i] on its batches.

        orders[i] holds lane i's sample indices, batch after batch, and sizes[i] its batch sizes. SGD on the mean loss,
        at a rate for each lane, or for each step of each lane; mu pulls towards w[i] with mu/2 ||.||^2 (squared) or
        mu ||.|| per tensor. With `update`, every lane follows that chain of links instead, with its own of `locals`
        and `carries`. Random layers draw from `seeds`. Blocks before chain.trained[first] are frozen. Losses and their
        squares are means over a batch, before its step.
        """
        K, way = len(w), way or self.way
        sizes = [np.asarray(s, dtype=np.int64) for s in sizes]
        checked(w, orders, sizes, self.where.size, len(self.samples.y), first, self.links)
        pulls = torch.as_tensor(mu, dtype=torch.float32).expand(K)
        power = 2 if squared else 1
        prox = power if bool((pulls != 0).any()) else 0
        lot = Lot(w, orders, sizes, rates_of(lr, K), pulls, locals, carries, seeds)
        out, losses = w.clone(), [torch.zeros(2, 0)] * K
        ends: list[tuple[Tensors, Tensors]] = [({}, {})] * K
        ranked = np.argsort([-len(s) for s in sizes], kind="stable")
        busy = [int(i) for i in ranked if len(sizes[i])]
        fits = self._lanes(max((int(s.max()) for s in sizes if len(s)), default=1), way)
        most, side = way.cut(len(busy), fits)
        groups = [busy[at : at + most] for at in range(0, len(busy), most)]
        with exact(self.precision):
            for at in range(0, len(groups), side):
                few = groups[at : at + side]
                benches = []
                for slot, group in enumerate(few):
                    batch = -(-max(int(sizes[i].max()) for i in group) // 16) * 16
                    mode = Mode(level(len(group), most), batch, first, prox, update, way, self.precision)
                    benches.append(self._bench(mode, slot))
                for lane, i, seen in self._drive(benches, few, lot):
                    losses[i] = seen[:, : len(sizes[i]), lane].clone()
                for bench, group in zip(benches, few, strict=True):
                    out[group] = bench.store(len(group)).to(out.device)
                    for i, end in zip(group, bench.ends(len(group)), strict=True):
                        ends[i] = end
        return Stacked(out, [pair[0] for pair in losses], [pair[1] for pair in losses], ends)

    def _drive(
        self, benches: Sequence[Bench], groups: Sequence[list[int]], lot: Lot
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Run every step of these groups side by side; (lane, its place in the lot, (2, steps, lanes) of its group)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a bench's own stream must not overtake what it reads
        steps = [np.array([len(lot.sizes[i]) for i in group]) for group in groups]
        seen: list[list[Tensor]] = [[] for _ in groups]
        for bench, group in zip(benches, groups, strict=True):
            with bench.on():
                lot.load(bench, group)
        for begin in range(0, max(int(each[0]) for each in steps), SEGMENT):
            runs: list[Iterator[int]] = []
            for bench, group, each in zip(benches, groups, steps, strict=True):
                end = min(begin + SEGMENT, int(each[0]))
                if end <= begin:
                    runs.append(iter(()))
                    continue
                orders, sizes = [lot.orders[i] for i in group], [lot.sizes[i] for i in group]
                with bench.on():
                    indices, counts = plan(orders, sizes, begin, end, bench.mode.batch)
                    bench.lay(indices, counts, table(lot.rates, group, begin, end))
                shapes = lengths(each, begin, end, bench.mode.lanes)
                runs.append(iter([k for k, many in shapes for _ in range(many)]))
            in_turn(benches, runs)
            for bench, each, found in zip(benches, steps, seen, strict=True):
                end = min(begin + SEGMENT, int(each[0]))
                if end > begin:
                    with bench.on():
                        found.append(bench.losses[:, : end - begin].to("cpu", copy=True))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for group, found in zip(groups, seen, strict=True):
            whole = torch.cat(found, 1)
            for lane, i in enumerate(group):
                yield lane, i, whole

    def evaluate(self, w: Tensor, index: Index) -> dict[str, Tensor]:
        """w (S, d), index (N,) or (S, N): "loss" (S, N) and the metrics' numbers (S, N, ...) in eval mode."""
        S, N = len(w), index.shape[-1]
        found: dict[str, Tensor] = {}
        at = torch.from_numpy(np.broadcast_to(index, (S, N)).astype(np.int32)).to(self.device)
        few = together(self.module, tuple(self.samples.x.shape[1:]), CHUNK, room=4)
        most = self._lanes(few)
        with exact(self.precision), torch.no_grad():
            for lane in range(0, S, most):
                # copies, since a view into w would leave products with rows that are not aligned
                views = self.where.views(w[lane : lane + most].to(self.device, torch.float32))
                tensors = {name: view.contiguous() for name, view in views.items()}
                k = min(most, S - lane)
                for begin in range(0, N, few):
                    chunk = at[lane : lane + k, begin : begin + few].contiguous()
                    count = torch.full((k,), chunk.shape[1], dtype=torch.int32, device=self.device)
                    with lowered(self.device, self.precision):
                        out = self.net.logits(tensors, chunk, count, 0, training=False).flatten(0, 1).float()
                    y = self.samples.targets(chunk)
                    numbers = {"loss": self.objective.losses(out, y)}
                    numbers |= {judge.name: judge.of(out, y) for judge in self.objective.judges}
                    for name, each in numbers.items():
                        each = each.reshape(*chunk.shape, *each.shape[1:])
                        if name not in found:
                            found[name] = each.new_zeros(S, N, *each.shape[2:])
                        found[name][lane : lane + k, begin : begin + few] = each
        return {name: each.to(w.device) for name, each in found.items()}

    def _bytes(self, lanes: int, batch: int, way: Way | None = None) -> int:
        """Estimated memory of a step: per lane w, its start, its gradient and one spare, and per sample activations."""
        net = self.network(way) if way else self.net
        return lanes * (4 * 4 * self.where.size + batch * net.bytes)

    def _lanes(self, batch: int, way: Way | None = None) -> int:
        """How many lanes fit into the memory budget."""
        return max(1, self.memory // self._bytes(1, batch, way))

    def _bench(self, mode: Mode, slot: int = 0) -> Bench:
        """Buffers that fit this mode, with room to spare from an earlier call or new; kept while they fit."""
        fits = [m for m, place in self._benches if place == slot and m.holds(mode)]
        if fits:
            mode = min(fits, key=lambda m: (m.batch, m.lanes))
        else:
            held = [m for m, _ in self._benches]
            while held and sum(self._bytes(m.lanes, m.batch, m.way) for m in (mode, *held)) > self.memory:
                old = next(((m, place) for m, place in self._benches if m != mode), None)
                if old is None:
                    break
                self._benches.pop(old)
                held = [m for m, _ in self._benches]
            net, names = self.network(mode.way), trained(self.where, self.links, mode.first)
            self._benches[mode, slot] = Bench(net, self.where, mode, names, self.objective)
        self._benches[mode, slot] = self._benches.pop((mode, slot))  # the latest used last
        return self._benches[mode, slot]
