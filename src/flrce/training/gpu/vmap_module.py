"""Modules of a user's own with tensors of their own: their code under vmap, the leaves within it
for all lanes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flrce.training.gpu.lane_layer import ForwardContext, LaneLayer, Tensors


def list_named_tensors(module: nn.Module, deep: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, a tied one by each; a module within it by its first name
    only.
    """
    parts = module.named_modules() if deep else (("", module),)
    return [
        (f"{path}.{name}".lstrip("."), x)
        for path, part in parts
        for name, x in (*part._parameters.items(), *part._buffers.items())
        if x is not None
    ]


def call_with_tensors(
    module: nn.Module, given: Tensors, args: tuple[Any, ...], more: dict[str, Any]
) -> Any:
    """The module's output with these tensors, all that `list_named_tensors` names, in place of its
    own.

    torch ties by names, and leaves tensors behind in a module that has two.
    """
    return functional_call(module, given, args, more, tie_weights=False)


class VmapModule(LaneLayer):
    """`names`: all tensors within it, also those of leaves; `bare`: those that no leaf within it
    holds.
    """

    def __init__(
        self, path: str, layer: nn.Module, names: Mapping[str, str], now: ForwardContext
    ) -> None:
        super().__init__(path, layer, names, now)
        self.bare = dict(names)
        # its statistics that a pass changes; the first one tells
        self.moving: set[str] | None = None

    def forward(self, *args: Any, **more: Any) -> Any:
        mapped = self.now.mapped
        if mapped is None:
            return super().forward(*args, **more)
        return call_with_tensors(
            self.layer, {name: mapped[full] for name, full in self.bare.items()}, args, more
        )

    def run(self, live: bool, *args: Any, **more: Any) -> Any:
        now = self.now
        self.layer.train(live)
        values, spec = pytree.tree_flatten((args, more))
        laned = [
            isinstance(x, Tensor) and x.dim() > 0 and self._has_lane_dim(x, i)
            for i, x in enumerate(values)
        ]
        split = [
            x.reshape(now.k, -1, *x.shape[1:]) if lane else x
            for x, lane in zip(values, laned, strict=True)
        ]

        def run_one_lane(tensors: Tensors, *given: Any) -> Any:
            inside, keys = pytree.tree_unflatten(list(given), spec)
            now.mapped = tensors
            try:
                return self.forward(*inside, **keys)
            finally:
                now.mapped = None

        whole = {full: now.tensors[full] for full in self.names.values()}
        dims = (dict.fromkeys(whole, 0), *(0 if lane else None for lane in laned))
        before = self._copy_statistics()
        y = torch.vmap(run_one_lane, dims)(whole, *split)
        self._restore_finished_lanes(before)
        return pytree.tree_map(lambda out: out.flatten(0, 1) if isinstance(out, Tensor) else out, y)

    def _copy_statistics(self) -> Tensors:
        """Copies (k, ...) of what a pass may change and nobody else looks after."""
        if not self.now.training:
            return {}
        names = self.moving
        if names is None:
            buffers = {name for name, _ in self.layer.named_buffers()}
            names = {full for name, full in self.bare.items() if name in buffers}
        return {full: self.now.tensors[full].clone() for full in names}

    def _restore_finished_lanes(self, before: Tensors) -> None:
        """Statistics of lanes that have finished stand still."""
        tensors, running = self.now.tensors, self.now.count > 0
        if self.moving is None and self.now.training:
            self.moving = {full for full, x in before.items() if not torch.equal(x, tensors[full])}
        for full in before:
            x = tensors[full]
            x.copy_(torch.where(running.reshape(-1, *(1,) * (x.dim() - 1)), x, before[full]))

    def _has_lane_dim(self, x: Tensor, i: int) -> bool:
        now, key = self.now, (f"{self.path}#{i}", self.now.count_call(f"{self.path}#{i}"))
        if now.learning:
            now.calls[key] = x.shape[0] == now.k * now.batch
        return now.calls.get(key, True)
