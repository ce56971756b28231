"""The tensors of a model, concatenated: which parts a lossy code may touch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
TensorSizes = Sequence[tuple[str, int]]
#: names of BatchNorm's statistics, which lossy codes send as float32
STATISTICS_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")
BATCHNORM_SUFFIXES = ("running_mean", "running_var")  # on the wire, but not trained
FLOAT_DTYPES = ("float16", "float32", "float64")


def count_floats(layout: TensorSizes) -> int:
    """Floats in a layout."""
    return sum(size for _, size in layout)


def split_statistics(layout: TensorSizes, exact_below: int = 0) -> tuple[list[slice], list[slice]]:
    """(spans that a lossy code takes, spans that travel as float32: BatchNorm's statistics).

    Neighbouring spans of one kind are joined, so a usual layout has at most one of each. Where a
    lossy code would take fewer floats than `exact_below`, all of them travel as float32.
    """
    spans: tuple[list[slice], list[slice]] = ([], [])
    start = 0
    for name, size in layout:
        kind = spans[name.endswith(STATISTICS_SUFFIXES)]
        if kind and kind[-1].stop == start:
            kind[-1] = slice(kind[-1].start, start + size)
        elif size:
            kind.append(slice(start, start + size))
        start += size
    if count_span_floats(spans[0]) < exact_below:
        return [], [slice(0, start)]
    return spans


def count_span_floats(spans: Sequence[slice]) -> int:
    """Floats in these spans."""
    return sum(span.stop - span.start for span in spans)


def take_spans(u: NDArray[Any], spans: Sequence[slice]) -> FloatArray:
    """The floats of these spans, one after another, as float32."""
    return np.concatenate([u[:0], *(u[span] for span in spans)]).astype(np.float32)


def join_spans(parts: Sequence[tuple[Sequence[slice], FloatArray]], size: int) -> FloatArray:
    """(size,) the vector whose spans hold these values: the inverse of `take_spans`."""
    u = np.zeros(size, np.float32)
    for spans, values in parts:
        at = 0
        for span in spans:
            u[span] = values[at : at + span.stop - span.start]
            at += span.stop - span.start
    return u


def order_float_arrays(values: Mapping[str, NDArray[Any]]) -> list[str]:
    """Names of a model's float arrays as they are concatenated: trained ones first, BatchNorm's
    statistics last. Arrays with infinities are constants, such as a causal mask.
    """
    floats = [
        name
        for name, value in values.items()
        if value.dtype.name in FLOAT_DTYPES and not is_constant_mask(value)
    ]
    return sorted(floats, key=lambda name: name.endswith(BATCHNORM_SUFFIXES))


def is_constant_mask(value: NDArray[Any]) -> bool:
    """Whether an array is a constant, as one with infinities is."""
    return bool(np.isinf(value).any()) and not bool(np.isnan(value).any())
