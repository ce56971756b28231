"""FedDyn (Acar et al. 2021): a link with state on the client, a server step with a memory.

    rounds = 6
    clients = 8
    per_round = 4
    [recipe]
    name = "fedavg"
    trainer = { piece = "feddyn:Dynamic", alpha = 0.1 }
    server = { piece = "feddyn:Server", alpha = 0.1 }
    aggregator = { piece = "mean", by = "equal" }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: `replace(recipes.fedavg(P=4), trainer=Dynamic(), server=Server(),
aggregator=WeightedMean(by="equal"))`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flrce import Link, LocalTrainer, ServerStep


@dataclass(frozen=True)
class Regulariser(Link):
    """g - h_k + alpha (w - w_start); afterwards h_k -= alpha (w - w_start). Adds no traffic."""

    alpha: float = 0.1

    def begin_round(self, w, local, client_state):
        return {"h": client_state.get("h", torch.zeros_like(w)), "start": w.clone()}

    def step(self, g, w, state):
        return g - state["h"] + self.alpha * (w - state["start"]), state

    def end_round(self, w, state):
        return {"h": state["h"] - self.alpha * (w - state["start"])}, {}


@dataclass(frozen=True)
class Dynamic(LocalTrainer):
    """A trainer: everyone's chain begins with the link."""

    alpha: float = 0.1

    @property
    def links(self):
        return (Regulariser(self.alpha),)

    def assign(self, tasks, state, view):
        return tasks


@dataclass(frozen=True)
class Memory:
    h: Tensor  # (d,)
    known: Tensor = field(metadata={"rows": True})  # (M,) one row per client, so its length is M


@dataclass(frozen=True)
class Server(ServerStep):
    """h -= alpha / M sum u_k; w = the mean of the clients' models - h / alpha."""

    alpha: float = 0.1

    def initial_state(self, M, d, D):
        return Memory(torch.zeros(d), torch.zeros(M))

    def step(self, w, target, updates, state):
        h = state.h - self.alpha * updates.u.sum(0) / len(state.known)
        d = updates.trainable
        return torch.cat([target[:d] - h / self.alpha, target[d:]]), Memory(h, state.known)
