"""What a network does as it runs that lanes would not follow: numbers it reads back, draws, buffers
it changes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flrce.training.gpu.lane_layer import LaneLayer

aten = torch.ops.aten
# item, bool, float, int; torch.equal
READ_OPERATIONS = (aten._local_scalar_dense.default, aten.equal.default)


class ReadDetector(TorchDispatchMode):
    """While it lasts: whether Python is told a number that depends on these tensors, such as `if
    x.mean() > 0`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.found = False
        self.held = dict(map(_get_storage, tensors))  # kept, so that none is taken for another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(_get_storage(x)[0] in self.held for x in _iterate_tensors((args, kwargs))):
            self.found = self.found or func in READ_OPERATIONS
            self.held.update(map(_get_storage, _iterate_tensors(out)))
        return out


def _iterate_tensors(tree: Any) -> Iterator[Tensor]:
    return (
        x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.layout == torch.strided
    )


def _get_storage(x: Tensor) -> tuple[int, Any]:
    kept = x.untyped_storage()
    return kept._cdata, kept


class BufferSnapshot:
    """A module's buffers that are no lane's own, as they are now: counters, flags, masks."""

    def __init__(self, module: nn.Module, own: Iterable[str]) -> None:
        own = frozenset(own)
        self.buffers = [
            (part, last, b.clone())
            for name, part, last, b in _iterate_buffers(module)
            if name not in own
        ]

    @property
    def has_changed(self) -> bool:
        return any(
            not _is_unchanged(part._buffers[name], before) for part, name, before in self.buffers
        )


def _iterate_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(whole name, module, name there, buffer); of a leaf those of the layer that it stands for."""
    for path, part in module.named_modules():
        inner = (
            part.layer.named_modules(prefix=path)
            if isinstance(part, LaneLayer)
            else ((path, part),)
        )
        for where, layer in inner:
            for name, b in layer.named_buffers(recurse=False):
                yield f"{where}.{name}".lstrip("."), layer, name, b


def _is_unchanged(now: Tensor | None, before: Tensor) -> bool:
    return (
        now is not None
        and now.shape == before.shape
        and bool(((now == before) | (now != now)).all())
    )
