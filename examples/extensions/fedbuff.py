"""FedBuff (Nguyen et al. 2022): a round ends with the first replies, and old ones count less.

    rounds = 12
    clients = 8
    per_round = 4  # always under way, as far as there are clients
    [recipe]
    name = "fedavg"
    pace = { piece = "buffered", size = 2 }
    aggregator = { piece = "fedbuff:Discounted", power = 0.5 }
    [fleet]
    profile = { raspberry-pi-4 = 0.5, jetson-nano = 0.5 }  # some are slower than others
    availability = { piece = "fedbuff:Shifts", length = 3 }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: `replace(recipes.fedavg(P=4), pace=BufferedPace(2), aggregator=Discounted())`, and the
Experiment's `fleet={"availability": ...}`. `updates.age` says how many rounds ago a client was sent
its model; None: all in this.
"""

from dataclasses import dataclass

import torch

from flrce import Aggregator
from flrce.rng import make_stream


@dataclass(frozen=True)
class Discounted(Aggregator):
    """w + sum p_k u_k, where p_k goes with 1 / (1 + age)^power."""

    power: float = 0.5

    def __call__(self, w, updates, state):
        age = torch.zeros(len(updates)) if updates.age is None else updates.age
        p = updates.n / (1 + age.double()) ** self.power
        return w + ((p / p.sum()) @ updates.U.double()).to(w.dtype)


@dataclass(frozen=True)
class Shifts:
    """In each shift of `length` rounds, a random half of the clients works."""

    length: int = 3

    def __call__(self, seed, client, t):
        return make_stream(seed, "shift", (t - 1) // self.length, client).random() < 0.5
