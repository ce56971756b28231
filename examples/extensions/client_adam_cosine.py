"""Clients train with clipped Adam and a cosine schedule over each round: settings alone.

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

from flrce.training.schedules import CosineDecay
from flrce.training.update_chain import Adam, GradientClip, UpdateChain

CHAIN = UpdateChain((GradientClip(1.0), Adam(0.01, schedule=CosineDecay(0.1, over="round"))))
