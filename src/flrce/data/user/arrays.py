"""A user's arrays as a Source: what x and y hold, with a log line for whatever was guessed."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flrce.data.fields import InputField, describe_fields, has_fields, pack_fields
from flrce.data.preprocessing import AS_GIVEN, Preprocessing
from flrce.data.sources import Source, TargetKind
from flrce.data.user.targets import convert_targets, format_examples, resolve_class_names
from flrce.data.user.text_columns import hash_text_array, is_text_array, mask_texts
from flrce.errors import BadInput

InputLayout = Literal["auto", "images", "series", "table", "tokens"]
#: a number, "mean" (of a column), "drop" (the row), or nothing: refuse
FillValue = float | int | str | None
IMAGE_CHANNELS = (1, 3, 4)
COLUMN_SETTINGS = ("target", "group", "test", "ignore", "features", "text", "buckets")
COLUMNS = "give a dict of columns of one length, of {client: (x, y)}, or of x and y"
MAX_UNSCALED_FEATURE = 100.0  # features beyond it want scaling before gradient descent does well
log = logging.getLogger("flrce")


def count_items(y: Any) -> int | None:
    """How many targets there are; None where y has no length, as an array of no dimension."""
    try:
        return len(y)
    except TypeError:
        return None


@dataclass(frozen=True)
class ArrayOptions:
    """What a user says about arrays."""

    kind: TargetKind | Literal["auto"] = "auto"
    layout: InputLayout = "auto"
    classes: Sequence[str] = ()
    fill: FillValue = None
    standardise: bool = False
    name: str = "mine"
    where: str = "arrays"  # how messages call them
    preprocessing: Preprocessing = AS_GIVEN  # how x was made of the columns of a table


def from_arrays(x: Any, y: Any, group: Any = None, test: Any = None, **how: Any) -> Source:
    """A source from arrays, tensors or lists in memory, checked; `how`: fields of `ArrayOptions`.

    x: samples; uint8 is scaled to 0..1. y: classes (integers or text), values (floats), labels (N,
    K) of 0 and 1, or next symbols. group: who a sample belongs to. test: True where a sample is
    only for judging. layout says what x is where its form does not: "series" (N, channels, steps),
    "tokens" (N, ids), "table", "images".
    """
    if unknown := sorted(how.keys() - {field.name for field in dataclass_fields(ArrayOptions)}):
        raise BadInput(
            f"{how.get('where', 'data')}: {unknown[0]!a} is no array or setting; give x, y, and"
            " optionally group and test"
        )
    options = ArrayOptions(**how)
    where, layout = options.where, options.layout
    fields: tuple[InputField, ...] = ()
    if has_fields(x, count_items(y)):
        x, fields = pack_fields(x, where)
        layout = "table"
        log.info("%s: samples of several inputs: %s", where, describe_fields(fields))
    x, y = (_to_array(value, which, where) for value, which in ((x, "x"), (y, "y")))
    _validate_counts(x, y, group, test, where)
    read = replace(options.preprocessing, fields=fields)
    if is_text_array(x):
        x, read = hash_text_array(x, where)
    if y.ndim == 2 and y.shape[1] == 1 and options.kind in ("auto", "classes"):
        y = y[:, 0] if y.dtype.kind != "f" else y  # a column
    held = None if test is None else _parse_split(test, where)
    if options.kind == "tokens" or (layout == "auto" and _is_next_symbol_task(x, y)):
        layout = "tokens"
    kept: Any = slice(None)
    filled: tuple[float, ...] = ()
    if layout == "tokens":
        x = _convert_tokens(x, where)
    else:
        x, kept, filled = _convert_numbers(x, layout, options.fill, where)
    x, y, group, held = x[kept], y[kept], _select_rows(group, kept), _select_rows(held, kept)
    form: InputLayout = "table" if layout == "auto" and x.ndim == 2 else layout
    targets = convert_targets(y, options.kind, form, where, len(options.classes))
    x = arrange_axes(x, layout, where)
    source = _build_source(x, targets, (group, held), replace(read, fill=filled), options)
    if options.standardise:
        return standardise_source(source, where)
    _suggest_standardising(source, where)
    return source


def _validate_counts(x: NDArray[Any], y: NDArray[Any], group: Any, test: Any, where: str) -> None:
    others = [len(value) for value in (group, test) if value is not None]
    if {len(x), len(y), *others} != {len(x)}:
        raise BadInput(
            f"{where} has {len(x)} samples but {len(y)} labels or another number of groups; make"
            " them equal"
        )
    if group is not None and np.ndim(group) != 1:
        raise BadInput(f"{where} group must name one client a sample, got shape {np.shape(group)}")
    if not len(x):
        raise BadInput(f"{where} holds no samples; give at least a few for each client")


def _suggest_standardising(source: Source, where: str) -> None:
    """A warning where features or values are so large that scaling them would help."""
    fields = source.preprocessing.fields if source.preprocessing else ()
    plain = not fields and source.x.ndim == 2 and source.x.dtype == np.float32
    named = {"features": source.x} if plain else {}
    named |= {"values to learn": source.y} if source.kind == "values" else {}
    for what, numbers in named.items():
        if (largest := np.abs(numbers).max(initial=0)) > MAX_UNSCALED_FEATURE:
            text = "%s: %s reach %.3g; data.standardise = true helps where training diverges"
            log.warning(text, where, what, largest)


def standardise_source(source: Source, where: str) -> Source:
    """The source with its features, and the values to be learnt, less their mean and divided by
    their deviation; hashed texts and the inputs of a network with several stay as they are.
    """
    prepared, x = source.preprocessing, source.x
    if prepared is None:
        raise BadInput(
            f"{where}: data.standardise needs one preparation for all, and each client's gaps are"
            " filled apart; give one table with a column for the client"
        )
    if not prepared.fields and (x.dtype == np.float32 or source.kind != "values"):
        prepared = _keep_texts(measure_features(x, source.held, prepared, where))
        x = prepared.transform(x)
    if source.kind != "values":
        return replace(source, x=x, preprocessing=prepared)
    training = source.y if source.held is None else source.y[~source.held]
    mean, deviation = training.mean(0, dtype=np.float64), training.std(0, dtype=np.float64)
    deviation = np.where(deviation > 0, deviation, 1.0)
    prepared = replace(
        prepared,
        target_mean=tuple(np.ravel(mean).tolist()),
        target_deviation=tuple(np.ravel(deviation).tolist()),
    )
    y = np.asarray((source.y - mean) / deviation, np.float32)
    return replace(source, x=x, y=y, preprocessing=prepared)


def _keep_texts(measured: Preprocessing) -> Preprocessing:
    """The preprocessing with nothing done to the features of texts."""
    if not any(column.is_text for column in measured.columns):
        return measured
    text = mask_texts(measured)
    return replace(
        measured,
        mean=tuple(np.where(text, 0.0, measured.mean).tolist()),
        deviation=tuple(np.where(text, 1.0, measured.deviation).tolist()),
    )


def _build_source(
    x: NDArray[Any],
    targets: tuple[NDArray[Any], tuple[str, ...], TargetKind],
    split: tuple[NDArray[Any] | None, NDArray[np.bool_] | None],
    prepared: Preprocessing,
    options: ArrayOptions,
) -> Source:
    y, names, kind = targets
    codes, groups = _encode_groups(split[0])
    return Source(
        options.name,
        np.ascontiguousarray(x),
        y,
        resolve_class_names(names, options.classes, options.where),
        codes,
        groups,
        scale=1 / 255 if x.dtype == np.uint8 else 1.0,
        kind=kind,
        held=split[1],
        preprocessing=prepared,
    )


def refuse_columns(how: Mapping[str, Any], why: str) -> None:
    """BadInput where settings name columns, and there are none."""
    for key in COLUMN_SETTINGS:
        if key in how:
            raise BadInput(f"data.{key} names a column of a table, {why}; drop it")


def arrange_axes(x: NDArray[Any], layout: InputLayout, where: str) -> NDArray[Any]:
    """x with the axes a network wants: images (N, C, H, W), series (N, C, L)."""
    wanted = {"images": (3, 4), "series": (3,), "table": (2,), "tokens": (2,)}
    if layout != "auto" and x.ndim not in wanted[layout]:
        raise BadInput(
            f"{where} x has shape {x.shape}, which is no {layout}; give {wanted[layout][-1]} axes"
        )
    if x.ndim == 3 and layout != "series":  # grey images without a channel axis
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in IMAGE_CHANNELS and x.shape[1] not in IMAGE_CHANNELS:
        text = "%s: x %s has its channels last; taken as %d images of shape %s"
        log.warning(text, where, x.shape, len(x), (x.shape[3], *x.shape[1:3]))
        return x.transpose(0, 3, 1, 2)
    if x.ndim == 1:
        return x[:, None]
    return x


def measure_features(
    x: NDArray[Any], held: NDArray[np.bool_] | None, prepared: Preprocessing, where: str
) -> Preprocessing:
    """Mean and deviation of each feature over all clients' training samples."""
    if x.dtype != np.float32:
        raise BadInput(
            f"{where}: only float features are standardised, x is {x.dtype}; leave standardise out"
        )
    training = x if held is None else x[~held]
    deviation = training.std(0, dtype=np.float64)
    return replace(
        prepared,
        mean=tuple(training.mean(0, dtype=np.float64).ravel().tolist()),
        deviation=tuple(np.where(deviation > 0, deviation, 1).ravel().tolist()),
    )


