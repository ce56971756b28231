"""What a client on Flower trains with, and the machinery around it: runners by thread, tracing by
turns.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.errors import BadInput
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner
from flrce.training.cpu import why_none
from flrce.training.objectives import Classification, Objective

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Local:
    """What a client trains with: a network, a pool of samples x (n, ...) and labels y, and which of
    them are its own.

    `train` and `held` index the pool (by default all of it is trained on and none held back); a
    sample reaches the network as x * scale + shift. `name` is the client's stable name; by default
    what `get_client_name` finds.
    """

    net: nn.Module
    x: Tensor
    y: Tensor
    train: Any = None  # positions, as an array from here on: (n,) int64
    held: Any = None
    scale: float = 1.0
    shift: float = 0.0
    name: str | None = None
    objective: Objective = Classification()
    kept: tuple[str, ...] = ()  # patterns of parameters that stay with this client
    # "auto" trains with fused kernels where the network and the machine have them
    kernel: str = "torch"

    def __post_init__(self) -> None:
        for name in ("train", "held"):  # a range, a list or a tensor will do
            index = getattr(self, name)
            if index is not None:
                object.__setattr__(self, name, to_index_array(name, index))

    @property
    def train_index(self) -> IndexArray:
        return np.arange(len(self.y)) if self.train is None else self.train


def to_index_array(name: str, index: Any) -> IndexArray:
    """Positions of samples as an array; a mask of booleans becomes the positions that are True."""
    values = np.asarray(index)
    if values.dtype == bool:
        values = np.flatnonzero(values)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise BadInput(
            f"Local({name}=...) holds {values.dtype} of shape {values.shape}; use positions of"
            " samples, such as range(100) or an array of integers"
        )
    return values.astype(np.int64, copy=False)


class TracingLock:
    """torch.fx patches every network's call while it traces one: in one process, it has to have it
    to itself.
    """

    def __init__(self) -> None:
        self.change, self.working = threading.Condition(), 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray hands copies of an app to its processes: each has its own turns
        return (TracingLock, ())

    @contextmanager
    def hold_shared(self) -> Iterator[None]:
        with self.change:
            self.working += 1
        try:
            yield
        finally:
            with self.change:
                self.working -= 1
                self.change.notify_all()

    @contextmanager
    def hold_exclusive(self) -> Iterator[None]:
        with self.change:  # held while it lasts, so nobody starts
            self.change.wait_for(lambda: not self.working)
            yield


class RunnerCache:
    """A Runner per thread and pool of samples: its network is bound to one client's work at a
    time.
    """

    def __init__(self, tracing: TracingLock, most: int = 4) -> None:
        self.here, self.tracing, self.most = threading.local(), tracing, most

    def __reduce__(self) -> tuple[Any, ...]:
        return RunnerCache, (self.tracing, self.most)

    def __call__(self, local: Local) -> ClientRunner:
        kept: dict[int, tuple[Tensor, ClientRunner]] = self.here.__dict__.setdefault("kept", {})
        if id(local.x) not in kept:
            net, shape = copy.deepcopy(local.net), tuple(local.x.shape[1:])
            with self.tracing.hold_exclusive():
                native = local.kernel != "torch" and not why_none(net, shape)
            samples = Samples(local.x, local.y, local.scale, local.shift)
            runner = ClientRunner(net, shape, samples, native, local.objective, local.kept)
            runner.compiled = local.kernel != "torch"
            kept[id(local.x)] = (local.x, runner)
            for old in list(kept)[: -self.most]:
                del kept[old]
        return kept[id(local.x)][1]
