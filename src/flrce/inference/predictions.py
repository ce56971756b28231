"""The outputs of a network as predictions."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.files import format_path
from flrce.data.sources import SampleSpec
from flrce.errors import BadInput
from flrce.storage.disk import BY_UMASK, write_atomically

LABEL_THRESHOLD = 0.5  # probability from which one of several labels is predicted


@dataclass(frozen=True, eq=False)
class Predictions:
    """One prediction per sample.

    `values` are class names, numbers (N,) or (N, K), label matrices of 0 and 1, or token ids.
    `probabilities` (N, classes) exist for classes, labels and tokens.
    """

    values: NDArray[Any]
    probabilities: NDArray[np.float32] | None
    classes: tuple[str, ...]
    targets: tuple[str, ...]  # names of what is predicted, where the data had names
    rows: tuple[str, ...]  # names of the samples: row numbers or files

    def __len__(self) -> int:
        return len(self.values)

    def to_columns(self) -> dict[str, Sequence[Any]]:
        """Named columns, one entry per sample: the predictions and, of classes, probabilities."""
        if self.values.ndim == 1:
            name = self.targets[0] if len(self.targets) == 1 else "prediction"
            columns: dict[str, Sequence[Any]] = {name: self.values.tolist()}
        else:
            names = self.targets or self.classes
            if len(names) != self.values.shape[1]:
                names = tuple(f"prediction {i}" for i in range(self.values.shape[1]))
            columns = {name: self.values[:, i].tolist() for i, name in enumerate(names)}
        if self.probabilities is not None and self.probabilities.shape[1] == len(self.classes):
            chances = self.probabilities.T.tolist()
            columns |= {f"p({c})": p for c, p in zip(self.classes, chances, strict=True)}
        return {"sample": list(self.rows), **columns}

    def to_pandas(self) -> Any:
        """A DataFrame of `to_columns`, indexed by sample."""
        try:
            import pandas
        except ImportError as why:
            raise BadInput("Predictions.to_pandas() needs pandas; pip install pandas") from why
        return pandas.DataFrame(self.to_columns()).set_index("sample")

    def to_csv(self, path: Path | str) -> None:
        """Write `to_columns` as a csv file."""
        columns = self.to_columns()
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        try:
            write_atomically(Path(path), text.getvalue().encode(), BY_UMASK)
        except OSError as why:
            raise BadInput(
                f"{format_path(Path(path))} cannot be written: {why.strerror or why};"
                " name another file"
            ) from why


def interpret_outputs(outputs: Tensor, spec: SampleSpec, rows: Sequence[str]) -> Predictions:
    """Predictions from a network's outputs (N, ...) by the kind of target."""
    targets = spec.preprocessing.targets if spec.preprocessing else ()
    classes, named = spec.classes, tuple(rows)
    if spec.kind == "values":
        flat = outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
        values = flat.numpy()
        if spec.preprocessing:
            values = spec.preprocessing.restore_targets(values)
        return Predictions(values, None, (), targets, named)
    if spec.kind == "labels":
        chance = torch.sigmoid(outputs)
        labels = (chance >= LABEL_THRESHOLD).numpy().astype(np.uint8)
        return Predictions(labels, chance.numpy(), classes, classes, named)
    if spec.predicts_every_position:
        outputs = outputs[:, -1]  # (N, L, symbols): the symbol after the last one
    chance = torch.softmax(outputs[:, : spec.outputs], 1)
    best = chance.argmax(1).numpy()
    values = np.array(classes)[best] if classes else best
    return Predictions(values, chance.numpy(), classes, targets, named)
