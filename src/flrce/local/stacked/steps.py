"""One SGD step of many lanes over static buffers, recorded once as a CUDA graph and replayed.

A step finds its batch through a counter that lives on the device, so that one recording serves every step of every
round; recordings differ only in the number of lanes that are still running.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from flrce.local.stacked.layers import ChainNet, FunctionalNet, Tensors
from flrce.models.flat import Layout

SEGMENT = 128  # steps whose plan is on the device at once


@dataclass(frozen=True)
class Mode:
    """What a recording depends on besides shapes. `prox`: 0 none, 2 squared norm, 1 the norm itself."""

    lanes: int
    batch: int
    first: int
    prox: int

    def holds(self, other: "Mode") -> bool:
        """Whether buffers of this mode serve the other, at less than twice its work."""
        same = (self.first, self.prox) == (other.first, other.prox)
        return same and other.lanes <= self.lanes and other.batch <= self.batch < 2 * other.batch


@contextmanager
def exact() -> Iterator[None]:
    """Full float32 products and repeatable kernels (TF32 stays off: signs of small updates decide)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def pull(now: Tensor, start: Tensor, mu: Tensor, prox: int) -> Tensor:
    """The proximal term's gradient for one stacked tensor (k, ...); mu (k,)."""
    away, wide = now - start, (-1,) + (1,) * (now.dim() - 1)
    if prox == 1:  # d||x||/dx = x / ||x||, and 0 at 0
        length = away.reshape(len(away), -1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        away = away / length.reshape(wide)
    return mu.reshape(wide) * away


class Bench:
    """Static buffers of mode.lanes lanes x mode.batch samples, and the recorded steps over them."""

    def __init__(self, net: ChainNet | FunctionalNet, where: Layout, mode: Mode, trained: frozenset[str]):
        device = net.samples.x.device
        K, B = mode.lanes, mode.batch
        self.net, self.where, self.mode, self.trained = net, where, mode, trained
        self.now: Tensors = {s.name: torch.zeros(K, *s.shape, device=device) for s in where.slots}
        self.start: Tensors = {name: torch.zeros_like(self.now[name]) for name in trained} if mode.prox else {}
        self.plan = torch.zeros(SEGMENT, K, B, dtype=torch.int32, device=device)
        self.counts = torch.zeros(SEGMENT, K, dtype=torch.int32, device=device)
        self.rate, self.mu = torch.zeros(K, device=device), torch.zeros(K, device=device)
        self.losses = torch.zeros(2, SEGMENT, K, device=device)  # mean loss, mean squared loss
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def load(self, w: Tensor, rate: Tensor, mu: Tensor) -> None:
        """Set the lanes' starting vectors w (K, d) and their rates (K,)."""
        for name, view in self.where.views(w).items():
            self.now[name][: len(w)].copy_(view)
        for name, start in self.start.items():
            start.copy_(self.now[name])
        self.rate[: len(w)].copy_(rate)
        self.mu[: len(w)].copy_(mu)

    def lay(self, indices: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Set the next steps' plan, (steps, K, batch) and (steps, K), and start from its first; spare lanes rest."""
        steps, K = counts.shape
        self.plan[:steps, :K].copy_(torch.from_numpy(indices))
        self.counts.zero_()
        self.counts[:steps, :K].copy_(torch.from_numpy(counts))
        self.clock.zero_()

    def store(self, K: int) -> Tensor:
        """The first K lanes' present vectors (K, d)."""
        return torch.cat([self.now[slot.name][:K].flatten(1) for slot in self.where.slots], 1)

    def run(self, k: int, steps: int) -> None:
        """`steps` more steps of the first k lanes."""
        if not self.plan.is_cuda:
            for _ in range(steps):
                self._step(k)
            return
        if k not in self.graphs:
            self._record(k)
            steps -= 1
        for _ in range(steps):
            self.graphs[k].replay()

    def _record(self, k: int) -> None:
        """Run one step as it is (which also warms up), then record it without running."""
        side = torch.cuda.Stream(self.plan.device)
        side.wait_stream(torch.cuda.current_stream(self.plan.device))
        with torch.cuda.stream(side):
            self._step(k)
        torch.cuda.current_stream(self.plan.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=side):
            self._step(k)
        self.graphs[k] = graph

    def _step(self, k: int) -> None:
        index = self.plan.index_select(0, self.clock)[0, :k]  # (k, B)
        count = self.counts.index_select(0, self.clock)[0, :k]  # (k,)
        leaves = {name: self.now[name][:k].detach().requires_grad_() for name in sorted(self.trained)}
        tensors = {name: leaves.get(name, value[:k]) for name, value in self.now.items()}
        mean, square = self._losses(tensors, index, count)
        rate = self.rate[:k] * (count > 0)  # a finished lane stands still, its proximal pull too
        steps = torch.autograd.grad((rate * mean).sum(), list(leaves.values()))
        with torch.no_grad():
            if self.mode.prox:
                force = rate * self.mu[:k]
                pulls = [pull(leaf, self.start[name][:k], force, self.mode.prox) for name, leaf in leaves.items()]
                steps = tuple(torch._foreach_add(steps, pulls))
            torch._foreach_sub_([self.now[name][:k] for name in leaves], steps)
            self.losses[:, :, :k].index_copy_(1, self.clock, torch.stack([mean, square])[:, None])
            self.clock += 1

    def _losses(self, tensors: Tensors, index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss, mean squared loss) of each lane's real samples, (k,) each."""
        logits = self.net.logits(tensors, index, count, self.mode.first, training=True)
        each = F.cross_entropy(logits.flatten(0, 1), self.net.samples.labels(index).flatten(), reduction="none")
        real = torch.arange(index.shape[1], device=index.device) < count[:, None]
        each = each.reshape(index.shape).where(real, 0)
        n = count.clamp(min=1)
        return each.sum(1) / n, each.detach().square().sum(1) / n
