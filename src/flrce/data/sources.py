"""Samples before they are shared out: embedded digits, Debian's Fashion-MNIST, arrays of one's own, prepared sets."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flrce.data import npz
from flrce.errors import BadInput

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
#: sets by name; those not embedded are prepared once with `flrce data prepare`
NAMES = ("digits", "fashion-mnist", "cifar10", "cifar100", "femnist", "speech", "mnist", "mnist-writers")


#: what y is: class codes (N,); numbers (N,) or (N, K); next symbols (N, L) or (N,); several labels at once (N, K)
Kind = Literal["classes", "values", "tokens", "labels"]
IGNORED = -100  # a position of y (N, L) that has no next symbol


@dataclass(frozen=True, eq=False)
class Source:
    """Samples with what is to be learnt of them.

    Numbers (uint8 or float32) reach a network as `x * scale + shift`. An x of int64 holds token ids: they reach it
    as they are, for an embedding to look up. The dtype alone decides.
    """

    name: str
    x: NDArray[Any]  # (N, C, H, W) or (N, ...) uint8 or float32; (N, L) int64 token ids
    y: NDArray[Any]  # int64 (N,) classes; float32 (N,) or (N, K) values; int64 (N, L) or (N,) tokens; (N, K) labels 0/1
    classes: tuple[str, ...]  # names of the classes, the vocabulary's symbols, or the labels; none for values
    group: NDArray[np.int64] | None = None  # (N,) code of the writer or speaker of each sample
    groups: tuple[str, ...] = ()  # the codes' names: untrusted text
    scale: float = 1.0
    shift: float = 0.0
    kind: Kind = "classes"
    held: NDArray[np.bool_] | None = None  # (N,) the data's own test split; None: each client holds some back

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def tokens(self) -> bool:
        """Whether x holds token ids."""
        return self.x.dtype == np.int64

    @property
    def outputs(self) -> int:
        """How many numbers a network gives per sample, or per position where y is (N, L)."""
        if self.kind == "values":
            return 1 if self.y.ndim == 1 else int(self.y.shape[1])
        return len(self.classes)

    @property
    def every(self) -> bool:
        """Whether a symbol is to be told at every position, not only after the last."""
        return self.kind == "tokens" and self.y.ndim == 2

    @cached_property
    def vocabulary(self) -> int:
        """How many token ids an embedding must know; 0 where x holds numbers."""
        if not self.tokens:
            return 0
        known = len(self.classes) if self.kind == "tokens" else 0
        return max(known, int(self.x.max(initial=-1)) + 1)


def digits() -> Source:
    """scikit-learn's 1,797 handwritten 8x8 digits; ships with the package, needs no download."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[:, None]  # 0..16
    return Source("digits", x, bunch.target.astype(np.int64), tuple("0123456789"), scale=1 / 16)


def fashion_mnist(folder: Path = FASHION) -> Source:
    """Fashion-MNIST's 60,000 training images from idx files (Debian: apt install dataset-fashion-mnist)."""
    from flrce.data.readers import read

    if not folder.is_dir():
        raise BadInput(f"data.name 'fashion-mnist' needs {folder}: apt install dataset-fashion-mnist, or data.path")
    return read("fashion-mnist", folder)


def arrays(path: Path) -> Source:
    """An .npz of one's own: x (N, ...) uint8 or float, y (N,) integers, optional group (N,)."""
    if not os.path.isfile(path):
        raise BadInput(f"data.path {str(path)!r} does not exist; give an .npz with x, y and optional group")
    found = npz.load(path, ("x", "y", "group"), f"data.path {str(path)!r}")
    return from_arrays(
        found.get("x"), found.get("y"), found.get("group"), name=path.stem, where=f"data.path {str(path)!r}"
    )


def from_arrays(
    x: np.ndarray | None,
    y: np.ndarray | None,
    group: np.ndarray | None = None,
    name: str = "mine",
    where: str = "arrays",
) -> Source:
    """A source from arrays in memory, checked."""
    if x is None or y is None:
        raise BadInput(f"{where} lacks {'x' if x is None else 'y'}; it needs x (samples) and y (labels)")
    if not x.ndim or y.ndim != 1 or (group is not None and group.ndim != 1):
        raise BadInput(f"{where} x must be (N, ...), y and group (N,), got {x.shape} and {y.shape}")
    if len(x) != len(y) or (group is not None and len(group) != len(x)):
        raise BadInput(f"{where} has {len(x)} samples but {len(y)} labels or another number of groups; make them equal")
    if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
        raise BadInput(f"{where} y must be one non-negative integer a sample, got {y.dtype} of shape {y.shape}")
    if x.dtype != np.uint8:
        if x.dtype.kind not in "fiub":
            raise BadInput(f"{where} x must be numbers, got {x.dtype}; save images as uint8 or features as float32")
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise BadInput(f"{where} x holds NaN or infinity; clean the samples first")
    codes: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    if group is not None:
        found, codes = np.unique(group, return_inverse=True)
        names = tuple(str(g) for g in found)
    if x.ndim == 3:  # grey images without a channel axis
        x = x[:, None]
    classes = tuple(str(c) for c in range(int(y.max(initial=0)) + 1))
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    return Source(name, np.ascontiguousarray(x), y.astype(np.int64), classes, codes, names, scale=scale)


def source(name: str, path: str | None = None) -> Source:
    """A data set by name, or an .npz of one's own by path."""
    if path is not None:
        return arrays(Path(path))
    if name == "digits":
        return digits()
    from flrce.data import cache

    folder = cache.home() / name
    if folder.is_dir():
        return cache.load(folder)
    if name == "fashion-mnist":
        return fashion_mnist()
    raise BadInput(
        f"data.name {name!r} is not prepared; run: flrce data prepare {name} --from DIR (looked in {folder})"
    )
