"""Local training of many clients at once on one device: clients and seeds form one client batch.

A lane is the local training of one client in one run; every tensor has the lane as its first
dimension. Lanes are sorted by falling number of steps, so that the k lanes that still run are
always the first k. k shrinks through few sizes, each with its own recorded step: a client with
thousands of steps costs only its own lane at the end.
"""

import copy
import gc
import logging
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.models.abilities import limit_samples_per_pass
from flrce.models.flat import ModelLayout, make_layout
from flrce.models.graph import LayerChain, build_layer_chain
from flrce.models.kinds import BASIC_KINDS
from flrce.models.tracing import is_plain_sequence
from flrce.training.gpu.chain_net import ChainNet, DeviceSamples, Tensors
from flrce.training.gpu.evaluation import LaneEvaluator
from flrce.training.gpu.fused_block import FusedBlock, fuse_layers, supports_triton
from flrce.training.gpu.lanes import (
    ClientBatchResult,
    Index,
    LaneBatch,
    Rates,
    broadcast_rates,
    build_rate_table,
    find_trained_names,
    iterate_lane_runs,
    plan_batches,
    round_up_lanes,
    validate_lanes,
)
from flrce.training.gpu.step_buffers import SEGMENT_STEPS, StepBuffers, StepSettings
from flrce.training.gpu.variants import Variant, list_candidate_variants
from flrce.training.gpu.verification import LaneNetwork, verify_network
from flrce.training.gpu.vmap_net import VmapNet
from flrce.training.links import ClientContext
from flrce.training.objectives import Classification, Objective
from flrce.training.precision import Precision, use_precision
from flrce.training.update_chain import UpdateChain

MAX_FUSED_CHANNELS = 64  # with more channels the fused kernels are slow and compile long
log = logging.getLogger("flrce")
# samples of one model evaluated at once: the host's caches hold few, a GPU wants many
MIN_PASS_SAMPLES, MAX_PASS_SAMPLES = 256, 4096


