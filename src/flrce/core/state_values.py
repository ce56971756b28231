"""What a piece's state may hold: each value becomes plain data and tensors, and from these itself
again, type and all. Its tables over clients grow here, and only here, when a client appears.

A piece declares a table as a field of its state: `field(metadata={"rows": True})`. "fill" says what
a row holds before it is first written (0 unless given); "square" means a table over pairs of
clients.

Nothing is executed to read a value back: a class is looked up among modules that are loaded
already, has to be a dataclass or a NamedTuple, and its fields are set without calling its
constructor.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.errors import BadInput, format_one_line

MAY_HOLD = (
    "None, bool, int, float, complex, str, bytes, tensors, numpy arrays and numbers, and tuples,"
    " lists, dicts with str or int keys, dataclasses and NamedTuples of these"
)
STORED_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64"
    " complex64 complex128 float8_e4m3fn float8_e5m2"
)
DTYPES = {name: getattr(torch, name) for name in STORED_DTYPES.split() if hasattr(torch, name)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ARRAYS, NUMBERS = "biufcSUmM", "biufcmM"  # kinds of numpy's types: of arrays, and of single numbers
# bits of an int from which it is written in hexadecimal digits: Python refuses to read longer
# decimals
MAX_TEXT_CHARACTERS = 1024
ROWS = "rows"  # in a field's metadata: a table over clients
PutTensor = Callable[[Tensor], str]  # keeps a tensor and returns the name that it is kept by
GetTensor = Callable[[str], Tensor]


class UnsupportedState(ValueError):
    """A value that no state may hold: where it is within the state, and what it is."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}")


def list_fields(state: Any) -> tuple[Field[Any], ...]:
    """The fields of a state that is a dataclass; none of any other."""
    return fields(state) if is_dataclass(state) and not isinstance(state, type) else ()


def validate_state(role: str, piece: Any, state: Any, M: int) -> None:
    """BadInput with one line unless a checkpoint can hold this state of a piece, and its tables
    have a row a client.
    """
    try:
        _inspect_state(state, M)
    except UnsupportedState as problem:
        name = type(piece).__name__
        raise BadInput(
            f"{role} {name} cannot be resumed: its state{problem}; a state may hold {MAY_HOLD}"
        ) from None


def _inspect_state(state: Any, M: int) -> None:
    if not is_dataclass(state):
        encode_value(state, None)
        return
    _refuse_strays(state, "")
    for f in list_fields(state):
        value = getattr(state, f.name)
        if f.metadata.get(ROWS) and isinstance(value, Tensor):
            _encode_tensor(value, None, f".{f.name}")
            if not value.dim() or len(value) < M:
                raise UnsupportedState(
                    f".{f.name}", f"is a table of shape {tuple(value.shape)} for {M} clients"
                )
        elif not f.metadata.get("plain"):
            encode_value(value, None, f".{f.name}")


def encode_value(value: Any, put: PutTensor | None, path: str = "") -> Any:
    """A value as JSON, its tensors kept by `put`; Unsupported says what cannot be. Without `put` it
    is only checked.
    """
    try:
        return _encode_value(value, put, path)
    except RecursionError:
        raise UnsupportedState(path, "contains itself, or is nested too deeply") from None


