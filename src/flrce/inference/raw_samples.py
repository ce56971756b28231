"""Raw samples for a trained model: files, folders, tables and arrays, prepared as in training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_text_limited
from flrce.data.fields import has_fields, pack_fields
from flrce.data.preprocessing import ColumnTable, Preprocessing
from flrce.data.readers.columns import convert_column
from flrce.data.readers.images import IMAGE_FORMATS, read_image
from flrce.data.sources import SampleSpec
from flrce.data.user.arrays import arrange_axes
from flrce.data.user.tables import read_table_columns, to_columns
from flrce.errors import BadInput
from flrce.formats.npz import load_npz

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
ACCEPTED_FORMS = (
    "give a csv, tsv, jsonl, parquet or npz file, a txt file with one text a line, an image, or a"
    " folder of images"
)
MAX_TEXT_BYTES = 4 << 30


@dataclass(frozen=True, eq=False)
class RawSamples:
    """Samples as a network takes them before scaling, and what else the file had."""

    x: NDArray[Any]  # (N, ...) in the spec's shape and dtype
    rows: tuple[str, ...]
    table: ColumnTable | None = None  # every column of a table, targets among them


def prepare_samples(data: Any, spec: SampleSpec) -> RawSamples:
    """A path, DataFrame, dict of columns, array, tensor or list as samples of the spec's form."""
    if isinstance(data, str | Path):
        return _read_path(Path(data), spec)  # texts come as a list, so that one is no path
    fields = spec.preprocessing.fields if spec.preprocessing else ()
    if fields and (isinstance(data, Mapping) or has_fields(data)):
        x, _ = pack_fields(data, "data", fields)
        return RawSamples(x, _number_rows(len(x)))
    if hasattr(data, "column_names"):  # a Dataset of HuggingFace
        table = {key: convert_column(list(data[key]), key) for key in data.column_names}
        return _prepare_table(table, spec, "Dataset")
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return _prepare_table(to_columns(data), spec, "DataFrame")
    if isinstance(data, Mapping):
        table = {str(key): np.asarray(value) for key, value in data.items()}
        return _prepare_table(table, spec, "data")
    if hasattr(data, "detach"):
        data = data.detach().cpu()
    array = np.asarray(data)
    if array.size and isinstance(array.flat[0], str):
        return _prepare_texts([str(text) for text in array.ravel()], spec, "data")
    return _prepare_array(array, spec, "data")


def _prepare_texts(texts: list[str], spec: SampleSpec, where: str) -> RawSamples:
    """One sample a text; BadInput where the model takes more than one text."""
    columns = require_preprocessing(spec).columns
    if len(columns) != 1 or not columns[0].is_text:
        raise BadInput(
            f"{where} holds text, and the model was trained on other samples; {ACCEPTED_FORMS}"
        )
    return _prepare_table({columns[0].name: np.array(texts, object)}, spec, where)


def _read_path(path: Path, spec: SampleSpec) -> RawSamples:
    if not path.exists():
        raise BadInput(f"{format_path(path)} does not exist; {ACCEPTED_FORMS}")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGE_FORMATS:
        return _read_images(path, spec)
    if suffix in TABLE_SUFFIXES:
        return _prepare_table(read_table_columns(path), spec, format_path(path))
    if suffix == ".txt":
        text = read_text_limited(path, MAX_TEXT_BYTES, "give one text a line", expansion=8)
        return _prepare_texts(text.splitlines(), spec, format_path(path))
    if suffix == ".npz":
        arrays = load_npz(path, ("x",), format_path(path))
        if "x" not in arrays:
            raise BadInput(f"{format_path(path)} has no array x; save the samples as x")
        return _prepare_array(arrays["x"], spec, format_path(path))
    raise BadInput(f"{format_path(path)} is of no known form; {ACCEPTED_FORMS}")


def _prepare_table(table: ColumnTable, spec: SampleSpec, where: str) -> RawSamples:
    prepared = require_preprocessing(spec)
    if not prepared.columns:
        raise BadInput(
            f"{where} is a table, and the model was trained on samples of shape {spec.shape};"
            " give an array or an npz file"
        )
    x = prepared.transform(prepared.encode_table(table, where), where)
    return RawSamples(x, _number_rows(len(x)), table)


def _prepare_array(x: NDArray[Any], spec: SampleSpec, where: str) -> RawSamples:
    if x.dtype.kind not in "biuf":
        raise BadInput(f"{where} holds {x.dtype}, not numbers; {ACCEPTED_FORMS}")
    if x.shape == spec.shape and x.ndim > 0:
        x = x[None]  # one sample
    if x.shape[1:] != spec.shape:
        x = arrange_axes(x, "auto", where) if x.ndim > 1 else x
    if x.shape[1:] != spec.shape:
        raise BadInput(
            f"{where} has samples of shape {x.shape[1:]}, and the model takes {spec.shape}"
        )
    if spec.dtype == "int64" and (x.dtype.kind == "f" or (len(x) and x.min() < 0)):
        raise BadInput(f"{where} must hold token ids 0, 1, ..., got {x.dtype}")
    whole = x.dtype == np.uint8 or (x == np.clip(np.round(x), 0, 255)).all()
    if spec.dtype == "uint8" and not whole:
        raise BadInput(
            f"{where} must hold whole numbers from 0 to 255, as in training; got {x.dtype} from"
            f" {x.min():g} to {x.max():g}"
        )
    converted = np.ascontiguousarray(x).astype(spec.dtype)
    return RawSamples(require_preprocessing(spec).transform(converted, where), _number_rows(len(x)))


def _read_images(path: Path, spec: SampleSpec) -> RawSamples:
    if len(spec.shape) != 3 or spec.dtype != "uint8":
        raise BadInput(
            f"{format_path(path)} holds images, and the model was trained on samples of shape"
            f" {spec.shape} {spec.dtype}"
        )
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in IMAGE_FORMATS)
    if not files:
        raise BadInput(f"{format_path(path)} holds no image; {ACCEPTED_FORMS}")
    channels, height, width = spec.shape
    fitted = require_preprocessing(spec).resized
    x = np.stack([read_image(file, (channels, height, width), fitted) for file in files])
    names = [str(file.relative_to(path)) if path.is_dir() else file.name for file in files]
    return RawSamples(x, tuple(names))


def require_preprocessing(spec: SampleSpec) -> Preprocessing:
    """The spec's preprocessing; BadInput where parts of the data had different ones."""
    if spec.preprocessing is None:
        raise BadInput(
            "each client's samples were prepared apart (other means or fill values), so a new"
            " sample has no single form; call .network on samples that you prepared yourself"
        )
    return spec.preprocessing


def _number_rows(count: int) -> tuple[str, ...]:
    return tuple(str(row + 1) for row in range(count))
