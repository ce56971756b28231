"""Folders of images, one folder a class. Needs Pillow."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_limited, validate_memory
from flrce.data.readers.files import track_progress
from flrce.data.sources import Source
from flrce.errors import BadInput

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
MAX_FILE_BYTES = 64 << 20  # bytes of one file
MAX_PIXELS = 1 << 26  # of one image: its header says how many, and a small file may say any number
MAX_POOL_BYTES = 16 << 30  # bytes of all pixels
GREY, COLOUR = {"1", "L"}, {"P", "LA", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
IMAGE_REMEDY = "give images of 8 bits a channel, in PNG, JPEG, BMP or WebP"


def read_image_classes(folder: Path, progress: bool = False) -> Source:
    """FOLDER/CLASS/*.png: grey if every image is grey, else RGB; classes in alphabetical order."""
    classes = list_class_images(folder)
    if not classes:
        raise BadInput(
            f"{format_path(folder)} has no folders of images; give one folder a class, as"
            " FOLDER/CLASS/*.png"
        )
    x, y = load_images(classes, progress, label="images")
    return Source("images", x, y, tuple(classes), scale=1 / 255)


def list_class_images(root: Path) -> dict[str, list[Path]]:
    """Images by the name of their folder, in alphabetical order."""
    folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    classes = {
        folder.name: sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_FORMATS)
        for folder in sorted(folders)
    }
    return {name: files for name, files in classes.items() if files}


def load_images(
    classes: dict[str, list[Path]], progress: bool, label: str, size: int | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels (N, C, H, W) and labels. Each image must have the first one's shape.

    With `size`, each is made that wide and high.
    """
    paths = [path for files in classes.values() for path in files]
    shape = _find_common_shape(paths)
    shape = (shape[0], size, size) if size else shape
    needed, images = len(paths) * math.prod(shape), f"{len(paths):,} images of shape {shape}"
    if needed > MAX_POOL_BYTES:
        raise BadInput(f"{images} need over {MAX_POOL_BYTES >> 30} GiB; make them smaller")
    validate_memory(needed, images, "make them smaller, with data.size")
    x = np.empty((len(paths), *shape), np.uint8)
    for row, path in enumerate(track_progress(paths, label, progress)):
        x[row] = read_image(path, shape, bool(size))
    return x, np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])


def _find_common_shape(paths: list[Path]) -> tuple[int, int, int]:
    with _open_image(paths[0]) as image:
        width, height = image.size
    grey = all(_read_mode(path) in GREY for path in paths)
    return (1 if grey else 3, height, width)


def _read_mode(path: Path) -> str:
    with _open_image(path) as image:
        return str(image.mode)


def read_image(path: Path, shape: tuple[int, int, int], fitted: bool = False) -> NDArray[np.uint8]:
    """Pixels (C, H, W) of one image; with `fitted`, resized to H x W."""
    channels, height, width = shape
    with _open_image(path) as image:
        # known from the header, before any pixel is decoded
        if image.size != (width, height) and not fitted:
            got = f"{image.size[0]}x{image.size[1]}"
            raise BadInput(
                f"{format_path(path)} is {got} where {width}x{height} is expected; give images of"
                f" one size, or say data.size = {min(width, height)} to have them made alike"
            )
        if image.mode not in GREY | COLOUR:  # 16 bits a channel would be clipped in silence
            raise BadInput(
                f"{format_path(path)} has pixels of kind {image.mode} where 8 bits a channel are"
                f" expected; {IMAGE_REMEDY}"
            )
        try:
            plain = image.convert("L" if channels == 1 else "RGB")
            pixels = np.asarray(plain.resize((width, height)) if fitted else plain)
        except (OSError, ValueError, SyntaxError) as why:
            raise BadInput(f"{format_path(path)} is cut short or damaged; {IMAGE_REMEDY}") from why
    return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def _open_image(path: Path) -> Any:
    """A Pillow image with only its header read. Its format must agree with its suffix."""
    try:
        from PIL import Image
    except ImportError as why:
        raise BadInput("image folders need Pillow; pip install pillow") from why
    from io import BytesIO

    try:
        image = Image.open(
            BytesIO(read_limited(path, MAX_FILE_BYTES, IMAGE_REMEDY)),
            formats=[IMAGE_FORMATS[path.suffix.lower()]],
        )
        if image.size[0] * image.size[1] > MAX_PIXELS:
            got = f"{image.size[0]}x{image.size[1]}"
            raise BadInput(
                f"{format_path(path)} is {got}, more than {MAX_PIXELS:,} pixels; make it smaller"
            )
        return image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as why:
        if isinstance(why, BadInput):
            raise
        raise BadInput(
            f"{format_path(path)} is no {IMAGE_FORMATS[path.suffix.lower()]} image; {IMAGE_REMEDY}"
        ) from why
