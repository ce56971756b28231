"""The batch of one step in the torch trainer: what links may ask of it, see link.Batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, nn

from flrce.errors import BadInput
from flrce.models.flat import find_head_layer
from flrce.training.objectives import Objective

LossTerms = Callable[["TrainingStep"], list[Tensor]]


class BoundNetwork:
    """Where a client's steps take place: the network bound to w (size,) and g (d,), and the
    client's randomness.
    """

    def __init__(
        self,
        net: nn.Module,
        parameters: Sequence[nn.Parameter],
        w: Tensor,
        g: Tensor,
        objective: Objective,
        random: bool,
        seed: Callable[[], int],
    ) -> None:
        self.net, self.w, self.g, self.objective = net, w, g, objective
        self.parameters = parameters  # all that train, in the order of w
        self.random, self.seed = random, seed
        self.seen: Tensor | None = None  # what the last layer was given last
        self.generator: Generator | None = None

    @contextmanager
    def record_features(self) -> Iterator[None]:
        """While it lasts, what reaches the last layer is remembered."""
        last = self.net.get_submodule(find_head_layer(self.net))
        hook = last.register_forward_pre_hook(self._store_features)
        try:
            yield
        finally:
            hook.remove()
            self.seen = None

    def _store_features(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        self.seen = given[0]

    @property
    def rng(self) -> Generator:
        if self.generator is None:
            self.generator = Generator().manual_seed(self.seed())
        return self.generator

    def write_gradient(self, total: Tensor) -> None:
        """The gradient of a scalar, into g; 0 for parameters that it does not depend on.

        They are collected once. Were each parameter's `grad` a view of g, it would first be set to
        0 and then added to: two more passes over a model's memory in each step.
        """
        try:
            total.backward()
            with torch.no_grad():
                torch.cat([_flatten_gradient(p) for p in self.parameters], out=self.g)
        finally:
            for p in self.parameters:
                p.grad = None

    @contextmanager
    def use_weights(self, point: Tensor) -> Iterator[None]:
        """With other weights; all is as it was afterwards, g and statistics too.

        Behind autograd's back: what a graph of this step has saved is in place again before anybody
        goes back along it.
        """
        here, w, g = self.w.data, self.w.clone(), self.g.clone()
        here[: len(point)].copy_(point)
        try:
            yield
        finally:
            here.copy_(w)
            self.g.copy_(g)

    def save_rng_state(self) -> Tensor | None:
        """The state of torch's generator, where the network draws from it."""
        if not self.random:
            return None
        return torch.cuda.get_rng_state(self.w.device) if self.w.is_cuda else torch.get_rng_state()

    def restore_rng_state(self, state: Tensor | None) -> None:
        if state is None:
            return
        if self.w.is_cuda:
            torch.cuda.set_rng_state(state, self.w.device)
        else:
            torch.set_rng_state(state)


def _flatten_gradient(p: nn.Parameter) -> Tensor:
    """(p.numel(),) what a backward pass left at a parameter."""
    if p.grad is None:
        return torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
    return p.grad.to_dense().reshape(-1)  # of an embedding it may be sparse


class TrainingStep:
    """One step's batch: inputs as the network sees them, targets, and what came of them."""

    def __init__(
        self, scene: BoundNetwork, x: Tensor, y: Tensor, step: int, rate: float, terms: LossTerms
    ) -> None:
        self.scene, self.x, self.y = scene, x, y
        self.step, self.rate, self.terms = step, rate, terms
        self.before = scene.save_rng_state()
        self.g = scene.g
        self.seen: Tensor | None = None
        self.out: Any = None

    def losses(self) -> Tensor:
        """(n,) the objective's loss of each sample here and now."""
        self.out = self.scene.net(self.x)
        self.seen = self.scene.seen
        return self.scene.objective.losses(self.out, self.y)

    def compute_total_loss(self, losses: Tensor) -> Tensor:
        """() the mean loss with the links' terms."""
        for term in self.terms(self):
            losses = losses + term
        return losses.mean()

    @property
    def features(self) -> Tensor:
        if self.seen is None:
            raise BadInput("the network's last layer was given nothing to serve as features")
        return self.seen

    @property
    def rng(self) -> Generator:
        return self.scene.rng

    def gradient_at(self, at: Tensor) -> Tensor:
        with self._replay_randomness(), self.scene.use_weights(at), torch.enable_grad():
            return self._compute_gradient(self.x, self.y).clone()

    def sample_gradients(self, at: Tensor | None = None) -> Tensor:
        layers = self.scene.net.modules()
        norms = (layer for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        if any(layer.training for layer in norms):
            raise BadInput(
                "BatchNorm mixes samples, so that none has a gradient of its own; take GroupNorm"
            )
        gradients = torch.empty(len(self.y), len(self.g), device=self.g.device)
        point = self.scene.w[: len(self.g)] if at is None else at
        with self._replay_randomness(), self.scene.use_weights(point), torch.enable_grad():
            for i in range(len(self.y)):
                gradients[i] = self._compute_gradient(self.x[i : i + 1], self.y[i : i + 1])
        return gradients

    def _compute_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """The scene's g (d,) after a backward pass of these samples with the links' terms."""
        other = TrainingStep(self.scene, x, y, self.step, self.rate, self.terms)
        self.scene.write_gradient(other.compute_total_loss(other.losses()))
        return self.scene.g

    def forward_at(self, at: Tensor) -> tuple[Any, Tensor]:
        net = self.scene.net
        modes = [(layer, layer.training) for layer in net.modules()]
        net.eval()
        try:
            with self.scene.use_weights(at), torch.no_grad():
                out = net(self.x)
                seen = self.scene.seen
        finally:
            for layer, mode in modes:
                layer.training = mode
        assert seen is not None
        return out, seen

    @contextmanager
    def _replay_randomness(self) -> Iterator[None]:
        """Random layers draw what they drew in this step; what comes after draws as if nothing had
        been asked.
        """
        after = self.scene.save_rng_state()
        self.scene.restore_rng_state(self.before)
        try:
            yield
        finally:
            self.scene.restore_rng_state(after)
