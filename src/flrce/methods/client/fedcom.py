"""FedCOMGATE's gradient correction (Haddadpour et al. 2021): the client's half, then the server's.

A client keeps delta_k and descends along g - delta_k; after a round of tau steps, delta_k += ((w -
w_k) / lr - mean q) / tau. The round's mean q is known once all have replied, so it arrives with the
client's next task and is settled then.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.bounds import LearningRate
from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.training.links import ClientContext, Link, Tensors

# in a task: a round and its mean q; 0 before the client's first
ROUND, MEAN = ("drift.round", "drift.mean")
DELTA, OWN, STEPS = "delta", "own", "steps"  # with the client, beside the round's number


@dataclass(frozen=True)
class GradientCorrection(Link):
    """g - delta_k; what the client needs to settle delta_k next time stays with it."""

    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        state_t, task = torch.tensor([local.task.t]), local.task
        length = torch.tensor(
            [task.update.lr * local.steps, float(local.steps)], dtype=torch.float64
        )
        return {
            DELTA: resolve_gradient_correction(task, client_state, len(w)).to(w),
            "start": w.clone(),
            ROUND: state_t,
            "length": length,
        }

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g - state[DELTA], state

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        far, steps = state["length"].tolist()
        own = -(w - state["start"]) / far
        return {
            DELTA: state[DELTA],
            OWN: own,
            ROUND: state[ROUND],
            STEPS: torch.tensor([steps]),
        }, {}


def resolve_gradient_correction(task: Task, client_state: Tensors, size: int) -> Tensor:
    """delta_k (size,) as of this round.

    The mean of a round in which the client's reply did not count never comes; what it kept of that
    round lapses.
    """
    delta = client_state.get(DELTA, torch.zeros(size))
    if (
        MEAN in task.tensors
        and ROUND in client_state
        and torch.equal(client_state[ROUND], task.tensors[ROUND])
    ):
        delta = delta + client_state[OWN] - task.tensors[MEAN] / float(client_state[STEPS])
    return delta


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
        tensors = {ROUND: torch.tensor([t])}
        return {**tensors, MEAN: state.means[t]} if t else tensors
