"""Local SGD in plain PyTorch: the reference for every faster trainer, and their fallback."""

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flrce.errors import BadInput
from flrce.local.pooling import quicken
from flrce.models.chain import chain
from flrce.models.flat import bind, layout
from flrce.models.inputs import inputs

CHUNK = 250  # samples an evaluation looks at together: fits the cache, where one giant batch does not


class Bench:
    """One network bound to one flat vector, reused for every client that a worker trains."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        self.layout = layout(net)
        self.w = torch.zeros(self.layout.size)
        self.g = torch.zeros(self.layout.trainable)
        self.net, self.shape = bind(quicken(copy.deepcopy(net)), self.w, self.g), shape
        self.given = net  # with the layers that a chain knows

    def train(
        self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float, order: NDArray[np.int64],
        sizes: NDArray[np.int64], lr: float, mu: float = 0.0, first: int = 0, squared: bool = True,
        drift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """New w (d,), and per step the mean loss and mean squared per-sample loss before it.

        x (n, ...), y (n,); `order` holds the sample indices of all batches, `sizes` the batches' lengths. The gradient
        gains mu (w - w_start) (FedProx), or its unsquared kin per tensor, and `drift` (trainable,) where one is given.
        Blocks before `first` are frozen, their BatchNorms in eval mode.
        """
        self.w.copy_(w)
        start = w[: self.layout.trainable].clone()
        weights = self.w[: self.layout.trainable]
        frozen = self._freeze(first)
        losses = torch.zeros(len(sizes))
        squares = torch.zeros(len(sizes))
        where = torch.from_numpy(order)
        for step, index in enumerate(where.split(sizes.tolist()) if len(sizes) else ()):
            self.g.zero_()
            batch = inputs(x.index_select(0, index), scale, shift)  # ten times as fast as x[index]
            loss = F.cross_entropy(self.net(batch), y[index], reduction="none")
            loss.mean().backward()
            with torch.no_grad():
                losses[step], squares[step] = loss.mean(), loss.square().mean()
                if mu:
                    pull = weights - start
                    self.g.add_(pull if squared else self._unit(pull), alpha=mu)
                if drift is not None:
                    self.g.add_(drift)
                for span in frozen:
                    self.g[span] = 0
                weights.sub_(self.g, alpha=lr)
        self._thaw()
        return self.w.clone(), losses, squares

    def evaluate(self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float) -> tuple[Tensor, Tensor]:
        """(correct (n,) bool, loss (n,)) in eval mode."""
        self.w.copy_(w)
        self.net.eval()
        correct, losses = [], []
        with torch.inference_mode():
            for part, label in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
                out = self.net(inputs(part, scale, shift))
                correct.append(out.argmax(1) == label)
                losses.append(F.cross_entropy(out, label, reduction="none"))
        return torch.cat(correct), torch.cat(losses)

    def _unit(self, pull: Tensor) -> Tensor:
        """Each tensor of the pull divided by its norm (0 at 0): the gradient of an unsquared penalty."""
        parts = [pull[s.span] for s in self.layout.slots if s.trainable]
        return torch.cat([part / part.norm() if part.any() else part for part in parts])

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
        return [s.span for s in self.layout.slots if s.trainable and s.name.rpartition(".")[0] in names]

    def _thaw(self) -> None:
        self.net.requires_grad_(True)
