"""Local epochs that follow progress: more while server steps agree, fewer when they cancel."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Gt, Lt

from flrce.core.bounds import EpochCount
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, RoundRecord, Task
from flrce.errors import BadInput
from flrce.methods.client.workload import PlainTraining, with_epochs


@dataclass(frozen=True)
class ProgressEpochs(LocalTrainer):
    """Everyone trains E epochs, which begin with the recipe's and follow the record of the rounds.

    After each round E becomes E (1 + gain c), at least `least` and at most `most`: c is the round's
    headway, the cosine of the server's step and the way of the rounds before. Steps that go on in
    the same direction ask for more local work, steps that cancel for less. Clients are told E,
    rounded to whole epochs, and costs are booked by it. The recipe's average must measure headway
    (`ema`). `inner` is the trainer that gets these tasks.
    """

    least: EpochCount = 1
    most: EpochCount = 10
    gain: Annotated[float, Gt(0), Lt(1)] = 0.5
    inner: LocalTrainer = field(default=PlainTraining(), metadata={"piece": True})

    def __post_init__(self) -> None:
        if not self.least <= self.most:
            raise BadInput(f"least = {self.least!r} is above most = {self.most!r}")
        if not isinstance(self.inner, LocalTrainer) or isinstance(self.inner, ProgressEpochs):
            raise BadInput(f"inner = {self.inner!r}: must be another trainer")

    @property
    def has_state(self) -> bool:
        return self.inner.has_state

    @property
    def observes_rounds(self) -> bool:
        return self.inner.observes_rounds

    @property
    def device_agnostic(self) -> bool:
        return self.inner.device_agnostic

    @property
    def links(self) -> Sequence[Any]:
        return self.inner.links

    @property
    def frozen_blocks(self) -> int:
        return self.inner.frozen_blocks

    @property
    def reported_classes(self) -> int:
        return self.inner.reported_classes

    @property
    def partial(self) -> bool:
        return self.inner.partial

    @property
    def changes_coordinates(self) -> bool:
        return self.inner.changes_coordinates

    @property
    def needs_layer_chain(self) -> bool:
        return self.inner.needs_layer_chain

    def check_recipe(self, recipe: Recipe) -> str:
        if recipe.sums or not recipe.average.measures_headway:
            return (
                "epochs that follow progress need the headway of each round: set average = 'ema',"
                " and leave out recipe.sums"
            )
        return self.inner.check_recipe(recipe)

    def initial_state(self, M: int, d: int, D: int) -> Any:
        return self.inner.initial_state(M, d, D)

    def observe(self, state: Any, event: RoundEvent) -> Any:
        return self.inner.observe(state, event)

    def assign(self, tasks: list[Task], state: Any, view: RoundView) -> list[Task]:
        counts = {
            epochs: self.count_epochs(epochs, view.history)
            for epochs in {task.work.epochs for task in tasks}
        }
        changed = [with_epochs(task, counts[task.work.epochs]) for task in tasks]
        return self.inner.assign(changed, state, view)

    def count_epochs(self, planned: int, history: Sequence[RoundRecord]) -> int:
        """Epochs of the round after these, where the recipe plans so many."""
        epochs = float(min(max(planned, self.least), self.most))
        for record in history:
            if record.diagnostics.headway is not None:
                epochs *= 1 + self.gain * record.diagnostics.headway
                epochs = min(max(epochs, self.least), self.most)
        return int(epochs + 0.5)
