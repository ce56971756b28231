"""Several trainers in one recipe: each changes the tasks in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.errors import BadInput


@dataclass(frozen=True)
class CombinedTraining(LocalTrainer):
    """The trainers in order; the links of the first come first in the chain.

    Its state is the tuple of their states. Two that send a tensor of the same name, or links that
    send the same extra, are an error.
    """

    piece: ClassVar[str] = "combined"
    trainers: tuple[LocalTrainer, ...] = field(default=(), metadata={"piece": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "trainers", tuple(self.trainers))  # experiment files have lists
        if not self.trainers:
            raise BadInput('trainers is empty; name at least one, such as ["proximal", "scaffold"]')
        for trainer in self.trainers:
            if not isinstance(trainer, LocalTrainer):
                raise BadInput(f"trainers: {type(trainer).__name__} must subclass LocalTrainer")

    def assign(self, tasks: list[Task], piece_state: Any, view: RoundView) -> list[Task]:
        for trainer, state in zip(self.trainers, self._get_states(piece_state), strict=True):
            before = {task.k: task.tensors for task in tasks}
            tasks = trainer.assign(tasks, state, view)
            for task in tasks:
                kept = before.get(task.k, {})
                taken = next(
                    (key for key, x in task.tensors.items() if key in kept and kept[key] is not x),
                    None,
                )
                if taken is not None:
                    raise BadInput(
                        f"{type(trainer).__name__} and a trainer before it both send a tensor"
                        f" {taken!r}; rename one"
                    )
        return tasks

    def _get_states(self, state: Any) -> Sequence[Any]:
        return (None,) * len(self.trainers) if state is None else state

    def initial_state(self, M: int, d: int, D: int) -> tuple[Any, ...]:
        return tuple(trainer.initial_state(M, d, D) for trainer in self.trainers)

    def observe(self, piece_state: Any, event: RoundEvent) -> tuple[Any, ...]:
        states = zip(self.trainers, self._get_states(piece_state), strict=True)
        return tuple(
            trainer.observe(state, event) if trainer.has_state else state
            for trainer, state in states
        )

    def report_figures(self, piece_state: Any, event: RoundEvent) -> Mapping[str, float]:
        states = zip(self.trainers, self._get_states(piece_state), strict=True)
        return _merge(*(trainer.report_figures(state, event) for trainer, state in states))

    def report_client_figures(
        self, piece_state: Any, event: RoundEvent
    ) -> Mapping[str, Mapping[int, float]]:
        states = zip(self.trainers, self._get_states(piece_state), strict=True)
        return _merge(*(trainer.report_client_figures(state, event) for trainer, state in states))

    def check_recipe(self, recipe: Recipe) -> str:
        checks = (trainer.check_recipe(recipe) for trainer in self.trainers)
        return next((why for why in checks if why), "")

    def check_fleet(self, recipe: Recipe, M: int, d: int, D: int) -> str:
        checks = (trainer.check_fleet(recipe, M, d, D) for trainer in self.trainers)
        return next((why for why in checks if why), "")

    @property
    def has_state(self) -> bool:
        return any(trainer.has_state for trainer in self.trainers)

    @property
    def observes_rounds(self) -> bool:
        return any(trainer.observes_rounds for trainer in self.trainers)

    @property
    def reads_clients(self) -> bool:
        return any(trainer.reads_clients for trainer in self.trainers)

    @property
    def device_agnostic(self) -> bool:
        return all(trainer.device_agnostic for trainer in self.trainers)

    @property
    def partial(self) -> bool:
        return any(trainer.partial for trainer in self.trainers)

    @property
    def changes_coordinates(self) -> bool:
        return any(trainer.changes_coordinates for trainer in self.trainers)

    @property
    def needs_layer_chain(self) -> bool:
        return any(trainer.needs_layer_chain for trainer in self.trainers)

    @property
    def links(self) -> Sequence[Any]:
        return tuple(link for trainer in self.trainers for link in trainer.links)

    @property
    def frozen_blocks(self) -> int:
        return max(trainer.frozen_blocks for trainer in self.trainers)

    @property
    def reported_classes(self) -> int:
        return max(trainer.reported_classes for trainer in self.trainers)


def _merge(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """All figures; BadInput where two trainers report the same name."""
    merged: dict[str, Any] = {}
    for table in tables:
        twice = next((name for name in table if name in merged), None)
        if twice is not None:
            raise BadInput(f"two trainers report a figure {twice!r}; rename one")
        merged |= table
    return merged
