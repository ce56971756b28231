"""A pickle of numbers, text, lists and dicts, read without calls or imports, and in memory of the
order of its size.

CPython's own unpickler, written in C, takes 34 GB for a few bytes that name a memo entry of number
2^31, and hashes nested tuples for ever. The one written in Python does neither once its opcodes are
limited to those of plain data.
"""

import pickle
from io import BytesIO
from typing import Any

PLAIN = (
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "EMPTY_LIST",
    "LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "GET",
    "BINGET",
    "LONG_BINGET",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "GLOBAL",
    "STACK_GLOBAL",
    "INST",
)
KEYS = (str, int, float)


class _PlainUnpickler(pickle._Unpickler):
    """Whatever would run code has to name a global first, and is refused there."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name}; only plain numbers, lists and dicts are read")


def _set_items(reader: Any, items: list[Any]) -> None:
    table = reader.stack[-1]
    if not isinstance(table, dict) or len(items) % 2:
        raise ValueError("it sets items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in KEYS:
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
    raise ValueError("it is no pickle of plain numbers, text, lists and dicts")


def _opcode(name: str) -> int:
    found: int = getattr(pickle, name)[0]
    return found


_known: dict[int, Any] = pickle._Unpickler.dispatch
_PlainUnpickler.dispatch = {
    **dict.fromkeys(range(256), _refuse_opcode),
    **{_opcode(name): _known[_opcode(name)] for name in PLAIN},
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
    except (
        Exception
    ) as why:  # an opcode without its operands raises whatever its handler meets first
        raise ValueError(f"it is a damaged pickle ({type(why).__name__})") from why
