"""A layer of a network that holds one set of weights for each lane, and what it reads while the
network runs once.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flrce.errors import BadInput
from flrce.training.gpu.across import call_across_lanes
from flrce.training.gpu.operations import MIN_DIRECT_ROWS, batched_linear, drop_values
from flrce.training.gpu.parametrized import compute_parametrized_tensor

Tensors = dict[str, Tensor]


@dataclass
class ForwardContext:
    """What the leaves read while the network runs once."""

    tensors: Tensors = field(default_factory=dict)  # (k, ...) each
    k: int = 1
    batch: int = 1  # samples of each lane
    count: Tensor = field(default_factory=lambda: torch.ones(1))  # (k,) of them real
    training: bool = True
    direct: bool = False  # whether convolutions and large products go through Triton kernels
    frozen: frozenset[str] = frozenset()  # leaves that stand still, in eval mode
    # (k,) the lanes' seeds and (1,) the step; None: nothing is dropped
    draw: tuple[Tensor, Tensor] | None = None
    # notes which calls get the batch and which get something that all samples share
    learning: bool = False
    calls: dict[tuple[str, int], bool] = field(default_factory=dict)
    samples: int = 1  # the same, also where `batch` counts something else for a while
    # of samples in what is dropped
    places: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)  # calls of each leaf in this pass
    mapped: Tensors | None = None  # while code runs under vmap: the tensors as one lane sees them
    weights: bool = False  # whether attention gives its weights, too, if it is asked for them

    def count_call(self, path: str) -> int:
        """How many calls this leaf had before in this pass; one more is counted."""
        before = self.made.get(path, 0)
        self.made[path] = before + 1
        return before


def _to_float32(x: Tensor) -> Tensor:
    """What autocast made coarser in float32 again: it does not reach code under vmap, which takes
    one dtype.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class LaneLayer(nn.Module):
    """In place of a layer. `names`: its tensors' names in w; what is not among them is the same for
    all lanes.
    """

    at = 0  # the dimension of an input that counts samples
    # tensors given that are samples; what follows may be the same for all of them, such as a mask
    inputs = 1

    def __init__(
        self, path: str, layer: nn.Module, names: Mapping[str, str], now: ForwardContext
    ) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not as a child: its tensors are not this module's
        self.path, self.names, self.now = path, dict(names), now

    def __getattr__(self, name: str) -> Any:
        """As the layer's; a lane's own tensor for code that sees one lane."""
        full, now = self.__dict__["names"].get(name), self.__dict__["now"]
        if full is not None and now.mapped is not None:
            return now.mapped[full]
        return getattr(self.__dict__["layer"], name)

    @property
    def is_trained(self) -> bool:
        """Whether gradients pass through it."""
        return self.now.training and self.path not in self.now.frozen

    @property
    def is_in_train_mode(self) -> bool:
        """Whether it drops values and uses statistics of the batch; a network's own code may keep
        a layer in evaluation mode while it trains.
        """
        return self.is_trained and self.training

    def forward(self, *args: Any, **more: Any) -> Any:
        if self.now.mapped is not None:
            return self._run_across_lanes(*args, **more)
        with torch.set_grad_enabled(self.is_trained):
            return self.run(self.is_in_train_mode, *args, **more)

    def run(self, live: bool, *args: Any, **more: Any) -> Any:
        raise NotImplementedError

    def find_input_batch_dim(self, i: int) -> int:
        """The dimension that counts samples in the i-th tensor given."""
        return self.at

    def find_output_batch_dim(self, i: int) -> int:
        """The same for the i-th tensor that comes out."""
        return self.find_input_batch_dim(i)

    def _run_across_lanes(self, *args: Any, **more: Any) -> Any:
        """For code that sees one lane: run over all lanes' samples."""
        now = self.now
        values, spec = pytree.tree_flatten((args, more))
        at = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
        made: list[Any] = []
        after: Any = None

        def run_all_lanes(given: Sequence[Tensor], laned: Sequence[bool]) -> list[Tensor]:
            nonlocal after
            for i, (place, x, own) in enumerate(zip(at, given, laned, strict=True)):
                if own or i < self.inputs:
                    x = x if own else x.expand(now.k, *x.shape)
                    dim = self.find_input_batch_dim(i)
                    x = x.movedim(0, dim).flatten(dim, dim + 1)
                values[place] = x
            outside = now.mapped, now.batch
            now.mapped, now.batch = None, values[at[0]].shape[self.find_input_batch_dim(0)] // now.k
            try:
                inside, keys = pytree.tree_unflatten(values, spec)
                found, after = pytree.tree_flatten(self.forward(*inside, **keys))
                made.extend(found)
                tensors = [_to_float32(x) for x in found if isinstance(x, Tensor)]
                dims = [self.find_output_batch_dim(i) for i in range(len(tensors))]
                return [
                    x.unflatten(d, (now.k, -1)).movedim(d, 0)
                    for x, d in zip(tensors, dims, strict=True)
                ]
            finally:
                now.mapped, now.batch = outside

        assert now.mapped is not None
        found = iter(
            call_across_lanes(
                run_all_lanes, next(iter(now.mapped.values())), [values[i] for i in at]
            )
        )
        return pytree.tree_unflatten(
            [next(found) if isinstance(x, Tensor) else x for x in made], after
        )

    def get_lane_tensor(self, name: str) -> Tensor | None:
        """(k, ...) of this layer, or None where it has none such."""
        if name in self.names:
            return self.now.tensors[self.names[name]]
        own = compute_parametrized_tensor(
            self.layer, name, {key: self.now.tensors[full] for key, full in self.names.items()}
        )
        if own is not None:
            return own
        shared: Tensor | None = getattr(self.layer, name)
        return None if shared is None else shared[None].expand(self.now.k, *shared.shape)

    def apply_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer: x (k, B, ..., I), weight (k, O, I), bias (k, O)."""
        least = 1 if self.now.learning else MIN_DIRECT_ROWS  # a verification has few rows
        return batched_linear(x, weight, bias, least if self.now.direct else None)

    def split_lanes(self, x: Tensor) -> Tensor:
        """(k, B, ...) of a long batch, or (k, 1, ...) of what all samples share."""
        now, call = self.now, self.now.count_call(self.path)
        if now.learning:
            now.calls[self.path, call] = x.dim() > self.at and x.shape[self.at] == now.k * now.batch
        if now.calls.get((self.path, call), True):
            x = x.movedim(self.at, 0) if self.at else x
            return x.reshape(now.k, -1, *x.shape[1:])
        return x.expand(now.k, 1, *x.shape)

    def merge_lanes(self, y: Tensor) -> Tensor:
        """(k B, ...) of (k, B, ...); what samples share is given to each."""
        if y.shape[1] != self.now.batch:
            y = y.expand(y.shape[0], self.now.batch, *y.shape[2:])
        y = y.flatten(0, 1)
        return y.movedim(0, self.at) if self.at else y

    def apply_dropout(self, x: Tensor, p: float, channels: bool = False) -> Tensor:
        """x with a share p of each lane's values at 0 (batched.drop)."""
        now, key = self.now, (self.path, self.now.count_call(f"{self.path}!"))
        if now.learning:
            now.places[key] = self._find_lane_dims(x)
        if now.draw is None or not p:
            return x
        at, inner = now.places.get(key, (0, 1))
        place = zlib.crc32(f"{self.path} {key[1]}".encode())
        x = x.movedim(at, 0)
        # samples first: what is dropped hangs on no padding
        lanes = x.unflatten(0, (now.k, -1)).movedim(inner, 1)
        return (
            drop_values(lanes, p, *now.draw, place, channels)
            .movedim(1, inner)
            .flatten(0, 1)
            .movedim(0, at)
        )

    def _find_lane_dims(self, x: Tensor) -> tuple[int, int]:
        """The dimension of x that counts what is of all lanes, and with a lane's part of it apart,
        that of samples.
        """
        now = self.now
        rows = [d for d, n in enumerate(x.shape) if n == now.k * now.batch]
        if not rows and x.dim() and x.shape[0] % (now.k * now.batch) == 0:
            rows = [0]  # several for each sample, such as heads
        if not rows:
            raise BadInput(f"what is dropped at {self.path!r} is of no lane's samples")
        lane = [now.batch, *(n for d, n in enumerate(x.shape) if d != rows[0])]
        return rows[0], 1 if lane[0] == now.samples or now.samples not in lane else 1 + lane.index(
            now.samples
        )
