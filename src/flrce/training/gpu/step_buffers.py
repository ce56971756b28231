"""One SGD step of many lanes over static buffers, recorded once as a CUDA graph and replayed.

A step finds its batch through a counter that lives on the device, so that one recording serves
every step of every round; recordings differ only in the number of lanes that are still running.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.models.flat import ModelLayout, TensorSlot
from flrce.training.gpu.chain_net import Tensors
from flrce.training.gpu.recording import record_graph
from flrce.training.gpu.variants import Variant
from flrce.training.gpu.verification import LaneNetwork
from flrce.training.links import ClientContext
from flrce.training.objectives import Objective
from flrce.training.precision import Precision, make_autocast_context
from flrce.training.update_chain import UpdateChain

SEGMENT_STEPS = 128  # steps whose plan is on the device at once


@dataclass(frozen=True)
class StepSettings:
    """What a recording depends on besides shapes. `prox`: 0 none, 2 squared norm, 1 the norm
    itself.

    `update` is a chain of links that is more than plain SGD with a proximal term; then prox is 0.
    """

    lanes: int
    batch: int
    first: int
    prox: int
    update: UpdateChain | None = None
    variant: Variant = Variant.CHAIN
    precision: Precision = "float32"

    def resize(self, lanes: int, batch: int) -> "StepSettings":
        return replace(self, lanes=lanes, batch=batch)

    def is_reusable_for(self, other: "StepSettings") -> bool:
        """Whether buffers of these settings serve the other, at less than twice its work."""
        same = self.resize(other.lanes, other.batch) == other
        return same and other.lanes <= self.lanes and other.batch <= self.batch < 2 * other.batch


def proximal_gradient(now: Tensor, start: Tensor, mu: Tensor, prox: int) -> Tensor:
    """The proximal term's gradient for one stacked tensor (k, ...); mu (k,)."""
    away, wide = now - start, (-1,) + (1,) * (now.dim() - 1)
    if prox == 1:  # d||x||/dx = x / ||x||, and 0 at 0
        length = away.reshape(len(away), -1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        away = away / length.reshape(wide)
    return mu.reshape(wide) * away


class StepBuffers:
    """Static buffers of K = settings.lanes lanes and B = settings.batch samples, and the
    recorded steps over them.
    """

    def __init__(
        self,
        net: LaneNetwork,
        where: ModelLayout,
        settings: StepSettings,
        trained: frozenset[str],
        objective: Objective,
    ):
        device = net.samples.x.device
        K, B = settings.lanes, settings.batch
        self.net, self.where, self.settings, self.trained, self.objective = (
            net,
            where,
            settings,
            trained,
            objective,
        )
        self.now: Tensors = {s.name: torch.zeros(K, *s.shape, device=device) for s in where.slots}
        self.start: Tensors = (
            {name: torch.zeros_like(self.now[name]) for name in trained} if settings.prox else {}
        )
        self.plan = torch.zeros(SEGMENT_STEPS, K, B, dtype=torch.int32, device=device)
        self.counts = torch.zeros(SEGMENT_STEPS, K, dtype=torch.int32, device=device)
        self.rates, self.mu = (
            torch.zeros(SEGMENT_STEPS, K, device=device),
            torch.zeros(K, device=device),
        )
        self.states: tuple[Tensors, ...] = ()  # of the links, (K, ...) each
        # mean loss, mean squared loss
        self.losses = torch.zeros(2, SEGMENT_STEPS, K, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)  # steps before this segment
        # what random layers draw from
        self.seeds = torch.zeros(K, dtype=torch.int64, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        links = settings.update.links if settings.update else ()
        self.looking = next((i for i, link in enumerate(links) if link.estimates_gradient), None)
        # whether a recording failed, so that steps run one kernel after another
        self.unrecorded = False

    def load_lanes(
        self,
        w: Tensor,
        mu: Tensor,
        locals: Sequence[ClientContext] = (),
        carries: Sequence[Tensors] = (),
        seeds: Sequence[int] = (),
    ) -> None:
        """Set the lanes' starting vectors w (K, d) and their proximal pulls (K,); links begin, each
        lane for itself.
        """
        for name, view in self.where.view_tensors(w).items():
            self.now[name][: len(w)].copy_(view)
        for name, start in self.start.items():
            start.copy_(self.now[name])
        self.mu[: len(w)].copy_(mu)
        self.seeds[: len(seeds)].copy_(torch.tensor(seeds, dtype=torch.int64))
        self.done.zero_()
        self.clock.zero_()
        if self.settings.update:
            self._begin_links(self._flatten_trained(len(w)), locals, carries)

    def _begin_links(
        self, w: Tensor, locals: Sequence[ClientContext], carries: Sequence[Tensors]
    ) -> None:
        update = self.settings.update
        assert update is not None
        for lane, (own, local) in enumerate(zip(w, locals, strict=True)):
            carry = _move_tensors(carries[lane], w.device) if carries else {}
            task = replace(local.task, tensors=_move_tensors(local.task.tensors, w.device))
            fresh = update.begin_round(own, replace(local, task=task), carry)
            if not lane and not _has_room(self.states, fresh):  # the first lane has the most steps
                K = self.settings.lanes
                self.graphs.clear()  # recorded over other buffers
                self.states = tuple(
                    {
                        name: x.to(w.device)[None].repeat(K, *(1,) * x.dim())
                        for name, x in state.items()
                    }
                    for state in fresh
                )
            for state, begun in zip(self.states, fresh, strict=True):
                for name, value in begun.items():
                    state[name][lane][tuple(map(slice, value.shape))].copy_(value)

    def collect_link_states(self, K: int) -> list[tuple[Tensors, Tensors]]:
        """(what stays, what travels) of each of the first K lanes' links, in the host's memory."""
        if self.settings.update is None:
            return [({}, {})] * K
        w, found = self._flatten_trained(K), []
        for lane in range(K):
            own = tuple({name: x[lane] for name, x in state.items()} for state in self.states)
            kept, sent = self.settings.update.end_round(w[lane], own)
            host = torch.device("cpu")
            found.append(
                (
                    {n: x.clone() for n, x in _move_tensors(kept, host).items()},
                    _move_tensors(sent, host),
                )
            )
        return found

    def _flatten_trained(self, k: int) -> Tensor:
        """(k, d) the trained coordinates of the first k lanes, in the order of w."""
        return torch.cat(
            [self.now[s.name][:k].reshape(k, s.size) for s in self._list_trained_slots()], 1
        )  # one may be a number

    def _split_trained(self, w: Tensor) -> Tensors:
        """The tensors (k, ...) of trained coordinates (k, d)."""
        slots = self._list_trained_slots()
        parts = w.split([s.size for s in slots], 1)
        return {
            s.name: part.reshape(len(w), *s.shape) for s, part in zip(slots, parts, strict=True)
        }

    def _list_trained_slots(self) -> list[TensorSlot]:
        """What trains, in the order of w."""
        return [s for s in self.where.slots if s.name in self.trained]

    def load_plan(
        self, indices: NDArray[np.int32], counts: NDArray[np.int32], rates: NDArray[np.float32]
    ) -> None:
        """Set the next steps' plan, (steps, K, batch), (steps, K) and (steps, K), from its first;
        spare lanes rest.
        """
        steps, K = counts.shape
        self.plan[:steps, :K].copy_(torch.from_numpy(indices))
        self.counts.zero_()
        self.counts[:steps, :K].copy_(torch.from_numpy(counts))
        self.rates[:steps, :K].copy_(torch.from_numpy(rates))
        self.done += self.clock
        self.clock.zero_()

    def read_vectors(self, K: int) -> Tensor:
        """The first K lanes' present vectors (K, d)."""
        return torch.cat(
            [self.now[slot.name][:K].reshape(K, slot.size) for slot in self.where.slots], 1
        )

    def run(self, k: int) -> None:
        """One more step of the first k lanes."""
        if not self.plan.is_cuda:
            self._step(k)
        elif k in self.graphs:
            self.graphs[k].replay()
        elif self.unrecorded:
            self._step(k)
        else:
            self._record_step(k)

    def _record_step(self, k: int) -> None:
        """Run one step of the first k lanes, and record it."""
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        graph = record_graph(partial(self._step, k), self.plan.device, pool)
        if graph is None:
            self.unrecorded = True
        else:
            self.graphs[k] = graph

    def _step(self, k: int) -> None:
        index = self.plan.index_select(0, self.clock)[0, :k]  # (k, B)
        count = self.counts.index_select(0, self.clock)[0, :k]  # (k,)
        # a finished lane stands still
        rate = self.rates.index_select(0, self.clock)[0, :k] * (count > 0)
        if self.looking is None:
            mean, square = self._step_by_gradient(index, count, rate)
        else:
            mean, square = self._step_by_estimate(self.looking, index, count, rate)
        with torch.no_grad():
            self.losses[:, :, :k].index_copy_(1, self.clock, torch.stack([mean, square])[:, None])
            self.clock += 1

    def _step_by_gradient(
        self, index: Tensor, count: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step along gradients from a backward pass; (mean loss, mean squared loss) of each
        lane.
        """
        k = len(rate)
        leaves = {
            name: self.now[name][:k].detach().requires_grad_() for name in sorted(self.trained)
        }
        tensors = {name: leaves.get(name, value[:k]) for name, value in self.now.items()}
        with make_autocast_context(index.device, self.settings.precision):
            each = self._compute_losses(tensors, index, count)
        n = count.clamp(min=1)
        mean, square = each.sum(1) / n, each.detach().square().sum(1) / n
        if self.settings.update:
            names = [slot.name for slot in self._list_trained_slots()]
            grads = _compute_gradients(mean.sum(), [leaves[name] for name in names])
            with torch.no_grad():
                g = torch.cat([grad.reshape(k, grad[0].numel()) for grad in grads], 1)
                self._apply_links(g, rate, count > 0)
        else:
            self._apply_sgd(leaves, mean, rate)
        return mean, square

    @torch.no_grad()
    def _step_by_estimate(
        self, i: int, index: Tensor, count: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step along what link i makes of losses alone; (mean loss, mean squared loss) of each
        lane.
        """
        k, update = len(rate), self.settings.update
        assert update is not None
        w, n = self._flatten_trained(k), count.clamp(min=1)[:, None]
        share = index.shape[1] / n  # a row's mean is then that of its real samples

        def compute_losses() -> Tensor:
            tensors = {name: value[:k] for name, value in self.now.items()} | self._split_trained(w)
            with make_autocast_context(index.device, self.settings.precision):
                return self._compute_losses(tensors, index, count) * share

        seen, g = update.links[i].estimate(
            compute_losses, w, {name: x[:k] for name, x in self.states[i].items()}
        )
        self._apply_links(g, rate, count > 0)
        each = seen / share
        return (each / n).sum(1), (each.square() / n).sum(1)

    def _apply_sgd(self, leaves: Tensors, mean: Tensor, rate: Tensor) -> None:
        """SGD, perhaps with a proximal pull."""
        k = len(rate)
        steps = _compute_gradients((rate * mean).sum(), list(leaves.values()))
        with torch.no_grad():
            if self.settings.prox:
                force = rate * self.mu[:k]
                pulls = [
                    proximal_gradient(leaf, self.start[name][:k], force, self.settings.prox)
                    for name, leaf in leaves.items()
                ]
                steps = tuple(torch._foreach_add(steps, pulls))
            torch._foreach_sub_([self.now[name][:k] for name in leaves], steps)

    def _apply_links(self, g: Tensor, rate: Tensor, running: Tensor) -> None:
        """Any chain of links, on all lanes' flat gradients (k, d) at once."""
        k, update = len(rate), self.settings.update
        assert update is not None
        before = tuple({name: value[:k] for name, value in state.items()} for state in self.states)
        direction, after = update.step(g, self._flatten_trained(k), before)
        for state, fresh in zip(before, after, strict=True):
            for name, value in state.items():
                live = running.reshape(-1, *(1,) * (value.dim() - 1))
                value.copy_(torch.where(live, fresh[name], value))
        for name, step in self._split_trained(rate[:, None] * direction).items():
            self.now[name][:k].sub_(step)

    def _compute_losses(self, tensors: Tensors, index: Tensor, count: Tensor) -> Tensor:
        """(k, B) losses of each lane's real samples; 0 where there is none."""
        draw = (self.seeds[: len(index)], self.done + self.clock)
        out = self.net.compute_logits(
            tensors, index, count, self.settings.first, training=True, draw=draw
        )
        each = self.objective.losses(
            out.flatten(0, 1).float(), self.net.samples.gather_targets(index)
        )
        real = torch.arange(index.shape[1], device=index.device) < count[:, None]
        return each.reshape(index.shape).where(real, 0)


def _compute_gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients by the leaves; 0 by what the network does not use."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)
    )


def _move_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    return {name: value.to(device) for name, value in tensors.items()}


def _has_room(states: Sequence[Tensors], fresh: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether the lanes' states (K, ...) have room for one that begins: of a link with something
    for every step.
    """
    if not states:
        return False
    for state, begun in zip(states, fresh, strict=True):
        for name, value in begun.items():
            if any(
                have < want for have, want in zip(state[name].shape[1:], value.shape, strict=True)
            ):
                return False
    return True
