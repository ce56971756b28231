"""Local training in plain PyTorch: any network, any objective, any chain of links, on any device.

The reference for every faster trainer, and what does the work where they do not apply.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce import crossing
from flrce.errors import BadInput, raised
from flrce.local.batch import Scene, Step
from flrce.local.link import Estimates, Local
from flrce.local.native import Kernel
from flrce.local.native.cells import hasten
from flrce.local.native.shortcuts import Shortcuts, widest, worth
from flrce.local.objective import Classification, Objective, each_of
from flrce.local.pooling import quicken
from flrce.local.precision import Precision, lower, repeatable
from flrce.local.updates import Chain
from flrce.models.abilities import together
from flrce.models.chain import chain
from flrce.models.drawing import kept, seeded, states
from flrce.models.flat import bind, layout
from flrce.models.inputs import inputs
from flrce.rng import stream

Index = NDArray[np.int64]
CHUNK = 250  # samples an evaluation looks at together: fits the cache, where one giant batch does not


@dataclass(frozen=True)
class Trained:
    """What came of a client's training."""

    w: Tensor  # (size,) the local vector after the last step, where the one was that it began with
    losses: Tensor  # (steps,) mean loss of each batch before its step
    squares: Tensor  # (steps,) mean squared per-sample loss
    carry: Mapping[str, Tensor] = field(default_factory=dict)  # what the links keep with the client
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what they send back