def _to_array(value: Any, which: str, where: str) -> NDArray[Any]:
    if value is None:
        raise BadInput(f"{where} lacks {which}; it needs x (samples) and y (labels)")
    if hasattr(value, "detach"):  # a tensor, which may need gradients or live on a GPU
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as why:
        raise BadInput(f"{where} {which} has rows of different lengths; make them equal") from why
    if array.ndim == 0:
        raise BadInput(
            f"{where} {which} must hold one entry a sample, got a single {type(value).__name__}"
        )
    return array


def _convert_numbers(
    x: NDArray[Any], layout: InputLayout, fill: FillValue, where: str
) -> tuple[NDArray[Any], Any, tuple[float, ...]]:
    """x in uint8 or float32, the rows that stay, and what fills a gap in each feature."""
    if x.dtype.kind in "OUS":
        raise BadInput(
            f"{where} x holds text or rows of different lengths; give numbers, or token ids of one"
            " length"
        )
    if x.dtype.kind not in "fiub":
        raise BadInput(
            f"{where} x must be numbers, got {x.dtype}; save images as uint8 or features as float32"
        )
    if layout == "auto" and x.ndim == 2 and x.dtype.kind in "iu":
        how = "numbers divided by 255" if x.dtype == np.uint8 else "numbers"
        text = "%s: x holds whole numbers %s to %s and is taken as %s; if they are token ids say"
        log.warning(f"{text} layout='tokens', else layout='table'", where, x.min(), x.max(), how)
    if x.dtype == np.uint8:
        return x, slice(None), ()
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if np.isinf(x).any():
        raise BadInput(f"{where} x holds NaN or infinity; clean the samples first")
    return _fill_missing(x, fill, where)


