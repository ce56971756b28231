"""Converts data packed for the experiments into prepared caches: python packed.py FOLDER NAME --out
CACHE_DIR

The packing, which is nobody's public form: FOLDER/cifar10 and FOLDER/cifar100 hold lossless WebP
sheets of 50 x 50 tiles with labels.npy and classes.txt; the others are npz files. Speech holds
8-bit differences along time (x_dt) with scale and offset per coefficient, and goes through the same
standardisation as the wav reader's features. FEMNIST is black on white and is inverted here, so
that ink is bright as in EMNIST. Shakespeare is lines of json, one a role; at stride 1 it takes 2.7
GB. Needs Pillow for CIFAR.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from flrce.data import cache
from flrce.data.readers.heart import build_heart_source
from flrce.data.readers.idx import DIGIT_CLASSES, EMNIST_CLASSES
from flrce.data.readers.shakespeare import WINDOW_LENGTH, build_role_source
from flrce.data.readers.speech import build_speech_source
from flrce.data.sources import Source
from flrce.data.user import from_arrays, from_columns

TILES, SIDE = 50, 32
SERIES_WINDOW, SERIES_STRIDE = 128, 64  # steps


def cifar(folder: Path) -> Source:
    from PIL import Image

    sheets = []
    for path in sorted(folder.glob("train-*.webp")):
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(TILES, SIDE, TILES, SIDE, 3)
        sheets.append(pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE))
    y = np.load(folder / "labels.npy", allow_pickle=False).astype(np.int64)
    classes = tuple((folder / "classes.txt").read_text().split())
    return Source(folder.name, np.concatenate(sheets), y, classes, scale=2 / 255, shift=-1.0)


def speech(path: Path) -> Source:
    with np.load(path, allow_pickle=False) as z:
        levels = np.cumsum(
            z["x_dt"], axis=3, dtype=np.uint8
        )  # wraps around, as the differences did
        features = levels * z["scale"][:, None] + z["offset"][:, None]  # (N, 1, 32, 32) float32
        y, speaker = z["y"].astype(np.int64), z["speaker"].astype(np.int64)
        return build_speech_source(
            features, y, tuple(map(str, z["classes"])), speaker, tuple(map(str, z["speaker_hash"]))
        )


def femnist(path: Path) -> Source:
    return _written("femnist", path, "client", EMNIST_CLASSES, invert=True)


def mnist_writers(path: Path) -> Source:
    return _written("mnist-writers", path, "writer", DIGIT_CLASSES, invert=False)


def _written(name: str, path: Path, key: str, classes: tuple[str, ...], invert: bool) -> Source:
    with np.load(path, allow_pickle=False) as z:
        x, y = z["x"], z["y"].astype(np.int64)
        names, codes = np.unique(z[key], return_inverse=True)
    groups = tuple(map(str, names))
    return Source(
        name, 255 - x if invert else x, y, classes, codes.astype(np.int64), groups, scale=1 / 255
    )


def shakespeare(path: Path) -> Source:
    return build_role_source(_roles(path), "shakespeare")


def shakespeare_tokens(path: Path) -> Source:
    return build_role_source(_roles(path), "shakespeare-tokens", stride=WINDOW_LENGTH, every=True)


def _roles(path: Path) -> dict[str, str]:
    with gzip.open(path, "rt") as lines:
        spoken = [json.loads(line) for line in lines]
    return {f"{line['play']}: {line['role']}": line["text"] + "\n" for line in spoken}


def fed_heart(path: Path) -> Source:
    with np.load(path, allow_pickle=False) as z:
        table = np.concatenate([z["x"], z["grade"][:, None]], 1).astype(np.float64)
        return build_heart_source(
            {str(name): table[z["group"] == name] for name in np.unique(z["group"])}
        )


def smartwatch(path: Path) -> Source:
    """Movements by subject: standardised windows (N, channels, 128) with the class of an exercise;
    a series shorter than one window is left out.
    """
    with np.load(path, allow_pickle=False) as z:
        x, edges = z["x"].astype(np.float32), z["offset"]
        names, subjects = z["labels"][z["y"]], z["subject"]
    windows, y, owner = [], [], []
    for subject, name, a, b in zip(subjects, names, edges, edges[1:], strict=False):
        if b - a >= SERIES_WINDOW:
            views = np.lib.stride_tricks.sliding_window_view(x[a:b], SERIES_WINDOW, axis=0)
            windows.append(views[::SERIES_STRIDE])
            y += [str(name)] * len(windows[-1])
            owner += [f"S{subject:02d}"] * len(windows[-1])
    pool = np.concatenate(windows).astype(np.float32)
    mean, deviation = pool.mean((0, 2), keepdims=True), pool.std((0, 2), keepdims=True)
    classes, codes = np.unique(y, return_inverse=True)
    groups, group = np.unique(owner, return_inverse=True)
    return Source(
        "smartwatch",
        (pool - mean) / np.where(deviation > 0, deviation, 1),
        codes.astype(np.int64),
        tuple(map(str, classes)),
        group.astype(np.int64),
        tuple(map(str, groups)),
    )


def chem97(path: Path) -> Source:
    """Exam scores by school district: a regression."""
    with np.load(path, allow_pickle=False) as z:
        columns = {
            key.removeprefix("chem97_"): z[key] for key in z.files if key.startswith("chem97_")
        }
    columns.pop("school")
    columns["score"] = columns["score"].astype(np.float32)
    return from_columns(columns, "score", "lea", name="chem97", standardise=True)


def vowel(path: Path) -> Source:
    with np.load(path, allow_pickle=False) as z:
        return from_arrays(
            z["vowel_x"], z["vowel_classes"][z["vowel_y"]], z["vowel_speaker"], name="vowel"
        )


PACKED = {
    "cifar10": ("cifar10", cifar),
    "cifar100": ("cifar100", cifar),
    "speech": ("speech.npz", speech),
    "femnist": ("femnist.npz", femnist),
    "mnist-writers": ("mnist_writers.npz", mnist_writers),
    "shakespeare": ("shakespeare.jsonl.gz", shakespeare),
    "shakespeare-tokens": ("shakespeare.jsonl.gz", shakespeare_tokens),
    "fed-heart": ("heart.npz", fed_heart),
    "smartwatch": ("smartwatch.npz", smartwatch),
    "chem97": ("tabular.npz", chem97),
    "vowel": ("tabular.npz", vowel),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of packed data")
    parser.add_argument(
        "name", choices=sorted(PACKED), metavar="NAME", help=", ".join(sorted(PACKED))
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="CACHE_DIR",
        help="the cache; NAME is made in it (default: flrce's)",
    )
    args = parser.parse_args()
    file, convert = PACKED[args.name]
    source = convert(args.folder / file)
    written = cache.write_prepared(source, (args.out or cache.get_data_folder()) / args.name)
    print(
        f"{written}: {len(source.y):,} samples, {len(source.classes)} classes, {len(source.groups)}"
        " groups"
    )


if __name__ == "__main__":
    main()
