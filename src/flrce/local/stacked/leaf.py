"""A layer of a network that holds one set of weights for each lane, and what it reads while the network runs once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flrce.local.stacked.batched import Convolving

Tensors = dict[str, Tensor]


@dataclass
class Pass:
    """What the leaves read while the network runs once."""

    tensors: Tensors = field(default_factory=dict)  # (k, ...) each
    k: int = 1
    batch: int = 1  # samples of each lane
    count: Tensor = field(default_factory=lambda: torch.ones(1))  # (k,) of them real
    training: bool = True
    convolving: Convolving = "columns"
    frozen: frozenset[str] = frozenset()  # leaves that stand still, in eval mode
    draw: tuple[Tensor, Tensor] | None = None  # (k,) the lanes' seeds and (1,) the step; None: nothing is dropped
    learning: bool = False  # notes which calls get the batch and which get something that all samples share
    calls: dict[tuple[str, int], bool] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # calls of each leaf in this pass

    def call(self, path: str) -> int:
        """How many calls this leaf had before in this pass; one more is counted."""
        before = self.made.get(path, 0)
        self.made[path] = before + 1
        return before


class Leaf(nn.Module):
    """In place of a layer. `names`: its tensors' names in w; what is not among them is the same for all lanes."""

    at = 0  # the dimension of an input that counts samples

    def __init__(self, path: str, layer: nn.Module, names: Mapping[str, str], now: Pass) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not as a child: its tensors are not this module's
        self.path, self.names, self.now = path, dict(names), now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    @property
    def live(self) -> bool:
        """Whether it trains in this pass."""
        return self.now.training and self.path not in self.now.frozen

    def forward(self, *args: Any, **more: Any) -> Any:
        with torch.set_grad_enabled(self.live):
            return self.run(self.live, *args, **more)

    def run(self, live: bool, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor | None:
        """(k, ...) of this layer, or None where it has none such."""
        if name in self.names:
            return self.now.tensors[self.names[name]]
        shared: Tensor | None = getattr(self.layer, name)
        return None if shared is None else shared[None].expand(self.now.k, *shared.shape)

    def apart(self, x: Tensor) -> Tensor:
        """(k, B, ...) of a long batch, or (k, 1, ...) of what all samples share."""
        now, call = self.now, self.now.call(self.path)
        if now.learning:
            now.calls[self.path, call] = x.dim() > self.at and x.shape[self.at] == now.k * now.batch
        if now.calls.get((self.path, call), True):
            x = x.movedim(self.at, 0) if self.at else x
            return x.reshape(now.k, -1, *x.shape[1:])
        return x.expand(now.k, 1, *x.shape)

    def together(self, y: Tensor) -> Tensor:
        """(k B, ...) of (k, B, ...); what samples share is given to each."""
        if y.shape[1] != self.now.batch:
            y = y.expand(y.shape[0], self.now.batch, *y.shape[2:])
        y = y.flatten(0, 1)
        return y.movedim(0, self.at) if self.at else y