def _fill_missing(
    x: NDArray[np.float32], fill: FillValue, where: str
) -> tuple[NDArray[np.float32], Any, tuple[float, ...]]:
    missing = np.isnan(x)
    if isinstance(fill, str) and fill not in ("mean", "drop"):
        raise BadInput(f"{where} fill = {fill!r} is unknown; use 'mean', 'drop' or a number")
    if fill is None and missing.any():
        count = int(missing.reshape(len(x), -1).any(1).sum())
        raise BadInput(
            f"{where} x holds NaN in {count} of {len(x)} samples; set fill (data.fill) to 'mean',"
            " 'drop' or a number"
        )
    if fill is None or fill == "drop":
        kept = ~missing.reshape(len(x), -1).any(1) if missing.any() else slice(None)
        return x, kept, ()
    if fill == "mean":
        counted = (~missing).sum(0)
        values = np.where(missing, 0, x).sum(0) / np.maximum(counted, 1)
    else:
        values = np.full(x.shape[1:], np.float32(fill))
    filled = np.where(missing, values, x).astype(np.float32) if missing.any() else x
    return filled, slice(None), tuple(np.asarray(values, np.float64).ravel().tolist())


def _convert_tokens(x: NDArray[Any], where: str) -> NDArray[np.int64]:
    if x.dtype.kind not in "iu" or (len(x) and x.min() < 0):
        raise BadInput(
            f"{where} x must hold token ids 0, 1, ..., got {x.dtype}; leave layout = 'tokens' out"
            " for numbers"
        )
    return x.astype(np.int64)


def _is_next_symbol_task(x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Whether x and y are ids in step, so that y must be the ids that follow."""
    whole = x.dtype.kind in "iu" and y.dtype.kind in "iu"
    return whole and x.shape == y.shape and x.ndim == 2 and int(y.max()) > 1


def _parse_split(test: Any, where: str) -> NDArray[np.bool_]:
    """True where a sample is for judging; of booleans, 0 and 1, or words such as train and test."""
    marks = np.asarray(test)
    if marks.dtype.kind in "OUS":
        words = np.char.lower(marks.astype(str))
        if not np.isin(words, ("train", "training", "test", "val", "valid", "validation")).all():
            raise BadInput(
                f"{where} splits samples into {format_examples(np.unique(words))}; use train and"
                " test"
            )
        return ~np.isin(words, ("train", "training"))
    if not np.isin(marks, (0, 1)).all():
        raise BadInput(f"{where} must mark test samples with True or 1, others with False or 0")
    return marks.astype(bool)


def _encode_groups(group: NDArray[Any] | None) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if group is None:
        return None, ()
    names, codes = np.unique(group, return_inverse=True)
    return codes.reshape(-1).astype(np.int64), tuple(str(g) for g in names)


def _select_rows(values: Any, kept: Any) -> Any:
    if values is None:
        return None
    array = np.asarray(values)
    return (array.astype(str) if array.dtype.kind == "O" else array)[kept]
