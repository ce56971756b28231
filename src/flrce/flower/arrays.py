"""Arrays as Flower's records carry them, and the flat vector w. A peer's bytes are never unpickled,
and its sizes are checked before anything of that size is made.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.linalg import MIN_COMPILED_FLOATS, write_difference
from flrce.core.pieces import MalformedPayload
from flrce.core.tensor_bytes import allocate_tensor, count_value_bytes
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.models.flat import ModelLayout, TensorSlot

T = TypeVar("T")
R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)
MAX_HEADER_BYTES = 10_000  # bytes that an .npy header may have
MAX_ARRAYS_PER_PAYLOAD = 4_096  # arrays in one payload
FLOAT_DTYPES = ("float16", "float32", "float64")
ALLOWED_DTYPES = {
    *FLOAT_DTYPES,
    "bool",
    *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)),
}
BATCHNORM_SUFFIXES = ("running_mean", "running_var")  # BatchNorm: on the wire, but not trained


def _retry_on_system_error(work: Callable[[], T]) -> T:
    """Do the work, anew where CPython 3.11 stumbles: two threads that parse literals at once, as
    numpy does to read an array's header, may raise SystemError (python/cpython#106905).
    """
    for _ in range(5):
        try:
            return work()
        except SystemError:
            continue
    return work()


@lru_cache(maxsize=1024)
def _parse_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran's order, dtype, and where the values start. Replies of a fleet have
    the same headers: numpy's parser, which evaluates a literal, sees each once.
    """
    stream = BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, fortran, kind = read(stream, max_header_size=MAX_HEADER_BYTES)
    return shape, fortran, kind, stream.tell()


def _slice_header(data: bytes) -> bytes:
    """As much of an .npy file as its header takes, if it has one of a sensible size."""
    wide = data[6:7] == b"\2"
    length = int.from_bytes(data[8 : 12 if wide else 10], "little")
    return data[: (12 if wide else 10) + min(length, MAX_HEADER_BYTES)]


def read_array(
    array: Array, dtype: str | None = None, shape: tuple[int, ...] | None = None
) -> NDArray[Any]:
    """A view of one array's values; dtype and shape must be those given, and the bytes exactly
    theirs.

    Where floats are wanted, those of another width will do: clients in other frameworks widen or
    narrow them.
    """
    if array.stype != "numpy.ndarray":
        raise MalformedPayload(f"serialised as {array.stype[:40]!r}, not numpy.ndarray")
    if (
        shape is not None
        and dtype is not None
        and len(array.data) > math.prod(shape) * _max_item_bytes(dtype) + MAX_HEADER_BYTES
    ):
        raise MalformedPayload(f"{len(array.data)} bytes for {dtype} of shape {shape}")
    try:
        stored_shape, fortran, kind, start = _retry_on_system_error(
            lambda: _parse_header(_slice_header(array.data))
        )
    except Exception as why:  # whatever numpy's parser raises on hostile bytes
        raise MalformedPayload(f"no .npy header ({type(why).__name__})") from why
    if kind.name not in ALLOWED_DTYPES or (
        dtype is not None and not _is_compatible_dtype(kind.name, dtype)
    ):
        raise MalformedPayload(f"dtype {str(kind)[:40]}, not {dtype or 'a plain number'}")
    if shape is not None and tuple(stored_shape) != tuple(shape):
        raise MalformedPayload(f"shape {str(stored_shape)[:60]}, not {tuple(shape)}")
    if (
        min(stored_shape, default=0) < 0
        or len(array.data) - start != math.prod(stored_shape) * kind.itemsize
    ):
        raise MalformedPayload(
            f"{len(array.data) - start} bytes for {kind} of shape {str(stored_shape)[:60]}"
        )
    values = np.frombuffer(array.data, kind, offset=start)
    # from a machine of the other kind
    values = values if kind.isnative else values.astype(kind.newbyteorder("="))
    try:
        return values.reshape(stored_shape[::-1]).T if fortran else values.reshape(stored_shape)
    except ValueError as why:  # no values, but more dimensions or larger ones than numpy has
        raise MalformedPayload(f"shape {str(stored_shape)[:60]}") from why


def _read_named_array(
    name: str, array: Array, dtype: str | None = None, shape: tuple[int, ...] | None = None
) -> NDArray[Any]:
    """The same; Malformed says which array it is."""
    try:
        return read_array(array, dtype, shape)
    except MalformedPayload as why:
        raise MalformedPayload(f"array {name[-60:]!r}: {why}") from why


