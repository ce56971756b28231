"""FedBN (Li et al. 2021): normalisation layers stay with their clients, by one setting.

    rounds = 6
    clients = 8
    per_round = 4
    recipe.name = "fedavg"
    data.partition = "natural"  # one client for each group
    [model]
    name = "fedbn:Normed"
    kept = "norms"  # or patterns of names, such as ["head.*", "*.bias"]

From Python: `flrce.run(flrce.Experiment.load("experiment.toml"), data=data())`. A file of your own
is `data.path`.
"""

from math import prod

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import flrce

CLIENTS = 8


class Normed(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(
            nn.Conv2d(shape[0], 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * prod(shape[1:]), outputs),
        )


def data() -> flrce.Source:
    """The digits, with another contrast and brightness at every client."""
    digits = load_digits()
    who = np.arange(len(digits.target)) % CLIENTS
    contrast, brightness = np.linspace(0.2, 3, CLIENTS), np.linspace(2, -2, CLIENTS)
    x = digits.images / 16 * contrast[who, None, None] + brightness[who, None, None]
    return flrce.Source.from_arrays(x.astype(np.float32), digits.target, group=who, layout="images")
