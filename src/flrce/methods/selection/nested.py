"""A selector inside another: its memory is the outer one's, and what it may do the outer one
may.
"""

from dataclasses import dataclass
from typing import Any

from flrce.core.traits import RoundObserver, StatefulPiece, is_device_agnostic
from flrce.core.types import RoundEvent


@dataclass(frozen=True)
class EmptyState:
    """The memory of an inner selector that has none."""


def init_inner_state(inner: Any, M: int, d: int, D: int) -> Any:
    return inner.initial_state(M, d, D) if isinstance(inner, StatefulPiece) else EmptyState()


def observe_inner(inner: Any, memory: Any, event: RoundEvent) -> Any:
    return inner.observe(memory, event) if isinstance(inner, RoundObserver) else memory


def is_inner_device_agnostic(inner: Any) -> bool:
    """Whether updates may stay on a device: the inner selector takes them there, or does not look
    at them.
    """
    return is_device_agnostic(inner) or not isinstance(inner, RoundObserver)
