"""CIFAR-10 and CIFAR-100: their author's python batches or binary version, or image folders.

Only the 50,000 training images are read, as in the paper: a federation makes its own hold-out from
them, and the test batch stays out of the pool. CIFAR-100 gets its fine labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_limited
from flrce.data.readers import images
from flrce.data.readers.files import check_labels, track_progress
from flrce.data.sources import Source
from flrce.errors import BadInput
from flrce.formats.plain_pickle import build_array, load_pickled_arrays

PIXELS_PER_IMAGE = 3 * 32 * 32
MAX_FILE_BYTES = 512 << 20  # bytes of one file; CIFAR-100's training batch has 155 MB

ImageBatch = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (N, 3, 32, 32), (N,)


@dataclass(frozen=True)
class CifarArchive:
    """What the public archives of one set contain."""

    name: str
    classes: int
    python_folder: str
    python: tuple[str, ...]
    label_key: str
    meta: str
    names_key: str
    binary_folder: str
    binary: tuple[str, ...]
    label_bytes: int  # in a binary record; the last one is the label wanted
    names: str

    @property
    def remedy(self) -> str:
        return f"unpack {self.name.replace('cifar', 'cifar-')}-python.tar.gz afresh"


CIFAR10 = CifarArchive(
    name="cifar10",
    classes=10,
    python_folder="cifar-10-batches-py",
    python=tuple(f"data_batch_{i}" for i in range(1, 6)),
    label_key="labels",
    meta="batches.meta",
    names_key="label_names",
    binary_folder="cifar-10-batches-bin",
    binary=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    label_bytes=1,
    names="batches.meta.txt",
)
CIFAR100 = CifarArchive(
    name="cifar100",
    classes=100,
    python_folder="cifar-100-python",
    python=("train",),
    label_key="fine_labels",
    meta="meta",
    names_key="fine_label_names",
    binary_folder="cifar-100-binary",
    binary=("train.bin",),
    label_bytes=2,  # coarse, fine
    names="fine_label_names.txt",
)


def read_cifar(layout: CifarArchive, folder: Path, progress: bool = False) -> Source:
    """The training images of CIFAR10 or CIFAR100 in whichever form lies in the folder."""
    for root in (folder, folder / layout.python_folder):
        files = [root / name for name in layout.python]
        if any(file.is_file() for file in files):
            names = _read_python_names(layout, root)
            return _join_batches(layout, files, _read_python_batch, names, progress)
    for root in (folder, folder / layout.binary_folder):
        files = [root / name for name in layout.binary]
        if any(file.is_file() for file in files):
            names = _read_binary_names(layout, root)
            return _join_batches(layout, files, _read_binary_batch, names, progress)
    for root in (folder / "train", folder / layout.name / "train"):
        if classes := images.list_class_images(root, depth=2):
            return _read_image_folders(layout, root, classes, progress)
    raise BadInput(
        f"{format_path(folder)} holds no {layout.name}; unpack"
        f" {layout.name.replace('cifar', 'cifar-')}-python.tar.gz or -binary.tar.gz there, or"
        " images as train/CLASS/*.png"
    )


def _join_batches(
    layout: CifarArchive,
    files: list[Path],
    read: Callable[[CifarArchive, Path], ImageBatch],
    names: tuple[str, ...],
    progress: bool,
) -> Source:
    batches = [read(layout, path) for path in track_progress(files, layout.name, progress)]
    largest = max(len(x) for x, _ in batches)
    for path, (x, _) in zip(files, batches, strict=True):
        if len(x) != largest:  # cut between two records
            raise BadInput(
                f"{format_path(path)} has {len(x):,} images where its fellows have {largest:,};"
                f" {layout.remedy}"
            )
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    return _build_source(layout, x, y, names)


def _build_source(
    layout: CifarArchive, x: NDArray[np.uint8], y: NDArray[np.int64], names: tuple[str, ...]
) -> Source:
    return Source(layout.name, x, y, names, scale=2 / 255, shift=-1.0)  # (x / 255 - 0.5) / 0.5


def _parse_batch_file(layout: CifarArchive, path: Path) -> dict[str, object]:
    raw = read_limited(path, MAX_FILE_BYTES, layout.remedy)
    try:
        return load_pickled_arrays(raw)
    except ValueError as why:
        raise BadInput(
            f"{format_path(path)} is not a {layout.name} file: {why}; {layout.remedy}"
        ) from why


def _read_python_names(layout: CifarArchive, root: Path) -> tuple[str, ...]:
    names = _parse_batch_file(layout, root / layout.meta).get(layout.names_key)
    if not isinstance(names, list):
        raise BadInput(
            f"{format_path(root / layout.meta)} lacks {layout.names_key!r}; {layout.remedy}"
        )
    names = [name.decode("latin-1") if isinstance(name, bytes) else name for name in names]
    return _validate_class_names(layout, root / layout.meta, names)


def _read_binary_names(layout: CifarArchive, root: Path) -> tuple[str, ...]:
    text = read_limited(root / layout.names, 1 << 16, layout.remedy).decode("utf-8", "replace")
    return _validate_class_names(layout, root / layout.names, text.split())


def _validate_class_names(
    layout: CifarArchive, path: Path, names: Sequence[object]
) -> tuple[str, ...]:
    words = tuple(name for name in names if isinstance(name, str) and name)
    if len(words) != len(names) or len(words) != layout.classes:
        raise BadInput(
            f"{format_path(path)} names {len(words)} classes instead of {layout.classes};"
            f" {layout.remedy}"
        )
    return words


def _read_python_batch(layout: CifarArchive, path: Path) -> ImageBatch:
    content = _parse_batch_file(layout, path)
    labels = content.get(layout.label_key)
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 256 for label in labels
    ):
        raise BadInput(
            f"{format_path(path)} lacks {layout.label_key!r}, one small integer an image;"
            f" {layout.remedy}"
        )
    try:
        x = build_array(content.get("data"))
    except ValueError as why:
        raise BadInput(
            f"{format_path(path)} is not a {layout.name} file: {why}; {layout.remedy}"
        ) from why
    if x.ndim != 2 or x.shape[1] != PIXELS_PER_IMAGE:
        raise BadInput(
            f"{format_path(path)} has an array of shape {x.shape} instead of (N,"
            f" {PIXELS_PER_IMAGE}); {layout.remedy}"
        )
    y = np.array(labels, np.int64)
    check_labels(path, y, len(x), layout.classes, layout.remedy)
    return np.ascontiguousarray(x).reshape(-1, 3, 32, 32), y


def _read_binary_batch(layout: CifarArchive, path: Path) -> ImageBatch:
    raw = np.frombuffer(read_limited(path, MAX_FILE_BYTES, layout.remedy), np.uint8)
    record = layout.label_bytes + PIXELS_PER_IMAGE
    if not raw.size or raw.size % record:
        raise BadInput(
            f"{format_path(path)} has {raw.size:,} bytes, no multiple of {record:,};"
            f" {layout.remedy}"
        )
    rows = raw.reshape(-1, record)
    y = rows[:, layout.label_bytes - 1].astype(np.int64)
    check_labels(path, y, len(rows), layout.classes, layout.remedy)
    return rows[:, layout.label_bytes :].reshape(-1, 3, 32, 32), y


def _read_image_folders(
    layout: CifarArchive, root: Path, found: dict[str, list[Path]], progress: bool
) -> Source:
    if len(found) != layout.classes:
        raise BadInput(
            f"{format_path(root)} has {len(found)} class folders instead of {layout.classes};"
            f" {layout.remedy}"
        )
    x, y = images.load_images(found, progress, label=layout.name, shape=(3, 32, 32))
    return _build_source(layout, x, y, tuple(found))
