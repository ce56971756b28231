"""A Flower strategy's own state (momenta, clipping norms, the last model) as bytes, and back."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from safetensors.torch import load, save
from torch import Tensor


def serialize_strategy(strategy: Strategy) -> Tensor:
    """A strategy's numbers and arrays as bytes; whatever is neither, such as functions, stays
    out.
    """
    arrays: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, owner, key in _iter_attributes(strategy):
        value = getattr(owner, key)
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
            continue
        kind, found = _extract_arrays(value)
        if kind:
            plain[name] = [kind, *found]
            arrays |= {
                f"{name}/{i}": torch.from_numpy(np.array(x, order="C"))
                for i, x in enumerate(found.values())
            }
    header = json.dumps(plain).encode()
    return torch.frombuffer(
        bytearray(len(header).to_bytes(8, "little") + header + save(arrays)), dtype=torch.uint8
    )


def restore_strategy(strategy: Strategy, blob: Tensor) -> None:
    """Give a strategy back what `serialize_strategy` took down."""
    data = blob.numpy().tobytes()
    size = int.from_bytes(data[:8], "little")
    plain, arrays = json.loads(data[8 : 8 + size]), load(data[8 + size :])
    for name, owner, key in list(_iter_attributes(strategy)):
        if name not in plain:
            continue
        value = plain[name]
        if isinstance(value, list):
            kind, *keys = value
            value = _rebuild_value(
                kind, {k: arrays[f"{name}/{i}"].numpy() for i, k in enumerate(keys)}
            )
        setattr(owner, key, value)


def _extract_arrays(value: Any) -> tuple[str, dict[str, Any]]:
    """("array" | "list" | "dict" | "record", its arrays by name), or "" for anything else."""
    if isinstance(value, np.ndarray):
        kind, found = "array", {"": value}
    elif isinstance(value, ArrayRecord):
        kind, found = "record", {name: array.numpy() for name, array in value.items()}
    elif isinstance(value, dict):
        kind, found = "dict", value
    elif isinstance(value, list):
        kind, found = "list", {str(i): x for i, x in enumerate(value)}
    else:
        return "", {}
    fine = all(
        isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fiub" for x in found.values()
    )
    return (kind, found) if fine and all(isinstance(name, str) for name in found) else ("", {})


def _rebuild_value(kind: str, found: dict[str, Any]) -> Any:
    if kind == "array":
        return found[""]
    if kind == "list":
        return list(found.values())
    return found if kind == "dict" else ArrayRecord({name: Array(x) for name, x in found.items()})


def _iter_attributes(strategy: Any, prefix: str = "") -> Iterable[tuple[str, Any, str]]:
    """(path, object, attribute) of a strategy and of those it wraps."""
    for key, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _iter_attributes(value, f"{prefix}{key}.")
        else:
            yield prefix + key, strategy, key
