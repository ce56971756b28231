"""Samples before they are shared out: digits, Fashion-MNIST, prepared sets, the user's own."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from flrce.data.preprocessing import AS_GIVEN, Preprocessing
from flrce.errors import BadInput

# where Debian's package dataset-fashion-mnist puts it
FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
#: sets by name; those not embedded are prepared once with `flrce data prepare`
DATASET_NAMES = (
    *("digits", "fashion-mnist", "cifar10", "cifar100", "femnist", "speech", "mnist"),
    *("shakespeare", "shakespeare-tokens", "fed-heart"),
)
STUDY_NAMES = ("mnist-writers", "smartwatch")  # prepared by experiments/adapters/packed.py


#: what y is: class codes (N,); numbers (N,) or (N, K); next symbols (N, L) or (N,); several labels
#: at once (N, K)
TargetKind = Literal["classes", "values", "tokens", "labels"]
IGNORED_TARGET = -100  # a position of y (N, L) that has no next symbol


@dataclass(frozen=True)
class SampleSpec:
    """What a network and whoever uses it must know of samples, without the samples."""

    shape: tuple[int, ...]  # of one sample, as the network takes it
    dtype: str  # uint8, float32, or int64 for token ids
    scale: float
    shift: float
    kind: TargetKind
    classes: tuple[str, ...]
    outputs: int
    vocabulary: int
    predicts_every_position: bool
    # None: parts of the data were prepared differently, so that a new sample has no one form
    preprocessing: Preprocessing | None

    def to_json(self) -> dict[str, Any]:
        """As plain data for model.json."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "SampleSpec":
        """The inverse of `to_json`."""
        return TypeAdapter(SampleSpec).validate_python(data)


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Samples with what is to be learnt of them.

    Numbers (uint8 or float32) reach a network as `x * scale + shift`. An x of int64 holds token
    ids: they reach it as they are, for an embedding to look up. The dtype alone decides.
    """

    name: str
    x: NDArray[Any]  # (N, C, H, W) or (N, ...) uint8 or float32; (N, L) int64 token ids
    # int64 (N,) classes; float32 (N,) or (N, K) values; int64 (N, L) or (N,) tokens; (N, K) labels
    # 0/1
    y: NDArray[Any]
    # names of the classes, the vocabulary's symbols, or the labels; none for values
    classes: tuple[str, ...]
    group: NDArray[np.int64] | None = None  # (N,) code of the writer or speaker of each sample
    groups: tuple[str, ...] = ()  # the codes' names: untrusted text
    scale: float = 1.0
    shift: float = 0.0
    kind: TargetKind = "classes"
    # (N,) the data's own test split; None: each client holds some back
    held: NDArray[np.bool_] | None = None
    ids: int = 0  # token ids that there are, where `classes` does not name them
    preprocessing: Preprocessing | None = AS_GIVEN  # how raw samples became x

    def __repr__(self) -> str:
        """One line: what it is, not its samples."""
        owners = f", {len(self.groups)} groups" if self.groups else ""
        held = "" if self.held is None else f", {int(self.held.sum())} for judging"
        what = f"{self.outputs} {self.kind}"
        return (
            f"Source({self.name!r}: {len(self.y)} samples {self.shape} {self.x.dtype},"
            f" {what}{owners}{held})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    @property
    def features(self) -> tuple[str, ...]:
        """Of a table: the columns that x was made of."""
        columns = self.preprocessing.columns if self.preprocessing else ()
        return tuple(column.name for column in columns)

    @property
    def spec(self) -> SampleSpec:
        """All but the samples."""
        return SampleSpec(
            self.shape,
            str(self.x.dtype),
            self.scale,
            self.shift,
            self.kind,
            self.classes,
            self.outputs,
            self.vocabulary,
            self.predicts_every_position,
            self.preprocessing,
        )

    @property
    def has_token_ids(self) -> bool:
        """Whether x holds token ids."""
        return self.x.dtype == np.int64

    @property
    def outputs(self) -> int:
        """How many numbers a network gives per sample, or per position where y is (N, L)."""
        if self.kind == "values":
            return 1 if self.y.ndim == 1 else int(self.y.shape[1])
        return len(self.classes) or self.ids

    @property
    def predicts_every_position(self) -> bool:
        """Whether a symbol is to be told at every position, not only after the last."""
        return self.kind == "tokens" and self.y.ndim == 2

    @cached_property
    def vocabulary(self) -> int:
        """How many token ids an embedding must know; 0 where x holds numbers."""
        if not self.has_token_ids:
            return 0
        known = self.outputs if self.kind == "tokens" else self.ids
        return max(known, int(self.x.max(initial=-1)) + 1)

    @staticmethod
    def from_arrays(x: Any, y: Any, group: Any = None, test: Any = None, **how: Any) -> "Source":
        """Arrays, tensors or lists: samples, targets, clients, and which are for tests."""
        return _build_source("from_arrays", x, y, group, test, **how)

    @staticmethod
    def from_dataset(data: Any, test: Any = None, group: Any = None, **how: Any) -> "Source":
        """A torch Dataset of (x, y) pairs, and optionally one of test samples."""
        return _build_source("from_dataset", data, test, group, **how)

    @staticmethod
    def from_huggingface(data: Any, target: str = "", group: str = "", **how: Any) -> "Source":
        """A HuggingFace Dataset, or a DatasetDict with train and test."""
        return _build_source("from_huggingface", data, target, group, **how)

    @staticmethod
    def from_pandas(
        frame: Any, target: str | Sequence[str] = "", group: str = "", **how: Any
    ) -> "Source":
        """A DataFrame: one row a sample."""
        return _build_source("from_pandas", frame, target=target, group=group, **how)

    @staticmethod
    def from_csv(
        path: Path | str, target: str | Sequence[str] = "", group: str = "", **how: Any
    ) -> "Source":
        """A csv file with a header line."""
        return _build_source("from_csv", path, target=target, group=group, **how)

    @staticmethod
    def from_parquet(
        path: Path | str, target: str | Sequence[str] = "", group: str = "", **how: Any
    ) -> "Source":
        """A parquet file (needs pandas and pyarrow)."""
        return _build_source("from_parquet", path, target=target, group=group, **how)

    @staticmethod
    def from_folder(path: Path | str, **how: Any) -> "Source":
        """Images, one folder a class (needs Pillow)."""
        return _build_source("from_folder", path, **how)

    @staticmethod
    def from_folders(path: Path | str, **how: Any) -> "Source":
        """One folder or file a client."""
        return _build_source("from_folders", path, **how)

    @staticmethod
    def from_leaf(path: Path | str, **how: Any) -> "Source":
        """LEAF's json: a file or a folder of them."""
        return _build_source("from_leaf", path, **how)


