"""MIFA (Gu et al. 2021): the server remembers each client's last update, and averages them all.

    rounds = 8
    clients = 8
    per_round = 4
    data.alpha = 1.0
    [recipe]
    name = "fedavg"
    aggregator = "mifa:LastUpdates"

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

Clients that could not be reached still count, by what they sent last.
"""

from dataclasses import dataclass, field

import torch

import flrce


@dataclass(frozen=True)
class Memory:
    updates: torch.Tensor = field(metadata={"rows": "trained"})  # (M, D), 0: none yet
    seen: torch.Tensor = field(metadata={"rows": "trained"})  # (M,) bool


@dataclass(frozen=True)
class LastUpdates(flrce.Aggregator):
    """w plus the mean of the last updates of all clients that ever replied."""

    def initial_state(self, M, d, D):
        return Memory(torch.zeros(M, D), torch.zeros(M, dtype=torch.bool))

    def remember(self, state, updates):
        state.updates[updates.k] = updates.U.float()
        state.seen[updates.k] = True
        return state

    def __call__(self, w, updates, state):
        copy = Memory(state.updates.clone(), state.seen.clone())
        known = self.remember(copy, updates)
        return w + known.updates[known.seen].double().mean(0).to(w.dtype)

    def observe(self, state, event):
        return self.remember(state, event.updates)

    def report_figures(self, state, event):
        return {"clients-seen": float(state.seen.sum())}
