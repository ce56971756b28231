"""The idx files of MNIST and its relatives, plain or gzipped.

MNIST and EMNIST come as a training and a test part; both go into one pool, because a
federation makes its own hold-out. Fashion-MNIST keeps to its 60,000 training images, like the set
that ships with Debian.
"""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, open_regular, validate_memory
from flrce.data.readers.files import check_labels, find_first_file
from flrce.data.sources import Source
from flrce.errors import BadInput

MAX_UNPACKED_BYTES = 1 << 30  # bytes once unpacked; EMNIST by class, the largest, has 547 MB
HEADER_BYTES = 20
MAX_GZIP_RATIO = 1032  # deflate cannot pack tighter, so a larger claim is false
DIGIT_CLASSES = tuple("0123456789")
EMNIST_CLASSES = (*DIGIT_CLASSES, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abcdefghijklmnopqrstuvwxyz")
FASHION_CLASSES = (
    *("T-shirt", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
# where unpacking and torchvision put the files; MNIST and Fashion-MNIST share file names
SEARCH_FOLDERS = {
    "MNIST": ("", "raw", "MNIST/raw"),
    "Fashion-MNIST": ("", "raw", "FashionMNIST/raw"),
    "EMNIST by class": ("", "raw", "gzip", "EMNIST/raw"),
}


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """An idx array. Its header is checked against the file's size before anything is allocated."""
    remedy = "download or copy it afresh"
    try:
        packed = path.suffix == ".gz"
        with open_regular(path, remedy, MAX_UNPACKED_BYTES + HEADER_BYTES) as opened:
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=opened)) if packed else opened
            header = np.frombuffer(file.read(4 + 4 * dims), np.uint8)
            if len(header) != 4 + 4 * dims or header[:4].tolist() != [0, 0, 8, dims]:
                raise BadInput(f"{format_path(path)} is no idx file of {dims} dimensions; {remedy}")
            shape = tuple(int(side) for side in header[4:].view(">u4"))
            size = prod(shape)
            room = min(MAX_UNPACKED_BYTES, path.stat().st_size * (MAX_GZIP_RATIO if packed else 1))
            if size > room:
                raise BadInput(
                    f"{format_path(path)} claims {size:,} bytes of data but can hold at most"
                    f" {room:,}; {remedy}"
                )
            validate_memory(size, format_path(path), remedy)
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as why:
        reason = getattr(why, "strerror", None) or str(why)
        raise BadInput(f"{format_path(path)} cannot be read ({reason}); {remedy}") from why
    if len(content) != size:
        held = "more" if len(content) > size else f"{len(content):,}"
        raise BadInput(
            f"{format_path(path)} claims {size:,} bytes of data but holds {held}; {remedy}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_mnist(folder: Path, progress: bool = False) -> Source:
    """MNIST, 60,000 + 10,000 digits without their writers."""
    x, y = _pool_parts(
        folder, "MNIST", [("train-images", "train-labels"), ("t10k-images", "t10k-labels")], 10
    )
    return Source("mnist", x, y, DIGIT_CLASSES, scale=1 / 255)


def read_fashion_mnist(folder: Path, progress: bool = False) -> Source:
    """Fashion-MNIST's 60,000 training images (Debian: dataset-fashion-mnist)."""
    x, y = _pool_parts(folder, "Fashion-MNIST", [("train-images", "train-labels")], 10)
    return Source("fashion-mnist", x, y, FASHION_CLASSES, scale=1 / 255)


def read_emnist(folder: Path, progress: bool = False) -> Source:
    """EMNIST by class: 697,932 + 116,323 characters, 62 classes, no writers; stored transposed."""
    stems = [f"emnist-byclass-{part}" for part in ("train", "test")]
    parts = [(f"{stem}-images", f"{stem}-labels") for stem in stems]
    x, y = _pool_parts(folder, "EMNIST by class", parts, 62)
    x = np.ascontiguousarray(x.transpose(0, 1, 3, 2))
    return Source("femnist", x, y, EMNIST_CLASSES, scale=1 / 255)


def find_idx_file(folder: Path, title: str, stem: str, dims: int) -> Path | None:
    """A file of the set, gzipped or not, under the names in use: x-idx3-ubyte and x.idx3-ubyte."""
    names = [f"{stem}{mark}idx{dims}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return find_first_file(folder, SEARCH_FOLDERS[title], names)


def _pool_parts(
    folder: Path, title: str, parts: list[tuple[str, str]], classes: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 1, 28, 28) and labels of all parts. The first part must exist."""
    pairs: list[tuple[NDArray[np.uint8], NDArray[np.int64]]] = []
    for images_stem, labels_stem in parts:
        images = find_idx_file(folder, title, images_stem, 3)
        labels = find_idx_file(folder, title, labels_stem, 1)
        if pairs and images is None and labels is None:
            continue
        if images is None or labels is None:
            missing = (
                f"{images_stem}-idx3-ubyte.gz" if images is None else f"{labels_stem}-idx1-ubyte.gz"
            )
            raise BadInput(f"{format_path(folder)} lacks {missing}; unpack {title}'s files there")
        x = _read_images(images)
        y = read_idx(labels, 1).astype(np.int64)
        check_labels(
            labels, y, len(x), classes, f"take it from the same copy of {title} as {images.name}"
        )
        pairs.append((x, y))
    xs, ys = zip(*pairs, strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def _read_images(path: Path) -> NDArray[np.uint8]:
    x = read_idx(path, 3)
    if x.shape[1:] != (28, 28):
        raise BadInput(
            f"{format_path(path)} has images of {x.shape[1]}x{x.shape[2]} instead of 28x28;"
            " download it afresh"
        )
    return x[:, None]
