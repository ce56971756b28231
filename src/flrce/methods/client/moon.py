"""MOON (Li et al. 2021): a client's features stay near the server's, and leave those of its own
last model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flrce.core.bounds import NonNegativeFloat, PositiveFloat
from flrce.core.pieces import Recipe
from flrce.errors import BadInput
from flrce.training.links import Batch, ClientContext, Link, Tensors


@dataclass(frozen=True)
class ContrastiveTerm(Link):
    """+ mu * -log(e^near / (e^near + e^far)) for each sample, near and far being cosines over the
    temperature.

    near: between the features of the model in training and of the model that the round began with;
    far: and of the client's model at the end of its last round. A client's first round has no such
    model, and no term.
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5
    # two more forward passes; a backward pass costs twice as much
    extra_passes: ClassVar[float] = 2 / 3

    def check_recipe(self, recipe: Recipe) -> str:
        return recipe.explain_parts("MOON compares whole models")

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        assert local.whole is not None
        return {"start": local.whole.clone(), "now": local.whole, **client_state}

    def loss_term(self, batch: Batch, state: Tensors) -> Tensor:
        z = batch.features.flatten(1)
        if not z.requires_grad:
            raise BadInput(
                "MOON compares what the last layer is given, and here that is the samples; add a"
                " layer"
            )
        if "last" not in state:
            return torch.zeros(len(z), device=z.device)
        near, far = (
            F.cosine_similarity(z, batch.forward_at(state[name])[1].flatten(1)) / self.temperature
            for name in ("start", "last")
        )
        return self.mu * F.softplus(far - near)

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        return {"last": state["now"].clone()}, {}
