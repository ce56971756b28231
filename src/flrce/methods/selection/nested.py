"""A selector inside another: its memory is the outer one's, and what it may do the outer one
may.
"""

from dataclasses import dataclass
from typing import Any

from flrce.core.roles import Selector


@dataclass(frozen=True)
class EmptyState:
    """The memory of an inner selector that has none."""


def init_inner_state(inner: Selector, M: int, d: int, D: int) -> Any:
    return inner.initial_state(M, d, D) if inner.has_state else EmptyState()


def is_inner_device_agnostic(inner: Selector) -> bool:
    """Whether updates may stay on a device: the inner selector takes them there, or does not look
    at them.
    """
    return inner.device_agnostic or not inner.observes_rounds
