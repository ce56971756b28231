"""Reads the data in a pickle without running it: no import, no call, no object of the file's choosing.

CIFAR's python batches are pickles, and unpickling executes whatever the file names. Here `pickletools` splits the
file into opcodes and a small stack machine keeps strings, numbers, lists, dicts and tuples; the few globals that
NumPy arrays and byte strings need become inert `Node`s, and any other global or opcode is refused by name.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_OPCODES = 5_000_000  # CIFAR-100's largest file needs some 400,000; bounds time and memory on a crafted one

CORES = ("numpy.core", "numpy._core")  # NumPy 1, NumPy 2
ARRAYS = {f"{core}.multiarray _reconstruct" for core in CORES}
BUFFERS = {f"{core}.numeric _frombuffer" for core in CORES}  # protocol 5
ALLOWED = ARRAYS | BUFFERS | {"numpy ndarray", "numpy dtype", "_codecs encode", "__builtin__ bytes", "builtins bytes"}

INTS = {"BININT", "BININT1", "BININT2", "LONG1"}
TEXTS = {"BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
PUSHED = INTS | TEXTS | BYTES
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Refused(ValueError):
    """The file is no plain data; the message says why, and the caller adds which file."""


@dataclass
class Node:
    """A global, or what calling it would have made: nothing but its name, arguments and state."""

    name: str
    args: Any = None
    state: Any = None


def parse(raw: bytes) -> dict[str, Any]:
    """The dictionary at the top of a pickle. Byte strings of Python 2 and their keys come back as latin-1 text."""
    try:
        top = _run(raw)
    except Refused:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as why:
        raise Refused("it is no complete pickle") from why
    if not isinstance(top, dict):
        raise Refused("it holds no dictionary")
    return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in top.items()}


def array(node: object) -> NDArray[np.uint8]:
    """The uint8 array that a node describes, built from its bytes."""
    match node:
        case Node(name, _, (_, tuple(shape), Node("numpy dtype", ("u1", *_)), fortran, (str() | bytes()) as data)) if (
            name in ARRAYS
        ):
            order = "F" if fortran else "C"
        case Node(name, ((bytes() | bytearray()) as data, Node("numpy dtype", ("u1", *_)), tuple(shape), order)) if (
            name in BUFFERS
        ):
            pass
        case _:
            raise Refused("its data is no uint8 array")
    try:
        content = np.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, np.uint8)
    except ValueError as why:  # wide characters, or nothing
        raise Refused("its array holds no bytes") from why
    if len(shape) > 4 or not all(type(side) is int and side >= 0 for side in shape) or order not in ("C", "F"):
        raise Refused("its array has an impossible shape")
    try:
        return content.reshape(shape, order="F" if order == "F" else "C")
    except (ValueError, OverflowError) as why:
        raise Refused(f"its array claims shape {shape} but holds {content.size:,} bytes") from why


def _run(raw: bytes) -> object:
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, Any] = {}
    arg: Any
    for count, (opcode, arg, _) in enumerate(pickletools.genops(raw)):
        name = opcode.name
        if count >= MAX_OPCODES:
            raise Refused(f"it has more than {MAX_OPCODES:,} opcodes")
        if name in PUSHED:
            stack.append(arg)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
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
            _build(name, arg, stack, marks)
    raise Refused("it ends early")


def _build(name: str, arg: Any, stack: list[Any], marks: list[int]) -> None:
    """Opcodes that make containers and nodes."""
    if name in TUPLES:
        _push_tuple(stack, len(stack) - TUPLES[name])
    elif name == "TUPLE":
        _push_tuple(stack, marks.pop())
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in ("APPEND", "APPENDS"):
        items = _cut(stack, len(stack) - 1 if name == "APPEND" else marks.pop())
        _top(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _cut(stack, len(stack) - 2 if name == "SETITEM" else marks.pop())
        if len(items) % 2 or not all(isinstance(key, str | bytes) for key in items[::2]):
            raise Refused("it has a dictionary with keys that are no text")  # hashing a deep tuple would recurse
        _top(stack, dict).update(zip(items[::2], items[1::2], strict=True))
    elif name == "GLOBAL":
        stack.append(_global(arg))
    elif name == "STACK_GLOBAL":
        stack.append(_global(" ".join(map(str, _cut(stack, len(stack) - 2)))))
    elif name == "REDUCE":
        function, args = _cut(stack, len(stack) - 2)
        stack.append(_reduce(function, args))
    elif name == "BUILD":
        state = stack.pop()
        _top(stack, Node).state = state
    else:
        raise Refused(f"it uses the pickle opcode {name}, which plain data does not need")


def _global(name: str) -> Node:
    if name not in ALLOWED:
        raise Refused(f"it asks to run {name.replace(' ', '.')!a:.80}, which no data set needs")
    return Node(name)


def _reduce(function: object, args: object) -> object:
    match function, args:
        case Node("_codecs encode"), (str() as text, "latin1" | "latin-1"):
            return text  # stays text: a memoised string encoded over and over costs nothing
        case Node("__builtin__ bytes" | "builtins bytes"), ():
            return ""
        case Node(name, None), tuple() if name in ARRAYS | BUFFERS | {"numpy dtype"}:
            return Node(name, args)
    raise Refused("it calls a function in a way that plain data does not need")


def _push_tuple(stack: list[Any], height: int) -> None:
    stack.append(tuple(_cut(stack, height)))


def _cut(stack: list[Any], height: int) -> list[Any]:
    """Pops everything above a height."""
    if not 0 <= height <= len(stack):
        raise Refused("it is no complete pickle")
    items = stack[height:]
    del stack[height:]
    return items


def _top(stack: list[Any], kind: type) -> Any:
    if not stack or not isinstance(stack[-1], kind):
        raise Refused("it is no complete pickle")
    return stack[-1]