class ClientBatchTrainer:
    """Trains and evaluates lanes of one network over samples that stay on the device."""

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
        self.where, self.device = where or make_layout(net), torch.device(device)
        self.objective = objective
        self.precision: Precision = precision
        self.samples = DeviceSamples(
            x.contiguous().to(device), y.to(device), float(scale), float(shift)
        )
        self.module, self.name = copy.deepcopy(net).to(device), type(net).__name__
        self.layer_chain: LayerChain | None = None
        with suppress(BadInput):
            self.layer_chain = build_layer_chain(net, shape)
        self.networks: dict[Variant, LaneNetwork | BadInput] = {}
        self.candidates = list_candidate_variants(
            net, self._prefers_chain(), supports_triton(self.device)
        )
        # read once: batches that followed the free memory would change bits from call to call
        self.memory = _get_default_memory(self.device) if memory is None else memory
        self._buffers: dict[StepSettings, StepBuffers] = {}
        self.evaluator = LaneEvaluator(
            self.get_network(self.default_variant), self.where, objective, precision
        )

    def _prefers_chain(self) -> bool:
        """Whether the network is a chain whose convolutions, if any, the fused kernels suit."""
        if self.layer_chain is None:
            return False
        if not supports_triton(self.device):
            return True
        blocks = [part for _, part in fuse_layers(self.layer_chain.layers)]
        convolutions = [layer for layer in self.layer_chain.layers if layer.kind == "conv"]
        fused = sum(isinstance(part, FusedBlock) for part in blocks) == len(convolutions)
        return fused and all(layer.out[0] <= MAX_FUSED_CHANNELS for layer in convolutions)

    def get_network(self, variant: Variant) -> LaneNetwork:
        """The network of many lanes for this variant; BadInput where the variant does not suit."""
        if variant not in self.networks:
            try:
                self.networks[variant] = self._build_network(variant)
            except BadInput as why:
                self.networks[variant] = why
                if variant is not self.candidates[-1]:
                    log.warning("%s: no client batch by %s kernels: %s", self.name, variant, why)
        network = self.networks[variant]
        if isinstance(network, BadInput):
            raise network
        return network

    def _build_network(self, variant: Variant) -> LaneNetwork:
        if variant is Variant.CHAIN:
            if self.layer_chain is None:
                raise BadInput(f"{self.name} is no chain of layers")
            chain = ChainNet(self.module, self.layer_chain, self.samples)
            if not is_plain_sequence(self.module, BASIC_KINDS):
                verify_network(chain, self.module)
            return chain
        direct = variant is Variant.DIRECT
        return VmapNet(self.module, self.samples, self.layer_chain, direct)

    def supports(self, variant: Variant) -> bool:
        try:
            self.get_network(variant)
        except BadInput:
            return False
        return True

    @property
    def default_variant(self) -> Variant:
        """The first candidate that suits the network; BadInput where none does."""
        for variant in self.candidates:
            if self.supports(variant):
                return variant
        reason = self.networks[self.candidates[0]]
        assert isinstance(reason, BadInput)
        raise reason

    def free_buffers(self) -> None:
        self._buffers.clear()
        self.evaluator.buffers.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def halve_memory(self) -> bool:
        """Free all buffers and use half as much memory from now on; False if nothing is left."""
        self.free_buffers()
        if self.memory < self._estimate_bytes(1, 1):
            return False
        self.memory //= 2
        return True

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
        variant: Variant | None = None,
    ) -> ClientBatchResult:
        """Train lane i from w[i] (d,) on its batches.

        orders[i] holds lane i's sample indices, batch after batch, and sizes[i] its batch sizes.
        SGD on the mean loss, at a rate for each lane, or for each step of each lane; mu pulls
        towards w[i] with mu/2 ||.||^2 (squared) or mu ||.|| per tensor. With `update`, every lane
        follows that chain of links instead, with its own of `locals` and `carries`. Random layers
        draw from `seeds`. Blocks before weight_layers[first] are frozen. Losses and their squares
        are means over a batch, before its step.
        """
        K, variant = len(w), variant or self.default_variant
        sizes = [np.asarray(s, dtype=np.int64) for s in sizes]
        validate_lanes(
            w, orders, sizes, self.where.size, len(self.samples.y), first, self.layer_chain
        )
        pulls = torch.as_tensor(mu, dtype=torch.float32).expand(K)
        power = 2 if squared else 1
        prox = power if bool((pulls != 0).any()) else 0
        lanes = LaneBatch(w, orders, sizes, broadcast_rates(lr, K), pulls, locals, carries, seeds)
        settings = StepSettings(1, 1, first, prox, update, variant, self.precision)
        with use_precision(self.precision):
            return self._train_groups(lanes, settings)

    def _train_groups(self, lanes: LaneBatch, settings: StepSettings) -> ClientBatchResult:
        """Train the lanes, as many at once as fit into memory, those with most steps first."""
        K, sizes = len(lanes.w), lanes.sizes
        w, losses = lanes.w.clone(), [torch.zeros(2, 0)] * K
        ends: list[tuple[Tensors, Tensors]] = [({}, {})] * K
        ranked = np.argsort([-len(s) for s in sizes], kind="stable")
        active = [int(i) for i in ranked if len(sizes[i])]
        largest = max((int(s.max()) for s in sizes if len(s)), default=1)
        fits = self._count_fitting_lanes(largest, settings.variant)
        for start in range(0, len(active), fits):
            group = active[start : start + fits]
            batch = round_up_batch(max(int(sizes[i].max()) for i in group))
            buffers = self._get_buffers(settings.resize(round_up_lanes(len(group), fits), batch))
            seen = self._run_group(buffers, group, lanes)
            w[group] = buffers.read_vectors(len(group)).to(w.device)
            for lane, (i, end) in enumerate(
                zip(group, buffers.collect_link_states(len(group)), strict=True)
            ):
                losses[i], ends[i] = seen[:, : len(sizes[i]), lane].clone(), end
        return ClientBatchResult(
            w, [pair[0] for pair in losses], [pair[1] for pair in losses], ends
        )

    def _run_group(self, buffers: StepBuffers, group: Sequence[int], lanes: LaneBatch) -> Tensor:
        """Run every step of a group; (2, steps, lanes): mean losses and mean squared losses."""
        orders, sizes = [lanes.orders[i] for i in group], [lanes.sizes[i] for i in group]
        steps = np.array([len(size) for size in sizes])
        lanes.copy_to_buffers(buffers, group)
        segments = []
        for begin in range(0, int(steps[0]), SEGMENT_STEPS):
            end = min(begin + SEGMENT_STEPS, int(steps[0]))
            indices, counts = plan_batches(orders, sizes, begin, end, buffers.settings.batch)
            buffers.load_plan(indices, counts, build_rate_table(lanes.rates, group, begin, end))
            for k, repeats in iterate_lane_runs(steps, begin, end, buffers.settings.lanes):
                for _ in range(repeats):
                    buffers.run(k)
            segments.append(buffers.losses[:, : end - begin].to("cpu", copy=True))
        return torch.cat(segments, 1)

    def evaluate(self, models: Sequence[Tensor] | Tensor, index: Index) -> Tensors:
        """models (S, d), index (N,) or (S, N): "loss" (S, N) and the metrics' values (S, N, ...)
        in evaluation mode.
        """
        S, N = len(models), index.shape[-1]
        most = self._choose_pass_samples()
        with use_precision(self.precision):
            scores = self.evaluator.evaluate(
                list(models), np.broadcast_to(index, (S, N)), most, self._count_fitting_lanes(most)
            )
        return {name: score.to(models[0].device) for name, score in scores.items()}

    def _choose_pass_samples(self) -> int:
        """Samples of one model to evaluate at once."""
        shape = tuple(self.samples.x.shape[1:])
        most = MAX_PASS_SAMPLES if self.device.type == "cuda" else MIN_PASS_SAMPLES
        while most > MIN_PASS_SAMPLES and self._estimate_bytes(1, most) > self.memory // 8:
            most //= 2
        return limit_samples_per_pass(self.module, shape, most, room=4)

    def _estimate_bytes(self, lanes: int, batch: int, variant: Variant | None = None) -> int:
        """Memory of a step: per lane w, its start, its gradient and one spare copy, and per sample
        the activations.
        """
        net = self.get_network(variant) if variant else self.evaluator.net
        return lanes * (4 * 4 * self.where.size + batch * net.bytes_per_sample)

    def _count_fitting_lanes(self, batch: int, variant: Variant | None = None) -> int:
        """How many lanes fit into the memory budget."""
        return max(1, self.memory // self._estimate_bytes(1, batch, variant))

    def _get_buffers(self, settings: StepSettings) -> StepBuffers:
        """Buffers for these settings: those of an earlier call where they serve, else new ones for
        which the oldest make room.
        """
        reusable = [other for other in self._buffers if other.is_reusable_for(settings)]
        if reusable:
            settings = min(reusable, key=lambda other: (other.batch, other.lanes))
        else:
            while self._buffers and self._exceeds_memory([settings, *self._buffers]):
                del self._buffers[next(iter(self._buffers))]
            net = self.get_network(settings.variant)
            names = find_trained_names(self.where, self.layer_chain, settings.first)
            self._buffers[settings] = StepBuffers(net, self.where, settings, names, self.objective)
        self._buffers[settings] = self._buffers.pop(settings)  # the latest used last
        return self._buffers[settings]

    def _exceeds_memory(self, held: Sequence[StepSettings]) -> bool:
        total = sum(self._estimate_bytes(s.lanes, s.batch, s.variant) for s in held)
        return total > self.memory


def round_up_batch(size: int) -> int:
    """Batch sizes are multiples of 16, so that few shapes are recorded."""
    return -(-size // 16) * 16


def _get_default_memory(device: torch.device) -> int:
    """Bytes: half of what is free on a GPU, 2 GiB elsewhere."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 << 30
