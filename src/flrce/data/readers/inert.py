"""Reads the data in a pickle without running it: no import, no call, no object of the file's
choosing.

CIFAR's python batches are pickles, and unpickling executes whatever the file names. Here
`pickletools` splits the file into opcodes and a small stack machine keeps strings, numbers, lists,
dicts and tuples; the few globals that NumPy arrays and byte strings need become inert
`PickleNode`s, and any other global or opcode is refused by name.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# CIFAR-100's largest file needs some 400,000; bounds time and memory on a crafted one
MAX_OPCODES = 5_000_000

NUMPY_CORES = ("numpy.core", "numpy._core")  # NumPy 1, NumPy 2
ARRAY_GLOBALS = {f"{core}.multiarray _reconstruct" for core in NUMPY_CORES}
BUFFER_GLOBALS = {f"{core}.numeric _frombuffer" for core in NUMPY_CORES}  # protocol 5
ALLOWED_GLOBALS = (
    ARRAY_GLOBALS
    | BUFFER_GLOBALS
    | {"numpy ndarray", "numpy dtype", "_codecs encode", "__builtin__ bytes", "builtins bytes"}
)

INT_OPCODES = {"BININT", "BININT1", "BININT2", "LONG1"}
TEXT_OPCODES = {"BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTES_OPCODES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
LITERAL_OPCODES = INT_OPCODES | TEXT_OPCODES | BYTES_OPCODES
CONSTANT_OPCODES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLE_OPCODES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class UnsafePickle(ValueError):
    """The file is no plain data; the message says why, and the caller adds which file."""


@dataclass
class PickleNode:
    """A global, or what calling it would have made: nothing but its name, arguments and state."""

    name: str
    args: Any = None
    state: Any = None


def parse_pickle(raw: bytes) -> dict[str, Any]:
    """The dictionary at the top of a pickle. Byte strings of Python 2 and their keys come back as
    latin-1 text.
    """
    try:
        top = _run_opcodes(raw)
    except UnsafePickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as why:
        raise UnsafePickle("it is no complete pickle") from why
    if not isinstance(top, dict):
        raise UnsafePickle("it holds no dictionary")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: value
        for key, value in top.items()
    }


def build_array(node: object) -> NDArray[np.uint8]:
    """The uint8 array that a node describes, built from its bytes."""
    match node:
        case PickleNode(
            name,
            _,
            (
                _,
                tuple(shape),
                PickleNode("numpy dtype", ("u1", *_)),
                fortran,
                (str() | bytes()) as data,
            ),
        ) if name in ARRAY_GLOBALS:
            order = "F" if fortran else "C"
        case PickleNode(
            name,
            (
                (bytes() | bytearray()) as data,
                PickleNode("numpy dtype", ("u1", *_)),
                tuple(shape),
                order,
            ),
        ) if name in BUFFER_GLOBALS:
            pass
        case _:
            raise UnsafePickle("its data is no uint8 array")
    try:
        content = np.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, np.uint8)
    except ValueError as why:  # wide characters, or nothing
        raise UnsafePickle("its array holds no bytes") from why
    if (
        len(shape) > 4
        or not all(type(side) is int and side >= 0 for side in shape)
        or order not in ("C", "F")
    ):
        raise UnsafePickle("its array has an impossible shape")
    try:
        return content.reshape(shape, order="F" if order == "F" else "C")
    except (ValueError, OverflowError) as why:
        raise UnsafePickle(
            f"its array claims shape {shape} but holds {content.size:,} bytes"
        ) from why


def _run_opcodes(raw: bytes) -> object:
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, Any] = {}
    arg: Any
    for count, (opcode, arg, _) in enumerate(pickletools.genops(raw)):
        name = opcode.name
        if count >= MAX_OPCODES:
            raise UnsafePickle(f"it has more than {MAX_OPCODES:,} opcodes")
        if name in LITERAL_OPCODES:
            stack.append(arg)
        elif name in CONSTANT_OPCODES:
            stack.append(CONSTANT_OPCODES[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            _run_build_opcode(name, arg, stack, marks)
    raise UnsafePickle("it ends early")


def _run_build_opcode(name: str, arg: Any, stack: list[Any], marks: list[int]) -> None:
    """Opcodes that make containers and nodes."""
    if name in TUPLE_OPCODES:
        _push_tuple(stack, len(stack) - TUPLE_OPCODES[name])
    elif name == "TUPLE":
        _push_tuple(stack, marks.pop())
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in ("APPEND", "APPENDS"):
        items = _pop_above(stack, len(stack) - 1 if name == "APPEND" else marks.pop())
        _get_top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop_above(stack, len(stack) - 2 if name == "SETITEM" else marks.pop())
        if len(items) % 2 or not all(isinstance(key, str | bytes) for key in items[::2]):
            # hashing a deep tuple would recurse
            raise UnsafePickle("it has a dictionary with keys that are no text")
        _get_top(stack, dict).update(zip(items[::2], items[1::2], strict=True))
    elif name == "GLOBAL":
        stack.append(_resolve_global(arg))
    elif name == "STACK_GLOBAL":
        stack.append(_resolve_global(" ".join(map(str, _pop_above(stack, len(stack) - 2)))))
    elif name == "REDUCE":
        function, args = _pop_above(stack, len(stack) - 2)
        stack.append(_reduce_call(function, args))
    elif name == "BUILD":
        state = stack.pop()
        _get_top(stack, PickleNode).state = state
    else:
        raise UnsafePickle(f"it uses the pickle opcode {name}, which plain data does not need")


def _resolve_global(name: str) -> PickleNode:
    if name not in ALLOWED_GLOBALS:
        raise UnsafePickle(
            f"it asks to run {name.replace(' ', '.')!a:.80}, which no data set needs"
        )
    return PickleNode(name)


def _reduce_call(function: object, args: object) -> object:
    match function, args:
        case PickleNode("_codecs encode"), (str() as text, "latin1" | "latin-1"):
            return text  # stays text: a memoised string encoded over and over costs nothing
        case PickleNode("__builtin__ bytes" | "builtins bytes"), ():
            return ""
        case PickleNode(name, None), tuple() if name in ARRAY_GLOBALS | BUFFER_GLOBALS | {
            "numpy dtype"
        }:
            return PickleNode(name, args)
    raise UnsafePickle("it calls a function in a way that plain data does not need")


def _push_tuple(stack: list[Any], height: int) -> None:
    stack.append(tuple(_pop_above(stack, height)))


def _pop_above(stack: list[Any], height: int) -> list[Any]:
    """Pops everything above a height."""
    if not 0 <= height <= len(stack):
        raise UnsafePickle("it is no complete pickle")
    items = stack[height:]
    del stack[height:]
    return items


def _get_top(stack: list[Any], kind: type) -> Any:
    if not stack or not isinstance(stack[-1], kind):
        raise UnsafePickle("it is no complete pickle")
    return stack[-1]
