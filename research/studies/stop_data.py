"""The data sets of `plans/stop-confirm-4.json`: `python research/studies/stop_data.py RAW OUT`.

RAW holds the files of the sets that no package ships. All are small, so that a run takes seconds.
"""

import sys
from pathlib import Path

import advise_data
import numpy as np

SPEECH_WORDS, SPEAKERS, WRITERS, WRITER_ROWS, PATCHES, STUDENTS = 12, 48, (600, 680), 50, 3000, 4000


def halve_images(x):
    """(N, 1, 28, 28) as (N, 196): means of 2 x 2 pixels, from 0 to 1."""
    return x.reshape(len(x), 14, 2, 14, 2).mean((2, 4)).reshape(len(x), -1).astype(np.float32) / 255


def build_diabetes(folder):
    """Progression of a disease, in standard deviations: a regression."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    y = (data.target - data.target.mean()) / data.target.std()
    return advise_data.scale_columns(data.data), y.astype(np.float32)


def build_grades(folder):
    """The five grades of the heart data, where the heart task has two classes."""
    with np.load(folder / "heart.npz") as file:
        return advise_data.scale_columns(file["x"]), file["grade"]


def build_characters(folder):
    with np.load(folder / "chars74k.npz") as file:
        return halve_images(file["x"]), file["y"].astype(np.int64), file["writer"]


def build_writers(folder):
    """At most 50 digits of each of 80 writers."""
    with np.load(folder / "mnist_writers.npz") as file:
        writer, rng = file["writer"], np.random.default_rng(4)
        chosen = np.unique(writer)[slice(*WRITERS)]
        keep = np.concatenate(
            [rng.permutation(np.flatnonzero(writer == k))[:WRITER_ROWS] for k in chosen]
        )
        return halve_images(file["x"][keep]), file["y"][keep].astype(np.int64), writer[keep]


def build_letters(folder):
    x, y, group = advise_data.build_femnist(folder)
    return advise_data.scale_columns(halve_images(255 * x)), y.astype(np.int64), group


def build_speech_means(folder):
    """Twelve words of 48 speakers as means and deviations of 32 coefficients over time."""
    with np.load(folder / "speech.npz") as file:
        words = file["y"] < SPEECH_WORDS
        speakers, counts = np.unique(file["speaker"][words], return_counts=True)
        chosen = speakers[np.argsort(-counts, kind="stable")][:SPEAKERS]
        keep = np.flatnonzero(words & np.isin(file["speaker"], chosen))
        x = np.cumsum(file["x_dt"][keep], axis=3, dtype=np.uint8).astype(np.float32)[:, 0]
        features = np.concatenate([x.mean(2), x.std(2)], 1)
        return (
            advise_data.scale_columns(features),
            file["y"][keep].astype(np.int64),
            file["speaker"][keep],
        )


def build_patches(folder):
    """3,000 pictures of CIFAR-10 as 8 x 8 grey values."""
    from PIL import Image

    sheet = np.asarray(Image.open(folder / "cifar10" / "train-19.webp").convert("L"), np.float32)
    more = np.asarray(Image.open(folder / "cifar10" / "train-18.webp").convert("L"), np.float32)
    tiles = [
        x.reshape(50, 32, 50, 32).transpose(0, 2, 1, 3).reshape(-1, 32, 32) for x in (more, sheet)
    ]
    x = np.concatenate(tiles)[-PATCHES:].reshape(-1, 8, 4, 8, 4).mean((2, 4)).reshape(PATCHES, -1)
    return advise_data.scale_columns(x), np.load(folder / "cifar10" / "labels.npy")[-PATCHES:]


def build_scores(folder):
    """Whether a student scores 6 or more, by school authority: two classes."""
    with np.load(folder / "tabular.npz") as file:
        columns = np.stack([file[f"chem97_{name}"] for name in ("gcse", "age", "female")], 1)
        keep = np.random.default_rng(4).permutation(len(columns))[:STUDENTS]
        y = (file["chem97_score"] >= 6).astype(np.int64)
        return advise_data.scale_columns(columns)[keep], y[keep]


BUILDERS = {
    **{
        name: advise_data.BUILDERS[name] for name in ("wine", "breast-cancer", "sites", "synthetic")
    },
    "motion": advise_data.build_smartwatch,
    "vowel": advise_data.build_vowel,
    "diabetes": build_diabetes,
    "grades": build_grades,
    "characters": build_characters,
    "writers": build_writers,
    "letters": build_letters,
    "speech-means": build_speech_means,
    "patches": build_patches,
    "scores": build_scores,
}


def main():
    raw, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for name, build in BUILDERS.items():
        arrays = dict(zip(("x", "y", "group"), build(raw), strict=False))
        np.savez_compressed(out / f"{name}.npz", **arrays)
        print(name, {key: values.shape for key, values in arrays.items()})


if __name__ == "__main__":
    main()
