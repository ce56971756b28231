"""Clients train with Adam, clipped, its rate on half a cosine over each round: settings alone, nothing to write.

    rounds = 6
    clients = 8
    per_round = 4
    recipe.name = "fedavg"
    [train]
    epochs = 2
    optimizer = "adam"
    lr = 0.01
    clip = 1.0
    schedule = { piece = "cosine", floor = 0.1, over = "round" }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python the same chain is a value that any recipe takes: `recipes.fedavg(update=CHAIN)`.
"""

from flrce.local.schedules import Cosine
from flrce.local.updates import Adam, Chain, Clip

CHAIN = Chain((Clip(1.0), Adam(0.01, schedule=Cosine(0.1, over="round"))))
