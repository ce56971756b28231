"""SCAFFOLD (Karimireddy et al. 2020): what a client's gradients differ from everyone's is taken out
of its steps.

The server has c, client k its c_k; both travel: d floats more down and d more up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from flrce.core.pieces import Recipe
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import RoundEvent, Task
from flrce.methods.client.step_counts import (
    add_counted_round,
    pack_client_vector,
    resolve_client_vector,
    update_counted_rounds,
)
from flrce.training.batches import compute_batch_sizes
from flrce.training.links import ClientContext, Link, Tensors

C, DELTA = "scaffold.c", "scaffold.delta"  # in a task: c; in a reply: c_k' - c_k


@dataclass(frozen=True)
class ControlVariate(Link):
    """g - c_k + c, and c_k' - c_k to the server at the end.

    Option II: c_k' = c_k - c + (w - w_k) / (sum of the steps' rates), the client's mean gradient on
    its way. Option I: its gradient at w over all its samples, for which the first of its epochs is
    spent; w stays where it is meanwhile.
    """

    option: Literal["I", "II"] = "II"

    @property
    def supports_client_batches(self) -> bool:
        return self.option == "II"

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        task = local.task
        own = resolve_client_vector(C, task, client_state, w)
        c = task.tensors[C].to(w) if C in task.tensors else torch.zeros_like(w)
        state = {"c": c, "own": own, "start": w.clone(), "t": torch.tensor([task.t])}
        if self.option == "II":
            far = sum(task.update.compute_step_rate(step, local) for step in range(local.steps))
            return {**state, "far": torch.tensor(far, dtype=torch.float64)}
        sizes = compute_batch_sizes(local.n, task.work.batch, False)[
            : local.steps // task.work.epochs
        ]  # of one epoch's batches
        shares = torch.from_numpy(sizes / sizes.sum())
        return {
            **state,
            "shares": shares,
            "passed": torch.tensor(0),
            "gradient": torch.zeros_like(w),
        }

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        if self.option == "I" and int(state["passed"]) < len(state["shares"]):
            share = float(state["shares"][state["passed"]])
            gradient = state["gradient"].add(g, alpha=share)
            return torch.zeros_like(g), {
                **state,
                "passed": state["passed"] + 1,
                "gradient": gradient,
            }
        return g - state["own"] + state["c"], state

    def list_extra_sizes(self, d: int) -> Mapping[str, int]:
        return {DELTA: d}

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        own = state["own"]
        if self.option == "II":
            new = own - state["c"] + (state["start"] - w) / float(state["far"])
        else:
            new = state["gradient"]
        return pack_client_vector(C, own, new, state["t"]), {DELTA: (new - own).cpu()}


@dataclass(frozen=True)
class ScaffoldState:
    """The sum of all c_k, and who may have changed its own."""

    total: Tensor  # (d,)
    # (M,) round of a client's last reply that counted; 0: none
    last: Tensor = field(metadata={"rows": "trained"})


@dataclass(frozen=True)
class ScaffoldTraining(LocalTrainer):
    """Sends c, the mean of all clients' c_k, and sums up what they send back."""

    option: Literal["I", "II"] = "II"

    @property
    def links(self) -> tuple[ControlVariate, ...]:
        return (ControlVariate(self.option),)

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("SCAFFOLD's variates are of whole models", personal=True):
            return why
        if self.option == "I" and recipe.update is not None and len(recipe.update.links) > 1:
            names = ", ".join(type(link).__name__ for link in recipe.update.links)
            return (
                f'option = "I" takes gradients at w, where {names} would move on; use plain SGD, or'
                ' option = "II"'
            )
        if self.option == "I" and recipe.work.steps is not None:
            return (
                'option = "I" spends an epoch on a client\'s gradient; give train.epochs instead of'
                " train.steps"
            )
        return ""

    def initial_state(self, M: int, d: int, D: int) -> ScaffoldState:
        return ScaffoldState(torch.zeros(d), torch.zeros(M, dtype=torch.long))

    def assign(self, tasks: list[Task], state: ScaffoldState, view: RoundView) -> list[Task]:
        c = state.total / len(state.last)
        tasks = [add_counted_round(task, state.last, **{C: c}) for task in tasks]
        if self.option == "I":
            tasks = [
                replace(task, work=replace(task.work, epochs=task.work.epochs + 1))
                for task in tasks
            ]
        return tasks

    def observe(self, state: ScaffoldState, event: RoundEvent) -> ScaffoldState:
        updates = event.updates
        total = (state.total.double() + updates.extras[DELTA].double().sum(0)).float()
        return ScaffoldState(total, update_counted_rounds(state.last, event))
