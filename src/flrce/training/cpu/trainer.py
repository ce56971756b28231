"""A compiled net as seen from Python."""

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.errors import BadInput
from flrce.training.batches import SampleBatches
from flrce.training.cpu.plan import Plan

EVALUATE_TILES = 4  # small enough that a tile's planes stay in the second-level cache
PAGE = 1 << 21
P, L, F, I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


def _allocate_zeros(size: int) -> NDArray[np.uint8]:
    """At least `size` bytes of zeros from the next page boundary on, in large pages where the
    system has them.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


def _point_to(w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float) -> tuple[Any, ...]:
    """Model and samples as the C functions take them."""
    return w.data_ptr(), x.data_ptr(), x.element_size(), y.data_ptr(), scale, shift


class Kernel:
    """One net's trainer. Calls release the interpreter, share nothing, and give the same bits on
    every thread.
    """

    def __init__(self, plan: Plan, shape: tuple[int, ...], lanes: int, path: Path) -> None:
        code = ctypes.CDLL(str(path))
        code.workspace.restype, code.workspace.argtypes = L, [L]
        batch: list[Any] = [
            P,
            L,
            P,
            P,
            I,
            P,
            F,
            F,
        ]  # workspace, tiles, w, samples, labels, scale, shift
        code.train.restype, code.train.argtypes = None, [*batch, P, P, L, F, F, I, I, P, P]
        code.gradient.restype, code.gradient.argtypes = None, [*batch, L, I, P, P]
        code.evaluate.restype, code.evaluate.argtypes = None, [*batch, L, L, P, P]
        self._code, self._plan, self._shape, self._lanes = code, plan, shape, lanes
        # workspaces by tiles
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._lock = Lock()

    def train(
        self,
        w: Tensor,
        batches: SampleBatches,
        lr: float,
        mu: float = 0.0,
        first: int = 0,
        squared: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """SGD on the mean cross-entropy: (w after, loss of each step's batch before it, mean
        squared loss likewise).

        mu pulls towards the first w: its square (mu/2 times the squared distance), or each tensor's
        plain distance. Blocks before `first` stay as they are, and their BatchNorms use and keep
        their running statistics.
        """
        samples = batches.samples
        w, x, y = self._validate_tensors(w, samples.x, samples.y)
        order, sizes = (np.ascontiguousarray(a, np.int64) for a in (batches.order, batches.sizes))
        self._check_order(order, sizes, len(x), first)
        w = w.clone()
        losses, squares = torch.empty(len(sizes)), torch.empty(len(sizes))
        if len(sizes):
            batch = _point_to(w, x, y, samples.scale, samples.shift)
            steps = (order.ctypes.data, sizes.ctypes.data, len(sizes), lr, mu, int(squared), first)
            out = (losses.data_ptr(), squares.data_ptr())
            with self._borrow_workspace(int(sizes.max())) as workspace:
                self._code.train(*workspace, *batch, *steps, *out)
        return w, losses, squares

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, g: Tensor, first: int = 0) -> Tensor:
        """(n,) losses of one batch, x as the net sees it; the gradient of their mean goes into g
        (d,).

        BatchNorm's running statistics in w move, and nothing else of it. Of blocks before `first` g
        is 0.
        """
        held, x, y = self._validate_tensors(w, x, y)
        if held.data_ptr() != w.data_ptr() or g.dtype != torch.float32 or not g.is_contiguous():
            raise BadInput("w and g must be contiguous float32: they are written to")
        self._check_sizes(np.array([len(x)]), first)
        losses = torch.empty(len(x))
        batch, out = _point_to(w, x, y, 1.0, 0.0), (g.data_ptr(), losses.data_ptr())
        with self._borrow_workspace(len(x)) as workspace:
            self._code.gradient(*workspace, *batch, len(x), first, *out)
        return losses

    def evaluate(
        self, w: Tensor, x: Tensor, y: Tensor, scale: float, shift: float
    ) -> tuple[Tensor, Tensor]:
        """(whether each sample's largest logit is its label's, its loss), with running
        statistics.
        """
        w, x, y = self._validate_tensors(w, x, y)
        correct, loss = torch.empty(len(x), dtype=torch.bool), torch.empty(len(x))
        sizes = (len(x), int(torch.Size(self._shape).numel()))
        batch, out = _point_to(w, x, y, scale, shift), (correct.data_ptr(), loss.data_ptr())
        with self._borrow_workspace(min(EVALUATE_TILES * self._lanes, len(x))) as workspace:
            self._code.evaluate(*workspace, *batch, *sizes, *out)
        return correct, loss

    @contextmanager
    def _borrow_workspace(self, samples: int) -> Iterator[tuple[int, int]]:
        """(address, tiles) of zeroed or used memory for so many samples that no other call
        holds.
        """
        tiles = max(1, -(-samples // self._lanes))
        with self._lock:
            spare = self._free[tiles]
            memory = spare.pop() if spare else None
        if memory is None:
            memory = _allocate_zeros(self._code.workspace(tiles))
        try:
            yield -(-memory.ctypes.data // PAGE) * PAGE, tiles
        finally:
            with self._lock:
                self._free[tiles].append(memory)

    def _validate_tensors(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors as the C code reads them; it reads no bounds, so they are checked here."""
        if w.shape != (self._plan.layout.size,):
            size = self._plan.layout.size
            raise BadInput(f"w has shape {tuple(w.shape)}, the net needs ({size},)")
        if tuple(x.shape[1:]) != self._shape or len(x) != len(y):
            raise BadInput(
                f"samples have shape {tuple(x.shape)} and labels {tuple(y.shape)}; the net takes"
                f" {self._shape}"
            )
        if x.dtype not in (torch.uint8, torch.float32):
            raise BadInput(f"samples are {x.dtype}; use torch.uint8 or torch.float32")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self._plan.classes:
            raise BadInput(
                f"labels run from {int(y.min())} to {int(y.max())}; the net has"
                f" {self._plan.classes} classes"
            )
        return w.detach().float().contiguous(), x.contiguous(), y.long().contiguous()

    def _check_order(
        self, order: NDArray[np.int64], sizes: NDArray[np.int64], n: int, first: int
    ) -> None:
        if len(order) and not 0 <= order.min() <= order.max() < n:
            raise BadInput(f"order names sample {order.max()}, there are {n}")
        if (len(sizes) and sizes.min() < 1) or sizes.sum() != len(order):
            raise BadInput(f"batch sizes add up to {sizes.sum()}, order names {len(order)} samples")
        self._check_sizes(sizes, first)

    def _check_sizes(self, sizes: NDArray[np.int64], first: int) -> None:
        if not 0 <= first < self._plan.blocks:
            raise BadInput(f"first must be from 0 to {self._plan.blocks - 1}, got {first}")
        alone = any(
            s.norm and s.index >= first and s.middle[1:] == (1, 1) for s in self._plan.stages
        )
        if alone and len(sizes) and sizes.min() == 1:
            raise BadInput("a batch of one sample has no variance for BatchNorm; raise train.batch")
