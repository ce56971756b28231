"""Many clients' local training at once on one device: clients and seeds stacked into one batched
model.

Lanes are sorted by their number of steps, so that the running ones are always the first k; k
shrinks through few sizes, each with its own recorded step, and a client with thousands of steps
costs only its own lane at the end.
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
from flrce.models.abilities import limit_samples_per_pass
from flrce.models.chain import LayerChain as Layers
from flrce.models.chain import build_layer_chain
from flrce.models.flat import ModelLayout, make_layout
from flrce.models.kinds import BASIC_KINDS
from flrce.models.tracing import is_plain_sequence
from flrce.training.gpu.folded import FoldedNet
from flrce.training.gpu.functional import FunctionalNet
from flrce.training.gpu.lanes import (
    ClientBatchResult,
    Index,
    LaneBatch,
    Rates,
    broadcast_rates,
    build_rate_table,
    find_trained_names,
    interleave_steps,
    iterate_lane_runs,
    plan_batches,
    round_up_lanes,
    validate_lanes,
)
from flrce.training.gpu.layers import ChainNet, DeviceSamples, Tensors
from flrce.training.gpu.steps import SEGMENT_STEPS, StepBuffers, StepSettings
from flrce.training.gpu.trial import LaneNetwork, verify_chain
from flrce.training.gpu.triton_block import supports_triton
from flrce.training.gpu.variants import Variant, list_candidate_variants
from flrce.training.links import ClientContext
from flrce.training.objectives import Classification, Objective
from flrce.training.precision import Precision, make_autocast_context, use_precision
from flrce.training.update_chain import UpdateChain

MAX_FUSED_CHANNELS = 64  # channels up to which fused kernels are tried
MAX_FUSED_PARAMETERS = (
    1_000_000  # floats of a network up to which its fused kernels are known to be fastest
)
MIN_LANES_PER_STREAM = 4  # lanes of a group that are worth a stream of their own
EVALUATION_CHUNK_SAMPLES = 256  # samples of one model evaluated at once


class ClientBatchTrainer:
    """K lanes (a lane = one client's local training in one run), all of one network, trained
    together on one device.
    """

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, ...],
        x: Tensor,
        y: Tensor,
        scale: float,
        shift: float,
        device: str,
        memory: int | None = None,
        objective: Objective = Classification(),
        where: ModelLayout | None = None,
        precision: Precision = "float32",
    ):
        if tuple(x.shape[1:]) != tuple(shape) or len(x) != len(y) or len(x) == 0:
            raise BadInput(
                f"samples {tuple(x.shape)} with {len(y)} labels do not fit a network for"
                f" {tuple(shape)}"
            )
        self.where, self.device, self.objective = (
            where or make_layout(net),
            torch.device(device),
            objective,
        )
        self.precision: Precision = precision
        self.samples = DeviceSamples(
            x.contiguous().to(device), y.to(device), float(scale), float(shift)
        )
        self.module = copy.deepcopy(net).to(device)
        self.links: Layers | None = None
        with suppress(BadInput):
            self.links = build_layer_chain(net, shape)
        self.nets: dict[str, LaneNetwork | BadInput] = {}
        self.ways = list_candidate_variants(
            net, self._is_chain_worthwhile(), supports_triton(self.device)
        )
        if (
            memory is None
        ):  # asked once: a split that followed the free memory would change bits from call to call
            memory = (
                torch.cuda.mem_get_info(self.device)[0] // 2
                if self.device.type == "cuda"
                else 2 << 30
            )
        self.memory = memory
        self._benches: dict[tuple[StepSettings, int], StepBuffers] = {}
        self.net = self.get_network(self.default_variant)

    def _is_chain_worthwhile(self) -> bool:
        """Whether the chain's own way is worth a try: its fused kernels are for few channels, and
        compile long.
        """
        if self.links is None:
            return False
        if self.device.type != "cuda":
            return True
        return all(
            layer.out[0] <= MAX_FUSED_CHANNELS
            for layer in self.links.layers
            if layer.kind == "conv"
        )

    def get_network(self, way: Variant) -> LaneNetwork:
        """The network of many lanes for this way; BadInput says why there is none."""
        key = str(replace(way, streams=1))  # streams share their network
        if key not in self.nets:
            try:
                self.nets[key] = self._build_network(way)
            except BadInput as why:
                self.nets[key] = why
        found = self.nets[key]
        if isinstance(found, BadInput):
            raise found
        return found

    def _build_network(self, way: Variant) -> LaneNetwork:
        if way.kind == "chain":
            if self.links is None:
                raise BadInput(f"{type(self.module).__name__} is no chain of layers")
            made = ChainNet(self.module, self.links, self.samples)
            if not is_plain_sequence(self.module, BASIC_KINDS):
                verify_chain(self.links, self.module, self.samples)
            return made
        if way.kind == "mapped":
            return FunctionalNet(self.module, self.samples)
        return FoldedNet(
            self.module, self.samples, self.links, way.convolving, 1 if way.kind == "single" else 2
        )

    @property
    def default_variant(self) -> Variant:
        """The first way that this network can go; BadInput where there is none."""
        reasons = []
        for way in self.ways:
            try:
                self.get_network(way)
                return way
            except BadInput as why:
                reasons.append(why)
        raise reasons[0]

    @property
    def fixed_variant(self) -> Variant | None:
        """The way that needs no measurement: the only one on a CPU, and fused kernels where they
        cover a small CNN.
        """
        if self.device.type != "cuda":
            return self.default_variant
        found = self.nets.get("chain")
        if (
            isinstance(found, ChainNet)
            and found.is_fully_fused
            and self.where.size < MAX_FUSED_PARAMETERS
        ):
            return Variant("chain")
        return None

    def variants_to_time(self, lanes: int) -> list[Variant]:
        """The ways that a measurement tries: vmap only for what does not fold, streams only for
        several lanes.
        """
        folds = any(self.supports(way) for way in self.ways if way.kind == "folded")
        few = [way for way in self.ways if way.kind != "mapped" or not folds]
        few = [way for way in few if way.kind != "single" or (lanes == 1) == (way.streams == 1)]
        return [
            way
            for way in few
            if way.kind != "folded"
            or way.streams == 1
            or lanes >= MIN_LANES_PER_STREAM * way.streams
        ]

    def supports(self, way: Variant) -> bool:
        """Whether this network can go that way."""
        try:
            self.get_network(way)
        except BadInput:
            return False
        return True

    def halve_memory(self) -> bool:
        """Let go of all buffers and ask for half as much memory from now on; False where there is
        nothing to halve.
        """
        self._benches.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.memory < self._estimate_bytes(1, 1):
            return False
        self.memory //= 2
        return True

    def free_other_buffers(self, but: str) -> None:
        """Let go of the buffers of all other ways."""
        for mode, slot in [key for key in self._benches if str(key[0].way) != but]:
            del self._benches[mode, slot]

    def train(
        self,
        w: Tensor,
        orders: Sequence[Index],
        sizes: Sequence[Index],
        lr: float | Tensor | Sequence[Rates],
        mu: float | Tensor = 0.0,
        first: int = 0,
        squared: bool = True,
        update: UpdateChain | None = None,
        locals: Sequence[ClientContext] = (),
        carries: Sequence[Tensors] = (),
        seeds: Sequence[int] = (),
        way: Variant | None = None,
    ) -> ClientBatchResult:
        """Train lane i from w[i] on its batches.

        orders[i] holds lane i's sample indices, batch after batch, and sizes[i] its batch sizes.
        SGD on the mean loss, at a rate for each lane, or for each step of each lane; mu pulls
        towards w[i] with mu/2 ||.||^2 (squared) or mu ||.|| per tensor. With `update`, every lane
        follows that chain of links instead, with its own of `locals` and `carries`. Random layers
        draw from `seeds`. Blocks before chain.trained[first] are frozen. Losses and their squares
        are means over a batch, before its step.
        """
        K, way = len(w), way or self.default_variant
        sizes = [np.asarray(s, dtype=np.int64) for s in sizes]
        validate_lanes(w, orders, sizes, self.where.size, len(self.samples.y), first, self.links)
        pulls = torch.as_tensor(mu, dtype=torch.float32).expand(K)
        power = 2 if squared else 1
        prox = power if bool((pulls != 0).any()) else 0
        lot = LaneBatch(w, orders, sizes, broadcast_rates(lr, K), pulls, locals, carries, seeds)
        out, losses = w.clone(), [torch.zeros(2, 0)] * K
        ends: list[tuple[Tensors, Tensors]] = [({}, {})] * K
        ranked = np.argsort([-len(s) for s in sizes], kind="stable")
        busy = [int(i) for i in ranked if len(sizes[i])]
        fits = self._count_fitting_lanes(
            max((int(s.max()) for s in sizes if len(s)), default=1), way
        )
        most, side = way.plan_groups(len(busy), fits)
        groups = [busy[at : at + most] for at in range(0, len(busy), most)]
        with use_precision(self.precision):
            for at in range(0, len(groups), side):
                few = groups[at : at + side]
                benches = []
                for slot, group in enumerate(few):
                    batch = -(-max(int(sizes[i].max()) for i in group) // 16) * 16
                    mode = StepSettings(
                        round_up_lanes(len(group), most),
                        batch,
                        first,
                        prox,
                        update,
                        way,
                        self.precision,
                    )
                    benches.append(self._get_buffers(mode, slot))
                for lane, i, seen in self._run_groups(benches, few, lot):
                    losses[i] = seen[:, : len(sizes[i]), lane].clone()
                for bench, group in zip(benches, few, strict=True):
                    out[group] = bench.read_vectors(len(group)).to(out.device)
                    for i, end in zip(group, bench.collect_link_states(len(group)), strict=True):
                        ends[i] = end
        return ClientBatchResult(
            out, [pair[0] for pair in losses], [pair[1] for pair in losses], ends
        )

    def _run_groups(
        self, benches: Sequence[StepBuffers], groups: Sequence[list[int]], lot: LaneBatch
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Run every step of these groups side by side; (lane, its place in the lot, (2, steps,
        lanes) of its group).
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # a bench's own stream must not overtake what it reads
        steps = [np.array([len(lot.sizes[i]) for i in group]) for group in groups]
        seen: list[list[Tensor]] = [[] for _ in groups]
        for bench, group in zip(benches, groups, strict=True):
            with bench.use_stream():
                lot.copy_to_buffers(bench, group)
        for begin in range(0, max(int(each[0]) for each in steps), SEGMENT_STEPS):
            runs: list[Iterator[int]] = []
            for bench, group, each in zip(benches, groups, steps, strict=True):
                end = min(begin + SEGMENT_STEPS, int(each[0]))
                if end <= begin:
                    runs.append(iter(()))
                    continue
                orders, sizes = [lot.orders[i] for i in group], [lot.sizes[i] for i in group]
                with bench.use_stream():
                    indices, counts = plan_batches(orders, sizes, begin, end, bench.mode.batch)
                    bench.load_plan(indices, counts, build_rate_table(lot.rates, group, begin, end))
                shapes = iterate_lane_runs(each, begin, end, bench.mode.lanes)
                runs.append(iter([k for k, many in shapes for _ in range(many)]))
            interleave_steps(benches, runs)
            for bench, each, found in zip(benches, steps, seen, strict=True):
                end = min(begin + SEGMENT_STEPS, int(each[0]))
                if end > begin:
                    with bench.use_stream():
                        found.append(bench.losses[:, : end - begin].to("cpu", copy=True))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for group, found in zip(groups, seen, strict=True):
            whole = torch.cat(found, 1)
            for lane, i in enumerate(group):
                yield lane, i, whole

    def evaluate(self, w: Tensor, index: Index) -> dict[str, Tensor]:
        """w (S, d), index (N,) or (S, N): "loss" (S, N) and the metrics' numbers (S, N, ...) in
        eval mode.
        """
        S, N = len(w), index.shape[-1]
        found: dict[str, Tensor] = {}
        at = torch.from_numpy(np.broadcast_to(index, (S, N)).astype(np.int32)).to(self.device)
        few = limit_samples_per_pass(
            self.module, tuple(self.samples.x.shape[1:]), EVALUATION_CHUNK_SAMPLES, room=4
        )
        most = self._count_fitting_lanes(few)
        with use_precision(self.precision), torch.no_grad():
            for lane in range(0, S, most):
                # copies, since a view into w would leave products with rows that are not aligned
                views = self.where.view_tensors(
                    w[lane : lane + most].to(self.device, torch.float32)
                )
                tensors = {name: view.contiguous() for name, view in views.items()}
                k = min(most, S - lane)
                for begin in range(0, N, few):
                    chunk = at[lane : lane + k, begin : begin + few].contiguous()
                    count = torch.full((k,), chunk.shape[1], dtype=torch.int32, device=self.device)
                    with make_autocast_context(self.device, self.precision):
                        out = (
                            self.net.compute_logits(tensors, chunk, count, 0, training=False)
                            .flatten(0, 1)
                            .float()
                        )
                    y = self.samples.gather_targets(chunk)
                    numbers = {"loss": self.objective.losses(out, y)}
                    numbers |= {
                        judge.name: judge.of(out, y) for judge in self.objective.evaluation_metrics
                    }
                    for name, each in numbers.items():
                        each = each.reshape(*chunk.shape, *each.shape[1:])
                        if name not in found:
                            found[name] = each.new_zeros(S, N, *each.shape[2:])
                        found[name][lane : lane + k, begin : begin + few] = each
        return {name: each.to(w.device) for name, each in found.items()}

    def _estimate_bytes(self, lanes: int, batch: int, way: Variant | None = None) -> int:
        """Estimated memory of a step: per lane w, its start, its gradient and one spare, and per
        sample activations.
        """
        net = self.get_network(way) if way else self.net
        return lanes * (4 * 4 * self.where.size + batch * net.bytes_per_sample)

    def _count_fitting_lanes(self, batch: int, way: Variant | None = None) -> int:
        """How many lanes fit into the memory budget."""
        return max(1, self.memory // self._estimate_bytes(1, batch, way))

    def _get_buffers(self, mode: StepSettings, slot: int = 0) -> StepBuffers:
        """Buffers that fit this mode, with room to spare from an earlier call or new; kept while
        they fit.
        """
        fits = [m for m, place in self._benches if place == slot and m.is_reusable_for(mode)]
        if fits:
            mode = min(fits, key=lambda m: (m.batch, m.lanes))
        else:
            held = [m for m, _ in self._benches]
            while (
                held
                and sum(self._estimate_bytes(m.lanes, m.batch, m.way) for m in (mode, *held))
                > self.memory
            ):
                old = next(((m, place) for m, place in self._benches if m != mode), None)
                if old is None:
                    break
                self._benches.pop(old)
                held = [m for m, _ in self._benches]
            net, names = (
                self.get_network(mode.way),
                find_trained_names(self.where, self.links, mode.first),
            )
            self._benches[mode, slot] = StepBuffers(net, self.where, mode, names, self.objective)
        self._benches[mode, slot] = self._benches.pop((mode, slot))  # the latest used last
        return self._benches[mode, slot]