def _build_source(form: str, *args: Any, **how: Any) -> Source:
    from flrce.data import user

    source: Source = getattr(user, form)(*args, **how)
    return source


def read_digits() -> Source:
    """scikit-learn's 1,797 handwritten 8x8 digits; ships with the package, needs no download."""
    spec = importlib.util.find_spec("sklearn")
    file = (
        Path(spec.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if spec else Path()
    )
    if file.is_file():  # without the second or two that loading scikit-learn takes
        # (1797, 65): 64 pixels from 0 to 16, and the digit
        table = np.loadtxt(file, np.int64, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True)).astype(np.int64)
    x, y = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1].copy()
    return Source("digits", x, y, tuple("0123456789"), scale=1 / 16)


def load_fashion_mnist(folder: Path = FASHION_MNIST_FOLDER) -> Source:
    """Fashion-MNIST's 60,000 training images (Debian: apt install dataset-fashion-mnist)."""
    from flrce.data.readers import read_dataset

    if not folder.is_dir():
        raise BadInput(
            f"data.name 'fashion-mnist' needs {folder}: apt install dataset-fashion-mnist, or"
            " data.path"
        )
    return read_dataset("fashion-mnist", folder)


def is_prepared(name: str) -> bool:
    """Whether a data set of this name, shipped or one's own, lies in the cache."""
    from flrce.data import cache

    return name == Path(name).name and os.path.isfile(
        cache.get_data_folder() / name / cache.META_FILE
    )  # False for any odd name


def load_source(name: str, path: str | None = None, **how: Any) -> Source:
    """A data set by name, or a user's file or folder by path; `how` has the reader's settings."""
    if path is not None:
        from flrce.data.user import from_path

        return from_path(path, **how)
    if name == "digits":
        return read_digits()
    from flrce.data import cache

    folder = cache.get_data_folder() / name
    if folder.is_dir():
        return cache.load_prepared(folder)
    if name == "fashion-mnist":
        return load_fashion_mnist()
    command = f"flrce data prepare {name} --from DIR"
    if name in STUDY_NAMES:
        command = f"python experiments/adapters/packed.py DIR {name}"
    raise BadInput(f"data.name {name!r} is not prepared; run: {command} (looked in {folder})")
