"""FedNTD (Lee et al. 2022): what the global model says about the wrong classes is not forgotten.

    rounds = 8
    clients = 8
    per_round = 4
    data.alpha = 1.0
    recipe.name = "fedavg"
    [train]
    update = [{ piece = "fedntd:NotTrueDistillation", strength = 1.0 }, { piece = "sgd", lr = 0.1 }]

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

A link that adds to the loss, and asks for the outputs of another model.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

import flrce


def drop_true_class(outputs, targets):
    """(n, classes - 1) the outputs of the other classes."""
    others = torch.ones_like(outputs, dtype=torch.bool).scatter(1, targets[:, None], False)
    return outputs[others].reshape(len(outputs), -1)


@dataclass(frozen=True)
class NotTrueDistillation(flrce.Link):
    """strength * KL(teacher || student) over the classes that are not the sample's."""

    strength: float = 1.0
    temperature: float = 1.0
    extra_passes = 1 / 3  # a forward pass of the teacher

    def begin_round(self, w, local, client_state):
        return {"start": local.whole.clone()}

    def loss_term(self, batch, state):
        teacher, _ = batch.forward_at(state["start"])
        student = drop_true_class(batch.out, batch.y) / self.temperature
        wanted = drop_true_class(teacher, batch.y) / self.temperature
        gap = F.kl_div(student.log_softmax(1), wanted.softmax(1), reduction="none")
        return self.strength * self.temperature**2 * gap.sum(1)