def _subtract(values: NDArray[Any], base: NDArray[Any], into: NDArray[Any]) -> None:
    np.subtract(values.astype(into.dtype, copy=False), base, out=into)


def _is_compatible_dtype(found: str, wanted: str) -> bool:
    return found == wanted or (found in FLOAT_DTYPES and wanted in FLOAT_DTYPES)


def _max_item_bytes(dtype: str) -> int:
    return 8 if dtype in FLOAT_DTYPES else np.dtype(dtype).itemsize


@dataclass(frozen=True, eq=False)
class ArrayTemplate:
    """A user's ArrayRecord as the flat vector w, and back. Integer arrays stay as they are at
    first.

    w is float64 where any array is, else float32; each array goes back in the dtype that it came
    in.
    """

    layout: ModelLayout
    dtypes: Mapping[str, str]  # every array, in the record's order
    fixed: Mapping[str, Array]

    @classmethod
    def from_arrays(cls, arrays: ArrayRecord, layout: ModelLayout | None = None) -> "ArrayTemplate":
        """Trained floats first, BatchNorm's statistics last, each in the record's order; or as the
        network's layout.
        """
        if not isinstance(arrays, ArrayRecord):
            raise BadInput(
                f"initial_arrays is a {type(arrays).__name__}; pass an ArrayRecord, such as "
                "ArrayRecord(net.state_dict()) or ArrayRecord(list_of_numpy_arrays)"
            )
        if not arrays:
            raise BadInput(
                "initial_arrays is empty; pass the model, such as ArrayRecord(net.state_dict())"
            )
        try:
            values = {name: _read_named_array(name, array) for name, array in arrays.items()}
        except MalformedPayload as why:
            raise BadInput(
                f"initial_arrays cannot be read: {why}; use arrays of plain numbers"
            ) from why
        shapes = {
            name: value.shape
            for name, value in values.items()
            if value.dtype.name in FLOAT_DTYPES and not _is_constant_mask(value)
        }
        if not shapes:
            raise BadInput(
                "initial_arrays holds no floating-point array, so there is nothing to train"
            )
        if layout is not None and {slot.name: slot.shape for slot in layout.slots} != shapes:
            raise BadInput(
                "initial_arrays and the network have different tensors; use"
                " ArrayRecord(net.state_dict())"
            )
        dtypes = {name: value.dtype.name for name, value in values.items()}
        fixed = {name: array for name, array in arrays.items() if name not in shapes}
        return cls(layout or _arrange_arrays(shapes), dtypes, fixed)

    def pack(
        self, arrays: ArrayRecord, minus: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """w (size,), or w - `minus`; Malformed unless the record has the template's keys, shapes
        and kinds.

        It is written `into` a vector of its size and dtype where there is one.
        """
        w = self._allocate_vector(arrays, into)
        flat, base = w.numpy(), None if minus is None else minus.numpy()
        for slot in self.layout.slots:
            values = self._read_values(arrays, slot)
            if base is None:
                flat[slot.span] = values
            else:
                _subtract(values, base[slot.span], flat[slot.span])
        return w

    def pack_update(self, arrays: ArrayRecord, w: Tensor, into: Tensor | None = None) -> Payload:
        """The record minus w as a dense payload; of large models with its largest magnitude, which
        is found in the same pass.
        """
        if self.layout.size <= MIN_COMPILED_FLOATS:
            return Payload({"u": self.pack(arrays, minus=w, into=into)})
        u, largest = self._allocate_vector(arrays, into), []
        flat, base = u.numpy(), w.numpy()
        for slot in self.layout.slots:
            parts = self._read_values(arrays, slot), base[slot.span], flat[slot.span]
            largest.append(write_difference(*parts))
            if largest[-1] is None:
                _subtract(*parts)
        known = [x for x in largest if x is not None]
        # the largest of all; a NaN comes out as NaN
        return Payload({"u": u}, float(np.max(known)) if len(known) == len(largest) else None)

    def _allocate_vector(self, arrays: ArrayRecord, into: Tensor | None) -> Tensor:
        """Where a record's values go; Malformed unless it has the template's keys."""
        if set(arrays) != set(self.dtypes):
            odd = sorted(set(arrays) ^ set(self.dtypes))
            raise MalformedPayload(f"arrays differ in {len(odd)} names, such as {odd[0][:60]!r}")
        return allocate_tensor(self.layout.size, dtype=self.dtype) if into is None else into

    def _read_values(self, arrays: ArrayRecord, slot: TensorSlot) -> NDArray[Any]:
        """(slot.size,) the values of one array."""
        dtype = self.dtypes[slot.name]
        return _read_named_array(slot.name, arrays[slot.name], dtype, slot.shape).reshape(-1)

    def count_float_bytes(self, arrays: ArrayRecord) -> int:
        """Bytes of a packed record's float values as they travelled: not every client keeps to our
        widths.
        """
        return sum(
            len(arrays[name].data) - _parse_header(_slice_header(arrays[name].data))[3]
            for name, _ in self.names
        )

    def unpack(self, w: Tensor) -> ArrayRecord:
        """The user's record with the values of w."""
        views = self.layout.view_tensors(w)
        return ArrayRecord(
            {
                name: self.fixed[name]
                if name in self.fixed
                else make_array(views[name].numpy().astype(dtype, copy=False))
                for name, dtype in self.dtypes.items()
            }
        )

    def to_named_tensors(self, w: Tensor) -> dict[str, Tensor]:
        """The float arrays of w by name, copied, in their own dtypes."""
        views = self.layout.view_tensors(w)
        return {
            name: view.to(getattr(torch, self.dtypes[name]), copy=True)
            for name, view in views.items()
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of w."""
        return torch.float64 if "float64" in self.dtypes.values() else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of the float values as they travel."""
        return sum(
            count_value_bytes(slot.size, getattr(torch, self.dtypes[slot.name]))
            for slot in self.layout.slots
        )

    @property
    def names(self) -> tuple[tuple[str, int], ...]:
        return tuple((slot.name, slot.size) for slot in self.layout.slots)


def _arrange_arrays(shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """Trained arrays first, BatchNorm's statistics last, each in the record's order."""
    slots, offset, trainable = [], 0, 0
    for name in sorted(shapes, key=lambda name: name.endswith(BATCHNORM_SUFFIXES)):
        is_trained = not name.endswith(BATCHNORM_SUFFIXES)
        slots.append(TensorSlot(name, shapes[name], offset, is_trained))
        offset += math.prod(shapes[name])
        trainable = offset if is_trained else trainable
    return ModelLayout(tuple(slots), trainable, offset)


def list_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """The records of one kind; Flower's own properties check every entry again, at each call."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def make_array(values: NDArray[Any]) -> Array:
    """`Array(values)`, byte for byte; the values are copied once, where Flower copies them three
    times.
    """
    header = BytesIO()
    plain = np.asarray(values, order="C")
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(plain))
    data = b"".join((header.getvalue(), plain.reshape(-1).view(np.uint8).data))
    return Array(str(plain.dtype), tuple(plain.shape), "numpy.ndarray", data)


def to_array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord(
        {name: make_array(x.detach().cpu().contiguous().numpy()) for name, x in tensors.items()}
    )


def read_tensors(
    arrays: ArrayRecord, cap: int, into: Mapping[str, Tensor] = {}
) -> dict[str, Tensor]:
    """Named tensors of at most `cap` bytes together; the lengths are looked at first.

    Each is written `into` the tensor of its name, where there is one of its shape and dtype.
    """
    if (
        len(arrays) > MAX_ARRAYS_PER_PAYLOAD
        or sum(len(array.data) for array in arrays.values()) > cap + len(arrays) * MAX_HEADER_BYTES
    ):
        raise MalformedPayload(
            f"{len(arrays)} arrays of {sum(len(a.data) for a in arrays.values())} bytes; at most"
            f" {cap}"
        )
    return {name: _copy_values(read_array(array), into.get(name)) for name, array in arrays.items()}


def _copy_values(values: NDArray[Any], into: Tensor | None) -> Tensor:
    if into is None or into.shape != values.shape or into.numpy().dtype != values.dtype:
        return torch.from_numpy(values.copy())
    into.numpy()[...] = values
    return into


def count_record_bytes(arrays: ArrayRecord) -> int:
    """What a record's arrays really weigh: values, headers and names."""
    return sum(len(array.data) + len(name) for name, array in arrays.items())


def _is_constant_mask(value: Any) -> bool:
    """Whether an array is a constant, as one with infinities is: a causal mask."""
    return bool(np.isinf(value).any()) and not bool(np.isnan(value).any())
