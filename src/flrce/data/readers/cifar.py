"""CIFAR-10 and CIFAR-100: their author's python batches, as torchvision has them.

Only the 50,000 training images are read, as in the paper: a federation makes its own hold-out from
them, and the test batch stays out of the pool. CIFAR-100 gets its fine labels.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_limited
from flrce.data.readers.files import check_labels, track_progress
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.formats.plain_pickle import build_array, load_pickled_arrays

PIXELS_PER_IMAGE = 3 * 32 * 32
MAX_FILE_BYTES = 512 << 20  # bytes of one file; CIFAR-100's training batch has 155 MB


@dataclass(frozen=True)
class CifarArchive:
    """What the public archive of one set contains."""

    name: str
    classes: int
    folder: str
    files: tuple[str, ...]
    label_key: str
    meta: str
    names_key: str

    @property
    def remedy(self) -> str:
        return f"unpack {self.name.replace('cifar', 'cifar-')}-python.tar.gz afresh"


CIFAR10 = CifarArchive(
    name="cifar10",
    classes=10,
    folder="cifar-10-batches-py",
    files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    label_key="labels",
    meta="batches.meta",
    names_key="label_names",
)
CIFAR100 = CifarArchive(
    name="cifar100",
    classes=100,
    folder="cifar-100-python",
    files=("train",),
    label_key="fine_labels",
    meta="meta",
    names_key="fine_label_names",
)


def read_cifar(archive: CifarArchive, folder: Path, progress: bool = False) -> Source:
    """The training images of CIFAR10 or CIFAR100."""
    roots = (folder, folder / archive.folder)
    root = next((r for r in roots if any((r / name).is_file() for name in archive.files)), None)
    if root is None:
        name = archive.name.replace("cifar", "cifar-")
        raise BadInput(
            f"{format_path(folder)} holds no {archive.name}; unpack {name}-python.tar.gz there"
        )
    names, paths = _read_class_names(archive, root), [root / name for name in archive.files]
    batches = [_read_batch(archive, path) for path in track_progress(paths, archive.name, progress)]
    largest = max(len(x) for x, _ in batches)
    for path, (x, _) in zip(paths, batches, strict=True):
        if len(x) != largest:
            raise BadInput(
                f"{format_path(path)} has {len(x):,} images where its fellows have {largest:,};"
                f" {archive.remedy}"
            )
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    return Source(archive.name, x, y, names, scale=2 / 255, shift=-1.0)  # (x / 255 - 0.5) / 0.5


def _refuse_file(archive: CifarArchive, path: Path, problem: object) -> BadInput:
    return BadInput(f"{format_path(path)} {problem}; {archive.remedy}")


def _parse_file(archive: CifarArchive, path: Path) -> dict[str, object]:
    raw = read_limited(path, MAX_FILE_BYTES, archive.remedy)
    try:
        return load_pickled_arrays(raw)
    except ValueError as why:
        raise _refuse_file(archive, path, f"is not a {archive.name} file: {why}") from why


def _read_class_names(archive: CifarArchive, root: Path) -> tuple[str, ...]:
    path = root / archive.meta
    names = _parse_file(archive, path).get(archive.names_key)
    if not isinstance(names, list):
        raise _refuse_file(archive, path, f"lacks {archive.names_key!r}")
    texts = [name.decode("latin-1") if isinstance(name, bytes) else name for name in names]
    words = tuple(name for name in texts if isinstance(name, str) and name)
    if len(words) != len(names) or len(words) != archive.classes:
        raise _refuse_file(
            archive, path, f"names {len(words)} classes instead of {archive.classes}"
        )
    return words


def _read_batch(archive: CifarArchive, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and labels (N,)."""
    content = _parse_file(archive, path)
    labels = content.get(archive.label_key)
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 256 for label in labels
    ):
        problem = f"lacks {archive.label_key!r}, one small integer an image"
        raise _refuse_file(archive, path, problem)
    try:
        x = build_array(content.get("data"))
    except ValueError as why:
        raise _refuse_file(archive, path, f"is not a {archive.name} file: {why}") from why
    if x.ndim != 2 or x.shape[1] != PIXELS_PER_IMAGE:
        problem = f"has an array of shape {x.shape} instead of (N, {PIXELS_PER_IMAGE})"
        raise _refuse_file(archive, path, problem)
    y = np.array(labels, np.int64)
    check_labels(path, y, len(x), archive.classes, archive.remedy)
    return np.ascontiguousarray(x).reshape(-1, 3, 32, 32), y
