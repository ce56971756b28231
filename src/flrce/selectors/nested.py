"""A selector inside another: its memory is the outer one's, and what it may do the outer one may."""

from dataclasses import dataclass
from typing import Any

from flrce.traits import Observes, Remembers, takes
from flrce.types import Event


@dataclass(frozen=True)
class Nothing:
    """The memory of an inner selector that has none."""


def init(inner: Any, M: int, d: int, D: int) -> Any:
    return inner.init(M, d, D) if isinstance(inner, Remembers) else Nothing()


def observe(inner: Any, memory: Any, event: Event) -> Any:
    return inner.observe(memory, event) if isinstance(inner, Observes) else memory


def anywhere(inner: Any) -> bool:
    """Whether updates may stay on a device: the inner selector takes them there, or does not look at them."""
    return takes(inner) or not isinstance(inner, Observes)
