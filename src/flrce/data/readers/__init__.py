"""Readers of the public forms of the data sets: files a user has already; nothing is downloaded.

Whoever prefers a download: the folders that torchvision (CIFAR10, CIFAR100, MNIST, QMNIST, FashionMNIST, EMNIST) and
torchaudio (SPEECHCOMMANDS) make with `download=True` are read as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flrce.data.readers import cifar, heart, idx, images, leaf, shakespeare, smartwatch, speech
from flrce.data.sources import Source
from flrce.errors import BadInput, nearest
from flrce.reading import shown


@dataclass(frozen=True)
class Reader:
    """One data set: what a folder must hold, how many samples its authors publish, and how to read it."""

    about: str
    samples: int | None  # None: it depends
    function: Callable[[Path, bool], Source]


def femnist(folder: Path, progress: bool = False) -> Source:
    """LEAF's FEMNIST (with writers) or EMNIST by class (without), whichever lies in the folder."""
    if idx.has_emnist(folder):
        return idx.emnist(folder, progress)
    if leaf.files(folder):
        return leaf.leaf(folder, progress)
    raise BadInput(
        f"{shown(folder)} holds neither LEAF's json files nor EMNIST's emnist-byclass-*-ubyte.gz; unpack one"
    )


READERS: dict[str, Reader] = {
    "cifar10": Reader("CIFAR-10: python batches, binary version, or train/CLASS/*.png", 50_000, cifar.cifar10),
    "cifar100": Reader("CIFAR-100, fine labels: the same forms", 50_000, cifar.cifar100),
    "femnist": Reader("FEMNIST: LEAF's json (with writers) or EMNIST by class (idx gz)", None, femnist),
    "speech": Reader("Google Speech Commands: folders of wav, with speakers", None, speech.speech),
    "mnist": Reader("MNIST: idx files, plain or gz", 70_000, idx.mnist),
    "mnist-writers": Reader(
        "MNIST with writers: QMNIST's labels and MNIST's or QMNIST's images", None, idx.mnist_writers
    ),
    "fashion-mnist": Reader("Fashion-MNIST: idx files (Debian: dataset-fashion-mnist)", 60_000, idx.fashion_mnist),
    "shakespeare": Reader("Shakespeare by role: LEAF's json, or one .txt file a role", None, shakespeare.shakespeare),
    "shakespeare-tokens": Reader(
        "the same, the next character at every position", None, shakespeare.shakespeare_tokens
    ),
    "fed-heart": Reader("heart disease in four hospitals: UCI's processed.*.data", 740, heart.heart),
    "smartwatch": Reader("movements by subject: one csv file a series", None, smartwatch.smartwatch),
    "images": Reader("images of your own: one folder a class (needs Pillow)", None, images.images),
}


def read(name: str, folder: Path, progress: bool = False) -> Source:
    """The samples of a data set from its public files; finds out which form lies in the folder."""
    if name not in READERS:
        raise BadInput(f"there is no reader for {name!r}; {nearest(name, READERS)}")
    if not folder.is_dir():
        raise BadInput(f"{shown(folder)} is no folder; unpack the data set and name the folder it makes")
    return READERS[name].function(folder, progress)
