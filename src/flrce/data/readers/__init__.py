"""Readers of the public forms of the data sets: files a user has already; nothing is downloaded.

Whoever prefers a download: the folders that torchvision (CIFAR10, CIFAR100, MNIST,
FashionMNIST, EMNIST) and torchaudio (SPEECHCOMMANDS) make with `download=True` are read as they
are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flrce.core.files import format_path
from flrce.data.readers import heart, idx, images, leaf, speech
from flrce.data.readers.cifar import CIFAR10, CIFAR100, read_cifar
from flrce.data.readers.shakespeare import read_shakespeare, read_shakespeare_tokens
from flrce.data.sources import Source
from flrce.errors import BadInput, suggest_name


@dataclass(frozen=True)
class DatasetReader:
    """One data set: what a folder must hold, how many samples it has, and how to read it."""

    about: str
    samples: int | None  # None: it depends
    function: Callable[[Path, bool], Source]


def read_femnist(folder: Path, progress: bool = False) -> Source:
    """LEAF's FEMNIST (with writers) or EMNIST by class (without), whichever lies in the folder."""
    if idx.find_idx_file(folder, "EMNIST by class", "emnist-byclass-train-images", 3):
        return idx.read_emnist(folder, progress)
    if leaf.list_leaf_files(folder):
        return leaf.read_femnist_leaf(folder, progress)
    raise BadInput(
        f"{format_path(folder)} holds neither LEAF's json files nor EMNIST's"
        " emnist-byclass-*-ubyte.gz; unpack one"
    )


DATASET_READERS: dict[str, DatasetReader] = {
    "cifar10": DatasetReader("CIFAR-10: python batches", 50_000, partial(read_cifar, CIFAR10)),
    "cifar100": DatasetReader(
        "CIFAR-100, fine labels: the same", 50_000, partial(read_cifar, CIFAR100)
    ),
    "femnist": DatasetReader(
        "FEMNIST: LEAF's json (with writers) or EMNIST by class (idx gz)", None, read_femnist
    ),
    "speech": DatasetReader(
        "Google Speech Commands: folders of wav, with speakers", None, speech.read_speech_commands
    ),
    "mnist": DatasetReader("MNIST: idx files, plain or gz", 70_000, idx.read_mnist),
    "fashion-mnist": DatasetReader(
        "Fashion-MNIST: idx files (Debian: dataset-fashion-mnist)", 60_000, idx.read_fashion_mnist
    ),
    "shakespeare": DatasetReader(
        "Shakespeare by role: LEAF's json, or one .txt file a role", None, read_shakespeare
    ),
    "shakespeare-tokens": DatasetReader(
        "the same, the next character at every position", None, read_shakespeare_tokens
    ),
    "fed-heart": DatasetReader(
        "heart disease in four hospitals: UCI's processed.*.data", 740, heart.read_heart_disease
    ),
    "images": DatasetReader(
        "images of your own: one folder a class (needs Pillow)", None, images.read_image_classes
    ),
}


def read_dataset(name: str, folder: Path, progress: bool = False) -> Source:
    """The samples of a data set from its public files; finds out which form lies in the folder."""
    if name not in DATASET_READERS:
        raise BadInput(f"there is no reader for {name!r}; {suggest_name(name, DATASET_READERS)}")
    if not folder.is_dir():
        raise BadInput(
            f"{format_path(folder)} is no folder; unpack the data set and name the folder it makes"
        )
    return DATASET_READERS[name].function(folder, progress)