def _encode_value(value: Any, put: PutTensor | None, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if value.bit_length() < MAX_TEXT_CHARACTERS else ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, Tensor):
        return _encode_tensor(value, put, path)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value, put, path)
    if kind is tuple or kind is list:
        return [
            kind.__name__,
            *(_encode_value(part, put, f"{path}[{i}]") for i, part in enumerate(value)),
        ]
    if kind is dict:
        return ["dict", *(_encode_item(key, part, put, path) for key, part in value.items())]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        parts = zip(kind._fields, value, strict=True)
        return [
            "namedtuple",
            name_class(kind, path),
            *(_encode_value(part, put, f"{path}.{name}") for name, part in parts),
        ]
    if is_dataclass(kind):
        return _encode_dataclass(value, put, path)
    raise UnsupportedState(
        path, f"is a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    )


def _encode_item(key: Any, value: Any, put: PutTensor | None, path: str) -> list[Any]:
    if type(key) not in (str, int):
        raise UnsupportedState(
            path, f"has the key {format_one_line(repr(key), 40)}, a {type(key).__name__}"
        )
    return [
        _encode_value(key, put, path),
        _encode_value(value, put, f"{path}[{format_one_line(repr(key), 40)}]"),
    ]


def _encode_tensor(value: Tensor, put: PutTensor | None, path: str) -> list[Any]:
    if type(value) is not Tensor:
        raise UnsupportedState(path, f"is a {type(value).__name__}, not a plain tensor")
    if value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        raise UnsupportedState(path, f"is a tensor of {value.layout}, {value.dtype}")
    if value.requires_grad:
        raise UnsupportedState(path, "is a tensor that asks for gradients (detach it)")
    if value.device.type not in ("cpu", "meta"):
        raise UnsupportedState(path, f"is a tensor on {value.device} (move it to the host)")
    name = "" if put is None else put(value)
    return ["tensor", name, DTYPE_NAMES[value.dtype], list(value.shape), _permuted_strides(value)]


def _permuted_strides(value: Tensor) -> list[int]:
    """Strides of a tensor whose dimensions lie in another order, which sums follow; none of any
    other.
    """
    if value.is_contiguous():
        return []
    strides = list(value.stride())
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return strides if value.permute(order).is_contiguous() else []


def _encode_numpy(value: Any, put: PutTensor | None, path: str) -> list[Any]:
    single = isinstance(value, np.generic)
    if not single and type(value) is not np.ndarray:
        raise UnsupportedState(path, f"is a {type(value).__name__}, not a plain numpy array")
    if value.dtype.kind not in (NUMBERS if single else ARRAYS) or value.dtype.hasobject:
        raise UnsupportedState(path, f"is a numpy value of type {value.dtype}")
    if single:
        return ["number", value.dtype.str, value.tobytes().hex()]
    turned = bool(value.flags.f_contiguous and not value.flags.c_contiguous)
    name = ""
    if put is not None:
        data = np.frombuffer(value.tobytes("F" if turned else "C"), np.uint8).copy()
        name = put(torch.from_numpy(data))
    return ["array", name, value.dtype.str, list(value.shape), turned]


def _encode_dataclass(value: Any, put: PutTensor | None, path: str) -> list[Any]:
    _refuse_strays(value, path)
    parts = [
        [f.name, _encode_value(getattr(value, f.name), put, f"{path}.{f.name}")]
        for f in fields(value)
    ]  # a table over clients that lies inside another value is stored whole
    return ["dataclass", name_class(type(value), path), *parts]


def _refuse_strays(value: Any, path: str) -> None:
    """Unsupported where an object has attributes that are no fields: they would be lost."""
    names = {f.name for f in fields(value)}
    for name in getattr(value, "__dict__", ()):
        if name not in names and not isinstance(getattr(type(value), name, None), cached_property):
            raise UnsupportedState(f"{path}.{name}", "is no field of its dataclass")


def name_class(kind: type[Any], path: str = "") -> str:
    """How a class is found again; Unsupported where it cannot be."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if find_class(name) is None:
        raise UnsupportedState(
            path, f"is a {kind.__qualname__}, a class that is not at the top of a module"
        )
    return name


def find_class(name: str) -> type[Any] | None:
    """A dataclass or NamedTuple of a module that is loaded, by name; None: there is none."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type):
        return None
    return (
        value
        if is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))
        else None
    )


def decode_value(node: Any, get: GetTensor) -> Any:
    """The value that `encode_value` wrote; ValueError where this is none, BadInput where a class is
    gone.
    """
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in DECODERS:
        return DECODERS[tag](rest, get)
    raise ValueError(f"{format_one_line(repr(tag), 40)} is no kind of value")


