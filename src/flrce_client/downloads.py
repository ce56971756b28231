"""Models as a device receives them: whole, encoded, or as a difference to one that it holds.

A model is named by a hash of its floats. A difference is decoded on each model that the device
holds; the one whose result has the promised hash is right. Where none is, the device says so, and
is sent a whole model next.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce_client.codec import Buffers, Codec
from flrce_client.layout import FloatArray, TensorSizes, count_floats
from flrce_client.streams import make_download_stream

STATISTICS_KEY = "batchnorm"  # the buffer of a download that holds BatchNorm's statistics
HASH_SIZE = 16  # bytes


def fingerprint_vector(w: NDArray[Any]) -> str:
    """A model in 32 hexadecimal digits."""
    return blake2b(np.ascontiguousarray(w).data, digest_size=HASH_SIZE).hexdigest()


@dataclass(frozen=True)
class ModelForm:
    """How a model's arrays are concatenated: float arrays by name, in order, with their shapes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: int  # the first floats are trained, the rest are BatchNorm's statistics

    @property
    def layout(self) -> TensorSizes:
        sizes = (int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)
        return tuple(zip(self.names, sizes, strict=True))

    @property
    def trained_layout(self) -> TensorSizes:
        """Names and sizes of the tensors that a code encodes."""
        kept, start = [], 0
        for name, size in self.layout:
            if start < self.trained:
                kept.append((name, size))
            start += size
        return tuple(kept)

    def pack(self, arrays: Mapping[str, NDArray[Any]], dtype: Any = np.float32) -> NDArray[Any]:
        """(floats of the form,) the arrays as one vector."""
        return np.concatenate(
            [np.zeros(0, dtype), *(arrays[name].reshape(-1).astype(dtype) for name in self.names)]
        )

    def unpack(self, w: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The arrays of a vector."""
        ends = np.cumsum([size for _, size in self.layout])[:-1]
        parts = np.split(w, ends)
        return {
            name: part.reshape(shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


def decode_model(
    buffers: Buffers, base: FloatArray, code: Codec, form: ModelForm, stream: tuple[int, int, str]
) -> FloatArray:
    """(D,) the model that a download makes of the base. `stream` is (seed, t, client)."""
    if not buffers:
        return base.copy()
    coded = {name: values for name, values in buffers.items() if name != STATISTICS_KEY}
    u = code.decode(coded, form.trained_layout, make_download_stream(*stream))
    model = base.copy()
    model[: form.trained] += u
    if count_floats(form.layout) > form.trained:
        model[form.trained :] = buffers[STATISTICS_KEY]
    return model


def find_decoded_model(
    buffers: Buffers,
    bases: Iterable[FloatArray],
    code: Codec,
    form: ModelForm,
    stream: tuple[int, int, str],
    digest: str,
) -> FloatArray | None:
    """The model with the promised hash; None: the difference refers to none of these bases."""
    for base in bases:
        model = decode_model(buffers, base, code, form, stream)
        if fingerprint_vector(model) == digest:
            return model
    return None
