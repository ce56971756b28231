"""nn.Module <-> the flat float32 vector w that travels.

Trainable parameters come first (in the module's order), then the float buffers (BatchNorm's running mean and
variance), so that `w[:layout.trainable]` is the vector of the paper's formulas and `w` is what a message carries.
Integer buffers (`num_batches_tracked`) never travel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One tensor's place in w."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in w: `size` floats travel, the first `trainable` of them are trained."""

    slots: tuple[Slot, ...]
    trainable: int
    size: int

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """Named views into w (..., size); writing to them writes to w."""
        return {s.name: w[..., s.span].reshape((*w.shape[:-1], *s.shape)) for s in self.slots}

    def __getitem__(self, name: str) -> Slot:
        return next(s for s in self.slots if s.name == name)


def tensors(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """(name, tensor, trainable) in the order of w."""
    named = list(module.named_parameters())
    trained = [(name, p.data, True) for name, p in named if p.requires_grad]
    fixed = [(name, p.data, False) for name, p in named if not p.requires_grad]
    buffers = [(name, b, False) for name, b in module.named_buffers() if b.is_floating_point()]
    return trained + fixed + buffers


def layout(module: nn.Module) -> Layout:
    """The layout of a module's w."""
    slots, offset, trainable = [], 0, 0
    for name, tensor, trained in tensors(module):
        slots.append(Slot(name, tuple(tensor.shape), offset, trained))
        offset += tensor.numel()
        trainable += tensor.numel() if trained else 0
    return Layout(tuple(slots), trainable, offset)


def pack(module: nn.Module) -> Tensor:
    """w, a copy of the module's tensors."""
    parts = [tensor.detach().reshape(-1).float() for _, tensor, _ in tensors(module)]
    return torch.cat(parts) if parts else torch.empty(0)


def unpack(module: nn.Module, w: Tensor) -> nn.Module:
    """Copy w into the module's tensors; returns the module."""
    offset = 0
    with torch.no_grad():
        for _, tensor, _ in tensors(module):
            tensor.copy_(w[offset : offset + tensor.numel()].reshape(tensor.shape))
            offset += tensor.numel()
    return module


def bind(module: nn.Module, w: Tensor, g: Tensor) -> nn.Module:
    """Make the module live inside w: parameters and buffers become views of w, gradients views of g (trainable,).

    One flat SGD step then updates every tensor at once.
    """
    where = layout(module)
    views = where.views(w)
    for name, p in module.named_parameters():
        p.data = views[name]
        if p.requires_grad:
            p.grad = g[where[name].span].view(p.shape)
    for path, sub in module.named_modules():
        for name, b in list(sub.named_buffers(recurse=False)):
            if b.is_floating_point():
                sub._buffers[name] = views[f"{path}.{name}" if path else name]
    return module
