"""Samples of several inputs (tensors, a dict), packed into one row of numbers and unpacked."""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from flrce.errors import BadInput

MAX_PACKED_INTEGER = 2**24  # float32 holds whole numbers up to it exactly


@dataclass(frozen=True)
class InputField:
    """One input of a network: its name (a number where it has none), shape of a sample and kind."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "float", "integer", "boolean" or "pixels", which are divided by 255

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FieldUnpacker:
    """A forward hook: the packed row of each sample as the inputs that the network takes, or as one
    dict or tuple of them.
    """

    fields: tuple[InputField, ...]
    as_batch: bool = False

    def __call__(self, net: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        parts = unpack_fields(args[0], self.fields)
        if self.fields[0].name.isdecimal():
            given = (tuple(parts),) if self.as_batch else parts
            return (*given, *args[1:]), kwargs
        named = dict(zip((field.name for field in self.fields), parts, strict=True))
        if self.as_batch:
            return (named, *args[1:]), kwargs
        return args[1:], {**kwargs, **named}


def has_fields(x: Any, count: int | None = None) -> bool:
    """Whether x is a dict or tuple of several inputs for `count` samples, not one array."""
    if isinstance(x, Mapping):
        return len(x) > 0
    if not isinstance(x, tuple) or len(x) < 2 or len(x) == count:
        return False
    return all(hasattr(part, "shape") and len(part.shape) >= 1 for part in x)


def pack_fields(
    x: Any, where: str, known: Sequence[InputField] = ()
) -> tuple[NDArray[np.float32], tuple[InputField, ...]]:
    """(N, numbers) and the fields; with `known` fields, x must have them."""
    named = x if isinstance(x, Mapping) else {str(i): part for i, part in enumerate(x)}
    if known and list(named) != [field.name for field in known]:
        missing = [field.name for field in known if field.name not in named]
        if missing:
            raise BadInput(f"{where} lacks the input {missing[0]!a}, which the network takes")
        named = {field.name: named[field.name] for field in known}
    arrays = {str(key): _to_numbers(value, str(key), where) for key, value in named.items()}
    if len({len(array) for array in arrays.values()}) != 1:
        sizes = ", ".join(f"{key} {len(array)}" for key, array in arrays.items())
        raise BadInput(f"{where} has inputs of different numbers of samples: {sizes}")
    fields = tuple(InputField(k, a.shape[1:], _find_kind(a)) for k, a in arrays.items())
    for field, wanted in zip(fields, known, strict=False):
        if field.shape != wanted.shape:
            raise BadInput(
                f"{where} input {field.name!a} has shape {field.shape}, the network takes"
                f" {wanted.shape}"
            )
    rows = [array.reshape(len(array), -1).astype(np.float32) for array in arrays.values()]
    return np.concatenate(rows, 1), fields


def _to_numbers(value: Any, name: str, where: str) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as why:
        raise BadInput(
            f"{where} input {name!a} has rows of different lengths; pad them to one"
        ) from why
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise BadInput(f"{where} input {name!a} holds {array.dtype}; give numbers or token ids")
    if array.dtype.kind in "iu" and array.size and abs(array).max() > MAX_PACKED_INTEGER:
        raise BadInput(f"{where} input {name!a} has numbers beyond 2**24; make them smaller")
    return array


def _find_kind(array: NDArray[Any]) -> str:
    if array.dtype == np.uint8:
        return "pixels"
    return {"b": "boolean", "f": "float"}.get(array.dtype.kind, "integer")


def unpack_fields(x: Tensor, fields: Sequence[InputField]) -> list[Tensor]:
    """The inputs of packed samples x (n, numbers), each of its shape and dtype."""
    inputs, start = [], 0
    for field in fields:
        part = x[:, start : start + field.size].reshape(len(x), *field.shape)
        start += field.size
        if field.kind == "integer":
            part = part.long()
        elif field.kind == "boolean":
            part = part > 0.5
        elif field.kind == "pixels":
            part = part / 255
        inputs.append(part)
    return inputs


def attach_fields(net: nn.Module, fields: Sequence[InputField]) -> nn.Module:
    """A copy of the network that takes packed samples; the network itself without fields."""
    if not fields:
        return net
    net = copy.deepcopy(net)
    unpack = FieldUnpacker(tuple(fields), _takes_batch(net, fields))
    net.register_forward_pre_hook(unpack, with_kwargs=True)
    return net


def _takes_batch(net: nn.Module, fields: Sequence[InputField]) -> bool:
    """Whether forward has one argument for all inputs: a dict of them, or a tuple."""
    arguments = inspect.signature(net.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if len(arguments) != 1 or any(argument.kind in variable for argument in arguments):
        return False
    return [field.name for field in fields] != [argument.name for argument in arguments]


def describe_fields(fields: Sequence[InputField]) -> str:
    """The inputs in words, for messages."""
    return ", ".join(f"{field.name} {field.shape} {field.kind}" for field in fields)
