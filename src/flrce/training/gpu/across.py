"""From code that runs under vmap over the lanes, a call that is made for all lanes at once."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

#: gets tensors of all lanes (k, ...), or of none where the flag says so; gives tensors (k, ...)
AllLanesCall = Callable[[Sequence[Tensor], Sequence[bool]], Sequence[Tensor]]


class _AcrossLanes(torch.autograd.Function):
    """Its rule for vmap is the call itself, which autograd follows as any other code."""

    @staticmethod
    def forward(lane: Tensor, call: AllLanesCall, *given: Tensor) -> Any:
        raise RuntimeError("made for calls under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise RuntimeError("made for calls under vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, lane: Tensor, call: AllLanesCall, *given: Tensor) -> Any:
        dims = in_dims[2:]
        whole = [
            x if dim is None else x.movedim(dim, 0) for x, dim in zip(given, dims, strict=True)
        ]
        found = tuple(call(whole, [dim is not None for dim in dims]))
        return found, (0,) * len(found)


def call_across_lanes(call: AllLanesCall, lane: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """What `call` makes of all lanes' tensors, as one lane sees it. `lane`: any tensor that is
    mapped over.
    """
    return list(cast(tuple[Tensor, ...], _AcrossLanes.apply(lane, call, *given)))