def build_dataclass(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An object with these fields, without calling its constructor."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def load_class(name: Any) -> type[Any]:
    """The class of this name; BadInput where it is gone."""
    kind = find_class(name) if isinstance(name, str) else None
    if kind is None:
        raise BadInput(
            f"the checkpoint holds a {format_one_line(name, 80)}, which is no longer there; bring"
            " it back to go on"
        )
    return kind


def _decode_dataclass(rest: list[Any], get: GetTensor) -> Any:
    kind = load_class(rest[0])
    values = {name: decode_value(node, get) for name, node in rest[1:]}
    if not is_dataclass(kind) or set(values) != {f.name for f in fields(kind)}:
        raise BadInput(
            f"{rest[0]} has other fields now than in the checkpoint; bring the old ones back to"
            " go on"
        )
    return build_dataclass(kind, values)


def _decode_namedtuple(rest: list[Any], get: GetTensor) -> Any:
    kind, values = load_class(rest[0]), [decode_value(node, get) for node in rest[1:]]
    if not issubclass(kind, tuple) or len(kind._fields) != len(values):  # type: ignore[attr-defined]
        raise BadInput(
            f"{rest[0]} has other fields now than in the checkpoint; bring the old ones back to"
            " go on"
        )
    return tuple.__new__(kind, values)


def _decode_tensor(rest: list[Any], get: GetTensor) -> Tensor:
    name, dtype, shape, strides = rest
    x = get(name)
    # a type that files do not have is kept as bytes
    x = x if x.dtype == DTYPES[dtype] else x.view(DTYPES[dtype])
    x = x.reshape(shape)
    return torch.empty_strided(shape, strides, dtype=x.dtype).copy_(x) if strides else x


def _decode_array(rest: list[Any], get: GetTensor) -> NDArray[Any]:
    name, dtype, shape, turned = rest
    data = bytearray(get(name).numpy().tobytes())
    return np.ndarray(tuple(shape), np.dtype(dtype), buffer=data, order="F" if turned else "C")


def _decode_parts(rest: list[Any], get: GetTensor) -> Iterator[Any]:
    return (decode_value(node, get) for node in rest)


DECODERS: dict[str, Callable[[list[Any], GetTensor], Any]] = {
    "int": lambda rest, get: int(rest[0], 16),
    "complex": lambda rest, get: complex(rest[0], rest[1]),
    "bytes": lambda rest, get: bytes.fromhex(rest[0]),
    "tuple": lambda rest, get: tuple(_decode_parts(rest, get)),
    "list": lambda rest, get: list(_decode_parts(rest, get)),
    "dict": lambda rest, get: {
        decode_value(key, get): decode_value(node, get) for key, node in rest
    },
    "number": lambda rest, get: np.frombuffer(bytes.fromhex(rest[1]), np.dtype(rest[0]))[0],
    "tensor": _decode_tensor,
    "array": _decode_array,
    "dataclass": _decode_dataclass,
    "namedtuple": _decode_namedtuple,
}


class RelationshipMap:
    """A selector's state that holds a map of clients, which run directories keep.

    Subclass it with these fields to have the map stored; without H nothing is.
    """

    Omega: Tensor | None  # (M, M); None: a sketch, or too many clients
    H: Tensor | None  # (M,)
    R: Tensor  # (M,)


def grow_tables(server_state: Mapping[str, Any], M: int) -> dict[str, Any]:
    """Every piece's state with room for M clients; what has it already is left as it is."""
    return {role: grow_state_tables(kept, M) for role, kept in server_state.items()}


def grow_state_tables(kept: Any, M: int) -> Any:
    """One state with room for M clients; also the tables of states that it holds."""
    if type(kept) in (list, tuple):
        parts = [grow_state_tables(part, M) for part in kept]
        same = all(new is old for new, old in zip(parts, kept, strict=True))
        return kept if same else type(kept)(parts)
    if type(kept) is dict:
        grown = {key: grow_state_tables(part, M) for key, part in kept.items()}
        return kept if all(grown[key] is part for key, part in kept.items()) else grown
    changes: dict[str, Any] = {}
    for f in list_fields(kept):
        table = getattr(kept, f.name)
        if not isinstance(table, Tensor):
            inner = grow_state_tables(table, M)
            if inner is not table:
                changes[f.name] = inner
            continue
        if not f.metadata.get("rows") or len(table) >= M:
            continue
        square = f.metadata.get("square")
        changes[f.name] = (
            grow_square_table(table, M)
            if square
            else grow_table(table, M, f.metadata.get("fill", 0.0))
        )
    return replace(kept, **changes) if changes else kept


def grow_square_table(table: Tensor, rows: int) -> Tensor:
    """The square table with at least this many rows and columns."""
    if len(table) >= rows:
        return table
    wide = table.new_zeros(rows, rows)
    wide[: len(table), : len(table)] = table
    return wide


def grow_table(table: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """The table with at least this many rows."""
    if len(table) >= rows:
        return table
    rows_added = table.new_full((rows - len(table), *table.shape[1:]), fill)
    return torch.cat([table, rows_added])
