"""Models of a client's own beside the shared one: FedRep's phases, Ditto's second model, APFL's mixture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flrce.bounds import Amount, Epochs, Share
from flrce.local.link import PERSONAL, Batch, Local

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Phases:
    """FedRep (Collins et al. 2021): first only what the client keeps trains, in its last epochs only what travels."""

    body: Epochs = 1

    def objection(self, recipe: Any) -> str:
        if not recipe.kept:
            return "FedRep needs parameters that stay with the client; name them: model.kept, or recipe.heads"
        if recipe.work.steps is not None:
            return "FedRep's phases are epochs; give train.epochs instead of train.steps"
        if recipe.work.epochs <= self.body:
            return f"body = {self.body} of train.epochs = {recipe.work.epochs}: leave at least one for the head"
        return ""

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        kept = torch.arange(len(w), device=w.device) < local.layout.own.trainable
        epoch = local.steps // local.task.work.epochs
        return {"kept": kept, "left": torch.tensor(local.steps), "body": torch.tensor(self.body * epoch)}

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        state = {**state, "left": state["left"] - 1}
        return g.masked_fill(self.still(state), 0), state

    def still(self, state: Tensors) -> Tensor:
        """(d,) the half that is not trained in this step."""
        return state["kept"] if int(state["left"]) < int(state["body"]) else ~state["kept"]


@dataclass(frozen=True)
class Second:
    """Ditto (Li et al. 2021): v, the client's own model, goes along grad f(v) + strength (v - w as it came).

    Its steps are plain ones at the rate of the shared model's, on the same batches.
    """

    strength: Amount = 0.1
    passes: ClassVar[float] = 1.0

    def objection(self, recipe: Any) -> str:
        return _whole("Ditto", recipe)

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        assert local.whole is not None
        return {"v": carry.get("v", w).clone(), "came": w.clone(), "now": local.whole}

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        v = state["v"]
        pulled = batch.gradient(v).add(v - state["came"], alpha=self.strength)
        return g, {**state, "v": v - batch.rate * pulled}

    def end(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return {"v": state["v"], PERSONAL: _with_statistics(state["v"], state["now"])}, {}


@dataclass(frozen=True)
class Mixture:
    """APFL (Deng et al. 2020): v goes along the gradient of f(alpha v + (1 - alpha) w), w along that of f(w).

    The client is judged by the mixture, with w as it trained it. With `adaptive`, alpha itself goes one step along its
    gradient <v - w, grad f(mixture)> at the beginning of each round, and stays within 0 and 1.
    """

    alpha: Share = 0.5
    adaptive: bool = False
    passes: ClassVar[float] = 1.0

    def objection(self, recipe: Any) -> str:
        return _whole("APFL", recipe)

    def begin(self, w: Tensor, local: Local, carry: Tensors) -> Tensors:
        assert local.whole is not None
        alpha = torch.tensor([self.alpha], dtype=torch.float64)
        first = torch.tensor(True)
        return {"v": carry.get("v", w).clone(), "alpha": carry.get("alpha", alpha), "first": first, "now": local.whole}

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        v, alpha = state["v"], float(state["alpha"])
        slope = batch.gradient(torch.lerp(w, v, alpha))
        after = {**state, "v": v - batch.rate * alpha * slope, "first": torch.tensor(False)}
        if self.adaptive and bool(state["first"]):
            moved = alpha - batch.rate * float((v - w).double() @ slope.double())
            after["alpha"] = torch.tensor([min(max(moved, 0.0), 1.0)], dtype=torch.float64)
        return g, after

    def end(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        mixed = torch.lerp(w, state["v"], float(state["alpha"]))
        kept = {"v": state["v"], "alpha": state["alpha"]}
        return {**kept, PERSONAL: _with_statistics(mixed, state["now"])}, {}


def _whole(name: str, recipe: Any) -> str:
    parts = recipe.partial or ("model.kept" if recipe.kept else "")
    return f"{name} has a whole model for each client, but {parts} leaves clients with parts; drop one" if parts else ""


def _with_statistics(v: Tensor, now: Tensor) -> Tensor:
    """(size,) a whole model: BatchNorm's statistics are the shared model's, as the client left them."""
    return torch.cat([v, now[len(v) :]])
