"""Models of a client's own beside the shared one: FedRep's phases, Ditto's second model, APFL's
mixture.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.bounds import EpochCount, NonNegativeFloat, Proportion
from flrce.core.pieces import Recipe
from flrce.training.links import PERSONAL_MODEL_KEY, Batch, ClientContext, Link, Tensors


@dataclass(frozen=True)
class FedRepPhases(Link):
    """FedRep (Collins et al. 2021): first only what the client keeps trains, in its last epochs
    only what travels.
    """

    body: EpochCount = 1

    def check_recipe(self, recipe: Recipe) -> str:
        if not recipe.personal:
            return (
                "FedRep needs parameters that stay with the client; name them: model.personal, or"
                " recipe.heads"
            )
        if recipe.work.steps is not None:
            return "FedRep's phases are epochs; give train.epochs instead of train.steps"
        if recipe.work.epochs <= self.body:
            return (
                f"body = {self.body} of train.epochs = {recipe.work.epochs}: leave at least one for"
                " the head"
            )
        return ""

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        kept = torch.arange(len(w), device=w.device) < local.layout.personal_layout.trainable
        epoch = local.steps // local.task.work.epochs
        return {
            "kept": kept,
            "left": torch.tensor(local.steps),
            "body": torch.tensor(self.body * epoch),
        }

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        state = {**state, "left": state["left"] - 1}
        return g.masked_fill(self.frozen_coordinates(state), 0), state

    def frozen_coordinates(self, state: Tensors) -> Tensor:
        """(d,) the half that is not trained in this step."""
        return state["kept"] if int(state["left"]) < int(state["body"]) else ~state["kept"]


@dataclass(frozen=True)
class DittoModel(Link):
    """Ditto (Li et al. 2021): v, the client's own model, goes along grad f(v) + strength (v - w as
    it came).

    Its steps are plain ones at the rate of the shared model's, on the same batches.
    """

    strength: NonNegativeFloat = 0.1
    extra_passes: ClassVar[float] = 1.0

    def check_recipe(self, recipe: Recipe) -> str:
        return _check_whole_models("Ditto", recipe)

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        assert local.whole is not None
        return {"v": client_state.get("v", w).clone(), "came": w.clone(), "now": local.whole}

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        v = state["v"]
        pulled = batch.gradient_at(v).add(v - state["came"], alpha=self.strength)
        return g, {**state, "v": v - batch.rate * pulled}

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return {
            "v": state["v"],
            PERSONAL_MODEL_KEY: _append_statistics(state["v"], state["now"]),
        }, {}


@dataclass(frozen=True)
class APFLMixture(Link):
    """APFL (Deng et al. 2020): v goes along the gradient of f(alpha v + (1 - alpha) w), w along
    that of f(w).

    The client is judged by the mixture, with w as it trained it. With `adaptive`, alpha itself goes
    one step along its gradient <v - w, grad f(mixture)> at the beginning of each round, and stays
    within 0 and 1.
    """

    alpha: Proportion = 0.5
    adaptive: bool = False
    extra_passes: ClassVar[float] = 1.0

    def check_recipe(self, recipe: Recipe) -> str:
        return _check_whole_models("APFL", recipe)

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        assert local.whole is not None
        alpha = torch.tensor([self.alpha], dtype=torch.float64)
        first = torch.tensor(True)
        return {
            "v": client_state.get("v", w).clone(),
            "alpha": client_state.get("alpha", alpha),
            "first": first,
            "now": local.whole,
        }

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        v, alpha = state["v"], float(state["alpha"])
        slope = batch.gradient_at(torch.lerp(w, v, alpha))
        after = {**state, "v": v - batch.rate * alpha * slope, "first": torch.tensor(False)}
        if self.adaptive and bool(state["first"]):
            moved = alpha - batch.rate * float((v - w).double() @ slope.double())
            after["alpha"] = torch.tensor([min(max(moved, 0.0), 1.0)], dtype=torch.float64)
        return g, after

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        mixed = torch.lerp(w, state["v"], float(state["alpha"]))
        kept = {"v": state["v"], "alpha": state["alpha"]}
        return {**kept, PERSONAL_MODEL_KEY: _append_statistics(mixed, state["now"])}, {}


def _check_whole_models(name: str, recipe: Recipe) -> str:
    return recipe.explain_parts(f"{name} has a whole model for each client", personal=True)


def _append_statistics(v: Tensor, now: Tensor) -> Tensor:
    """(size,) a whole model: BatchNorm's statistics are the shared model's, as the client left
    them.
    """
    return torch.cat([v, now[len(v) :]])
