"""Rare classes count more in the loss; the primary metric is macro-F1, where all count alike.

    rounds = 6
    clients = 8
    per_round = 4
    recipe.name = "fedavg"
    data.alpha = 1.0
    [objective]
    name = "classification"
    weights = [1, 1, 1, 1, 1, 8, 8, 8, 8, 8]
    metrics = ["macro-f1", "accuracy"]

From Python: `flrce.run(flrce.Experiment.load("experiment.toml"), data=data())`. Every round's
record has all metrics, in `record.metrics` (mean over clients) and `record.pooled` (over all
samples).
"""

import numpy as np
from sklearn.datasets import load_digits

import flrce

RARE = 8  # times fewer samples of the digits 5 to 9


def data() -> flrce.Source:
    digits = load_digits()
    stays = (digits.target < 5) | (np.arange(len(digits.target)) % RARE == 0)
    return flrce.Source.from_arrays(
        (digits.images / 16).astype(np.float32)[stays], digits.target[stays]
    )
