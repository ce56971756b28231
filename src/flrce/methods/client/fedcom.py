"""FedCOMGATE's gradient correction, the server's half of it; drift.py is the client's."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.core.bounds import LearningRate
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.methods.client.gradient_tracking import MEAN, ROUND, GradientCorrection


@dataclass(frozen=True)
class CorrectionState:
    """The mean of what each round sent, for the clients that have yet to hear it."""

    # (M,) round of a client's last reply that counted; 0: none
    last: Tensor = field(metadata={"rows": "trained"})
    # round -> mean q (d,), while some `last` points to it
    means: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


@dataclass(frozen=True)
class CorrectedTraining(LocalTrainer):
    """Training along g - delta_k (FedCOMGATE, Haddadpour et al. 2021).

    mean q = (w - w') / (rate * lr) follows from successive models; `rate` is the aggregator's. It
    is sent with the next task, d floats more on the way down.
    """

    lr: LearningRate = 0.1
    rate: LearningRate = 1.0

    @property
    def links(self) -> tuple[GradientCorrection, ...]:
        return (GradientCorrection(),)

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("the gradient correction needs whole models", personal=True):
            return why
        if recipe.pace.buffer_size is not None:
            return (
                "FedCOMGATE's correction is a client's step less the mean of the others' from the"
                " same model; with a buffered pace they start from different ones: use another pace"
            )
        if recipe.aggregator.rate is None:
            other = type(recipe.aggregator).__name__
            return (
                f"the gradient correction needs a plain mean of updates, {other} is none; set"
                ' aggregator = "mean"'
            )
        if recipe.aggregator.rate != self.rate:
            return f"trainer.rate = {self.rate} must be the aggregator's rate; set both alike"
        if recipe.update is not None and recipe.update.lr != self.lr:
            return (
                f"trainer.lr = {self.lr} must be the clients' rate {recipe.update.lr}; set both"
                " alike"
            )
        return ""

    def initial_state(self, M: int, d: int, D: int) -> CorrectionState:
        return CorrectionState(torch.zeros(M, dtype=torch.long))

    def assign(self, tasks: list[Task], state: CorrectionState, view: RoundView) -> list[Task]:
        return [
            replace(task, tensors={**task.tensors, **self._build_correction_tensors(task.k, state)})
            for task in tasks
        ]

    def observe(self, state: CorrectionState, event: RoundEvent) -> CorrectionState:
        updates = event.updates
        last = state.last.clone()
        last[updates.k] = event.t
        mean = (event.w - event.w_next)[: updates.trainable] / (self.rate * self.lr)
        used = set(last.tolist())
        return CorrectionState(
            last, {t: q for t, q in {**state.means, event.t: mean}.items() if t in used}
        )

    def _build_correction_tensors(self, k: int, state: CorrectionState) -> dict[str, Tensor]:
        t = int(state.last[k]) if k < len(state.last) else 0
        told = {ROUND: torch.tensor([t])}
        return {**told, MEAN: state.means[t]} if t else told
