"""How much a client trains, and how."""

from dataclasses import dataclass
from typing import Any

from flrce.pieces import View
from flrce.types import Task


@dataclass(frozen=True)
class SGD:
    """E epochs of plain SGD for everyone."""

    epochs: int = 5
    batch: int = 128
    lr: float = 0.1

    def assign(self, tasks: list[Task], memory: Any, view: View) -> list[Task]:
        return tasks