class Trainer:
    """One network bound to one flat vector, reused for every client that a worker trains."""

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], objective: Objective = Classification(),
        kept: Sequence[str] = (), device: str | torch.device = "cpu", precision: Precision = "float32",
        kernel: Kernel | None = None, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.kernel = kernel  # finds gradients faster than autograd, where links want nothing else of a batch
        self.layout, self.objective, self.shape = layout(net, kept), objective, shape
        self.where = self.layout.local
        self.w = torch.zeros(self.where.size, device=device)
        self.g = torch.zeros(self.where.trainable, device=device)
        self.precision: Precision = precision
        self.net = quicken(copy.deepcopy(net).to(device))
        if compiled:
            self.net = hasten(self.net)
        self.widest = widest(self.net) if compiled else 0  # weights of one layer
        self.net = bind(self.net, self.w, self.g, self.where)
        self.net = lower(self.net, self.w.device, precision)
        self.given = net  # with the layers that a chain knows
        self.learning = [p for p in self.net.parameters() if p.requires_grad]
        self.buffers = [(m, name, b) for m in self.net.modules() for name, b in m.named_buffers(recurse=False)]
        self.counts = [(b, b.clone()) for _, _, b in self.buffers if not b.is_floating_point()]
        self.random: dict[bool, bool] = {}  # whether it draws in training, in evaluation; the first batch tells
        self.fresh = [(m, dict(vars(m))) for m in self.net.modules()]  # modules may note things as they run

    def train(
        self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float, order: Index, sizes: Index,
        update: Chain, local: Local, carry: Mapping[str, Tensor] = {}, augment: Sequence[Any] = (),
    ) -> Trained:  # fmt: skip
        """Train from the local vector w (size,) on these batches.

        x (n, ...), y (n, ...); `order` holds the sample indices of all batches, `sizes` the batches' lengths. Blocks
        before the task's first one are frozen, their BatchNorms in eval mode.
        """
        self.w.copy_(w)
        weights = self.w[: self.where.trainable]
        frozen = self._freeze(local.task.part.first)
        losses, squares = torch.zeros(2, len(sizes), device=self.w.device)
        where = torch.from_numpy(order).to(x.device)
        local, carry = self._here(local), self._moved(carry)
        task = local.task
        rng = torch.Generator().manual_seed(_seed(task, "augment")) if augment else None
        states = update.begin(weights, local, carry)
        alone = next((link for link in update.links if isinstance(link, Estimates)), None)
        two = inputs(x[:2], scale, shift)
        with self._doing(x, max(sizes, default=0)), self._drawing(two, _seed(task, "layers")):
            self._forget()
            scene = Scene(self.net, self.w, self.g, self.objective, self.random[True], partial(_seed, task, "links"))
            with scene.watched() if update.asks else nullcontext():
                for step, index in enumerate(where.split(sizes.tolist()) if len(sizes) else ()):
                    self.g.zero_()
                    batch = inputs(x.index_select(0, index), scale, shift)  # ten times as fast as x[index]
                    for transform in augment:
                        batch = transform(batch, rng)
                    rate = update.rate(step, local)
                    one = Step(scene, batch, y[index], step, rate, partial(update.terms, states=states))
                    if self.kernel is not None and alone is None and not update.asks:
                        loss = self.kernel.gradient(self.w, batch, y[index], self.g, task.part.first)
                    elif alone is None:
                        loss = self._derived(one)
                    else:
                        loss = self._estimated(alone, one, weights, states[update.links.index(alone)])
                    with torch.no_grad():
                        losses[step], squares[step] = loss.mean(), loss.square().mean()
                        direction, states = update.step(self.g, weights, states, one)
                        for span in frozen:
                            direction[span] = 0
                        for mask in update.still(states):
                            direction = direction.masked_fill(mask, 0)
                        weights.sub_(direction, alpha=rate)
        self._thaw()
        self._rebind()
        stays, sent = update.end(weights, states)
        sent = {name: value.cpu() for name, value in sent.items()}
        stays = {name: value.cpu() for name, value in stays.items()}
        done = self.w.clone() if w.device == self.w.device else crossing.home(self.w)
        return Trained(done, losses.cpu(), squares.cpu(), stays, sent)

    def _derived(self, one: Step) -> Tensor:
        """(n,) losses; their mean's gradient is in g."""
        try:
            loss = one.losses()
            one.bent(loss).backward()
        except (BadInput, torch.OutOfMemoryError):
            raise
        except Exception as why:  # whatever a network of the user's may raise
            shape, name = tuple(one.x.shape), type(self.given).__name__
            raise BadInput(f"{name} cannot be trained on a batch of shape {shape}: {raised(why)}") from why
        return loss

    def _estimated(self, link: Estimates, one: Step, weights: Tensor, state: Any) -> Tensor:
        """(n,) losses; the gradient that the link found is in g."""
        with torch.no_grad():
            loss, g = link.estimate(one.losses, weights, state)
            self.g.copy_(g)
        return loss

    def _forget(self) -> None:
        """What modules counted or noted before, such as BatchNorm's batches: no client goes on with another's."""
        for count, first in self.counts:
            count.copy_(first)
        for module, attributes in self.fresh:
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: value for name, value in attributes.items() if name != "training"})

    def _rebind(self) -> None:
        """Buffers that a forward replaced by new tensors: their values go into w, and w is what they are again."""
        for module, name, bound in self.buffers:
            found = module._buffers[name]
            if found is not bound and found is not None:
                bound.copy_(found)
                module._buffers[name] = bound

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.w.device) for name, value in tensors.items()}

    def _here(self, local: Local) -> Local:
        """What the client knows, with its model and the tensors of its task on this device."""
        task = local.task
        task = replace(task, tensors=self._moved(task.tensors)) if task.tensors else task
        return replace(local, task=task, whole=self.w)

    def evaluate(self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float) -> dict[str, Tensor]:
        """ "loss" (n,), and the numbers of each metric (n, ...), in eval mode."""
        self.w.copy_(w)
        self.net.eval()
        found: dict[str, list[Tensor]] = {"loss": [], **{judge.name: [] for judge in self.objective.judges}}
        two = inputs(x[:2], scale, shift)
        few = self._together()
        with self._doing(x, min(few, len(x))), torch.inference_mode(), self._drawing(two, 0):
            self._forget()
            for part, target in zip(x.split(few), y.split(few), strict=True):
                out = self.net(inputs(part, scale, shift))
                found["loss"].append(each_of(self.objective.losses(out, target), target, self.objective, "losses"))
                for judge in self.objective.judges:
                    found[judge.name].append(each_of(judge.of(out, target), target, judge, f"{judge.name}.of"))
        self._rebind()
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _together(self) -> int:
        """Samples to look at together: fewer where the network says that its answers are large."""
        return together(self.given, self.shape, CHUNK, room=4 if self.w.device.type == "cuda" else 1)

    @contextmanager
    def _doing(self, x: Tensor, n: int) -> Iterator[None]:
        """While batches of n samples train or are judged: the same bits twice, by compiled layers where these pay."""
        with repeatable(self.w.device, self.precision), Shortcuts() if worth(self.widest, x, n) else nullcontext():
            yield

    def _drawing(self, batch: Tensor, seed: int) -> AbstractContextManager[None]:
        """Random layers draw from this seed; a network without them needs no turn."""
        mode = self.net.training
        if mode not in self.random:
            self.random[mode] = self._draws(batch)
        return seeded(seed, self.w.device) if self.random[mode] else nullcontext()

    def _draws(self, batch: Tensor) -> bool:
        """Whether a forward pass in this mode takes numbers from a generator."""
        if not len(batch):
            return False
        with kept(self.w.device), torch.no_grad():
            state = self.w.clone()  # BatchNorm moves its statistics
            before = states(self.w.device)
            self.net(batch.repeat(2, *(1,) * (batch.dim() - 1)))  # two samples at least, for BatchNorm
            after = states(self.w.device)
            self._rebind()
            self.w.copy_(state)
        return before != after

    def _freeze(self, first: int) -> list[slice]:
        """Freeze the blocks before `first`; returns the spans of w that must not move."""
        self.net.train()
        if not first:
            return []
        blocks = chain(self.given, self.shape)
        if first >= len(blocks.trained):
            raise BadInput(f"first trained block {first}: the network has only {len(blocks.trained)}")
        cut = blocks.layers.index(blocks.trained[first])
        modules = dict(self.net.named_modules())
        names = {layer.name for layer in blocks.layers[:cut] if layer.name}
        for name in names:
            modules[name].eval().requires_grad_(False)
        return [s.span for s in self.where.slots if s.trainable and s.name.rpartition(".")[0] in names]

    def _thaw(self) -> None:
        for p in self.learning:
            p.requires_grad_(True)


def _seed(task: Any, purpose: str) -> int:
    return int(stream(task.seed, purpose, task.t, task.client).integers(2**63))


def layer_seed(task: Any) -> int:
    """What a task's random layers draw from."""
    return _seed(task, "layers")
