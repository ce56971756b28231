"""A language model that predicts the next letter; its clients hold different rhymes.

    rounds = 8
    clients = 4
    per_round = 2
    objective = "next-token"  # accuracy per letter, then perplexity
    recipe.name = "fedavg"
    data.partition = "natural"
    model.name = "token_lm:Letters"
    [train]
    optimizer = "adam"
    lr = 0.01
    epochs = 3

From Python: `flrce.run(flrce.Experiment.load("experiment.toml"), data=data())`. x (N, L) holds
letters by number, y (N, L) those that follow.
"""

import numpy as np
from torch import nn

import flrce

L = 16
RHYMES = (
    "one two three four five six seven eight nine ten, then all of them again. ",
    "monday tuesday wednesday thursday friday, then saturday and sunday. ",
    "january february march april may and june, july and august come soon. ",
    "red orange yellow green blue and violet, the bow is not gone yet. ",
)


class Letters(nn.Module):
    def __init__(self, vocabulary: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        self.look = nn.Embedding(vocabulary, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.say = nn.Linear(width, outputs)

    def forward(self, ids):  # (n, L) -> (n, L, outputs)
        return self.say(self.read(self.look(ids))[0])


def data() -> flrce.Source:
    symbols = sorted(set("".join(RHYMES)))
    x, y, who = [], [], []
    for client, rhyme in enumerate(RHYMES):
        ids = np.array([symbols.index(letter) for letter in rhyme * 3])
        for start in range(0, len(ids) - L - 1, 3):
            x.append(ids[start : start + L])
            y.append(ids[start + 1 : start + L + 1])
            who.append(client)
    return flrce.Source.from_arrays(
        np.stack(x), np.stack(y), group=who, kind="tokens", classes=symbols
    )
