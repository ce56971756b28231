"""Regression on a table: ten figures of 442 patients, and how their diabetes went on a year later.

    rounds = 10
    clients = 5
    per_round = 4
    recipe.name = "fedavg"
    data.partition = "natural"
    train.lr = 0.02
    model.name = "regression:Net"  # leave it out for one that fits the data
    [objective]
    name = "regression"
    loss = "huber"

From Python: `flrce.run(flrce.Experiment.load("experiment.toml"), data=data())`. The headline is the
mean absolute error: lower is better, and stops, tables and reports know it. A csv file of your own
is `data.path` with `data.target`.
"""

import numpy as np
from sklearn.datasets import load_diabetes
from torch import nn

import flrce


class Net(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(nn.Linear(shape[0], 16), nn.Tanh(), nn.Linear(16, outputs))


def data() -> flrce.Source:
    """One client for each decade of the patients' ages; targets in standard deviations."""
    table = load_diabetes(scaled=False)
    y = (table.target - table.target.mean()) / table.target.std()
    decade = np.clip(table.data[:, 0] // 10, 2, 6)
    x, y = table.data.astype(np.float32), y.astype(np.float32)
    return flrce.Source.from_arrays(x, y, group=decade, standardise=True)
