"""Ditto (Li et al. 2021): each client also trains its own model, pulled towards the shared one.

    rounds = 6
    clients = 8
    per_round = 4
    recipe.name = "fedavg"
    objective = "ditto:Both"
    [model]
    name = "ditto:Ditto"
    kept = "personal.*"  # stays with the client: no byte of it travels
    [train]
    update = [{ piece = "ditto:Pull", strength = 0.1 }, { piece = "sgd", lr = 0.1 }]

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: the same keys, `flrce.Experiment(objective="ditto:Both", ...)`. A client is judged by
its personal model.
"""

import copy
from dataclasses import dataclass
from math import prod

from torch import nn

from flrce import Link
from flrce.training.metrics import METRICS, Metric
from flrce.training.objectives import Classification


class Ditto(nn.Module):
    """Two copies of one network, alike at first."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(
            nn.Flatten(), nn.Linear(prod(shape), 32), nn.ReLU(), nn.Linear(32, outputs)
        )
        self.personal = copy.deepcopy(self.shared)

    def forward(self, x):
        return self.shared(x), self.personal(x)


@dataclass(frozen=True)
class Both:
    """Each copy's own loss; they share no parameters, so each copy sees only its own gradient."""

    evaluation_metrics = (Metric("accuracy", lambda out, y: METRICS["accuracy"].of(out[1], y)),)

    def losses(self, out, y):
        return sum(Classification().losses(each, y) for each in out)


@dataclass(frozen=True)
class Pull(Link):
    """g + strength (v - w) for the personal v, where w is the shared model as it came."""

    strength: float = 0.1

    def begin_round(self, w, local, client_state):
        own = (
            local.layout.personal_layout.trainable
        )  # what a client keeps comes first among what it trains
        return {"came": w[own:].clone()}

    def step(self, g, w, state):
        own = len(w) - len(state["came"])
        g[:own] += self.strength * (w[:own] - state["came"])
        return g, state
