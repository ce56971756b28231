"""Pickles of plain data and uint8 arrays, read without calls, imports or extra memory.

CPython's own unpickler, written in C, takes 34 GB for a few bytes that name a memo entry of number
2^31, and hashes nested tuples for ever. The one written in Python does neither once its opcodes are
limited to those of plain data.
"""

import pickle
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.errors import format_one_line

PLAIN_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL", "INST"),
)
KEY_TYPES = (str, bytes, int, float)
#: what arrays need besides: bytes, calls and states, of inert nodes alone
ARRAY_OPCODES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "REDUCE", "BUILD")
MAX_ARRAY_OPCODES = 5_000_000  # CIFAR-100's largest file needs some 400,000
NUMPY_CORES = ("numpy.core", "numpy._core")  # NumPy 1, NumPy 2
ARRAY_GLOBALS = {f"{core}.multiarray._reconstruct" for core in NUMPY_CORES}
BUFFER_GLOBALS = {f"{core}.numeric._frombuffer" for core in NUMPY_CORES}  # protocol 5
TEXT_GLOBALS = {"_codecs.encode", "__builtin__.bytes", "builtins.bytes"}
ALLOWED_GLOBALS = ARRAY_GLOBALS | BUFFER_GLOBALS | TEXT_GLOBALS | {"numpy.ndarray", "numpy.dtype"}


class _PlainUnpickler(pickle._Unpickler):
    """Whatever would run code has to name a global first, and is refused there."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}; only plain numbers, lists and dicts are read")


def _set_items(reader: Any, items: list[Any]) -> None:
    table = reader.stack[-1]
    if not isinstance(table, dict) or len(items) % 2:
        raise ValueError("it sets items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in KEY_TYPES:
            raise ValueError(f"it has a dict with a {type(key).__name__} for a key")
        table[key] = value


def _load_setitem(reader: Any) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set_items(reader, [key, value])


def _load_setitems(reader: Any) -> None:
    _set_items(reader, reader.pop_mark())


def _load_dict(reader: Any) -> None:
    items = reader.pop_mark()
    reader.append({})
    _set_items(reader, items)


def _refuse_opcode(reader: Any) -> None:
    raise ValueError("it is no complete pickle of plain numbers, text, lists and dicts")


def _opcode(name: str) -> int:
    found: int = getattr(pickle, name)[0]
    return found


_known: dict[int, Any] = pickle._Unpickler.dispatch
_PlainUnpickler.dispatch = {
    **dict.fromkeys(range(256), _refuse_opcode),
    **{_opcode(name): _known[_opcode(name)] for name in PLAIN_OPCODES},
    _opcode("SETITEM"): _load_setitem,
    _opcode("SETITEMS"): _load_setitems,
    _opcode("DICT"): _load_dict,
}


def load_plain_pickle(raw: bytes) -> Any:
    """What the pickle holds; ValueError where it is damaged or no plain data."""
    try:
        return _PlainUnpickler(BytesIO(raw)).load()
    except ValueError:
        raise
    except Exception as why:  # an opcode without its operands may raise anything
        raise ValueError(f"it is a damaged pickle ({type(why).__name__})") from why


@dataclass
class PickleNode:
    """A global, or what calling it would have made: nothing but its name, arguments and state."""

    name: str
    args: Any = None
    state: Any = None

    def __call__(self, *args: Any) -> Any:
        match self.name, args:  # text stays text: encoding it over and over costs nothing
            case "__builtin__.bytes" | "builtins.bytes", ():
                return ""
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                return text
        if self.args is not None or self.name in (*TEXT_GLOBALS, "numpy.ndarray"):
            raise ValueError("it calls a function in a way that plain data does not need")
        return PickleNode(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _ArrayUnpickler(_PlainUnpickler):
    """As above, and numpy's few globals as nodes; byte strings of Python 2 are latin-1 text."""

    count = 0

    def find_class(self, module: str, name: str) -> PickleNode:
        if f"{module}.{name}" not in ALLOWED_GLOBALS:
            asked = format_one_line(f"{module}.{name}", 80)
            raise ValueError(f"it asks to run {asked}, which no data set needs")
        return PickleNode(f"{module}.{name}")


def _count_opcodes(handler: Any) -> Any:
    def run(reader: Any) -> None:
        reader.count += 1
        if reader.count > MAX_ARRAY_OPCODES:
            raise ValueError(f"it has more than {MAX_ARRAY_OPCODES:,} opcodes")
        handler(reader)

    return run


_ArrayUnpickler.dispatch = {
    **{code: _count_opcodes(handler) for code, handler in _PlainUnpickler.dispatch.items()},
    **{_opcode(name): _count_opcodes(_known[_opcode(name)]) for name in ARRAY_OPCODES},
}


def load_pickled_arrays(raw: bytes) -> dict[str, Any]:
    """The dictionary at the top of a pickle, its arrays as nodes; ValueError if it is not plain."""
    try:
        top = _ArrayUnpickler(BytesIO(raw), encoding="latin1").load()
    except ValueError:
        raise
    except Exception as why:
        raise ValueError("it is no complete pickle") from why
    if not isinstance(top, dict):
        raise ValueError("it holds no dictionary")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: value
        for key, value in top.items()
    }


def build_array(node: object) -> NDArray[np.uint8]:
    """The uint8 array that a node describes, built from its bytes."""
    match node:
        case PickleNode(name=name, state=(_, tuple(shape), form, fortran, str() | bytes() as data)):
            known, order = name in ARRAY_GLOBALS, "F" if fortran else "C"
        case PickleNode(name=name, args=(bytes() | bytearray() as data, form, tuple(shape), order)):
            known = name in BUFFER_GLOBALS
        case _:
            raise ValueError("its data is no uint8 array")
    if not known or not _is_byte_type(form) or order not in ("C", "F"):
        raise ValueError("its data is no uint8 array")
    if len(shape) > 4 or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError("its array has an impossible shape")
    try:
        content = np.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, np.uint8)
    except ValueError as why:  # wide characters, or nothing
        raise ValueError("its array holds no bytes") from why
    try:
        return content.reshape(shape, order="F" if order == "F" else "C")
    except (ValueError, OverflowError) as why:
        claim = f"its array claims shape {shape} but holds {content.size:,} bytes"
        raise ValueError(claim) from why


def _is_byte_type(form: object) -> bool:
    if not isinstance(form, PickleNode) or form.name != "numpy.dtype":
        return False
    return isinstance(form.args, tuple) and form.args[:1] == ("u1",)
