"""Samples before they are shared out: embedded digits, Debian's Fashion-MNIST, arrays of one's own, prepared sets."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flrce.errors import BadInput

FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
#: sets by name; those not embedded are prepared once with `flrce data prepare`
NAMES = ("digits", "fashion-mnist", "cifar10", "cifar100", "femnist", "speech", "mnist", "mnist-writers")


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled samples; a network sees `x * scale + shift`."""

    name: str
    x: NDArray[np.uint8] | NDArray[np.float32]  # (N, C, H, W), or (N, ...) of one's own
    y: NDArray[np.int64]  # (N,)
    classes: tuple[str, ...]
    group: NDArray[np.int64] | None = None  # (N,) code of the writer or speaker of each sample
    groups: tuple[str, ...] = ()  # the codes' names: untrusted text
    scale: float = 1.0
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


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
    if not path.is_file():
        raise BadInput(f"data.path {str(path)!r} does not exist; give an .npz with x, y and optional group")
    try:
        with np.load(path, allow_pickle=False) as z:
            found = {key: z[key] for key in z.files}
    except (ValueError, OSError, EOFError) as why:
        raise BadInput(
            f"data.path {str(path)!r} is no plain .npz ({why}); save with numpy.savez(x=..., y=...)"
        ) from why
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
    if len(x) != len(y) or (group is not None and len(group) != len(x)):
        raise BadInput(f"{where} has {len(x)} samples but {len(y)} labels or another number of groups; make them equal")
    if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
        raise BadInput(f"{where} y must be one non-negative integer a sample, got {y.dtype} of shape {y.shape}")
    if x.dtype != np.uint8:
        if x.dtype.kind not in "fiub":
            raise BadInput(f"{where} x must be numbers, got {x.dtype}; save images as uint8 or features as float32")
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
